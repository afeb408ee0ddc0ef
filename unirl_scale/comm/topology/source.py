"""Text with its file name and line numbers, so that every refusal can say where."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from unirl_scale.core.errors import PlanError

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[()][A-Za-z0-9]|\x1b[=>]")
_MAX_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class Source:
    """A file's text. `name` is the path, or `<text>`."""

    name: str
    text: str

    @property
    def lines(self) -> list[str]:
        """The lines, without terminal colour codes and line ends."""
        return _ANSI.sub("", self.text).splitlines()

    def line_of(self, word: str, default: int = 1) -> int:
        """Number (from 1) of the first line that contains `word`."""
        for number, line in enumerate(self.lines, 1):
            if word in line:
                return number
        return default

    def error(self, line: int, got: str, expected: str, hint: str) -> PlanError:
        """The refusal every reader raises: where, what was there, what the rule is, what would fix it."""
        return PlanError(f"{self.name}:{line}: got {got}; must be {expected}; hint: {hint}")


def load(path_or_text: str | os.PathLike[str]) -> Source:
    """Read a file, or wrap text that has a line break or starts like a document.

    Raises:
        PlanError: the file is missing, unreadable, empty, too large or not text.
    """
    if isinstance(path_or_text, str) and _is_text(path_or_text):
        return _checked(Source("<text>", path_or_text))
    path = Path(path_or_text)
    name = str(path)
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise PlanError(
                f"{name}:1: got a file of {path.stat().st_size} bytes; must be at most {_MAX_BYTES}; "
                "hint: give the topology file itself, not an archive or a log"
            )
        raw = path.read_bytes()
    except OSError as err:
        raise PlanError(
            f"{name}:1: got {err.strerror or err}; must be a readable topology file; "
            "hint: check the path and its permissions"
        ) from err
    return _checked(Source(name, _decode(raw, name)))


def _is_text(value: str) -> bool:
    if "\n" in value:
        return True
    return value.lstrip()[:1] in ("{", "[", "<") or bool(re.match(r"\s*(export\s+)?[A-Za-z_]+=", value))


def _decode(raw: bytes, name: str) -> str:
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):  # what `> file` writes in PowerShell
        return raw.decode("utf-16", errors="replace")
    if b"\x00" in raw[:4096]:
        raise PlanError(
            f"{name}:1: got a binary file; must be text; hint: decompress it, or export it as text, first"
        )
    return raw.decode("utf-8-sig", errors="replace")


def _checked(source: Source) -> Source:
    if not source.text.strip():
        raise source.error(
            1, "an empty file", "a topology", "run the command that writes it again and look at its exit code"
        )
    return source
