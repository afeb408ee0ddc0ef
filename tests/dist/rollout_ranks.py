"""What the rollout tests run on ranks: sample on one mesh, score on another, compare bits."""

from __future__ import annotations

import random
from dataclasses import replace

import torch

from tests.dist.engine_ranks import GQA
from unirl_scale.comm.groups import GroupFactory
from unirl_scale.core.config import InvarianceConfig, MeshConfig, MeshesConfig, ModelsConfig, RolloutConfig, RunConfig
from unirl_scale.core.load import resolve
from unirl_scale.kernels.check import same_bits
from unirl_scale.kernels.reference import ReferenceOps
from unirl_scale.parallel.samples import Sample
from unirl_scale.train.roles import Roles
from unirl_scale.train.rollout import Draw, Judged, sample

PROMPTS = 9


def rollout_config(actor: MeshConfig, rollout: MeshConfig, precision: str = "fp32", **options: object) -> RunConfig:
    return resolve(
        RunConfig(
            precision=precision,
            model=ModelsConfig(actor=GQA),
            invariance=InvarianceConfig(model_leaves=6, data_slots=6),
            mesh=MeshesConfig(actor=actor, rollout=rollout),
            rollout=RolloutConfig(
                **{"max_prompt_tokens": 12, "max_response_tokens": 40, "temperature": 0.8, **options}
            ),
        )
    )


def sample_and_score(groups: GroupFactory, cfg: RunConfig, step: int = 3) -> tuple[list[Judged], list[bool]]:
    """Sampled responses, and for each whether the training forward gives the recorded bits."""
    with torch.no_grad():
        roles = Roles(cfg, groups, ReferenceOps(), torch.device("cpu"))
        rng = random.Random(5)
        prompts = [
            tuple(rng.randrange(GQA.vocab_size) for _ in range(rng.randrange(1, 12))) for _ in range(PROMPTS)
        ]
        roles.refresh_rollout()
        draw = Draw(prompts=prompts, sample_ids=range(100, 100 + PROMPTS), seed=11, step=step)
        judged = sample(roles, draw, cfg.rollout, [(0,), (3, 4)], lambda number, tokens: float(len(tokens)))
        scored = roles.actor.score([Sample(p, j.tokens) for p, j in zip(prompts, judged)])
    return judged, [same_bits(torch.from_numpy(j.logprobs), s) for j, s in zip(judged, scored)]


def with_rollout(cfg: RunConfig, **mesh: int) -> RunConfig:
    return replace(cfg, mesh=replace(cfg.mesh, rollout=MeshConfig(**mesh)))
