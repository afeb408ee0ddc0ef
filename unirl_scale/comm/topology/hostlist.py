"""SLURM host lists: `rack[01-03,7]n[1-2],login.a` to names and back."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

from unirl_scale.comm.topology.model import MAX_NODES

_NAME = re.compile(r"[A-Za-z0-9._:@+*\-]*\Z")
_TAIL = re.compile(r"(.*?)(\d+)\Z")


def split_list(text: str) -> list[str]:
    """Split at commas outside brackets.

    Raises:
        ValueError: a bracket is not closed, not opened or nested.
    """
    parts, depth, start = [], 0, 0
    for i, ch in enumerate(text):
        if ch == "[":
            depth += 1
        elif ch == "]":
            depth -= 1
        elif ch == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
        if depth not in (0, 1):
            raise ValueError(f"bracket at column {i + 1} of {text!r}")
    if depth:
        raise ValueError(f"'[' never closed in {text!r}")
    parts.append(text[start:])
    return [p.strip() for p in parts]


def expand(text: str) -> list[str]:
    """Names of a host list, in its order. Leading zeros set the width, as in SLURM.

    Raises:
        ValueError: malformed brackets or ranges, an empty name, or more than MAX_NODES names.
    """
    names: list[str] = []
    for part in split_list(text):
        if not part:
            raise ValueError(f"empty name in {text!r}")
        names.extend(_expand_one(part))
        if len(names) > MAX_NODES:
            raise ValueError(f"{text!r} names more than {MAX_NODES} hosts")
    return names


def _expand_one(part: str) -> list[str]:
    pieces = re.split(r"\[([^\]]*)\]", part)
    if "[" not in part:
        if not _NAME.match(part):
            raise ValueError(f"{part!r} is not a host name")
        return [part]
    result = [""]
    for i, piece in enumerate(pieces):
        if i % 2 == 0:
            if not _NAME.match(piece):
                raise ValueError(f"{piece!r} in {part!r} is not part of a host name")
            choices = [piece]
        else:
            choices = _expand_ranges(piece, part)
        if len(result) * len(choices) > MAX_NODES:
            raise ValueError(f"{part!r} names more than {MAX_NODES} hosts")
        result = [head + tail for head in result for tail in choices]
    return result


def _expand_ranges(body: str, part: str) -> list[str]:
    out: list[str] = []
    for item in body.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", item)
        if not match:
            raise ValueError(f"range {item!r} in {part!r}")
        low, high = match[1], match[2] or match[1]
        if int(high) < int(low):
            raise ValueError(f"range {item!r} in {part!r} runs backwards")
        if int(high) - int(low) >= MAX_NODES:
            raise ValueError(f"range {item!r} in {part!r} is too long")
        width = len(low) if low.startswith("0") or len(low) == len(high) else 0
        out.extend(f"{n:0{width}d}" for n in range(int(low), int(high) + 1))
    return out


def fold(names: Sequence[str]) -> str:
    """The shortest plain host list for `names`, keeping their order.

    Runs of consecutive numbers with one prefix and one width become a bracket.
    """
    parsed = [(m[1], m[2]) if (m := _TAIL.match(n)) else (n, "") for n in names]
    runs: list[tuple[str, list[tuple[str, str]]]] = []
    for prefix, group in groupby(parsed, key=lambda p: (p[0], p[1] == "")):
        numbers = [digits for _, digits in group]
        if prefix[1]:
            runs.extend((prefix[0], []) for _ in numbers)
        else:
            runs.append((prefix[0], _runs(numbers)))
    return ",".join(_render(prefix, spans) for prefix, spans in runs)


def _runs(numbers: list[str]) -> list[tuple[str, str]]:
    spans: list[tuple[str, str]] = []
    for digits in numbers:
        if spans:
            low, high = spans[-1]
            if int(digits) == int(high) + 1 and len(digits) == len(low):
                spans[-1] = (low, digits)
                continue
        spans.append((digits, digits))
    return spans


def _render(prefix: str, spans: list[tuple[str, str]]) -> str:
    if not spans:
        return prefix
    if len(spans) == 1 and spans[0][0] == spans[0][1]:
        return prefix + spans[0][0]
    return f"{prefix}[{','.join(a if a == b else f'{a}-{b}' for a, b in spans)}]"
