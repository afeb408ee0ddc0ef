"""Llama, Qwen2 and Qwen3 from a Hugging Face directory, as their reference implementations compute; fp64.

Reads config.json and the tensors' public names only: it knows nothing of leaves or fused matrices.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor


class HubModel:
    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.tensors: dict[str, Tensor] = {}
        for file in folder.glob("*.safetensors"):
            self.tensors |= {name: t.double() for name, t in load_file(file).items()}

    def norm(self, x: Tensor, name: str) -> Tensor:
        mean = x.pow(2).mean(-1, keepdim=True)
        return self.tensors[name] * x * torch.rsqrt(mean + self.config["rms_norm_eps"])

    def linear(self, x: Tensor, name: str) -> Tensor:
        return torch.nn.functional.linear(x, self.tensors[name + ".weight"], self.tensors.get(name + ".bias"))

    def rotate(self, x: Tensor) -> Tensor:
        """x [heads, tokens, d]."""
        d = x.shape[-1]
        frequency = 1.0 / self.config["rope_theta"] ** (torch.arange(0, d, 2, dtype=torch.float64) / d)
        angle = torch.outer(torch.arange(x.shape[1], dtype=torch.float64), frequency)
        cos, sin = (torch.cat([f, f], -1) for f in (angle.cos(), angle.sin()))
        half = torch.cat([-x[..., d // 2 :], x[..., : d // 2]], -1)
        return x * cos + half * sin

    def hidden(self, ids: list[int]) -> Tensor:
        c = self.config
        heads, kv, d = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        x = self.tensors["model.embed_tokens.weight"][torch.tensor(ids)]
        for i in range(c["num_hidden_layers"]):
            p = f"model.layers.{i}."
            y = self.norm(x, p + "input_layernorm.weight")
            q, k, v = (
                self.linear(y, f"{p}self_attn.{n}_proj").view(len(ids), count, d).transpose(0, 1)
                for n, count in (("q", heads), ("k", kv), ("v", kv))
            )
            if c["model_type"] == "qwen3":
                q = self.norm(q, p + "self_attn.q_norm.weight")
                k = self.norm(k, p + "self_attn.k_norm.weight")
            q, k = self.rotate(q), self.rotate(k)
            k, v = (t.repeat_interleave(heads // kv, 0) for t in (k, v))
            scores = q @ k.transpose(1, 2) / d**0.5
            scores += torch.full_like(scores, float("-inf")).triu(1)
            o = (scores.softmax(-1) @ v).transpose(0, 1).reshape(len(ids), heads * d)
            x = x + self.linear(o, p + "self_attn.o_proj")
            y = self.norm(x, p + "post_attention_layernorm.weight")
            gate = torch.nn.functional.silu(self.linear(y, p + "mlp.gate_proj"))
            x = x + self.linear(gate * self.linear(y, p + "mlp.up_proj"), p + "mlp.down_proj")
        return self.norm(x, "model.norm.weight")

    def logits(self, ids: list[int]) -> Tensor:
        """[tokens, vocab], or [tokens, 1] of a token classifier."""
        h = self.hidden(ids)
        if self.config["architectures"][0].endswith("ForTokenClassification"):
            return self.linear(h, "score")
        if self.config["tie_word_embeddings"]:
            return h @ self.tensors["model.embed_tokens.weight"].t()
        return self.linear(h, "lm_head")
