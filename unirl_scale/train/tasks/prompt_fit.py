"""A split as token ids that fit the model, checked as a whole before step 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from unirl_scale.core.errors import ConfigError
from unirl_scale.train.tasks.errors import config_error
from unirl_scale.train.tasks.interface import Split, Task
from unirl_scale.train.tasks.tokenizer import TokenizeError

_NAMED_ROWS = 8  # how many rows an error spells out


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedPrompts:
    """The prompts of a split that can be asked.

    Attributes:
        indices: positions in the task's split, ascending.
        tokens: prompt token ids, same order.
        dropped: positions left out as too long.
        truncated: positions whose beginning was cut off; they are in `indices` too.
    """

    indices: tuple[int, ...]
    tokens: tuple[tuple[int, ...], ...]
    dropped: tuple[int, ...]
    truncated: tuple[int, ...]


def fit_prompts(
    task: Task, split: Split, max_tokens: int, on_long_prompt: Literal["error", "drop", "truncate"]
) -> FittedPrompts:
    """Tokenise a split and apply the length policy.

    Args:
        max_tokens: `rollout.max_prompt_tokens`.
        on_long_prompt: `error` stops; `drop` leaves the prompt out; `truncate` keeps its last max_tokens.

    Raises:
        ConfigError: a prompt is too long under `error`, a prompt has no tokens, a prompt holds a character
            that the tokenizer lacks, or nothing is left. Rows are named.
    """
    encoded = _encode(task, split, [p.text for p in task.prompts(split, range(task.size(split)))])
    empty = [i for i, ids in enumerate(encoded) if not ids]
    too_long = [i for i, ids in enumerate(encoded) if len(ids) > max_tokens]
    if empty:
        raise config_error(f"task ({split})", f"empty prompts in {_named(empty)}", "need at least one token")
    if too_long and on_long_prompt == "error":
        raise _too_long(
            "rollout.max_prompt_tokens", max_tokens, encoded, f"prompt of {split}", "on_long_prompt"
        )
    dropped = set(too_long) if on_long_prompt == "drop" else set()
    kept = [i for i in range(len(encoded)) if i not in dropped]
    if not kept and encoded:
        rule = f"leaves none of the {len(encoded)} prompts of {split}"
        hint = f"max_prompt_tokens: {min(len(ids) for ids in encoded)} or more"
        raise config_error("rollout.max_prompt_tokens", max_tokens, rule, hint)
    return FittedPrompts(
        indices=tuple(kept),
        tokens=tuple(encoded[i][-max_tokens:] for i in kept),
        dropped=tuple(sorted(dropped)),
        truncated=tuple(too_long) if on_long_prompt == "truncate" else (),
    )


def fit_targets(
    task: Task, split: Split, indices: Sequence[int], max_tokens: int
) -> tuple[tuple[int, ...], ...]:
    """Token ids of what supervised training imitates, each with its end token.

    Args:
        indices: positions in the split, e.g. `FittedPrompts.indices`.
        max_tokens: `rollout.max_response_tokens`, end token included.

    Raises:
        ConfigError: a prompt without a target, a target that is too long or holds a character that the
            tokenizer lacks. Rows are named.
    """
    targets = [task.sft_target(p) for p in task.prompts(split, indices)]
    missing = [i for i, target in zip(indices, targets, strict=True) if target is None]
    if missing:
        got, rule = f"no target in {_named(missing)}", "supervised training needs a target or an answer"
        raise config_error(f"task ({split})", got, rule, "start with another algorithm than sft")
    eos = task.tokenizer.eos_id
    encoded = [(*ids, eos) for ids in _encode(task, split, [t for t in targets if t is not None], indices)]
    if any(len(ids) > max_tokens for ids in encoded):
        path = "rollout.max_response_tokens"
        raise _too_long(path, max_tokens, encoded, f"target of {split}, end token included", "", indices)
    return tuple(encoded)


def _encode(
    task: Task, split: Split, texts: Sequence[str], rows: Sequence[int] | None = None
) -> list[tuple[int, ...]]:
    """Token ids of all texts; an error says which row it came from."""
    out = []
    for i, text in enumerate(texts):
        try:
            out.append(task.tokenizer.encode(text))
        except TokenizeError as error:
            raise ConfigError(f"row {rows[i] if rows else i} of {split}: {error}") from error
    return out


def _too_long(
    path: str,
    max_tokens: int,
    encoded: Sequence[Sequence[int]],
    what: str,
    policy: str,
    rows: Sequence[int] | None = None,
) -> ConfigError:
    """Names the rows, and the length and policy that would do."""
    long = [(rows[i] if rows else i, len(ids)) for i, ids in enumerate(encoded) if len(ids) > max_tokens]
    spelled = ", ".join(f"row {i}: {n} tokens" for i, n in long[:_NAMED_ROWS])
    more = f" and {len(long) - _NAMED_ROWS} more" if len(long) > _NAMED_ROWS else ""
    rule = f"must hold every {what}; too long are {spelled}{more}"
    hint = f"{path}: {max(n for _, n in long)}"
    if policy:
        hint += f", or rollout.{policy}: drop | truncate (keeps the last {max_tokens} tokens)"
    return config_error(path, max_tokens, rule, hint)


def _named(rows: Sequence[int]) -> str:
    more = f" and {len(rows) - _NAMED_ROWS} more" if len(rows) > _NAMED_ROWS else ""
    return f"rows {', '.join(str(i) for i in rows[:_NAMED_ROWS])}{more}"
