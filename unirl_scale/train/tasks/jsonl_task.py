"""Prompts from a JSONL file, judged by a verifier that the configuration names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from unirl_scale.core.errors import ConfigError
from unirl_scale.core.problems import name_hint, show
from unirl_scale.train.data_order import epoch_permutation
from unirl_scale.train.tasks import verifiers
from unirl_scale.train.tasks.errors import config_error
from unirl_scale.train.tasks.fingerprint import fingerprint_of
from unirl_scale.train.tasks.interface import Prompt, Split
from unirl_scale.train.tasks.tokenizer import Tokenizer, TokenizerOptions

_FIELDS = ("prompt", "answer", "target")


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonlOptions:
    """One JSON object a line: `prompt`, `answer`, optionally `target`; other fields are metadata."""

    path: str
    heldout_path: str = ""  # a file of its own, or ...
    heldout_size: int = 0  # ... at least this many rows of `path`, all rows of a prompt together
    seed: int = 0  # of that choice
    verifier: str = "exact_match"  # exact_match | numeric | regex | package.module:function
    pattern: str = ""  # of regex
    tolerance: float = 0.0  # of numeric, absolute
    tokenizer: TokenizerOptions = field(default_factory=TokenizerOptions)


class JsonlTask:
    """Rows in file order. The splits share no prompt text.

    Raises:
        ConfigError: an unreadable file, a malformed row (file and line are named), or splits that overlap.
    """

    options_type: ClassVar[type[JsonlOptions]] = JsonlOptions

    def __init__(self, options: JsonlOptions) -> None:
        self.options = options
        self.tokenizer = Tokenizer(options.tokenizer)
        self._verifier = verifiers.resolve(
            options.verifier, pattern=options.pattern, tolerance=options.tolerance
        )
        rows = read_rows(options.path, "task.path", options.verifier)
        if options.heldout_path and options.heldout_size:
            rule, hint = "cannot go with heldout_path", "leave one of them out"
            raise config_error("task.heldout_size", options.heldout_size, rule, hint)
        if options.heldout_path:
            heldout = read_rows(options.heldout_path, "task.heldout_path", options.verifier)
            _refuse_overlap(rows, heldout, options)
        else:
            rows, heldout = _split(rows, options)
        self._splits: dict[Split, list[Prompt]] = {"train": _numbered(rows), "heldout": _numbered(heldout)}

    def size(self, split: Split) -> int:
        """Prompts in the split."""
        return len(self._splits[split])

    def prompts(self, split: Split, indices: Sequence[int]) -> list[Prompt]:
        """The prompts at these positions of the split."""
        return [self._splits[split][i] for i in indices]

    def reward(self, prompt: Prompt, response_text: str) -> float | None:
        """The named verifier's score."""
        return verifiers.judge(self._verifier, prompt, response_text)

    def sft_target(self, prompt: Prompt) -> str | None:
        """The row's `target`, else its `answer`."""
        return prompt.answer if prompt.target is None else prompt.target

    def fingerprint(self) -> str:
        """SHA-256 over the data of both splits."""
        return fingerprint_of(self._splits)


