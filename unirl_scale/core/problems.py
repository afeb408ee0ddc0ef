"""Problem: one line of a user's mistake. Collected first, raised together."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from unirl_scale.core.errors import ConfigError

_SHOWN_CHARS = 60
_SHOWN_NAMES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """`path: got VALUE; rule; hint: ...`.

    Attributes:
        path: dotted field path, e.g. `stages[1].optim.lr`, or a file position.
        got: the value as the user would write it (see `show`), or "nothing".
        rule: what must hold, "must be ...".
        hint: nearest legal values or the way out; "" = none.
    """

    path: str
    got: str
    rule: str
    hint: str = ""

    def __str__(self) -> str:
        line = f"{self.path}: got {self.got}; {self.rule}"
        return f"{line}; hint: {self.hint}" if self.hint else line


def show(value: Any) -> str:
    """The value on one line as YAML flow text would have it, cut to a readable length."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "..."


def nearest_name(name: str, legal: Iterable[str]) -> str | None:
    """The legal name closest to a misspelt one, or None when nothing is close."""
    matches = difflib.get_close_matches(name.lower(), list(legal), n=1, cutoff=0.6)
    return matches[0] if matches else None


def name_hint(name: str, legal: Iterable[str]) -> str:
    """`did you mean X?` when something is close, else the legal names, or the first dozen of many."""
    names = list(legal)
    near = nearest_name(name, names)
    if near:
        return f"did you mean {near}?"
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return f"one of {', '.join(names[:_SHOWN_NAMES])}{more}"


def raise_all(problems: Sequence[Problem | str], source: str = "") -> None:
    """Raise ConfigError with every problem, one a line; return quietly when there is none.

    Args:
        problems: what is wrong.
        source: the file or object they are about, put in front.
    """
    if not problems:
        return
    prefix = f"{source}: " if source else ""
    if len(problems) == 1:
        raise ConfigError(f"{prefix}{problems[0]}")
    raise ConfigError(f"{prefix}{len(problems)} problems\n" + "\n".join(f"  {p}" for p in problems))
