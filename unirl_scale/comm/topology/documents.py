"""JSON, YAML and XML with the line of every part, and refusals that name it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar
from xml.parsers import expat

import yaml

from unirl_scale.comm.topology.source import Source

T = TypeVar("T")


def read_json(source: Source, kind: type[T]) -> T:
    """Parse JSON of a given kind; `//` comments, which vendor examples carry, are dropped.

    Raises:
        PlanError: not JSON, not of this kind, cut, or a key given twice in one object.
    """
    value = _parse_json(source)
    if not isinstance(value, kind):
        raise source.error(1, f"a JSON {type(value).__name__}", f"a {kind.__name__}", "give the file itself")
    return value


def objects(source: Source, item: Mapping[str, Any], key: str, *, least: int = 1) -> list[dict[str, Any]]:
    """The list of objects under `key`.

    Raises:
        PlanError: absent, not a list, shorter than `least`, or with an entry that is no object.
    """
    value = item.get(key, [] if not least else None)
    line = source.line_of(f'"{key}"')
    if not isinstance(value, list) or len(value) < least:
        got = f"no {key}" if key not in item else f"{key} {str(value)[:30]!r}"
        raise source.error(line, got, f"a list {key} of at least {least}", "is the file complete?")
    for entry in value:
        if not isinstance(entry, dict):
            raise source.error(line, f"{entry!r} in {key}", "an object", "is the file complete?")
    return value


def whole(source: Source, item: Mapping[str, Any], key: str) -> int:
    """The whole number under `key`, written as a number or as a string.

    Raises:
        PlanError: absent or something else.
    """
    value = item.get(key)
    if isinstance(value, bool) or not re.fullmatch(r"[0-9]{1,9}", str(value)):
        got = f"{key} {value!r} in {json.dumps(item)[:60]}"
        raise source.error(source.line_of(f'"{key}"'), got, "a whole number", "write it again with its tool")
    return int(str(value))


def _parse_json(source: Source) -> Any:

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                line = source.line_of(f'"{key}"')
                raise source.error(
                    line, f"key {key!r} twice in one object", "each key once", "keep one of the two"
                )
            seen[key] = value
        return seen

    text = source.text.lstrip("\ufeff")
    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError:
        plain = re.sub(r'("(?:\\.|[^"\\\n])*")|//[^\n]*', lambda m: m[1] or "", text)
    try:
        return json.loads(plain, object_pairs_hook=unique)
    except json.JSONDecodeError as err:
        cut = err.pos >= len(plain.rstrip())
        got = "the end of the file" if cut else f"{err.msg.lower()} at column {err.colno}"
        hint = "the file is cut; copy it again" if cut else "check the comma, quote or bracket there"
        raise source.error(err.lineno, got, "JSON", hint) from err
    except RecursionError as err:
        raise source.error(1, "very deep nesting", "a topology file", "give the file itself") from err


@dataclass(frozen=True, slots=True)
class YamlDoc:
    """A YAML value and the line on which each part starts, keyed by its path."""

    value: Any
    lines: dict[tuple[str | int, ...], int]

    def line(self, *path: str | int) -> int:
        """Line of the part, or of the nearest part above it."""
        key = tuple(path)
        while key and key not in self.lines:
            key = key[:-1]
        return self.lines.get(key, 1)


def read_yaml(source: Source) -> YamlDoc:
    """Parse one YAML document.

    Raises:
        PlanError: not YAML, several documents, or a key given twice.
    """
    try:
        loader = yaml.SafeLoader(source.text)
        node = loader.get_single_node()
        lines: dict[tuple[str | int, ...], int] = {}
        if node is not None:
            _record_lines(source, node, (), lines, set())
        value = None if node is None else loader.construct_document(node)
        return YamlDoc(value, lines)
    except yaml.MarkedYAMLError as err:
        mark = err.problem_mark or err.context_mark
        got = " ".join(str(err.problem or err).split())
        hint = "indent with spaces; check colons, quotes and brackets here"
        raise source.error(mark.line + 1 if mark else 1, got, "YAML", hint) from err
    except (yaml.YAMLError, ValueError, RecursionError) as err:
        raise source.error(
            1, " ".join(str(err).split())[:100], "YAML", "export the file as plain text"
        ) from err


def _record_lines(
    source: Source,
    node: yaml.Node,
    path: tuple[str | int, ...],
    lines: dict[tuple[str | int, ...], int],
    above: set[int],
) -> None:
    line = node.start_mark.line + 1
    lines.setdefault(path, line)
    if id(node) in above:
        raise source.error(line, "an alias that contains itself", "a plain document", "write the value out")
    inside = above | {id(node)}
    if isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            _record_lines(source, item, (*path, i), lines, inside)
    elif isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            name = str(key.value)
            if name in seen:
                raise source.error(
                    key.start_mark.line + 1, f"key {name!r} twice", "each key once", "keep one"
                )
            seen.add(name)
            lines[(*path, name)] = key.start_mark.line + 1
            _record_lines(source, value, (*path, name), lines, inside)


@dataclass(slots=True)
class Element:
    """An XML element and the line of its opening tag."""

    tag: str
    attrs: dict[str, str]
    line: int
    children: list[Element] = field(default_factory=list)

    def find(self, tag: str) -> Iterator[Element]:
        """Direct children with this tag."""
        return (c for c in self.children if c.tag == tag)

    def walk(self) -> Iterator[Element]:
        """This element and everything below it, in document order."""
        yield self
        for child in self.children:
            yield from child.walk()


def read_xml(source: Source) -> Element:
    """Parse XML.

    Raises:
        PlanError: not XML, cut, or with a DOCTYPE (entities have no place in a topology).
    """
    stack: list[Element] = []
    roots: list[Element] = []
    parser = expat.ParserCreate()
    skipped = source.text[: len(source.text) - len(source.text.lstrip())].count("\n")

    def start(tag: str, attrs: dict[str, str]) -> None:
        element = Element(tag, attrs, parser.CurrentLineNumber + skipped)
        (stack[-1].children if stack else roots).append(element)
        stack.append(element)
        if len(stack) > 64:
            raise source.error(
                element.line, "elements 64 deep", "a PCI tree", "give the topology file itself"
            )

    def end(_: str) -> None:
        stack.pop()

    def doctype(*_: Any) -> None:
        raise source.error(
            parser.CurrentLineNumber + skipped, "a DOCTYPE", "plain elements", "remove the DOCTYPE"
        )

    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.StartDoctypeDeclHandler = doctype
    try:
        parser.Parse(source.text.lstrip().encode(), True)
    except expat.ExpatError as err:
        line = err.lineno + skipped
        if stack:
            top = stack[-1]
            got = f"{expat.ErrorString(err.code)} inside <{top.tag}> opened on line {top.line}"
            raise source.error(line, got, "XML closed to the end", "the file is cut; copy it again") from err
        raise source.error(line, expat.ErrorString(err.code), "XML", "give the file the tool wrote") from err
    return roots[0]
