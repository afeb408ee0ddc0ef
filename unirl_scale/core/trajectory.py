"""Trajectory: what was sampled in one step. The same on every rank, in sample-id order; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """B samples of a step.

    Attributes:
        sample_ids: global numbers, ascending; noise and order are keyed by them, never by a rank.
        group_ids: equal for the samples of one prompt.
        prompts, responses: token ids of each sample; responses include their end token.
        truncated: the response was cut at the maximum length.
        rollout_logprobs: fp32, one array a sample, as recorded when its tokens were sampled; empty for
            teacher-forced targets.
        rewards: as the task returned them; None = the task could not judge.
    """

    sample_ids: tuple[int, ...]
    group_ids: tuple[int, ...]
    prompts: tuple[tuple[int, ...], ...]
    responses: tuple[tuple[int, ...], ...]
    truncated: tuple[bool, ...]
    rollout_logprobs: tuple[NDArray[np.float32], ...] = ()
    rewards: tuple[float | None, ...] = field(default=())

    @property
    def size(self) -> int:
        """B."""
        return len(self.sample_ids)

    @property
    def width(self) -> int:
        """S, the longest response; at least 1."""
        return max(1, max((len(r) for r in self.responses), default=1))

    def mask(self) -> NDArray[np.bool_]:
        """bool [B, S], the response tokens."""
        lengths = np.array([len(r) for r in self.responses]).reshape(-1, 1)
        result: NDArray[np.bool_] = np.arange(self.width).reshape(1, -1) < lengths
        return result
