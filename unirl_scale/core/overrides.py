"""`key=value` overrides: dotted paths with list indices into a document that is not yet type-checked."""

from __future__ import annotations

import re
import typing
from collections.abc import Sequence
from typing import Any

from unirl_scale.core.problems import Problem, show
from unirl_scale.core.typed import field_default, field_kinds, is_config_class, join, to_plain
from unirl_scale.core.yaml_text import read_yaml

_PATH = re.compile(r"[A-Za-z_][\w-]*(?:\.[\w-]+|\[\d+\])*")
_SEGMENT = re.compile(r"[\w-]+")


def apply_overrides(tree: dict[str, Any], overrides: Sequence[str], root: type) -> list[Problem]:
    """Set each `path=value` in the tree, in order; the value is YAML.

    Args:
        tree: the document, changed in place.
        overrides: e.g. `mesh.actor.tp=2`, `stages.1.num_steps=5` or `stages[1].num_steps=5`.
        root: dataclass of the document: a list or plug-in mapping that the document leaves out starts from
            its default, so `stages.0.num_steps=5` keeps the default stage.

    Returns:
        Problems of form (no `=`, unreadable value, index out of range); unknown keys are left for the reader.
    """
    problems = []
    for text in overrides:
        path, equals, raw = text.partition("=")
        if not equals or not _PATH.fullmatch(path):
            rule = "must be KEY=VALUE with a dotted KEY"
            problems.append(Problem(path="override", got=show(text), rule=rule, hint="e.g. mesh.actor.tp=2"))
            continue
        value, problem = read_yaml(raw, f"override {path}")
        problem = problem or _set(tree, root, _SEGMENT.findall(path), value)
        if problem is not None:
            problems.append(problem)
    return problems


def _set(tree: dict[str, Any], root: type, segments: Sequence[str], value: Any) -> Problem | None:
    node: Any = tree
    kind: Any = root
    path = ""
    for depth, segment in enumerate(segments):
        last = depth == len(segments) - 1
        if isinstance(node, list):
            if not segment.isdecimal() or int(segment) >= len(node):
                rule = f"must be an index 0..{len(node) - 1} of {path}" if node else f"{path} is empty"
                return Problem(path=f"override {'.'.join(segments)}", got=segment, rule=rule)
            key: Any = int(segment)
            path = f"{path}[{segment}]"
            kind = _item_kind(kind)
        elif isinstance(node, dict):
            key = segment
            present = node.get(key) is not None
            path = join(path, segment)
            if not present and not last:
                node[key] = _default(kind, segment)
            kind = _field_kind(kind, segment)
        else:
            rule = f"{path} is a single value and has no {segment}"
            return Problem(path=f"override {'.'.join(segments)}", got=show(node), rule=rule)
        if last:
            node[key] = value
        else:
            node = node[key]
    return None


def _default(kind: Any, name: str) -> Any:
    """What an absent list or plug-in mapping starts from; {} for everything else."""
    if is_config_class(kind) and name in field_kinds(kind):
        default = field_default(kind, name)
        if isinstance(default, tuple | dict):
            return to_plain(default)
    return {}


def _field_kind(kind: Any, name: str) -> Any:
    """The dataclass or tuple behind a field, seen through `| None`; None inside a plug-in's own mapping."""
    found = field_kinds(kind).get(name) if is_config_class(kind) else None
    inner = [arg for arg in typing.get_args(found) if is_config_class(arg)]
    return inner[0] if inner and typing.get_origin(found) is not tuple else found


def _item_kind(kind: Any) -> Any:
    args = typing.get_args(kind)
    return args[0] if typing.get_origin(kind) is tuple and args else None
