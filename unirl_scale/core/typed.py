"""Plain values to typed frozen dataclasses, and back. Finds every problem in one pass.

Understands nested dataclasses, `X | Y | None`, Literal, tuples, dicts and the scalars. A plug-in's own
mapping (`name` plus options) is a `dict[str, Any]` field whose name the caller lists in `plugins`.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Literal, TypeGuard

from unirl_scale.core.errors import ConfigError
from unirl_scale.core.problems import Problem, name_hint, nearest_name, show

# Field name -> plug-in name -> its options dataclass, e.g. {"task": {"jsonl": JsonlOptions}}.
Plugins = Mapping[str, Mapping[str, type]]

_SCALAR_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


class _Bad(Enum):
    """What a value that has a problem becomes."""

    BAD = 0


BAD = _Bad.BAD


def is_config_class(kind: object) -> TypeGuard[type]:
    """Whether the annotation is a dataclass."""
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def field_kinds(cls: type) -> dict[str, Any]:
    """Field name -> resolved annotation of a dataclass, in order."""
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def field_default(cls: type, name: str) -> Any:
    """A fresh default of the field; dataclasses.MISSING when it has none."""
    found = next(f for f in dataclasses.fields(cls) if f.name == name)
    if found.default_factory is not dataclasses.MISSING:
        return found.default_factory()
    return found.default


def join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def to_plain(value: Any) -> Any:
    """Dataclasses to dicts and tuples to lists, all the way down."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    return value


def describe(kind: Any) -> str:
    """The annotation in a user's words: "an integer", "a list of numbers", ..."""
    if kind in _SCALAR_NAMES:
        return _SCALAR_NAMES[kind]
    if kind is type(None):
        return "null"
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return "one of " + ", ".join(str(arg) for arg in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(arg) for arg in args)
    if origin is tuple:
        each = f"a list, each {describe(args[0])}"
        return each if Ellipsis in args else f"a list of {len(args)}, each {describe(args[0])}"
    return "a mapping of settings" if is_config_class(kind) or origin is dict else "a plain value"


