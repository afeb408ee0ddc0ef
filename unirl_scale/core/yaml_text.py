"""YAML text in and out, with the scalars of YAML 1.2.

PyYAML follows YAML 1.1, where `off` is false, `1e-3` is a string, `1:30` is ninety and a key given twice
silently wins. Each of those would change what a run means, so scalars here are those of the 1.2 core schema.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from unirl_scale.core.problems import Problem, show

_SCALARS: tuple[tuple[str, str, str], ...] = (
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("int", r"^[-+]?[0-9]+$", "-+0123456789"),
    (
        "float",
        r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        "-+0123456789.",
    ),
)
_DROPPED = {f"tag:yaml.org,2002:{name}" for name in ("bool", "int", "float", "timestamp", "value")}


class _Loader(yaml.SafeLoader):
    pass


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _add_scalars(cls: type[_Loader] | type[_Dumper]) -> None:
    for name, pattern, first in _SCALARS:
        cls.add_implicit_resolver(f"tag:yaml.org,2002:{name}", re.compile(pattern), list(first))


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(str(loader.construct_scalar(node)))


def _represent_list(dumper: yaml.SafeDumper, data: list[Any]) -> yaml.SequenceNode:
    flat = not any(isinstance(item, dict | list) for item in data)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=flat)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag not in _DROPPED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_add_scalars(_Loader)
# The dumper keeps the 1.1 scalars too: text that either version would misread is quoted.
_add_scalars(_Dumper)
# The 1.1 constructor reads a leading zero as octal.
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Dumper.add_representer(list, _represent_list)


def dump_yaml(value: Any) -> str:
    """Block YAML of dicts, lists and scalars; keys keep their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=110, allow_unicode=True)


def read_yaml(text: str, name: str) -> tuple[Any, Problem | None]:
    """Parse one YAML document.

    Args:
        text: the document.
        name: file name or other words for the error.

    Returns:
        (value, None), or (None, problem) when the text is unreadable: line and column, never an exception.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, None
        _refuse_repeats(node, set())
        return loader.construct_document(node), None
    except yaml.MarkedYAMLError as error:
        return None, _marked(error, text, name)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        got = (
            f"character U+{ord(error.character) if isinstance(error.character, str) else error.character:04X}"
        )
        return None, Problem(path=f"{name}:{line}", got=got, rule=f"must be printable text ({error.reason})")
    except RecursionError:
        return None, Problem(path=name, got="very deep nesting", rule="must be a plain mapping of settings")


def _marked(error: yaml.MarkedYAMLError, text: str, name: str) -> Problem:
    mark = error.problem_mark or error.context_mark
    lines = text.splitlines()
    where, got = name, "text"
    if mark is not None:
        where = f"{name}:{mark.line + 1}:{mark.column + 1}"
        got = show(lines[mark.line].strip() if mark.line < len(lines) else "")
    reason = " ".join(str(error.problem or error).split())
    hint = "check indentation, colons, quotes and brackets here"
    if "\\t" in reason:
        hint = "indent with spaces, not tabs"
    elif reason.startswith("key "):
        hint = "keep one of the two"
    elif reason.startswith("alias "):
        hint = "write the value out"
    return Problem(path=where, got=got, rule=f"must be readable YAML ({reason})", hint=hint)


def _refuse_repeats(node: yaml.Node, above: set[int]) -> None:
    """Raise for a key given twice, or an alias that contains itself."""
    if isinstance(node, yaml.ScalarNode):
        return
    if id(node) in above:
        raise yaml.constructor.ConstructorError(None, None, "alias that contains itself", node.start_mark)
    inside = above | {id(node)}
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_repeats(item, inside)
        return
    seen: set[str] = set()
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode):
            if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value} twice", key.start_mark)
            seen.add(key.value)
        _refuse_repeats(value, inside)
