"""What the edge-case tests run on ranks: training steps on given data, and engine steps on given
minibatches."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tests.dist.engine_faults import BrokenGradient
from tests.dist.engine_ranks import MHA, STEPS, Case, Digests, algorithm, build_role, minibatch, train_step
from unirl_scale.comm.groups import GroupFactory
from unirl_scale.core.config import (
    DigestConfig,
    InvarianceConfig,
    MeshConfig,
    MeshesConfig,
    ModelsConfig,
    OptimConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    StageConfig,
)
from unirl_scale.core.load import resolve
from unirl_scale.kernels.reference import ReferenceOps
from unirl_scale.parallel.samples import Sample
from unirl_scale.rl.interface import LossBatch
from unirl_scale.train.learn import learn
from unirl_scale.train.loop import build_algorithm
from unirl_scale.train.minibatch import Minibatch
from unirl_scale.train.roles import Role, Roles
from unirl_scale.train.stage import StageRunner, StepLog
from unirl_scale.train.state import TrainState

OPTIM = OptimConfig(lr=3e-3, clip_grad=0.5, weight_decay=0.1)


# ---- one minibatch ----------------------------------------------------------------------------------
def of_samples(samples: Sequence[Sample], seed: int) -> Minibatch:
    """A PPO minibatch of these samples with random advantages; nothing in it depends on the other rows."""
    width = max(len(s.response) for s in samples)
    g = torch.Generator().manual_seed(seed)

    def values() -> Tensor:
        return torch.randn(len(samples), width, generator=g)

    mask = torch.tensor([[t < len(s.response) for t in range(width)] for s in samples])
    base = -math.log(MHA.vocab_size)
    batch = LossBatch(
        mask=mask,
        old_logprobs=base + 0.3 * values(),
        advantages=values(),
        returns=values(),
        old_values=values(),
        ref_logprobs=base + 0.3 * values(),
    )
    return Minibatch(samples=tuple(samples), batch=batch, weights=algorithm().weights(mask))


def without_row(whole: Minibatch, row: int) -> Minibatch:
    """The same minibatch as if a row had never been sampled."""
    keep = [i for i in range(len(whole.samples)) if i != row]
    batch = whole.batch.rows(torch.tensor(keep))
    samples = tuple(whole.samples[i] for i in keep)
    return Minibatch(samples=samples, batch=batch, weights=algorithm().weights(batch.mask))


def moved_to_front(whole: Minibatch, row: int) -> Minibatch:
    order = [row, *(i for i in range(len(whole.samples)) if i != row)]
    batch = whole.batch.rows(torch.tensor(order))
    samples = tuple(whole.samples[i] for i in order)
    return Minibatch(samples=samples, batch=batch, weights=algorithm().weights(batch.mask))


def learn_on(role: Role, case: Case, data: Minibatch) -> dict[str, str]:
    loss = data.critic_loss(algorithm()) if case.head == "value" else data.actor_loss(algorithm())
    with torch.no_grad():
        report = learn(role, data.samples, loss, OPTIM, OPTIM.lr, digest=True)
    assert report.result.applied
    return report.digests


def with_and_without_an_empty_row(groups: GroupFactory, case: Case) -> tuple[Digests, Digests, Digests]:
    """Digests over three steps: an empty row (full of NaN) present; absent; and a full row absent instead.

    The row is the first of the first slot, so that every other row stays in its slot when it is gone.
    """
    runs: tuple[Digests, Digests, Digests] = ([], [], [])
    roles = [build_role(groups, case) for _ in runs]
    for step in range(3):
        data = moved_to_front(minibatch(case, step), 4)
        assert not data.samples[0].response
        for tensor in (data.batch.old_logprobs, data.batch.advantages, data.batch.ref_logprobs):
            assert tensor is not None
            tensor[0] = torch.nan
        cuts = (data, without_row(data, 0), without_row(data, 1))
        for run, role, cut in zip(runs, roles, cuts):
            run.append(learn_on(role, case, cut))
    return runs


def one_long_row(groups: GroupFactory, case: Case) -> Digests:
    """A row of a thousand tokens among fifteen of ten."""
    rng = random.Random(0)

    def tokens(n: int) -> tuple[int, ...]:
        return tuple(rng.randrange(MHA.vocab_size) for _ in range(n))

    samples = [Sample(tokens(3), tokens(997)), *(Sample(tokens(4), tokens(6)) for _ in range(15))]
    role = build_role(groups, case)
    return [learn_on(role, case, of_samples(samples, seed=0))]


def one_side_empty(groups: GroupFactory, case: Case) -> Digests:
    """Every response of the second half is empty, so that a data-parallel rank has nothing to run."""
    role, out = build_role(groups, case), []
    for step in range(2):
        samples = minibatch(case, step).samples
        half = len(samples) // 2
        samples = (*samples[:half], *(Sample(s.prompt, ()) for s in samples[half:]))
        out.append(learn_on(role, case, of_samples(samples, step)))
    return out


def broken_then_sound(groups: GroupFactory, case: Case) -> dict[str, object]:
    """A step whose gradient is NaN on rank 0 alone, then a sound one."""
    role = build_role(groups, replace(case, fault="broken_gradient"))
    untouched = build_role(groups, case)
    assert role.engine is not None and untouched.engine is not None
    before = role.engine.state_digests()
    broken = train_step(role, case, 0)
    kept = role.engine.state_digests() == before and role.engine.adam_steps == 0
    if isinstance(role.engine.ctx.ops, BrokenGradient):
        role.engine.ctx.ops.armed = False
    after, expected = (train_step(r, case, 1).digests for r in (role, untouched))
    return {
        "loss": broken.loss,
        "applied": broken.result.applied,
        "nonfinite": broken.result.nonfinite,
        "state kept": kept,
        "next step as if the broken one had not been": after == expected,
    }


def replicated_bits(groups: GroupFactory, case: Case) -> list[dict[str, str]]:
    """After each step, this rank's replicated weights and their optimizer state, and its copy of leafed
    weights."""
    role = build_role(groups, case)
    assert role.engine is not None
    out = []
    for step in range(STEPS):
        train_step(role, case, step)
        found = {}
        for i, optimizer in enumerate(role.engine.optimizers):
            tensors = {"weights": optimizer.chunk.flat_replicated, **optimizer.replicated.tensors()}
            found |= {f"chunk {i} {name}": digest(t) for name, t in tensors.items()}
            found[f"chunk {i} leafed"] = digest(optimizer.chunk.flat)
        out.append(found)
    return out


def digest(t: Tensor) -> str:
    return hashlib.sha256(t.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


# ---- one training step ------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Question:
    """A prompt with a number, which is what the scripted judge goes by."""

    number: int
    tokens: tuple[int, ...]


class ScriptedData:
    """Prompts in order and rewards by prompt number, in place of a task."""

    stops = ((0,),)

    def __init__(self, rewards: Sequence[float | None]) -> None:
        self.rewards = rewards

    def next(self, cursor: int, count: int) -> list[Question]:
        rng = random.Random(0)
        prompts = [
            tuple(rng.randrange(MHA.vocab_size) for _ in range(rng.randrange(1, 6))) for _ in range(64)
        ]
        return [Question(i, prompts[i % 64]) for i in range(cursor, cursor + count)]

    def judge(self, question: Question, tokens: Sequence[int]) -> float | None:
        return self.rewards[question.number % len(self.rewards)]


@dataclass(frozen=True, kw_only=True)
class Script:
    """PPO with a critic on a mesh of its own, two minibatches a step, for a few steps."""

    rewards: tuple[float | None, ...]
    actor: MeshConfig = field(default_factory=MeshConfig)
    critic: MeshConfig = field(default_factory=MeshConfig)
    on_invalid: str = "drop"
    broken: bool = False
    steps: int = 2

    @property
    def cfg(self) -> RunConfig:
        stage = StageConfig(
            batch_size=8,
            minibatch_size=4,
            num_steps=self.steps,
            algorithm={"name": "ppo", "kl_loss_coef": 0.1, "kl_in_reward_coef": 0.05},
            optim=OPTIM,
            critic_optim=OPTIM,
        )
        return resolve(
            RunConfig(
                model=ModelsConfig(actor=replace(MHA, num_layers=2)),
                invariance=InvarianceConfig(model_leaves=4, data_slots=4),
                mesh=MeshesConfig(actor=self.actor, critic=self.critic),
                rollout=RolloutConfig(max_prompt_tokens=8, max_response_tokens=8),
                stages=(stage,),
                reward=RewardConfig(on_invalid=self.on_invalid),
                digest=DigestConfig(every=1),
            )
        )


@dataclass(frozen=True, kw_only=True)
class Played:
    """What the steps left behind on a rank."""

    state: TrainState
    logs: list[StepLog]
    weights_before: dict[str, dict[str, str]]
    weights_after: dict[str, dict[str, str]]
    error: str = ""


def play(groups: GroupFactory, script: Script) -> Played:
    """Run the script's steps; an error ends it as it would end a run, and is returned."""
    cfg = script.cfg
    ops = BrokenGradient() if script.broken and groups.rank == 0 else ReferenceOps()
    state, logs, error = TrainState(), [], ""
    with torch.no_grad():
        roles = Roles(cfg, groups, ops, torch.device("cpu"))
        chosen = build_algorithm(cfg.stages[0])
        roles.prepare(critic=True, reference=True)
        state = replace(state, kl=chosen.initial_kl)
        runner = StageRunner(cfg, cfg.stages[0], chosen, roles, ScriptedData(script.rewards))  # type: ignore[arg-type]
        before = _weights(roles)
        try:
            for _ in range(script.steps):
                state, log = runner.step(state)
                logs.append(log)
        except ValueError as failure:
            error = f"{type(failure).__name__}: {failure}"
        return Played(
            state=state, logs=logs, weights_before=before, weights_after=_weights(roles), error=error
        )


def _weights(roles: Roles) -> dict[str, dict[str, str]]:
    """Digests of the master weights of the roles this rank holds."""
    engines = {"actor": roles.actor.engine, "critic": roles.critic.engine if roles.critic else None}
    return {name: e.state_digests()["master"] for name, e in engines.items() if e is not None}
