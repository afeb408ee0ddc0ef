"""Setup: what a process prepares once, whatever mesh it trains on later."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from unirl_scale.core.config import HardwareConfig, ModelConfig, RunConfig, StageConfig
from unirl_scale.core.errors import ConfigError
from unirl_scale.core.load import read_options
from unirl_scale.kernels.select import op_table, probe_shapes
from unirl_scale.kernels.table import OpTable
from unirl_scale.rl.algorithms import ALGORITHMS, build
from unirl_scale.rl.interface import Algorithm
from unirl_scale.train.data import PromptSource, build_task
from unirl_scale.train.roles import DTYPES
from unirl_scale.train.tasks.interface import Task

_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Data, device and ops of a process.

    Attributes:
        cfg: resolved, with the vocabulary's size; its meshes are those asked for.
        data: prompts of the training split.
        held_out: prompts to evaluate on, if any.
    """

    cfg: RunConfig
    device: torch.device
    task: Task
    data: PromptSource
    held_out: PromptSource | None
    ops: OpTable


def prepare(cfg: RunConfig) -> Setup:
    """Read the data and check the ops; joins nobody.

    Raises:
        ConfigError: the data cannot be had as asked.
        InvarianceError: the platform cannot hold `invariance.mode: layout`.
    """
    torch.set_num_threads(cfg.hardware.threads)
    device = _device(cfg.hardware)
    task = build_task(cfg)
    supervised = any(not build_algorithm(stage).needs.rollout for stage in cfg.stages)
    data = PromptSource(task, cfg, "train", supervised=supervised)
    held_out = PromptSource(task, cfg, "heldout") if cfg.eval.num_prompts else None
    cfg = _with_vocabulary(cfg, task.tokenizer.vocab_size)
    models = [m for m in (cfg.model.actor, cfg.model.critic) if m is not None]
    shapes = [probe_shapes(m, cfg.invariance.model_leaves) for m in dict.fromkeys(models)]
    ops = op_table(cfg.hardware, cfg.invariance.mode, shapes, DTYPES[cfg.precision], device)
    return Setup(cfg=cfg, device=device, task=task, data=data, held_out=held_out, ops=ops)


def transport(hardware: HardwareConfig) -> tuple[str, torch.device]:
    """torch's backend of the groups, and where it reads and writes; what lies elsewhere is staged."""
    device = _device(hardware)
    if hardware.transport == "host":
        return "gloo", torch.device("cpu")
    return _BACKENDS[hardware.vendor], device


def build_algorithm(stage: StageConfig) -> Algorithm:
    """The stage's algorithm with its options read from the plug-in mapping."""
    name = str(stage.algorithm["name"])
    options = read_options(ALGORITHMS[name].options_type, stage.algorithm, "algorithm")
    return build(name, options)


def _with_vocabulary(cfg: RunConfig, size: int) -> RunConfig:
    """`vocab_size: 0` takes the tokenizer's.

    Raises:
        ConfigError: a vocabulary that is smaller than the tokenizer's.
    """

    def sized(model: ModelConfig) -> ModelConfig:
        return model if model.vocab_size else replace(model, vocab_size=size)

    critic = cfg.model.critic
    models = replace(cfg.model, actor=sized(cfg.model.actor), critic=sized(critic) if critic else None)
    for name, model in (("actor", models.actor), ("critic", models.critic)):
        if model is not None and model.vocab_size < size:
            raise ConfigError(
                f"model.{name}.vocab_size: got {model.vocab_size}; must hold the tokenizer's {size} tokens; "
                f"hint: {size}, or 0 to take the tokenizer's"
            )
    return replace(cfg, model=models)


def _device(hardware: HardwareConfig) -> torch.device:
    if hardware.vendor == "cpu":
        return torch.device("cpu")
    return torch.device(hardware.vendor, 0)  # the launcher shows each rank its own device only
