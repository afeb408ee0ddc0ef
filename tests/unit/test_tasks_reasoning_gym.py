"""reasoning_gym data sets as a task: splits, templates, verifier, errors."""

from __future__ import annotations

import builtins
from typing import Any

import pytest

from unirl_scale.core.errors import ConfigError
from unirl_scale.train.tasks.interface import Task
from unirl_scale.train.tasks.reasoning_gym_task import ReasoningGymOptions
from unirl_scale.train.tasks.tasks import build
from unirl_scale.train.tasks.tokenizer import TokenizerOptions

pytest.importorskip("reasoning_gym")

TWO_DIGITS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}


def task(**options: Any) -> Task:
    given = {"options": TWO_DIGITS, "size": 60, "heldout_size": 20} | options
    return build("reasoning_gym", ReasoningGymOptions(**given))


def texts(made: Task, split: Any) -> list[str]:
    return [p.text for p in made.prompts(split, range(made.size(split)))]


def test_splits_have_the_sizes_asked_for_and_share_no_prompt() -> None:
    made = task(options={**TWO_DIGITS, "max_digits": 1})  # 200 questions in all: collisions are certain
    train, heldout = texts(made, "train"), texts(made, "heldout")
    assert (len(train), len(heldout), len(set(heldout))) == (60, 20, 20)
    assert not set(train) & set(heldout)
    assert [p.index for p in made.prompts("train", [5, 3])] == [5, 3]


def test_data_follow_the_seed_alone() -> None:
    assert task().fingerprint() == task().fingerprint()
    assert task(seed=1).fingerprint() != task().fingerprint()
    assert texts(task(seed=0), "train") != texts(task(seed=1), "train")


def test_the_stock_question_and_the_sets_own_verifier() -> None:
    made = task()
    prompt = made.prompts("train", [0])[0]
    assert prompt.text.startswith("State the final answer") and prompt.answer is not None
    assert made.sft_target(prompt) == prompt.answer
    assert made.reward(prompt, prompt.answer) == 1.0
    assert made.reward(prompt, f" {prompt.answer}\n") == 1.0
    wrong = made.reward(prompt, "nothing")
    assert wrong is not None and wrong < 1.0


def test_a_template_shortens_the_prompt_and_keeps_the_verifier() -> None:
    made = task(
        prompt_template="{expression}=",
        drop_characters=" ",
        tokenizer=TokenizerOptions(mode="charset", charset="0123456789+-="),
    )
    for prompt in made.prompts("train", range(60)):
        assert len(prompt.text) <= 6 and prompt.text.endswith("=") and " " not in prompt.text
        assert prompt.answer is not None and eval(prompt.text[:-1].replace("=", "")) == int(prompt.answer)
        assert made.reward(prompt, prompt.answer) == 1.0
        assert made.tokenizer.decode(made.tokenizer.encode(prompt.text)) == prompt.text


def test_an_answer_its_verifier_cannot_parse_is_worth_nothing() -> None:
    made = task(dataset="prime_factorization", options={}, size=5, heldout_size=5)
    prompt = made.prompts("train", [0])[0]
    assert prompt.answer is not None and made.reward(prompt, prompt.answer) == 1.0
    assert made.reward(prompt, "seven times bananas") == 0.0


@pytest.mark.parametrize(
    "options, expected",
    [
        ({"dataset": "chain_sums"}, r'task.dataset: got "chain_sums"; .*did you mean chain_sum\?'),
        ({"options": {"max_term": 2}}, r"task.options.max_term: got 2; .*did you mean max_terms\?"),
        ({"options": {"seed": 4}}, r"task.options.seed: got 4; is set one level up; hint: task.seed: 4"),
        (
            {"options": {"min_terms": 9}},
            r'task.options: got \{"min_terms": 9\}; .*max_terms must be >= min_terms',
        ),
        ({"options": {"min_terms": "two"}}, r"task.options: got .*chain_sum refuses them"),
        ({"size": 0}, r"task.size: got 0; must be at least 1"),
        ({"heldout_size": -1}, r"task.heldout_size: got -1; must be at least 0"),
        ({"prompt_template": "{expresion}="}, r"task.prompt_template: .*KeyError.*expression"),
        ({"prompt_template": "{expression="}, r"task.prompt_template: .*ValueError"),
        ({"prompt_template": "{}"}, r"task.prompt_template: .*IndexError"),
    ],
)
def test_a_bad_option_is_named_with_a_way_out(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        task(**options)


def test_a_data_set_with_too_few_questions_is_refused() -> None:
    few = {"min_terms": 1, "max_terms": 1, "min_digits": 1, "max_digits": 1}  # ten questions
    with pytest.raises(ConfigError, match="chain_sum gave 10 distinct held-out and 0 training prompts"):
        task(options=few, size=10, heldout_size=11)
    with pytest.raises(ConfigError, match="gave 10 distinct held-out and 0 training"):
        task(options=few, size=10, heldout_size=10)
    assert task(options=few, size=10, heldout_size=5).size("train") == 10


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def blocked(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("reasoning_gym"):
            raise ImportError("No module named 'reasoning_gym'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", blocked)
    with pytest.raises(ConfigError, match=r"hint: pip install 'unirl-scale\[tasks\]'"):
        task()
