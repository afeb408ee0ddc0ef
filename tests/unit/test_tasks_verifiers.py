"""Verifiers by name, and what happens when one raises."""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Iterator

import pytest

from unirl_scale.core.errors import ConfigError
from unirl_scale.train.tasks.interface import Prompt
from unirl_scale.train.tasks.verifiers import judge, resolve


@pytest.mark.parametrize(
    "response, answer, score",
    [("42", "42", 1.0), (" 42\n", "42", 1.0), ("42.", "42", 0.0), ("", "42", 0.0), ("", "", 1.0)],
)
def test_exact_match(response: str, answer: str, score: float) -> None:
    assert resolve("exact_match")(response, answer, {}) == score


@pytest.mark.parametrize(
    "response, answer, score",
    [
        ("it is 42", "42", 1.0),
        ("42.0", "42", 1.0),
        ("first 41, then 42", "42", 1.0),
        ("42, no: 41", "42", 0.0),
        ("1,234", "1234", 1.0),
        ("-3e2", "-300", 1.0),
        ("none", "42", 0.0),
        ("", "42", 0.0),
        ("123456789012345678901", "123456789012345678902", 0.0),  # equal as float64
        ("9" * 400, "42", 0.0),
        ("1e9999", "42", 0.0),
    ],
)
def test_numeric(response: str, answer: str, score: float) -> None:
    assert resolve("numeric")(response, answer, {}) == score


def test_numeric_tolerance_is_absolute() -> None:
    verify = resolve("numeric", tolerance=0.01)
    assert [verify(r, "3.14", {}) for r in ("3.149", "3.131", "3.16")] == [1.0, 1.0, 0.0]


def test_regex_with_a_pattern_compares_its_group_with_the_answer() -> None:
    verify = resolve("regex", pattern=r"<answer>(.*?)</answer>")
    assert verify("so <answer> 42 </answer>", "42", {}) == 1.0
    assert verify("so <answer>41</answer>", "42", {}) == 0.0
    assert verify("42", "42", {}) == 0.0
    assert resolve("regex", pattern=r"\d+")("is 42!", "42", {}) == 1.0


def test_regex_without_a_pattern_takes_the_answer_as_one() -> None:
    verify = resolve("regex")
    assert verify(" 007 ", "0*7", {}) == 1.0 and verify("70", "0*7", {}) == 0.0


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    made = types.ModuleType("made_up_verifiers")
    made.length = lambda response, answer, metadata: len(response) / metadata["most"]  # type: ignore[attr-defined]
    made.constant = 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "made_up_verifiers", made)
    yield made


def test_a_function_of_the_users_own(module: types.ModuleType) -> None:
    assert resolve("made_up_verifiers:length")("abc", None, {"most": 4}) == 0.75


@pytest.mark.parametrize(
    "name, expected",
    [
        ("exact_mach", r'task.verifier: got "exact_mach".*did you mean exact_match\?'),
        ("no_such_package.x:f", r"must import \(ModuleNotFoundError.*PYTHONPATH"),
        ("made_up_verifiers:lenght", r"must name a function of made_up_verifiers.*did you mean length\?"),
        ("made_up_verifiers:constant", r"must name a function"),
    ],
)
def test_an_unknown_verifier_is_refused(module: types.ModuleType, name: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        resolve(name)


def test_options_of_another_verifier_are_refused_together() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve("exact_match", pattern="(", tolerance=-1.0)
    text = str(caught.value)
    for part in (
        "belongs to the regex",
        "belongs to the numeric",
        "must be >= 0",
        "must be a regular expression",
    ):
        assert part in text


def test_a_verifier_that_raises_cannot_judge_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    def broken(response: str, answer: str | None, metadata: object) -> float:
        raise RuntimeError("no")

    prompt = Prompt(index=17, text="?", answer="1")
    with caplog.at_level(logging.WARNING):
        assert judge(broken, prompt, "abc") is None
    assert "prompt 17" in caplog.text and "RuntimeError('no')" in caplog.text
    assert judge(resolve("exact_match"), prompt, "1") == 1.0
