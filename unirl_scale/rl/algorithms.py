"""The algorithms by name: one file and one line each."""

from __future__ import annotations

import difflib
from typing import Any

from unirl_scale.core.errors import ConfigError
from unirl_scale.rl.grpo import Grpo
from unirl_scale.rl.interface import Algorithm
from unirl_scale.rl.ppo import Ppo
from unirl_scale.rl.sft import Sft

ALGORITHMS: dict[str, type[Ppo] | type[Grpo] | type[Sft]] = {
    "ppo": Ppo,
    "grpo": Grpo,
    "sft": Sft,
}


def build(name: str, options: Any) -> Algorithm:
    """The algorithm `name` with an instance of its `options_type`.

    Raises:
        ConfigError: no such algorithm, or options that break a rule (all of them are listed).
    """
    if name not in ALGORITHMS:
        near = difflib.get_close_matches(name, ALGORITHMS, n=1) or sorted(ALGORITHMS)
        raise ConfigError(f"algorithm.name: got {name!r}, no such algorithm\nhint: {', '.join(near)}")
    algorithm: Algorithm = ALGORITHMS[name](options)
    return algorithm
