"""The tasks by name: one file and one line each."""

from __future__ import annotations

from typing import Any

from unirl_scale.core.problems import name_hint
from unirl_scale.train.tasks.errors import config_error
from unirl_scale.train.tasks.interface import Task
from unirl_scale.train.tasks.jsonl_task import JsonlTask
from unirl_scale.train.tasks.reasoning_gym_task import ReasoningGymTask

TASKS: dict[str, type[ReasoningGymTask] | type[JsonlTask]] = {
    "reasoning_gym": ReasoningGymTask,
    "jsonl": JsonlTask,
}


def build(name: str, options: Any) -> Task:
    """The task `name` with an instance of its `options_type`.

    Raises:
        ConfigError: no such task, or data that cannot be had as asked.
    """
    if name not in TASKS:
        rule, hint = "no such task", name_hint(name, TASKS)
        raise config_error("task.name", name, rule, hint)
    task: Task = TASKS[name](options)
    return task
