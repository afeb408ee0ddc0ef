"""PromptSource: a split of the task as token ids, in the order of training, with its verifier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unirl_scale.core.config import RunConfig
from unirl_scale.core.load import read_options
from unirl_scale.train.data_order import prompts_at
from unirl_scale.train.tasks.interface import Prompt, Split, Task
from unirl_scale.train.tasks.prompt_fit import fit_prompts, fit_targets
from unirl_scale.train.tasks.tasks import TASKS, build


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as the model reads it; `row` is its place among the prompts that fit."""

    prompt: Prompt
    tokens: tuple[int, ...]
    row: int


class PromptSource:
    """Prompts of one split; the same on every rank.

    Args:
        task: built once for a run, see `build_task`.
        supervised: also read and check the targets to imitate.

    Raises:
        ConfigError: a prompt or target does not fit; rows are named, before step 1.
    """

    def __init__(self, task: Task, cfg: RunConfig, split: Split, *, supervised: bool = False) -> None:
        rollout = cfg.rollout
        self.task, self.split, self.seed = task, split, cfg.seed
        self.fitted = fit_prompts(task, split, rollout.max_prompt_tokens, rollout.on_long_prompt)
        self._prompts = task.prompts(split, self.fitted.indices)
        self._targets: Sequence[tuple[int, ...]] = ()
        if supervised:
            self._targets = fit_targets(task, split, self.fitted.indices, rollout.max_response_tokens)
        tokenizer = task.tokenizer
        self.stops = [(tokenizer.eos_id,), *(tokenizer.encode(text) for text in rollout.stop)]

    def next(self, cursor: int, count: int) -> list[EncodedPrompt]:
        """Prompts cursor .. cursor + count - 1 of the endless, epoch-wise shuffled order."""
        rows = prompts_at(self.seed, cursor, count, len(self._prompts))
        return [self._encoded(row) for row in rows]

    def first(self, count: int) -> list[EncodedPrompt]:
        """The first prompts of the split, unshuffled; fewer when the split has fewer."""
        return [self._encoded(row) for row in range(min(count, len(self._prompts)))]

    def _encoded(self, row: int) -> EncodedPrompt:
        return EncodedPrompt(self._prompts[row], self.fitted.tokens[row], row)

    def target(self, prompt: EncodedPrompt) -> tuple[int, ...]:
        """The tokens to imitate, end token included."""
        return self._targets[prompt.row]

    def judge(self, prompt: EncodedPrompt, tokens: Sequence[int]) -> float | None:
        """The verifier's score of a response."""
        return self.task.reward(prompt.prompt, self.task.tokenizer.decode(tokens))


def build_task(cfg: RunConfig) -> Task:
    """The task that the configuration names.

    Raises:
        ConfigError: its data cannot be had as asked.
    """
    name = str(cfg.task["name"])
    return build(name, read_options(TASKS[name].options_type, cfg.task, "task"))