class TypedReader:
    """One pass over one document. Problems gather in `problems`; a value that has one reads as BAD."""

    def __init__(self, root: type, plugins: Plugins) -> None:
        self.problems: list[Problem] = []
        self._plugins = plugins
        self._homes: dict[str, list[str]] = {}
        self._index(root, "")

    def _index(self, cls: type, path: str) -> None:
        """Where each key lives, so that a key at the wrong level can be sent home."""
        for name, kind in field_kinds(cls).items():
            here = join(path, name)
            self._homes.setdefault(name, []).append(here)
            for inner in (kind, *typing.get_args(kind)):
                if is_config_class(inner):
                    self._index(inner, f"{here}[0]" if typing.get_origin(kind) is tuple else here)

    def read(self, kind: Any, value: Any, path: str) -> Any:
        """`value` as `kind`, or BAD with its problems recorded."""
        origin = typing.get_origin(kind)
        if kind is Any:
            return self._plain(value, path)
        if origin in (typing.Union, types.UnionType):
            return self._union(typing.get_args(kind), value, path)
        if origin is Literal:
            return self._literal(typing.get_args(kind), value, path)
        if origin is tuple:
            return self._tuple(kind, value, path)
        if origin is dict:
            return self._dict(typing.get_args(kind)[1], value, path)
        if is_config_class(kind):
            return self.read_dataclass(kind, value, path)
        return self._scalar(kind, value, path)

    def read_dataclass(self, cls: type, value: Any, path: str, *, skip: Sequence[str] = ()) -> Any:
        """A mapping as a dataclass; unknown and missing keys are problems, keys in `skip` are ignored."""
        if not isinstance(value, Mapping):
            hint = (
                "leave the key out for its defaults" if value is None else "write `key: value` lines below it"
            )
            return self._wrong(path or "the file", value, describe(cls), hint)
        kinds = field_kinds(cls)
        before = len(self.problems)
        given = {}
        for key, item in value.items():
            if key in kinds:
                given[key] = self.read(kinds[key], item, join(path, key))
            elif key not in skip:
                self._unknown(str(key), item, kinds, path)
        for name in kinds:
            if name not in value and field_default(cls, name) is dataclasses.MISSING:
                self._wrong(join(path, name), ..., "given", f"it is {describe(kinds[name])}")
        if len(self.problems) > before:
            return BAD
        try:
            return cls(**given)
        except ConfigError as error:  # a plug-in's own __post_init__ rules
            self.problems.append(Problem(path=path, got=show(value), rule=str(error)))
            return BAD

    def _wrong(self, path: str, value: Any, rule: str, hint: str = "") -> _Bad:
        got = "nothing" if value is ... else show(value)
        self.problems.append(Problem(path=path, got=got, rule=f"must be {rule}", hint=hint))
        return BAD

    def _unknown(self, key: str, value: Any, kinds: Mapping[str, Any], path: str) -> None:
        near = nearest_name(key, kinds)
        homes = [home for home in self._homes.get(key, []) if home != join(path, key)]
        if near is not None:
            hint = f"did you mean {join(path, near)}?"
        elif homes:
            hint = f"did you mean {homes[0]}?"
        else:
            hint = f"known keys: {', '.join(kinds) or 'none'}"
        got = show(value)
        self.problems.append(Problem(path=join(path, key), got=got, rule="unknown key", hint=hint))

    def _union(self, kinds: tuple[Any, ...], value: Any, path: str) -> Any:
        if value is None and type(None) in kinds:
            return None
        others = [kind for kind in kinds if kind is not type(None)]
        if len(others) == 1:
            return self.read(others[0], value, path)
        before = len(self.problems)
        for kind in others:
            result = self.read(kind, value, path)
            if result is not BAD:
                del self.problems[before:]
                return result
        del self.problems[before:]
        return self._wrong(path, value, " or ".join(describe(kind) for kind in kinds))

    def _literal(self, legal: tuple[Any, ...], value: Any, path: str) -> Any:
        for option in legal:
            if value == option and type(value) is type(option):
                return option
        names = [str(option) for option in legal]
        near = nearest_name(str(value), names)
        return self._wrong(path, value, f"one of {', '.join(names)}", f"did you mean {near}?" if near else "")

    def _tuple(self, kind: Any, value: Any, path: str) -> Any:
        args = typing.get_args(kind)
        if not isinstance(value, list | tuple):
            return self._wrong(
                path, value, describe(kind), f"write [{show(value)}]" if value is not None else "write []"
            )
        if Ellipsis in args:
            kinds: Sequence[Any] = [args[0]] * len(value)
        elif len(args) == len(value):
            kinds = args
        else:
            return self._wrong(path, value, describe(kind), f"give {len(args)} items, not {len(value)}")
        items = [
            self.read(k, item, f"{path}[{i}]") for i, (k, item) in enumerate(zip(kinds, value, strict=True))
        ]
        return BAD if BAD in items else tuple(items)

    def _dict(self, item_kind: Any, value: Any, path: str) -> Any:
        if not isinstance(value, Mapping):
            return self._wrong(path, value, "a mapping of settings")
        name = path.rpartition(".")[2]
        if name in self._plugins:
            return self._plugin(self._plugins[name], value, path)
        items = {str(key): self.read(item_kind, item, join(path, str(key))) for key, item in value.items()}
        return BAD if BAD in items.values() else items

    def _plugin(self, known: Mapping[str, type], value: Mapping[Any, Any], path: str) -> Any:
        """`name` plus the fields of that plug-in's options; the defaults are filled in."""
        name = value.get("name", ...)
        if not isinstance(name, str) or name not in known:
            hint = name_hint(name, known) if isinstance(name, str) else f"one of {', '.join(known)}"
            return self._wrong(join(path, "name"), name, "a known name", hint)
        options = self.read_dataclass(known[name], value, path, skip=("name",))
        return BAD if options is BAD else {"name": name, **to_plain(options)}

    def _plain(self, value: Any, path: str) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, list | tuple):
            items = [self._plain(item, f"{path}[{i}]") for i, item in enumerate(value)]
            return BAD if BAD in items else items
        if isinstance(value, Mapping):
            return self._dict(Any, value, path)
        return self._wrong(path, value, "a plain value")

    def _scalar(self, kind: Any, value: Any, path: str) -> Any:
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if isinstance(value, kind) and (kind is not int or not isinstance(value, bool)):
            return value
        return self._wrong(path, value, _SCALAR_NAMES[kind], _scalar_hint(kind, value))


def _scalar_hint(kind: Any, value: Any) -> str:
    """What the user most likely meant to write."""
    if kind is str:
        return f'quote it: "{show(value)}"' if isinstance(value, bool | int | float) else ""
    if kind is bool:
        words = {"yes": "true", "on": "true", "1": "true", "no": "false", "off": "false", "0": "false"}
        word = words.get(str(value).lower())
        return f"write {word}" if word else ""
    try:
        number = float(value)
        if kind is float:
            return f"write {number!r} without quotes"
        return f"write {int(number)}" if number == int(number) else f"{int(number)} or {int(number) + 1}"
    except (TypeError, ValueError, OverflowError):
        return ""
