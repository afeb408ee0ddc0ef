"""Greedy answers to held-out prompts, judged by the task."""

from __future__ import annotations

from unirl_scale.core.config import RunConfig
from unirl_scale.train.data import PromptSource
from unirl_scale.train.roles import Roles
from unirl_scale.train.rollout import Draw, sample

SOLVED = 1.0 - 1e-9  # task verifiers give 1.0 for a right answer and may give partial credit


def evaluate(roles: Roles, data: PromptSource, cfg: RunConfig, step: int) -> dict[str, float]:
    """`eval/accuracy` (share of prompts with full reward) and `eval/reward` (mean). Collective over the
    world."""
    prompts = data.first(cfg.eval.num_prompts)
    roles.refresh_rollout()
    draw = Draw(
        prompts=[p.tokens for p in prompts],
        sample_ids=range(len(prompts)),
        seed=cfg.seed,
        step=step,
        greedy=True,
    )
    judged = sample(
        roles, draw, cfg.rollout, data.stops, lambda number, tokens: data.judge(prompts[number], tokens)
    )
    rewards = [j.reward or 0.0 for j in judged]
    return {
        "eval/accuracy": sum(r >= SOLVED for r in rewards) / len(rewards),
        "eval/reward": sum(rewards) / len(rewards),
    }
