"""What the rollout tests run on ranks: sample on one mesh, score on another, compare bits."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tests.dist.engine_ranks import GQA
from unirl_scale.comm.groups import GroupFactory
from unirl_scale.core.config import (
    InvarianceConfig,
    MeshConfig,
    MeshesConfig,
    ModelsConfig,
    RolloutConfig,
    RunConfig,
)
from unirl_scale.core.load import resolve
from unirl_scale.kernels.check import same_bits
from unirl_scale.kernels.reference import ReferenceOps
from unirl_scale.parallel.samples import Sample
from unirl_scale.train.roles import Roles
from unirl_scale.train.rollout import Draw, Judged, sample

PROMPTS = 9


@dataclass(frozen=True, kw_only=True)
class Run:
    """A configuration to sample with, and where it deviates from the others it is held against.

    Attributes:
        ids: global sample ids; they and nothing else say which noise a sample gets.
        stops: token sequences that end a response.
        group: samples a prompt; PROMPTS samples in all.
        nudged: one mantissa bit of one weight of the rollout copy is flipped after the copy.
    """

    cfg: RunConfig
    seed: int = 11
    step: int = 3
    ids: Sequence[int] = range(100, 100 + PROMPTS)
    greedy: bool = False
    stops: tuple[tuple[int, ...], ...] = ((0,), (7,))
    group: int = 1
    nudged: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What was sampled, and the training forward's log-probs of it, as bytes.

    Attributes:
        equal: for each sample, whether the training forward gives the recorded bits.
    """

    judged: list[Judged]
    equal: list[bool]

    @property
    def tokens(self) -> list[tuple[int, ...]]:
        return [j.tokens for j in self.judged]

    @property
    def bits(self) -> list[tuple[tuple[int, ...], bytes, bool, float | None]]:
        """Everything a layout must not change."""
        return [(j.tokens, j.logprobs.tobytes(), j.truncated, j.reward) for j in self.judged]


def rollout_config(
    actor: MeshConfig | None = None,
    rollout: MeshConfig | None = None,
    precision: str = "fp32",
    **options: object,
) -> RunConfig:
    single = MeshConfig()
    return resolve(
        RunConfig(
            precision=precision,
            model=ModelsConfig(actor=GQA),
            invariance=InvarianceConfig(model_leaves=6, data_slots=6),
            mesh=MeshesConfig(actor=actor or single, rollout=rollout or single),
            rollout=RolloutConfig(
                **{"max_prompt_tokens": 12, "max_response_tokens": 40, "temperature": 0.8, **options}
            ),
        )
    )


def sample_and_score(groups: GroupFactory, run: Run) -> Outcome:
    """Sample on the rollout mesh, then score the same tokens with the training forward."""
    with torch.no_grad():
        roles = Roles(run.cfg, groups, ReferenceOps(), torch.device("cpu"))
        roles.prepare(critic=False, reference=False)
        rng = random.Random(5)
        lengths = [rng.randrange(1, 12) for _ in range(PROMPTS)]
        prompts = [tuple(rng.randrange(GQA.vocab_size) for _ in range(n)) for n in lengths]
        prompts = [prompts[i - i % run.group] for i in range(PROMPTS)]
        roles.refresh_rollout()
        if run.nudged and roles.decoder is not None:
            weight = roles.decoder.chunk.weights["layers.0.ffn_down"]
            weight.view(torch.int32)[0, 0, 0] ^= 1 << 12
        draw = Draw(prompts=prompts, sample_ids=run.ids, seed=run.seed, step=run.step, greedy=run.greedy)
        judged = sample(roles, draw, run.cfg.rollout, run.stops, lambda number, tokens: float(len(tokens)))
        scored = roles.actor.score([Sample(p, j.tokens) for p, j in zip(prompts, judged)])
    equal = [same_bits(torch.from_numpy(j.logprobs), s) for j, s in zip(judged, scored)]
    return Outcome(judged=judged, equal=equal)
