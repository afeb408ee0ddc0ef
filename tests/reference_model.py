"""The transformer again, as plainly as torch allows: autograd, one rank. Truth in fp64, a peer in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from unirl_scale.core.config import ModelConfig
from unirl_scale.parallel.spec import initial_leaf, normal_rows, parameter_specs

Weights = dict[str, Tensor]


def stored_weights(model: ModelConfig, leaves: int, head: str, seed: int) -> Weights:
    """The engine's own initial values, by stored name: leafed [W, ...], replicated [...]; fp64 with
    gradient."""
    rows = normal_rows(seed)
    out = {}
    for spec in parameter_specs(model, leaves, head):
        parts = [initial_leaf(spec, leaf, leaves, rows) for leaf in range(leaves if spec.leafed else 1)]
        value = torch.stack(parts) if spec.leafed else parts[0]
        out[spec.name] = value.double().requires_grad_()
    return out


def _norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w


def _rope(x: Tensor, theta: float) -> Tensor:
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(x.shape[0], dtype=torch.float64)[:, None] * frequency
    cos, sin = angle.cos()[:, None].to(x.dtype), angle.sin()[:, None].to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def hidden(model: ModelConfig, leaves: int, w: Weights, ids: list[int]) -> Tensor:
    """Final-norm rows [len(ids), H] of one sequence."""
    x = w["embed"].flatten(0, 1)[torch.tensor(ids)]
    d, qh, kh = model.head_dim, model.num_heads // leaves, model.num_kv_heads // leaves
    for i in range(model.num_layers):
        p = f"layers.{i}."
        fused = torch.einsum("th,lnh->tln", _norm(x, w[p + "attn_norm"], model.norm_eps), w[p + "qkv"])
        if model.qkv_bias:
            fused = fused + w[p + "qkv_bias"]
        q, k, v = fused.view(len(ids), leaves, qh + 2 * kh, d).split([qh, kh, kh], 2)
        q, k, v = (t.reshape(len(ids), -1, d) for t in (q, k, v))
        if model.qk_norm:
            q, k = _norm(q, w[p + "q_norm"], model.norm_eps), _norm(k, w[p + "k_norm"], model.norm_eps)
        q, k = _rope(q, model.rope_theta), _rope(k, model.rope_theta)
        k, v = (t.repeat_interleave(qh // kh, 1) for t in (k, v))
        o = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True, scale=d**-0.5
        ).transpose(0, 1)
        x = x + torch.einsum("tlk,lnk->tn", o.reshape(len(ids), leaves, -1), w[p + "attn_out"])
        gu = torch.einsum("th,lnh->tln", _norm(x, w[p + "ffn_norm"], model.norm_eps), w[p + "gate_up"])
        gate, up = gu.chunk(2, -1)
        x = x + torch.einsum("tlk,lnk->tn", torch.nn.functional.silu(gate) * up, w[p + "ffn_down"])
    return _norm(x, w["final_norm"], model.norm_eps)


def score(
    model: ModelConfig,
    leaves: int,
    w: Weights,
    prompt: tuple[int, ...],
    response: tuple[int, ...],
    inv_temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """(logprobs, entropy) [len(response)] of an lm head, or (values, values) of a value head."""
    h = hidden(model, leaves, w, [*prompt, *response])
    rows = h[len(prompt) - 1 : len(prompt) + len(response) - 1]
    if "value_head" in w:
        values = rows @ w["value_head"][0] + w["value_bias"]
        return values, values
    head = w["embed"] if model.tie_embeddings else w["lm_head"]
    logits = (rows @ head.flatten(0, 1).t())[:, : model.vocab_size] * inv_temperature
    logp = logits.log_softmax(-1)
    return logp.gather(1, torch.tensor(response)[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
