"""Any data set of the PyPI package `reasoning_gym`, with its own verifier as the reward."""

from __future__ import annotations

import dataclasses
import logging
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from unirl_scale.core.errors import ConfigError
from unirl_scale.core.problems import Problem, name_hint, raise_all, show
from unirl_scale.train.tasks.errors import config_error
from unirl_scale.train.tasks.fingerprint import fingerprint_of
from unirl_scale.train.tasks.interface import Prompt, Split
from unirl_scale.train.tasks.tokenizer import Tokenizer, TokenizerOptions

_LOG = logging.getLogger(__name__)
_ATTEMPTS_A_PROMPT = 20  # generated items a wanted prompt before giving up on a data set with too few of them
_OWN_KEYS = ("seed", "size")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningGymOptions:
    """Which data set, how much of it, and how its question is put.

    `prompt_template` is a format string over `question` and the item's metadata keys, e.g. "{expression}=".
    """

    dataset: str = "chain_sum"
    options: dict[str, Any] = field(default_factory=dict)  # of the data set itself
    seed: int = 0  # of the data, not of the run
    size: int = 2000  # training prompts; may repeat when the data set has few
    heldout_size: int = 200  # distinct prompts, none of them in training
    prompt_template: str = "{question}"
    drop_characters: str = ""  # removed from the prompt, e.g. " "
    tokenizer: TokenizerOptions = field(default_factory=TokenizerOptions)


class ReasoningGymTask:
    """Held-out prompts are the first distinct ones generated, training prompts the following others.

    The items depend on the data set's options and `seed` alone, except that a few data sets iterate over sets
    of strings and so follow PYTHONHASHSEED: compare `fingerprint` between ranks. The verifier is the data
    set's own `score_answer`, on the response without white space around it.
    """

    options_type: ClassVar[type[ReasoningGymOptions]] = ReasoningGymOptions

    def __init__(self, options: ReasoningGymOptions) -> None:
        self.options = options
        self.tokenizer = Tokenizer(options.tokenizer)
        self._dataset = _create(options)
        self._splits = self._generate()
        self._check_verifier()

    def _generate(self) -> dict[Split, list[Prompt]]:
        options = self.options
        heldout: dict[str, Prompt] = {}
        train: list[Prompt] = []
        attempts = _ATTEMPTS_A_PROMPT * (options.size + options.heldout_size)
        for number in range(attempts):
            if len(train) == options.size and len(heldout) == options.heldout_size:
                return {"train": train, "heldout": list(heldout.values())}
            item = self._dataset[number]
            text = self._text(item)
            if len(heldout) < options.heldout_size:
                if text not in heldout:
                    heldout[text] = _prompt(len(heldout), text, item)
            elif text not in heldout:
                train.append(_prompt(len(train), text, item))
        got = f"{options.heldout_size} and size {options.size}"
        rule = (
            f"{options.dataset} gave {len(heldout)} distinct held-out and {len(train)} training prompts"
            f" in {attempts} tries"
        )
        hint = f"heldout_size: {len(heldout) // 2}, or options that allow more questions"
        raise config_error("task.heldout_size", got, rule, hint)

    def _text(self, item: Mapping[str, Any]) -> str:
        """The prompt of one generated item."""
        fields = {**item["metadata"], "question": item["question"]}
        try:
            text = string.Formatter().vformat(self.options.prompt_template, (), fields)
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            names = [name for name, value in fields.items() if isinstance(value, str | int | float)]
            rule = f"must be a format string over the item's fields ({type(error).__name__}: {error})"
            hint = f"fields of {self.options.dataset}: {', '.join(names)}"
            raise config_error("task.prompt_template", self.options.prompt_template, rule, hint) from error
        return text.translate({ord(c): None for c in self.options.drop_characters})

    def size(self, split: Split) -> int:
        """Prompts in the split."""
        return len(self._splits[split])

    def prompts(self, split: Split, indices: Sequence[int]) -> list[Prompt]:
        """The prompts at these positions of the split."""
        return [self._splits[split][i] for i in indices]

    def reward(self, prompt: Prompt, response_text: str) -> float | None:
        """The data set's own score of the response; 0.0 when its verifier trips over the response.

        Some of these verifiers parse without checking. A response they cannot parse is a wrong answer, not
        one that cannot be judged: dropping it would teach the model that nonsense costs nothing.
        """
        try:
            return self._score(prompt, response_text)
        except Exception as error:
            _LOG.debug("%s on %r: %r", self.options.dataset, response_text, error)
            return 0.0

    def _score(self, prompt: Prompt, response_text: str) -> float:
        return float(self._dataset.score_answer(response_text.strip(), prompt.metadata["item"]))

    def _check_verifier(self) -> None:
        """Score one reference answer, so that `reward` may blame the response when the verifier raises."""
        prompt = self._splits["train"][0]
        try:
            self._score(prompt, prompt.target or "")
        except Exception as error:
            rule = f"its verifier fails on its own answer ({type(error).__name__}: {error})"
            hint = "another data set, or another version of reasoning_gym"
            raise config_error("task.dataset", self.options.dataset, rule, hint) from error

    def sft_target(self, prompt: Prompt) -> str | None:
        """The data set's reference answer."""
        return prompt.target

    def fingerprint(self) -> str:
        """SHA-256 over the data of both splits."""
        return fingerprint_of(self._splits)


def _prompt(index: int, text: str, item: Mapping[str, Any]) -> Prompt:
    answer = item["answer"]
    answer = answer if answer is None else str(answer)
    return Prompt(index=index, text=text, answer=answer, target=answer, metadata={"item": item})


def _create(options: ReasoningGymOptions) -> Any:
    """The generator. Its class comes untyped from the package."""
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError(
            f"task.name: got reasoning_gym; needs the package reasoning_gym ({error});"
            " hint: pip install 'unirl-scale[tasks]'"
        ) from error
    if options.dataset not in DATASETS:
        rule = f"must be one of the {len(DATASETS)} data sets of reasoning_gym"
        hint = name_hint(options.dataset, DATASETS)
        raise config_error("task.dataset", options.dataset, rule, hint)
    dataset_class, config_class = DATASETS[options.dataset]
    raise_all(_option_problems(options, [f.name for f in dataclasses.fields(config_class)]))
    size = _ATTEMPTS_A_PROMPT * (options.size + options.heldout_size)
    try:
        return dataset_class(config=config_class(**options.options, seed=options.seed, size=size))
    except Exception as error:  # their rules are asserts, but any type may come out of 100 constructors
        rule = f"{options.dataset} refuses them: {error or type(error).__name__}"
        raise config_error("task.options", options.options, rule) from error


def _option_problems(options: ReasoningGymOptions, known: Sequence[str]) -> list[Problem]:
    problems = []
    for key, value in options.options.items():
        path = f"task.options.{key}"
        if key in _OWN_KEYS:
            problems.append(
                Problem(
                    path=path, got=show(value), rule="is set one level up", hint=f"task.{key}: {show(value)}"
                )
            )
        elif key not in known:
            hint = name_hint(key, [name for name in known if name not in _OWN_KEYS])
            rule = f"unknown option of {options.dataset}"
            problems.append(Problem(path=path, got=show(value), rule=rule, hint=hint))
    for name, least in (("size", 1), ("heldout_size", 0)):
        value = getattr(options, name)
        if value < least:
            rule = f"must be at least {least}"
            problems.append(Problem(path=f"task.{name}", got=str(value), rule=rule, hint=f"{least}"))
    return problems
