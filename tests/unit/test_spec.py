"""Initial values do not depend on W or on who holds what; parameters are those of a Llama or Qwen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from unirl_scale.core.config import ModelConfig
from unirl_scale.parallel.spec import (
    ParamSpec,
    initial_leaf,
    normal_rows,
    parameter_specs,
    vocab_rows_per_leaf,
)

MODEL = ModelConfig(
    hidden_size=16,
    num_layers=3,
    num_heads=8,
    num_kv_heads=4,
    head_dim=4,
    ffn_size=24,
    vocab_size=29,
    qkv_bias=True,
    qk_norm=True,
    init_std=0.3,
)


def logical(spec: ParamSpec, leaves: int, seed: int = 5) -> dict[str, Tensor]:
    """The logical tensors of a stored parameter, joined from its leaves; padding is checked and dropped."""
    rows = normal_rows(seed)
    stored = [initial_leaf(spec, leaf, leaves, rows) for leaf in range(leaves if spec.leafed else 1)]
    out = {}
    start = 0
    for part in spec.parts:
        each = -(-part.rows // len(stored)) if part.cut == "rows" else part.rows
        pieces = [leaf[start : start + each] for leaf in stored]
        start += each
        whole = torch.cat(pieces, dim=1 if part.cut == "cols" else 0)
        assert not whole[part.rows :].any()
        out[part.name] = whole[: part.rows]
    assert all(start == leaf.shape[0] for leaf in stored)
    return out


def all_logical(model: ModelConfig, leaves: int, head: str = "lm", seed: int = 5) -> dict[str, Tensor]:
    return {
        k: v for spec in parameter_specs(model, leaves, head) for k, v in logical(spec, leaves, seed).items()
    }


@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize("tied", [False, True])
def test_initial_values_do_not_depend_on_the_number_of_leaves(tied: bool, head: str) -> None:
    model = replace(MODEL, tie_embeddings=tied)
    one = all_logical(model, 1, head)
    for leaves in (2, 4):
        other = all_logical(model, leaves, head)
        assert list(other) == list(one)
        assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_another_seed_gives_other_matrices_and_the_same_norms_and_biases() -> None:
    a, b = all_logical(MODEL, 2, seed=5), all_logical(MODEL, 2, seed=6)
    changed = {name for name in a if not torch.equal(a[name], b[name])}
    assert changed == {name for name in a if a[name].dim() == 2}


def test_layers_are_initialised_independently_and_with_the_named_spread() -> None:
    values = all_logical(replace(MODEL, hidden_size=256, ffn_size=512), 4)
    assert not torch.equal(values["layers.0.mlp.up_proj.weight"], values["layers.1.mlp.up_proj.weight"])
    assert values["layers.0.mlp.up_proj.weight"].std().item() == pytest.approx(0.3, rel=0.02)
    # Residual branches: std / sqrt(2 num_layers).
    assert values["layers.0.mlp.down_proj.weight"].std().item() == pytest.approx(0.3 / 6**0.5, rel=0.02)
    assert torch.equal(values["layers.2.input_layernorm.weight"], torch.ones(256))
    assert not values["layers.2.self_attn.q_proj.bias"].any()


@pytest.mark.parametrize(
    ("vocab", "leaves", "rows"), [(29, 1, 29), (29, 4, 8), (29, 12, 3), (32, 4, 8), (3, 4, 1)]
)
def test_vocabulary_rows_are_padded_by_w_alone(vocab: int, leaves: int, rows: int) -> None:
    model = replace(MODEL, vocab_size=vocab)
    assert vocab_rows_per_leaf(model, leaves) == rows
    embed = parameter_specs(model, leaves, "lm")[0]
    values = torch.cat([initial_leaf(embed, leaf, leaves, normal_rows(1)) for leaf in range(leaves)])
    assert values.shape == (rows * leaves, MODEL.hidden_size)
    assert values[:vocab].abs().amin() > 0 and not values[vocab:].any()


@pytest.mark.parametrize("leaves", [1, 2, 4])
def test_every_parameter_of_the_model_is_there_once(leaves: int) -> None:
    h, f, v, d, layers = 16, 24, 29, 4, 3
    attention = h * (8 + 2 * 4) * d + (8 + 2 * 4) * d + 8 * d * h + 2 * d  # qkv, bias, out, qk-norm
    block = attention + 3 * h * f + 2 * h
    for head, tied, extra in (("lm", False, v * h), ("lm", True, 0), ("value", False, h + 1)):
        model = replace(MODEL, tie_embeddings=tied)
        specs = parameter_specs(model, leaves, head)
        assert len({s.name for s in specs}) == len(specs)
        names = [part.name for s in specs for part in s.parts]
        assert len(set(names)) == len(names)
        count = sum(part.rows * max(part.cols, 1) for s in specs for part in s.parts)
        assert count == v * h + layers * block + h + extra
        assert [s.layer for s in specs] == sorted(s.layer for s in specs)


def test_weight_decay_is_for_matrices_only() -> None:
    for head in ("lm", "value"):
        for spec in parameter_specs(MODEL, 2, head):
            assert spec.decay == all(part.cols > 0 for part in spec.parts), spec.name
