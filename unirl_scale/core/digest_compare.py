"""Two runs' digests side by side: the first step and tensor whose bits differ.

A line of `digests.jsonl` is `{"step": optimizer step, "tensors": {name: sha256 hex}}`; other keys are notes.
A step may be spread over several lines, e.g. one a role.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unirl_scale.core.errors import ConfigError
from unirl_scale.core.problems import show

# Optimizer step -> tensor name -> digest, both in the order they were written.
Digests = Mapping[int, Mapping[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What differs between runs A and B.

    Attributes:
        steps: steps present in both.
        tensors: digests compared.
        differing: (step, tensor) whose digests differ, in the order of run A.
        missing: sentences about steps and tensors that only one of the runs has.
    """

    steps: int
    tensors: int
    differing: tuple[tuple[int, str], ...]
    missing: tuple[str, ...]

    @property
    def equal(self) -> bool:
        return not self.differing and not self.missing

    @property
    def first_difference(self) -> str:
        """`step 3: actor.grad.embed.weight (and 12 more)`, or the first thing missing; "" when equal."""
        if not self.differing:
            return self.missing[0] if self.missing else ""
        step, tensor = self.differing[0]
        more = len(self.differing) - 1
        return f"step {step}: {tensor}" + (f" (and {more} more)" if more else "")


def parse_digests(lines: Iterable[str], name: str) -> Digests:
    """Read digests.jsonl.

    Args:
        lines: the file's lines with their ends; a last line without one is the unfinished write of a killed
            run and is left out.
        name: file name for errors.

    Raises:
        ConfigError: a damaged line, a tensor with two digests at one step, or no digest at all.
    """
    digests: dict[int, dict[str, str]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.endswith("\n"):
            break
        step, tensors = _parse_line(line, f"{name}:{number}")
        known = digests.setdefault(step, {})
        for tensor, digest in tensors.items():
            if known.setdefault(tensor, digest) != digest:
                raise ConfigError(
                    f"{name}:{number}: got a second digest of {tensor} at step {step}; a run has one a step; "
                    "hint: a resumed run recomputed that step to other bits"
                )
    if not digests:
        raise ConfigError(
            f"{name}: got no digests; a compared run must record them; hint: train with digest.every=1"
        )
    return digests


def _parse_line(line: str, where: str) -> tuple[int, dict[str, str]]:
    try:
        record: Any = json.loads(line)
        step, tensors = record["step"], record["tensors"]
    except (ValueError, KeyError, TypeError):
        step = tensors = None
    strings = isinstance(tensors, dict) and all(isinstance(digest, str) for digest in tensors.values())
    if not isinstance(step, int) or not strings:
        rule = 'must be {"step": N, "tensors": {name: digest}}'
        raise ConfigError(f"{where}: got {show(line.strip())}; {rule}; hint: the file is damaged")
    return step, tensors


def read_digests(run_dir: Path) -> Digests:
    """The digests of a run directory.

    Raises:
        ConfigError: no such run, or its digests are missing or damaged.
    """
    path = run_dir / "digests.jsonl"
    try:
        with path.open(encoding="utf-8", newline="\n") as lines:
            return parse_digests(lines, str(path))
    except FileNotFoundError:
        if not run_dir.is_dir():
            raise ConfigError(f"{run_dir}: got no such directory; must be a run directory") from None
        hint = "train with digest.every=1"
        raise ConfigError(
            f"{run_dir}: got no digests.jsonl; a compared run must record digests; hint: {hint}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: got {error}; must be a readable text file") from None


def compare_digests(a: Digests, b: Digests) -> Comparison:
    """Hold every step and tensor of two runs against each other."""
    differing: list[tuple[int, str]] = []
    missing: list[str] = []
    common = [step for step in a if step in b]
    for label, ours, theirs in (("A", a, b), ("B", b, a)):
        only = sorted(step for step in ours if step not in theirs)
        if only:
            missing.append(f"{_steps(only)} only in {label}")
    for step in common:
        differing += [(step, name) for name, digest in a[step].items() if b[step].get(name, digest) != digest]
        missing += _missing_tensors(step, a[step], b[step], "A")
        missing += _missing_tensors(step, b[step], a[step], "B")
    tensors = sum(len(a[step].keys() & b[step].keys()) for step in common)
    return Comparison(steps=len(common), tensors=tensors, differing=tuple(differing), missing=tuple(missing))


def _missing_tensors(step: int, ours: Mapping[str, str], theirs: Mapping[str, str], label: str) -> list[str]:
    only = [name for name in ours if name not in theirs]
    more = f" and {len(only) - 1} more" if len(only) > 1 else ""
    return [f"step {step}: {only[0]}{more} only in {label}"] if only else []


def _steps(steps: list[int]) -> str:
    if len(steps) == 1:
        return f"step {steps[0]}"
    return f"{len(steps)} steps ({steps[0]}..{steps[-1]})"
