"""The prompt-length policy and supervised targets, before step 1."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from unirl_scale.core.errors import ConfigError
from unirl_scale.train.tasks.interface import Prompt, Split
from unirl_scale.train.tasks.prompt_fit import fit_prompts, fit_targets
from unirl_scale.train.tasks.tokenizer import Tokenizer, TokenizerOptions


class FixedTask:
    """Prompts as given."""

    options_type = object

    def __init__(self, texts: Sequence[str], targets: Sequence[str | None] = (), charset: str = "") -> None:
        options = TokenizerOptions(mode="charset", charset=charset) if charset else TokenizerOptions()
        self.tokenizer = Tokenizer(options)
        self.rows = [Prompt(index=i, text=t) for i, t in enumerate(texts)]
        self.targets = targets

    def size(self, split: Split) -> int:
        return len(self.rows)

    def prompts(self, split: Split, indices: Sequence[int]) -> list[Prompt]:
        return [self.rows[i] for i in indices]

    def reward(self, prompt: Prompt, response_text: str) -> float | None:
        return None

    def sft_target(self, prompt: Prompt) -> str | None:
        return self.targets[prompt.index]

    def fingerprint(self) -> str:
        return ""


LONG = "".join(chr(ord("0") + i) for i in range(40))  # 40 different characters
TASK = FixedTask(["ab", LONG, "abc"])


def test_error_stops_and_names_row_length_and_ways_out() -> None:
    with pytest.raises(ConfigError) as caught:
        fit_prompts(TASK, "train", 32, "error")
    text = str(caught.value)
    assert "rollout.max_prompt_tokens: got 32" in text and "row 1: 40 tokens" in text
    assert "row 0" not in text and "hint: rollout.max_prompt_tokens: 40" in text
    assert "drop | truncate (keeps the last 32 tokens)" in text


def test_drop_leaves_the_row_out_and_counts_it() -> None:
    fitted = fit_prompts(TASK, "train", 32, "drop")
    assert fitted.indices == (0, 2) and fitted.dropped == (1,) and fitted.truncated == ()
    assert [TASK.tokenizer.decode(ids) for ids in fitted.tokens] == ["ab", "abc"]


def test_truncate_keeps_the_last_tokens() -> None:
    fitted = fit_prompts(TASK, "train", 32, "truncate")
    assert fitted.indices == (0, 1, 2) and fitted.truncated == (1,) and fitted.dropped == ()
    assert TASK.tokenizer.decode(fitted.tokens[1]) == LONG[-32:] and len(fitted.tokens[1]) == 32


def test_what_fits_exactly_is_left_alone_by_every_policy() -> None:
    for policy in ("error", "drop", "truncate"):
        fitted = fit_prompts(TASK, "train", 40, policy)  # type: ignore[arg-type]
        assert fitted.indices == (0, 1, 2) and fitted.dropped == fitted.truncated == ()


def test_many_long_rows_are_counted_not_all_spelled_out() -> None:
    with pytest.raises(ConfigError, match="row 7: 40 tokens and 12 more"):
        fit_prompts(FixedTask([LONG] * 20), "train", 32, "error")


def test_dropping_everything_is_an_error() -> None:
    with pytest.raises(
        ConfigError, match=r"leaves none of the 1 prompts of train; hint: max_prompt_tokens: 40"
    ):
        fit_prompts(FixedTask([LONG]), "train", 32, "drop")


def test_an_empty_prompt_is_named() -> None:
    with pytest.raises(ConfigError, match="empty prompts in rows 1"):
        fit_prompts(FixedTask(["a", ""]), "train", 32, "error")


def test_a_character_outside_the_charset_names_the_row() -> None:
    with pytest.raises(ConfigError, match=r'row 1 of heldout: task.tokenizer.charset: .*lacks "c"'):
        fit_prompts(FixedTask(["ab", "abc"], charset="ab"), "heldout", 32, "error")


def test_targets_end_with_the_end_token() -> None:
    task = FixedTask(["a", "b", "c"], ["1", "22", "3"])
    got = fit_targets(task, "train", (0, 2), 2)
    assert got == ((*task.tokenizer.encode("1"), 2), (*task.tokenizer.encode("3"), 2))


@pytest.mark.parametrize(
    "targets, expected",
    [
        (["1", None, "3"], '"no target in rows 1"; supervised training needs'),
        (["1", "2", "333"], r"rollout.max_response_tokens: got 3; .*row 2: 4 tokens; hint: .*: 4"),
    ],
)
def test_a_target_that_is_missing_or_too_long_is_named(targets: list[str | None], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        fit_targets(FixedTask(["a", "b", "c"], targets), "train", (0, 1, 2), 3)
