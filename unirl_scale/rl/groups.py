"""Group-relative advantages of whole responses: GRPO, Dr.GRPO, RLOO, the REINFORCE++ baseline, DAPO's extras.

A group is the samples of one prompt that are still in (valid reward, at least one token). Means and variances
are two-pass over correctly rounded sums, so neither the order of the rows nor a dropped row moves a bit, and
a group whose rewards are all equal gives exactly 0, which is decided by comparing rewards, not by arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

STD_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAdvantages:
    """float64 [B] advantages (0 in rows that are out) and how many groups could say nothing."""

    advantages: Tensor
    singleton_groups: int  # one sample left: nothing to compare with
    zero_variance_groups: int  # two or more samples, all rewards equal


def _members(rows: Tensor, group_ids: Tensor) -> list[list[int]]:
    """Row numbers of each group, leaving out the rows that are out."""
    groups: dict[int, list[int]] = {}
    for row, (inside, group) in enumerate(zip(rows.tolist(), group_ids.tolist(), strict=True)):
        if inside:
            groups.setdefault(group, []).append(row)
    return list(groups.values())


def _score_groups(
    rewards: Tensor, rows: Tensor, group_ids: Tensor, score: Callable[[Sequence[float]], list[float]]
) -> GroupAdvantages:
    values: list[float] = rewards.double().tolist()
    out = [0.0] * len(values)
    singletons = flat = 0
    for members in _members(rows, group_ids):
        group = [values[i] for i in members]
        if len(group) == 1:
            singletons += 1
        elif min(group) == max(group):
            flat += 1
        else:
            for i, advantage in zip(members, score(group), strict=True):
                out[i] = advantage
    advantages = torch.tensor(out, dtype=torch.float64, device=rewards.device)
    return GroupAdvantages(advantages=advantages, singleton_groups=singletons, zero_variance_groups=flat)


def _centred(group: Sequence[float]) -> list[float]:
    mean = math.fsum(group) / len(group)
    return [r - mean for r in group]


def _std(centred: Sequence[float]) -> float:
    """Standard deviation with Bessel's correction."""
    return math.sqrt(math.fsum(c * c for c in centred) / (len(centred) - 1))


def group_mean_baseline(rewards: Tensor, rows: Tensor, group_ids: Tensor) -> GroupAdvantages:
    """R - mean of the group: Dr.GRPO (Liu et al. 2025), baseline variant of REINFORCE++ (Hu et al. 2025).

    Args:
        rewards: float64 [B].
        rows: bool [B], samples that are in.
        group_ids: int64 [B].
    """
    return _score_groups(rewards, rows, group_ids, _centred)


def grpo(rewards: Tensor, rows: Tensor, group_ids: Tensor) -> GroupAdvantages:
    """(R - mean) / (std + 1e-6) of the group. Shao et al. 2024 (DeepSeekMath), section 4.1.2."""

    def score(group: Sequence[float]) -> list[float]:
        centred = _centred(group)
        scale = _std(centred) + STD_EPS
        return [c / scale for c in centred]

    return _score_groups(rewards, rows, group_ids, score)


def rloo(rewards: Tensor, rows: Tensor, group_ids: Tensor, *, normalize: bool = False) -> GroupAdvantages:
    """R minus the mean of the *other* samples = n / (n - 1) (R - mean). Ahmadian et al. 2024.

    `normalize` divides by the std of the whole group + 1e-6, which bounds |A| by sqrt(n). (The std of the
    others alone may be 0, and a one-pass variance turns that into anything.)
    """

    def score(group: Sequence[float]) -> list[float]:
        centred = _centred(group)
        factor = len(group) / (len(group) - 1)
        scale = _std(centred) + STD_EPS if normalize else 1.0
        return [c * factor / scale for c in centred]

    return _score_groups(rewards, rows, group_ids, score)


def informative_rows(rewards: Tensor, rows: Tensor, group_ids: Tensor) -> Tensor:
    """bool [B]: rows of groups whose rewards are not all equal.

    DAPO's dynamic sampling (Yu et al. 2025, section 3.2). The trainer samples new prompts for the groups
    that fall out. Judge by the task's own reward, before any penalty: an overlong penalty would make a group
    of wrong answers look informative.
    """
    values: list[float] = rewards.double().tolist()
    keep = torch.zeros(len(values), dtype=torch.bool, device=rewards.device)
    for members in _members(rows, group_ids):
        group = [values[i] for i in members]
        if min(group) != max(group):
            keep[members] = True
    return keep


def overlong_penalty(lengths: Tensor, max_length: int, cache: int) -> Tensor:
    """DAPO's soft overlong punishment (Yu et al. 2025, section 3.4): float64 [B].

    0 up to max_length - cache tokens, then linearly down to -1 at max_length, -1 beyond.

    Args:
        lengths: int64 [B], kept tokens of each response.
        max_length: L, tokens.
        cache: Lc, tokens, 0 < Lc <= L.
    """
    over = (max_length - cache - lengths).double() / cache
    return over.clamp(-1.0, 0.0) + 0.0
