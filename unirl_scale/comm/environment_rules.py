"""Rules for environment variables, as values: what a variable may hold, and a refusal that names it.

Nothing here reads or writes the process environment: mappings go in, mappings and problems come out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from unirl_scale.core.errors import PlanError
from unirl_scale.core.problems import Problem, nearest_name

Check = Callable[[str], tuple[str, str] | None]
"""Value -> None, or (rule, hint)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Variables to export, and why each is set."""

    variables: Mapping[str, str]
    reasons: Mapping[str, str]

    def lines(self) -> list[str]:
        """`export NAME=VALUE  # reason`, sorted by name."""
        width = max((len(f"{k}={v}") for k, v in self.variables.items()), default=0)
        return [
            f"export {f'{k}={quoted(v)}'.ljust(width + 2)}  # {self.reasons[k]}"
            for k, v in sorted(self.variables.items())
        ]


def quoted(value: str) -> str:
    """The value as a shell word."""
    return value if re.fullmatch(r"[\w@%+=:,./\-]*", value) else "'" + value.replace("'", "'\\''") + "'"


def refuse(problems: Sequence[Problem]) -> None:
    """Raise with every problem, one a line.

    Raises:
        PlanError: there is a problem.
    """
    if problems:
        raise PlanError("environment: " + "\n".join(str(p) for p in problems))


def problem(name: str, got: str, rule: str, hint: str = "") -> Problem:
    """A refusal of one variable."""
    return Problem(path=name, got=repr(got), rule=rule, hint=hint)


def whole(low: int, high: int | None = None, step: int = 1) -> Check:
    """A whole number from `low` to `high`, a multiple of `step`."""

    def check(value: str) -> tuple[str, str] | None:
        top = "" if high is None else f" to {high}"
        rule = f"must be a whole number from {low}{top}" + (f", a multiple of {step}" if step > 1 else "")
        if not re.fullmatch(r"-?\d+", value.strip()):
            return rule, f"e.g. {low}"
        number = int(value)
        inside = number >= low and (high is None or number <= high)
        if inside and number % step == 0:
            return None
        near = max(low, min(number, high if high is not None else number))
        return rule, f"nearest legal value {near - near % step if near - near % step >= low else low}"

    return check


def one_of(*legal: str, ignore_case: bool = False) -> Check:
    """One of some words."""

    def check(value: str) -> tuple[str, str] | None:
        same = [w for w in legal if w == value or (ignore_case and w.lower() == value.lower())]
        if same:
            return None
        near = nearest_name(value, legal)
        return f"must be one of {', '.join(legal)}", f"did you mean {near}?" if near else f"e.g. {legal[0]}"

    return check


def apply_checks(env: Mapping[str, str], checks: Mapping[str, Check]) -> list[Problem]:
    """Problems of every variable that has a check."""
    found = []
    for name in sorted(env):
        verdict = checks[name](env[name]) if name in checks else None
        if verdict:
            found.append(problem(name, env[name], *verdict))
    return found


def unknown_names(env: Mapping[str, str], prefix: str, known: Sequence[str]) -> list[Problem]:
    """Misspelt variables: they start with the prefix, are not known, but are close to one that is."""
    found = []
    for name in sorted(env):
        if not name.startswith(prefix) or name in known:
            continue
        near = nearest_name(name.lower(), [k.lower() for k in known])
        if near and _distance_is_small(name.lower(), near):
            rule = "is read by nothing"
            found.append(problem(name, env[name], rule, f"did you mean {near.upper()}?"))
    return found


def _distance_is_small(a: str, b: str) -> bool:
    """At most two letters inserted, dropped or changed."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        last, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (x != y))
    return row[-1] <= 2
