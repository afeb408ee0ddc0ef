"""Prompts from JSONL files: rows, splits, and errors that name file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from unirl_scale.core.errors import ConfigError
from unirl_scale.train.tasks.interface import Task
from unirl_scale.train.tasks.jsonl_task import JsonlOptions
from unirl_scale.train.tasks.tasks import build


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return str(path)


def sums(n: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(n)]


def task(path: str, **options: Any) -> Task:
    return build("jsonl", JsonlOptions(path=path, **options))


def test_rows_in_file_order_with_answer_target_and_metadata(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "answer": 5, "level": 2},
        "",
        {"prompt": "b", "answer": "x", "target": "think: x"},
    ]
    made = task(write(tmp_path / "d.jsonl", rows))
    first, second = made.prompts("train", [0, 1])
    assert (first.index, first.text, first.answer, dict(first.metadata)) == (0, "a", "5", {"level": 2})
    assert made.sft_target(first) == "5" and made.sft_target(second) == "think: x"
    assert made.reward(second, " x ") == 1.0 and made.reward(second, "think: x") == 0.0
    assert made.size("train") == 2 and made.size("heldout") == 0


def test_heldout_rows_are_disjoint_complete_and_follow_the_seed(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", sums(30) + sums(5))  # five prompts come twice
    splits = {}
    for seed in (0, 0, 1):
        made = task(path, heldout_size=8, seed=seed)
        texts = [[p.text for p in made.prompts(s, range(made.size(s)))] for s in ("train", "heldout")]
        assert not set(texts[0]) & set(texts[1]) and len(texts[0]) + len(texts[1]) == 35
        assert len(texts[1]) in (8, 9)
        splits.setdefault(seed, texts)
        assert splits[seed] == texts
    assert splits[0] != splits[1]


def test_a_heldout_file_of_its_own_must_not_overlap(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", sums(5))
    made = task(train, heldout_path=write(tmp_path / "held.jsonl", [{"prompt": "9+9=", "answer": "18"}]))
    assert (made.size("train"), made.size("heldout")) == (5, 1)
    overlapping = write(tmp_path / "bad.jsonl", [{"prompt": "9+9=", "answer": "18"}, sums(4)[3]])
    with pytest.raises(ConfigError, match=r'shares 1 prompts.*"3\+1=" \(line 2, and line 4 of .*train.jsonl'):
        task(train, heldout_path=overlapping)
    with pytest.raises(ConfigError, match="cannot go with heldout_path"):
        task(train, heldout_path=overlapping, heldout_size=1)


def test_fingerprint_follows_the_data_and_nothing_else(tmp_path: Path) -> None:
    a = task(write(tmp_path / "a.jsonl", sums(10)), heldout_size=2)
    b = task(write(tmp_path / "b.jsonl", sums(10)), heldout_size=2)
    changed = [*sums(9), {"prompt": "9+1=", "answer": "11"}]
    c = task(write(tmp_path / "c.jsonl", changed), heldout_size=2)
    assert a.fingerprint() == b.fingerprint() != c.fingerprint() and len(a.fingerprint()) == 64
    assert task(write(tmp_path / "a.jsonl", sums(10)), heldout_size=3).fingerprint() != a.fingerprint()


@pytest.mark.parametrize(
    "row, expected",
    [
        ('{"prompt": "a", }', r"d.jsonl:2: column \d+: .*one JSON object a line"),
        ("[1, 2]", r"d.jsonl:2: got \[1, 2\]; must be a JSON object"),
        ({"promt": "a", "answer": "1"}, r"d.jsonl:2: prompt: got null; .*the row has promt, answer"),
        ({"prompt": "", "answer": "1"}, r'd.jsonl:2: prompt: got ""; must be non-empty text'),
        ({"prompt": 3, "answer": "1"}, r"d.jsonl:2: prompt: got 3"),
        ({"prompt": "a", "answer": [1]}, r"d.jsonl:2: answer: got \[1\]; must be text or a number"),
        ({"prompt": "a", "answer": True}, r"d.jsonl:2: answer: got true"),
        ({"prompt": "a"}, r"d.jsonl:2: answer: got null or nothing; the exact_match verifier"),
        ({"prompt": "a", "answer": "1", "target": 1}, r"d.jsonl:2: target: got 1; must be text"),
    ],
)
def test_a_bad_row_names_file_and_line(tmp_path: Path, row: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        task(write(tmp_path / "d.jsonl", [sums(1)[0], row]))


def test_numeric_needs_numbers_for_answers(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [{"prompt": "a", "answer": "two"}])
    with pytest.raises(
        ConfigError, match=r'd.jsonl:1: answer: got "two"; the numeric verifier needs a number'
    ):
        task(path, verifier="numeric")
    made = task(write(tmp_path / "e.jsonl", [{"prompt": "a", "answer": 2.5}]), verifier="numeric")
    assert made.reward(made.prompts("train", [0])[0], "about 2.50") == 1.0


def test_bytes_that_are_no_utf8_name_the_line(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"prompt": "a", "answer": "1"}\n{"prompt": "\xff", "answer": "1"}\n')
    with pytest.raises(ConfigError, match=r"d.jsonl:2: byte 12 is no UTF-8"):
        task(str(path))


def test_a_missing_or_empty_file_is_one_line_with_a_hint(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", sums(2))
    with pytest.raises(ConfigError, match=r"task.path: got .*No such file.*did you mean train.jsonl\?"):
        task(str(tmp_path / "trian.jsonl"))
    with pytest.raises(ConfigError, match="has no rows"):
        task(write(tmp_path / "empty.jsonl", ["", ""]))
    with pytest.raises(ConfigError, match="Is a directory"):
        task(str(tmp_path))


@pytest.mark.parametrize("heldout_size", [-1, 3, 4])
def test_a_heldout_size_that_leaves_nothing_is_refused(tmp_path: Path, heldout_size: int) -> None:
    path = write(tmp_path / "d.jsonl", sums(3))
    with pytest.raises(ConfigError, match=r"task.heldout_size: got .*\[0, 2\]"):
        task(path, heldout_size=heldout_size)


def test_one_prompt_over_and_over_cannot_be_split(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", sums(1) * 4)
    with pytest.raises(ConfigError, match="leaves no training rows"):
        task(path, heldout_size=1)


def test_an_unknown_task_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r'task.name: got "json"; no such task; hint: did you mean jsonl\?'):
        build("json", None)
