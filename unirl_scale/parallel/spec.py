"""What parameters a transformer has, how each is cut into leaves, and how it is initialised.

A *leafed* parameter is stored as a stack of leaves [L, ...]: leaf w holds the heads, FFN rows or vocabulary
rows that the canonical tree calls leaf w, so that tensor parallelism moves whole leaves and no byte inside
one. A *replicated* parameter is whole on every tensor-parallel rank. Its gradient is either `partial` (each
rank sums its own leaves, [L, ...]; the tree over the W leaves finishes it) or computed whole everywhere.

Initial values are keyed by (seed, logical name, row), so they do not depend on W, on the layout or on the
rank.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from unirl_scale.core.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A logical (Hugging Face style) matrix or vector inside a parameter, concatenated along dim 0 of a leaf.

    `cut` says which dim of the *logical* tensor [rows, cols] the leaves cut; `rows`, `cols` are its whole
    size (cols 0 = a vector). Rows past `rows` of the last leaf are padding and stay 0.
    """

    name: str
    rows: int
    cols: int
    cut: Literal["rows", "cols", "none"]
    std: float  # of the normal initialisation; 0 with `fill`
    fill: float = 0.0


# (logical tensor, start, stop) -> its rows start .. stop - 1, fp32 [stop - start, max(cols, 1)].
Rows = Callable[[Part, int, int], np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """One stored parameter.

    Attributes:
        name: unique in the model, e.g. "layers.3.qkv".
        layer: transformer layer it belongs to; -1 embedding side, num_layers head side.
        shape: of one leaf when leafed, of the whole otherwise.
        leafed: stored as [L, *shape].
        partial: replicated with per-leaf partial gradients [L, *shape].
        decay: weight decay applies (matrices, not norms and biases).
        parts: logical tensors it holds.
    """

    name: str
    layer: int
    shape: tuple[int, ...]
    leafed: bool
    partial: bool = False
    decay: bool = True
    parts: tuple[Part, ...] = ()

    @property
    def numel(self) -> int:
        """Elements of one leaf, or of the whole when replicated."""
        return math.prod(self.shape)


def vocab_rows_per_leaf(model: ModelConfig, leaves: int) -> int:
    """Vocabulary rows of a leaf; the last leaves are padded. Depends on W, never on TP."""
    return -(-model.vocab_size // leaves)


def parameter_specs(model: ModelConfig, leaves: int, head: Literal["lm", "value"]) -> tuple[ParamSpec, ...]:
    """All parameters of a model in canonical order (the order of the grad-norm tree and of digests)."""
    hidden, vocab = model.hidden_size, model.vocab_size
    v = vocab_rows_per_leaf(model, leaves)
    specs = [
        ParamSpec(
            name="embed",
            layer=-1,
            shape=(v, hidden),
            leafed=True,
            parts=(
                Part(name="embed_tokens.weight", rows=vocab, cols=hidden, cut="rows", std=model.init_std),
            ),
        )
    ]
    for i in range(model.num_layers):
        specs += _layer_specs(model, leaves, i)
    last = model.num_layers
    specs.append(_norm("final_norm", last, hidden, "norm.weight"))
    if head == "value":
        weight = Part(name="value_head.weight", rows=1, cols=hidden, cut="none", std=model.init_std)
        bias = Part(name="value_head.bias", rows=1, cols=0, cut="none", std=0.0)
        specs.append(
            ParamSpec(name="value_head", layer=last, shape=(1, hidden), leafed=False, parts=(weight,))
        )
        specs.append(
            ParamSpec(name="value_bias", layer=last, shape=(1,), leafed=False, decay=False, parts=(bias,))
        )
    elif not model.tie_embeddings:
        part = Part(name="lm_head.weight", rows=vocab, cols=hidden, cut="rows", std=model.init_std)
        specs.append(ParamSpec(name="lm_head", layer=last, shape=(v, hidden), leafed=True, parts=(part,)))
    return tuple(specs)


def _norm(name: str, layer: int, size: int, logical: str) -> ParamSpec:
    part = Part(name=logical, rows=size, cols=0, cut="none", std=0.0, fill=1.0)
    return ParamSpec(
        name=name, layer=layer, shape=(size,), leafed=False, partial=True, decay=False, parts=(part,)
    )


def _layer_specs(model: ModelConfig, leaves: int, i: int) -> list[ParamSpec]:
    hidden, d, std = model.hidden_size, model.head_dim, model.init_std
    out_std = std / math.sqrt(2 * model.num_layers)  # residual branches, as GPT-2 and Megatron scale them
    p = f"layers.{i}."
    heads = {
        "q_proj": model.num_heads * d,
        "k_proj": model.num_kv_heads * d,
        "v_proj": model.num_kv_heads * d,
    }
    qkv_rows = sum(heads.values()) // leaves
    specs = [
        _norm(p + "attn_norm", i, hidden, p + "input_layernorm.weight"),
        ParamSpec(
            name=p + "qkv",
            layer=i,
            shape=(qkv_rows, hidden),
            leafed=True,
            parts=tuple(
                Part(name=f"{p}self_attn.{n}.weight", rows=r, cols=hidden, cut="rows", std=std)
                for n, r in heads.items()
            ),
        ),
    ]
    if model.qkv_bias:
        parts = tuple(
            Part(name=f"{p}self_attn.{n}.bias", rows=r, cols=0, cut="rows", std=0.0) for n, r in heads.items()
        )
        specs.append(
            ParamSpec(name=p + "qkv_bias", layer=i, shape=(qkv_rows,), leafed=True, decay=False, parts=parts)
        )
    if model.qk_norm:
        specs += [_norm(f"{p}{n}_norm", i, d, f"{p}self_attn.{n}_norm.weight") for n in "qk"]
    attn_width, ffn = model.num_heads * d, model.ffn_size
    specs += [
        ParamSpec(
            name=p + "attn_out",
            layer=i,
            shape=(hidden, attn_width // leaves),
            leafed=True,
            parts=(
                Part(
                    name=p + "self_attn.o_proj.weight", rows=hidden, cols=attn_width, cut="cols", std=out_std
                ),
            ),
        ),
        _norm(p + "ffn_norm", i, hidden, p + "post_attention_layernorm.weight"),
        ParamSpec(
            name=p + "gate_up",
            layer=i,
            shape=(2 * ffn // leaves, hidden),
            leafed=True,
            parts=tuple(
                Part(name=f"{p}mlp.{n}.weight", rows=ffn, cols=hidden, cut="rows", std=std)
                for n in ("gate_proj", "up_proj")
            ),
        ),
        ParamSpec(
            name=p + "ffn_down",
            layer=i,
            shape=(hidden, ffn // leaves),
            leafed=True,
            parts=(Part(name=p + "mlp.down_proj.weight", rows=hidden, cols=ffn, cut="cols", std=out_std),),
        ),
    ]
    return specs


def normal_rows(seed: int) -> Rows:
    """Counter-based normal values of logical rows: Philox 4x64 keyed by (seed, name), counter = row."""

    def rows(part: Part, start: int, stop: int) -> np.ndarray:
        cols = max(part.cols, 1)
        out = np.full((stop - start, cols), part.fill, dtype=np.float32)
        if part.std:
            digest = hashlib.sha256(f"{seed}/{part.name}".encode()).digest()
            key = np.frombuffer(digest[:16], dtype=np.uint64)
            for r in range(start, stop):
                bits = np.random.Philox(key=key, counter=np.array([0, 0, r, 0], dtype=np.uint64))
                out[r - start] = np.random.Generator(bits).standard_normal(cols, dtype=np.float64) * part.std
        return out

    return rows


def initial_leaf(spec: ParamSpec, leaf: int, leaves: int, rows: Rows) -> Tensor:
    """Initial values of leaf `leaf` of W (the whole parameter when it is replicated), fp32, `spec.shape`."""
    pieces = []
    for part in spec.parts:
        if part.cut == "rows":
            n = -(-part.rows // leaves)
            start, stop = leaf * n, min((leaf + 1) * n, part.rows)
            piece = np.zeros((n, max(part.cols, 1)), dtype=np.float32)
            if stop > start:
                piece[: stop - start] = rows(part, start, stop)
        elif part.cut == "cols":
            n = part.cols // leaves
            piece = rows(part, 0, part.rows)[:, leaf * n : (leaf + 1) * n]
        else:
            piece = rows(part, 0, part.rows)
        pieces.append(piece)
    return torch.from_numpy(np.ascontiguousarray(np.concatenate(pieces))).reshape(spec.shape)
