"""What a task is to the trainer: prompts by index, a verifier, a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

from unirl_scale.train.tasks.tokenizer import Tokenizer

Split = Literal["train", "heldout"]
SPLITS: tuple[Split, ...] = ("train", "heldout")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One question.

    Attributes:
        index: position in its split.
        text: what the model reads.
        answer: the expected answer; None when only a verifier can tell.
        target: what supervised training should write; None when there is nothing to imitate.
        metadata: whatever else the verifier needs.
    """

    index: int
    text: str
    answer: str | None = None
    target: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


class Task(Protocol):
    """A plug-in: one file, one line in `tasks.TASKS`, constructed as `cls(options)`.

    The two splits share no prompt text and depend on the options alone, so every rank builds the same data.

    Raises (at construction): ConfigError when the data cannot be had as asked.
    """

    options_type: ClassVar[type[Any]]  # frozen dataclass that the loader fills from the YAML mapping
    tokenizer: Tokenizer

    def size(self, split: Split) -> int:
        """Prompts in the split."""
        ...

    def prompts(self, split: Split, indices: Sequence[int]) -> list[Prompt]:
        """The prompts at these positions of the split, in this order."""
        ...

    def reward(self, prompt: Prompt, response_text: str) -> float | None:
        """The verifier's score; None when it could not judge (`reward.on_invalid` decides what then)."""
        ...

    def sft_target(self, prompt: Prompt) -> str | None:
        """The text to imitate in supervised training, or None."""
        ...

    def fingerprint(self) -> str:
        """SHA-256 over the data of both splits: equal data, equal fingerprint."""
        ...
