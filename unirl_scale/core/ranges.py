"""The legal range of every number in RunConfig, as a table, and the walk that holds a config against it."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, TypeVar

from unirl_scale.core.config import (
    CheckpointConfig,
    DigestConfig,
    ElasticConfig,
    EvalConfig,
    HardwareConfig,
    InvarianceConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    RolloutConfig,
    RunConfig,
    StageConfig,
)
from unirl_scale.core.problems import Problem, show
from unirl_scale.core.typed import join

T = TypeVar("T")


def _text(bound: float) -> str:
    return str(int(bound)) if bound == int(bound) else f"{bound:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """low <= x <= high, or with < where an end is open."""

    low: float
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False

    def holds(self, value: float) -> bool:
        """Whether a finite value is inside."""
        above = value > self.low if self.low_open else value >= self.low
        below = value < self.high if self.high_open else value <= self.high
        return math.isfinite(value) and above and below

    @property
    def rule(self) -> str:
        low = f"{'>' if self.low_open else '>='} {_text(self.low)}"
        if self.high == math.inf:
            return f"must be {low}"
        return f"must be {low} and {'<' if self.high_open else '<='} {_text(self.high)}"

    def hint(self, value: float) -> str:
        """The nearest legal end, or a word about an open one."""
        if not math.isfinite(value):
            return "write a finite number"
        if value <= self.low:
            low = _text(self.low)
            return f"a value above {low}" if self.low_open else f"{low} is the smallest"
        high = _text(self.high)
        return f"a value below {high}" if self.high_open else f"{high} is the largest"

    def inside(self, value: float) -> float:
        """A legal number of the same type, for rules that must still divide by it."""
        if self.holds(value):
            return value
        if self.high < math.inf and value > self.low:
            return type(value)(self.high / 2 if self.high_open else self.high)
        return type(value)(self.low + 1 if self.low_open else self.low)


POSITIVE = Bound(low=0, low_open=True)
NOT_NEGATIVE = Bound(low=0)
AT_LEAST_1 = Bound(low=1)
SECONDS = Bound(low=0, high=1e8, low_open=True)  # three years; a wait takes no more than 292
DECAY = Bound(low=0, high=1, high_open=True)

RANGES: dict[type, dict[str, Bound]] = {
    HardwareConfig: {"threads": AT_LEAST_1},
    InvarianceConfig: {"model_leaves": AT_LEAST_1, "data_slots": AT_LEAST_1},
    ModelConfig: {
        "hidden_size": AT_LEAST_1,
        "num_layers": AT_LEAST_1,
        "num_heads": AT_LEAST_1,
        "num_kv_heads": AT_LEAST_1,
        "head_dim": Bound(low=2),
        "ffn_size": AT_LEAST_1,
        "vocab_size": NOT_NEGATIVE,
        "rope_theta": POSITIVE,
        "norm_eps": POSITIVE,
        "init_std": POSITIVE,
    },
    MeshConfig: {
        "tp": AT_LEAST_1,
        "pp": AT_LEAST_1,
        "dp": AT_LEAST_1,
        "vpp": AT_LEAST_1,
        "micro_batch_size": AT_LEAST_1,
        "pipeline_split": AT_LEAST_1,
        "bucket_elements": AT_LEAST_1,
        "first_rank": NOT_NEGATIVE,
    },
    OptimConfig: {
        "lr": POSITIVE,
        "min_lr": NOT_NEGATIVE,
        "betas": DECAY,
        "eps": POSITIVE,
        "weight_decay": NOT_NEGATIVE,
        "clip_grad": NOT_NEGATIVE,
        "warmup_steps": NOT_NEGATIVE,
    },
    RolloutConfig: {
        "max_prompt_tokens": AT_LEAST_1,
        "max_response_tokens": AT_LEAST_1,
        "temperature": NOT_NEGATIVE,
        "top_k": NOT_NEGATIVE,
        "top_p": Bound(low=0, high=1, low_open=True),
        "batch_size": NOT_NEGATIVE,
        "page_size": AT_LEAST_1,
        "kv_cache_tokens": NOT_NEGATIVE,
        "prefill_tokens": AT_LEAST_1,
    },
    StageConfig: {
        "num_steps": AT_LEAST_1,
        "batch_size": AT_LEAST_1,
        "minibatch_size": NOT_NEGATIVE,
        "epochs": AT_LEAST_1,
        "group_size": AT_LEAST_1,
        "critic_warmup_steps": NOT_NEGATIVE,
    },
    EvalConfig: {"num_prompts": NOT_NEGATIVE, "every": NOT_NEGATIVE},
    DigestConfig: {"every": NOT_NEGATIVE},
    ElasticConfig: {
        "min_ranks": AT_LEAST_1,
        "model_parallel_floor": AT_LEAST_1,
        "spares": Bound(low=0, high=1 << 16),
        "heartbeat_interval_s": SECONDS,
        "heartbeat_timeout_s": SECONDS,
        "stall_timeout_s": Bound(low=0, high=SECONDS.high),
        "regroup_timeout_s": SECONDS,
        "wait_timeout_s": SECONDS,
        "max_restarts_per_step": AT_LEAST_1,
        "straggler_ratio": NOT_NEGATIVE,
        "grace_s": SECONDS,
    },
    CheckpointConfig: {
        "every": NOT_NEGATIVE,
        "keep": NOT_NEGATIVE,
        "deadline_s": SECONDS,
        "snapshot_every": NOT_NEGATIVE,
    },
    # The sampler's counter takes the seed as a signed 64-bit word.
    RunConfig: {"seed": Bound(low=0, high=2**63 - 1)},
}


def range_problems(cfg: RunConfig) -> tuple[list[Problem], RunConfig]:
    """Numbers outside their range, in the file's order, and the config with a legal number in their place."""
    problems: list[Problem] = []
    return problems, _walk(cfg, "", problems)


def _walk(node: T, path: str, problems: list[Problem]) -> T:
    """The config dataclass with every number inside its range; each that was not adds a problem."""
    bounds = RANGES.get(type(node), {})

    def legal(value: Any, name: str, here: str) -> Any:
        if isinstance(value, tuple):
            return tuple(legal(item, name, f"{here}[{i}]") for i, item in enumerate(value))
        if dataclasses.is_dataclass(value):
            return _walk(value, here, problems)
        if name not in bounds or bounds[name].holds(value):
            return value
        bound = bounds[name]
        problems.append(Problem(path=here, got=show(value), rule=bound.rule, hint=bound.hint(value)))
        return bound.inside(value)

    names = [field.name for field in dataclasses.fields(node)]  # type: ignore[arg-type]
    return type(node)(**{name: legal(getattr(node, name), name, join(path, name)) for name in names})