def read_rows(path: str, key: str, verifier: str) -> list[Prompt]:
    """The rows of a JSONL file; `index` is the line number for now. Blank lines are passed over.

    Args:
        path: of the file.
        key: the option that named it, for errors.
        verifier: its needs are checked row by row: all but a function need an answer, numeric needs a number.

    Raises:
        ConfigError: names file and line.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        near = name_hint(Path(path).name, _siblings(Path(path)))
        raise ConfigError(f"{key}: got {show(path)}; {error.strerror or error}; hint: {near}") from error
    rows = [
        _row(line, number, f"{path}:{number}", verifier)
        for number, line in enumerate(data.split(b"\n"), start=1)
        if line.strip()
    ]
    if not rows:
        raise ConfigError(f'{key}: got {show(path)}; has no rows; hint: {{"prompt": "1+1=", "answer": "2"}}')
    return rows


def _siblings(path: Path) -> list[str]:
    return sorted(p.name for p in path.parent.iterdir()) if path.parent.is_dir() else [str(path.parent)]


def _row(line: bytes, number: int, where: str, verifier: str) -> Prompt:
    """One line as a Prompt."""
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: byte {error.start} is no UTF-8; hint: save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{where}: column {error.colno}: {error.msg}; must be one JSON object a line"
        ) from error
    if not isinstance(record, dict):
        raise ConfigError(f'{where}: got {show(record)}; must be a JSON object; hint: {{"prompt": ...}}')
    prompt = record.get("prompt")
    if not isinstance(prompt, str) or not prompt:
        near = "" if "prompt" in record else f"; hint: the row has {', '.join(record) or 'no fields'}"
        raise ConfigError(f"{where}: prompt: got {show(prompt)}; must be non-empty text{near}")
    answer = _answer(record.get("answer"), where, verifier)
    target = record.get("target")
    if target is not None and not isinstance(target, str):
        raise ConfigError(f"{where}: target: got {show(target)}; must be text")
    metadata: dict[str, Any] = {name: value for name, value in record.items() if name not in _FIELDS}
    return Prompt(index=number, text=prompt, answer=answer, target=target, metadata=metadata)


def _answer(value: object, where: str, verifier: str) -> str | None:
    """An answer as text; JSON numbers are taken as they are written back."""
    if isinstance(value, bool) or not isinstance(value, str | int | float | None):
        raise ConfigError(f"{where}: answer: got {show(value)}; must be text or a number")
    if value is None and verifier in verifiers.NAMES:
        raise ConfigError(f"{where}: answer: got null or nothing; the {verifier} verifier compares with it")
    answer = value if isinstance(value, str) or value is None else json.dumps(value)
    if verifier == "numeric" and verifiers.last_number(answer or "") is None:
        raise ConfigError(f"{where}: answer: got {show(answer)}; the numeric verifier needs a number in it")
    return answer


def _numbered(rows: Sequence[Prompt]) -> list[Prompt]:
    return [replace(row, index=i) for i, row in enumerate(rows)]


def _split(rows: list[Prompt], options: JsonlOptions) -> tuple[list[Prompt], list[Prompt]]:
    """Move prompts, chosen by the seed, to the held-out split until it has heldout_size rows."""
    if not 0 <= options.heldout_size < len(rows):
        rule = f"must lie in [0, {len(rows) - 1}], {options.path} has {len(rows)} rows"
        hint = str(max(0, len(rows) // 10))
        raise config_error("task.heldout_size", options.heldout_size, rule, hint)
    texts = list(dict.fromkeys(row.text for row in rows))
    rows_of = dict.fromkeys(texts, 0)
    for row in rows:
        rows_of[row.text] += 1
    chosen: set[str] = set()
    count = 0
    for i in epoch_permutation(options.seed, 0, len(texts)).tolist():
        if count >= options.heldout_size:
            break
        chosen.add(texts[i])
        count += rows_of[texts[i]]
    if count == len(rows) and rows:
        rule = f"leaves no training rows, {options.path} has {len(texts)} distinct prompts"
        raise config_error("task.heldout_size", options.heldout_size, rule, "less")
    train = [row for row in rows if row.text not in chosen]
    return train, [row for row in rows if row.text in chosen]


def _refuse_overlap(train: Sequence[Prompt], heldout: Sequence[Prompt], options: JsonlOptions) -> None:
    lines = {row.text: row.index for row in train}
    shared = [row for row in heldout if row.text in lines]
    if shared:
        row = shared[0]
        rule = (
            f"shares {len(shared)} prompts with task.path, first {show(row.text)}"
            f" (line {row.index}, and line {lines[row.text]} of {options.path})"
        )
        hint = "take them out of one file"
        raise config_error("task.heldout_path", options.heldout_path, rule, hint)
