"""SLURM host lists: `gpu[001-003,007],login1` -> host names, in the list's order."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from unirl_scale.core.errors import ConfigError

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand_hosts(text: str) -> Iterator[str]:
    """The hosts one by one, so that the first of ten thousand costs nothing.

    Zero padding is kept (`n[08-11]` -> n08 n09 n10 n11), a name may have several brackets, and the last one
    turns fastest.

    Raises:
        ConfigError: brackets that do not match, or a range that is not numbers or runs backwards.
    """
    for item in _split(text):
        yield from _expand_item(item, text)


def first_host(text: str) -> str:
    """The first host of the list.

    Raises:
        ConfigError: the list is empty or malformed.
    """
    for host in expand_hosts(text):
        return host
    raise _malformed(text, "an empty list")


def _malformed(text: str, what: str) -> ConfigError:
    return ConfigError(f"host list: got {text!r}, {what}; must be like node[01-04,07],gpu1")


def _split(text: str) -> Iterator[str]:
    """Cut at the commas outside brackets."""
    depth, item = 0, ""
    for char in text.strip():
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            raise _malformed(text, "brackets do not match")
        if char == "," and depth == 0:
            if item:
                yield item
            item = ""
        else:
            item += char
    if depth:
        raise _malformed(text, "a bracket is not closed")
    if item:
        yield item


def _expand_item(item: str, text: str) -> Iterator[str]:
    parts = re.split(r"\[([^\]]*)\]", item)  # plain, inside, plain, inside, ..., plain
    names, ranges = parts[0::2], parts[1::2]
    if not ranges:
        yield item
        return
    # The outer brackets are few; only the last one's numbers are worth generating lazily.
    outer = [list(_numbers(inside, text)) for inside in ranges[:-1]]
    for chosen in itertools.product(*outer):
        prefix = "".join(name + number for name, number in zip(names, chosen, strict=False))
        for number in _numbers(ranges[-1], text):
            yield f"{prefix}{names[-2]}{number}{names[-1]}"


def _numbers(inside: str, text: str) -> Iterator[str]:
    for part in inside.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise _malformed(text, f"{part!r} is not a number or a range")
        low, high = match.group(1), match.group(2) or match.group(1)
        if int(high) < int(low):
            raise _malformed(text, f"{part} runs backwards")
        for number in range(int(low), int(high) + 1):
            yield str(number).zfill(len(low))
