"""Hugging Face `config.json` <-> ModelConfig, for the Llama, Qwen2 and Qwen3 families. Imports no torch.

The three differ in two switches: Llama has neither, Qwen2 has QKV biases, Qwen3 norms queries and keys by
head. A critic is their token-classification form with one label: `score` is the value head.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

from unirl_scale.core.config import ModelConfig, RunConfig
from unirl_scale.core.errors import ConfigError
from unirl_scale.core.problems import Problem, raise_all, show

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"

# config.json key -> field, with the default that the families give it (None = the key must be there).
_SIZES: Mapping[str, tuple[str, Any]] = {
    "hidden_size": ("hidden_size", None),
    "num_hidden_layers": ("num_layers", None),
    "num_attention_heads": ("num_heads", None),
    "intermediate_size": ("ffn_size", None),
    "vocab_size": ("vocab_size", None),
    "rms_norm_eps": ("norm_eps", 1e-6),
    "initializer_range": ("init_std", 0.02),
    "tie_word_embeddings": ("tie_embeddings", False),
}
# Keys that would change the arithmetic to something this trainer does not do, and their harmless values.
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "quantization_config": (None,),
}
_FAMILIES = ("llama", "qwen2", "qwen3")


def read_model(folder: Path) -> ModelConfig:
    """The sizes of a Hugging Face model directory.

    Raises:
        ConfigError: no directory, another architecture, or arithmetic that differs from the families'.
    """
    file = folder / CONFIG
    try:
        plain = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{folder}: it has no {CONFIG}; must be a Hugging Face model directory") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: {error}; must be readable JSON") from None
    raise_all(_foreign(plain), str(file))
    values = {field: plain.get(key, default) for key, (field, default) in _SIZES.items()}
    missing = [key for key, (field, _) in _SIZES.items() if values[field] is None]
    if missing:
        raise ConfigError(f"{file}: it lacks {', '.join(missing)}")
    heads = values["num_heads"]
    kind = plain["model_type"]
    return ModelConfig(
        **values,
        num_kv_heads=plain.get("num_key_value_heads") or heads,
        head_dim=plain.get("head_dim") or values["hidden_size"] // heads,
        qkv_bias=True if kind == "qwen2" else bool(plain.get("attention_bias", False)),
        qk_norm=kind == "qwen3",
        rope_theta=float(_rope(plain).get("rope_theta", 10000.0)),
    )


def _rope(plain: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where rope_theta is: at the top, or in rope_parameters as transformers 5 writes it."""
    return {**plain, **(plain.get("rope_parameters") or {})}


def _foreign(plain: Any) -> list[Problem]:
    if not isinstance(plain, dict):
        return [Problem(path="the file", got=show(plain), rule="must be a mapping")]
    kind = plain.get("model_type")
    if kind not in _FAMILIES:
        return [Problem(path="model_type", got=show(kind), rule=f"must be one of {', '.join(_FAMILIES)}")]
    problems = [
        Problem(path=key, got=show(plain[key]), rule=f"must be {show(legal[0])} or left out")
        for key, legal in _PLAIN.items()
        if key in plain and plain[key] not in legal
    ]
    scaling = plain.get("rope_scaling") or {}
    rope = {**scaling, **(plain.get("rope_parameters") or {})}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        problems.append(Problem(path="rope_scaling", got=show(rope), rule="must be plain rotary embedding"))
    return problems


def model_to_plain(
    model: ModelConfig, head: Literal["lm", "value"], dtype: str, max_tokens: int
) -> dict[str, Any]:
    """The `config.json` of a model.

    Args:
        head: "value" makes it a token classifier with one label.
        dtype: of the stored tensors, e.g. "bfloat16".
        max_tokens: longest sequence it was trained on.
    """
    family, kind = ("Qwen3", "qwen3") if model.qk_norm else ("Llama", "llama")
    if model.qkv_bias and not model.qk_norm:
        family, kind = "Qwen2", "qwen2"
    form = "ForCausalLM" if head == "lm" else "ForTokenClassification"
    plain = {
        "architectures": [family + form],
        "model_type": kind,
        **{key: getattr(model, field) for key, (field, _) in _SIZES.items()},
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "rope_theta": model.rope_theta,
        "max_position_embeddings": max_tokens,
        "torch_dtype": dtype,
    }
    if kind != "qwen2":
        plain["attention_bias"] = model.qkv_bias
    if head == "value":
        plain |= {"num_labels": 1, "id2label": {"0": "value"}, "label2id": {"value": 0}}
        plain["tie_word_embeddings"] = False
    return plain


def with_pretrained(cfg: RunConfig) -> RunConfig:
    """Take the sizes of models that start from a directory.

    A model that the file leaves out takes the directory's sizes; one that it spells out must have them.

    Raises:
        ConfigError: the sizes differ, all of them at once.
    """
    models = cfg.model
    problems: list[Problem] = []
    if models.actor_path:
        actor = _sized("actor", models.actor, read_model(Path(models.actor_path)), problems)
        models = replace(models, actor=actor)
    if models.critic_path:
        given = models.critic or ModelConfig()
        critic = _sized("critic", given, read_model(Path(models.critic_path)), problems)
        models = replace(models, critic=replace(critic, tie_embeddings=False))
    raise_all(problems)
    return replace(cfg, model=models)


def _sized(name: str, given: ModelConfig, found: ModelConfig, problems: list[Problem]) -> ModelConfig:
    if given != ModelConfig():
        for field in (f.name for f in fields(ModelConfig)):
            got, has = getattr(given, field), getattr(found, field)
            if got != has and field not in ("init_std", "tie_embeddings" if name == "critic" else ""):
                path, rule = f"model.{name}.{field}", f"must be that of model.{name}_path"
                problems.append(Problem(path=path, got=show(got), rule=rule, hint=show(has)))
    return found
