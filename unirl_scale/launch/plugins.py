"""The plug-ins that a configuration may name, and their own rules. Importing them loads torch."""

from __future__ import annotations

from unirl_scale.core.config import RunConfig
from unirl_scale.core.errors import ConfigError
from unirl_scale.core.load import read_options
from unirl_scale.core.problems import Problem
from unirl_scale.core.typed import Plugins


def plugin_options() -> Plugins:
    """The options dataclass of every task and algorithm by name, for `core.load`."""
    from unirl_scale.rl.algorithms import ALGORITHMS
    from unirl_scale.train.tasks.tasks import TASKS

    return {
        "algorithm": {name: algorithm.options_type for name, algorithm in ALGORITHMS.items()},
        "task": {name: task.options_type for name, task in TASKS.items()},
    }


def algorithm_problems(cfg: RunConfig) -> list[Problem | str]:
    """What the algorithms themselves refuse: options out of range, or groups too small for the estimator."""
    from unirl_scale.rl.algorithms import ALGORITHMS, build

    problems: list[Problem | str] = []
    for i, stage in enumerate(cfg.stages):
        name, path = stage.algorithm["name"], f"stages[{i}]"
        options_type: type = ALGORITHMS[name].options_type
        try:
            algorithm = build(name, read_options(options_type, stage.algorithm, f"{path}.algorithm"))
        except ConfigError as error:
            lines = str(error).replace("\nhint:", "; hint:").splitlines()
            problems += [f"{path}.{line}" for line in lines]
            continue
        least = algorithm.needs.min_group_size
        if stage.group_size < least:
            rule = f"must be at least {least} for {name}"
            got = str(stage.group_size)
            problems.append(Problem(path=f"{path}.group_size", got=got, rule=rule, hint=f"{least}"))
    return problems
