"""The device matrix that `nvidia-smi topo -m` and `npu-smi info -t topo` print, whole or damaged."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from unirl_scale.comm.topology import boxes
from unirl_scale.comm.topology.model import SELF, UNKNOWN, Note
from unirl_scale.comm.topology.source import Source

_TRAILER = re.compile(r"\s+(CPU Affinity|NUMA Affinity|GPU NUMA ID)\b.*$")
_NAME = re.compile(r"[A-Za-z][\w.:\-]*\Z")


@dataclass(frozen=True, slots=True)
class Row:
    """One printed row: cell of each column (absent = not printed), then whatever followed the cells."""

    line: int
    cells: dict[str, str]
    rest: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    """The matrix as printed. `columns` keeps the printed order; a column may lack its row."""

    columns: tuple[str, ...]
    trailer: tuple[str, ...]
    rows: dict[str, Row]
    notes: list[Note] = field(default_factory=list)

    def pair(self, source: Source, a: str, b: str) -> str:
        """The path between two columns, from either row.

        Raises:
            PlanError: the two rows contradict each other.
        """
        there = self.rows[a].cells.get(b, UNKNOWN) if a in self.rows else UNKNOWN
        back = self.rows[b].cells.get(a, UNKNOWN) if b in self.rows else UNKNOWN
        if UNKNOWN not in (there, back) and there != back:
            raise source.error(
                self.rows[b].line,
                f"{back} from {b} to {a}, but line {self.rows[a].line} has {there} from {a} to {b}",
                "the same path both ways",
                "print the matrix again; one of the two rows is damaged",
            )
        return back if there == UNKNOWN else there


def read_matrix(source: Source, device: re.Pattern[str], path: re.Pattern[str], command: str) -> Matrix:
    """Find the matrix in the text and read it cell by cell.

    Args:
        device: matches a device's column name.
        path: matches a cell.
        command: what prints such a file, for the hints.

    Raises:
        PlanError: no header, a second header, a repeated row, or a row that names itself in the wrong place.
    """
    lines = source.lines
    start = next((i for i, text in enumerate(lines) if _is_header(text, device, path)), None)
    if start is None:
        raise source.error(
            1, "no line of device names", f"the matrix of `{command}`", "save the command's whole output"
        )
    columns, trailer = _header(lines[start])
    if len(set(columns)) != len(columns):
        twice = next(c for c in columns if columns.count(c) > 1)
        raise source.error(start + 1, f"column {twice} twice", "each device once", f"run `{command}` again")
    matrix = Matrix(columns=columns, trailer=trailer, rows={})
    cut = not source.text.endswith("\n")
    for i, text in enumerate(lines[start + 1 :], start + 2):
        words = text.split()
        if _is_header(text, device, path) and words != words[:1]:
            raise source.error(
                i, "a second header", "the matrix of one machine", "give one file a node, not one for all"
            )
        if not words or words[0] not in columns:
            continue
        if words[0] in matrix.rows:
            first = matrix.rows[words[0]].line
            raise source.error(
                i, f"row {words[0]} again (first on line {first})", "each row once", "give one file a node"
            )
        matrix.rows[words[0]] = _row(source, matrix, words[0], text, i, path, cut and i == len(lines))
    odd = next((n for n in matrix.notes if "is not a path" in n.what), None)
    if odd and not any(row.cells for row in matrix.rows.values()):
        raise source.error(odd.line, odd.what, f"paths as `{command}` names them", f"run `{command}`")
    return matrix


def device_paths(
    source: Source, matrix: Matrix, names: Sequence[str], kind: Callable[[str], str], notes: list[Note]
) -> tuple[list[list[str]], dict[int, str]]:
    """Paths between devices, gaps filled where that is safe, and the degraded devices with the reason.

    Args:
        kind: a cell's path, UNKNOWN where it says none.
        notes: gets what was missing, filled or degraded.

    Raises:
        PlanError: two rows contradict each other.
    """
    missing = "row missing, the file is cut; its paths come from the other rows"
    lost = [n for n in names if n not in matrix.rows]
    notes += [Note(what=f"{n}: {missing}", source=source.name, severity="filled") for n in lost]
    paths = [[SELF if a == b else kind(matrix.pair(source, a, b)) for b in names] for a in names]
    boxes.fill_uniform(paths, names, notes, source.name)
    degraded = boxes.find_degraded(paths, names, exempt=lambda k: k == UNKNOWN)
    notes += [
        Note(what=f"{names[i]}: {why}", source=source.name, severity="degraded")
        for i, why in degraded.items()
    ]
    return paths, degraded


def _is_header(text: str, device: re.Pattern[str], path: re.Pattern[str]) -> bool:
    names = _TRAILER.sub("", " " + text).split()
    if not names or not device.match(names[0]):
        return False
    return all(_NAME.match(n) and not path.match(n) for n in names)


def _header(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    names = tuple(_TRAILER.sub("", " " + text).split())
    trailer = tuple(t for t in ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID") if t in text)
    return names, trailer


def _row(
    source: Source, matrix: Matrix, name: str, text: str, line: int, path: re.Pattern[str], cut: bool
) -> Row:
    words = [w.strip() for w in text.split("\t")] if "\t" in text.strip() else text.split()
    if words and words[0].split() != [name]:  # a prompt or blanks before the first tab
        words = text.split()
    words = words[1:]
    columns, own = matrix.columns, matrix.columns.index(name)
    cells: list[str] = []
    while len(cells) < len(columns) and len(cells) < len(words) and path.match(words[len(cells)]):
        cells.append(words[len(cells)])
    rest = tuple(words[len(cells) :])
    if len(cells) < len(columns):
        if cut and not rest and cells:
            cells.pop()  # the cell the cut went through
        if rest and rest[0] and not re.match(r"[\d,\-]+\Z|N/A\Z", rest[0]):
            matrix.notes.append(
                Note(what=f"{name}: cell {rest[0]!r} is not a path", source=source.name, line=line)
            )
        return Row(line, _align(source, matrix, name, cells, line), rest)
    if cells[own] != SELF:
        raise source.error(
            line,
            f"{cells[own]} where row {name} meets its own column",
            "X there",
            "a cell is missing or moved",
        )
    return Row(line, {c: t for c, t in zip(columns, cells) if t != SELF}, rest)


def _align(source: Source, matrix: Matrix, name: str, cells: Sequence[str], line: int) -> dict[str, str]:
    """Place the cells of a short row. Only what the row's X anchors, or what is the same wherever it
    goes, is used; the rest stays unknown and is filled from the other rows."""
    columns, own = matrix.columns, matrix.columns.index(name)
    placed: dict[str, str] = {}
    before, after = list(cells), []
    if SELF in cells:
        at = list(cells).index(SELF)
        before, after = list(cells[:at]), list(cells[at + 1 :])
    if len(before) == own or SELF not in cells:
        placed.update(zip(columns[:own], before))
    needed = len(columns) - own - 1
    same = len(set(after)) == 1 and len(before) == own
    if len(after) == needed or same:
        placed.update(zip(columns[own + 1 :], after))
    missing = len(columns) - len(cells)
    matrix.notes.append(
        Note(
            what=f"{name}: {missing} of {len(columns)} cells are missing; taken from the other rows",
            source=source.name,
            line=line,
            severity="filled",
        )
    )
    return placed
