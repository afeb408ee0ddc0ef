"""A task's ConfigError in the same words as every other."""

from __future__ import annotations

from typing import Any

from unirl_scale.core.errors import ConfigError
from unirl_scale.core.problems import Problem, show


def config_error(path: str, value: Any, rule: str, hint: str = "") -> ConfigError:
    """`path: got VALUE; rule; hint: ...`, ready to be raised."""
    return ConfigError(str(Problem(path=path, got=show(value), rule=rule, hint=hint)))
