"""Two runs' digests: equal, the first difference, and what only one of them has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from unirl_scale.core.digest_compare import compare_digests, parse_digests, read_digests
from unirl_scale.core.errors import ConfigError


def lines(*records: tuple[int, dict[str, str]]) -> list[str]:
    return [json.dumps({"step": step, "tensors": tensors}) + "\n" for step, tensors in records]


BASE = ((1, {"loss": "a", "grad/w": "b"}), (2, {"loss": "c", "grad/w": "d"}))


def test_equal_runs_are_equal_however_a_step_is_spread_over_lines() -> None:
    spread = [(1, {"loss": "a"}), (1, {"grad/w": "b"}), (2, {"grad/w": "d"}), (2, {"loss": "c"})]
    result = compare_digests(parse_digests(lines(*BASE), "A"), parse_digests(lines(*spread), "B"))
    assert result.equal
    assert (result.steps, result.tensors, result.first_difference) == (2, 4, "")


def test_the_first_difference_is_by_step_and_then_in_the_order_of_writing() -> None:
    other = [(1, {"loss": "a", "grad/w": "b"}), (2, {"grad/w": "x", "loss": "y"})]
    result = compare_digests(parse_digests(lines(*BASE), "A"), parse_digests(lines(*other), "B"))
    assert not result.equal
    assert result.differing == ((2, "loss"), (2, "grad/w"))
    assert result.first_difference == "step 2: loss (and 1 more)"


def test_missing_steps_and_tensors_are_reported_for_both_sides() -> None:
    other = [(1, {"loss": "a", "extra": "b"}), (3, {"loss": "c"}), (4, {"loss": "c"})]
    result = compare_digests(parse_digests(lines(*BASE), "A"), parse_digests(lines(*other), "B"))
    assert not result.equal
    assert not result.differing
    assert result.missing == (
        "step 2 only in A",
        "2 steps (3..4) only in B",
        "step 1: grad/w only in A",
        "step 1: extra only in B",
    )


def test_an_unfinished_last_line_is_left_out() -> None:
    assert parse_digests([*lines(*BASE), '{"step": 3, "ten'], "A") == parse_digests(lines(*BASE), "A")


@pytest.mark.parametrize(
    "damaged",
    ["nonsense\n", '{"step": 1}\n', '{"step": "1", "tensors": {}}\n', '{"step": 1, "tensors": {"a": 3}}\n'],
)
def test_a_damaged_line_is_named(damaged: str) -> None:
    with pytest.raises(ConfigError, match="A:3: got"):
        parse_digests([*lines(*BASE), damaged], "A")


def test_one_tensor_has_one_digest_a_step() -> None:
    with pytest.raises(ConfigError, match="second digest of loss at step 1"):
        parse_digests(lines((1, {"loss": "a"}), (1, {"loss": "b"})), "A")
    assert parse_digests(lines((1, {"loss": "a"}), (1, {"loss": "a"})), "A") == {1: {"loss": "a"}}


def test_runs_without_digests_are_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such directory"):
        read_digests(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"digest\.every=1"):
        read_digests(tmp_path)
    (tmp_path / "digests.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"digest\.every=1"):
        read_digests(tmp_path)
