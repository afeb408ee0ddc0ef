"""What the checkpoint tests run on ranks: steps of actor and critic with a reference, saved and restored."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from tests.dist.engine_ranks import GQA, MHA, Case, algorithm, minibatch
from unirl_scale.comm.groups import GroupFactory
from unirl_scale.core.config import (
    CheckpointConfig,
    InvarianceConfig,
    MeshConfig,
    MeshesConfig,
    ModelsConfig,
    OptimConfig,
    RolloutConfig,
    RunConfig,
    StageConfig,
)
from unirl_scale.core.load import resolve
from unirl_scale.core.ranks import RankInfo
from unirl_scale.kernels.reference import ReferenceOps
from unirl_scale.train.checkpoint.memory import MemoryFolder
from unirl_scale.train.checkpoint.resume import restore
from unirl_scale.train.checkpoint.saving import Checkpointer
from unirl_scale.train.checkpoint.session import open_session
from unirl_scale.train.checkpoint.writer import no_probe
from unirl_scale.train.learn import hash_tensor, learn
from unirl_scale.train.roles import Roles
from unirl_scale.train.state import TrainState

Digests = dict[int, dict[str, str]]  # by step

OPTIM = OptimConfig(lr=3e-3, clip_grad=0.5, weight_decay=0.1)
LEAVES, SLOTS, SAMPLES = 6, 6, 7
ACTOR = replace(GQA, num_layers=2, vocab_size=29)
CRITIC = replace(MHA, num_layers=2)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One start of a run.

    Attributes:
        actor, critic, reference: layouts; the ranks they span are the world.
        stop: step after which it ends.
        end: "finish" as a run that is done, "abandon" as one that dies.
        ranks_per_node: for replicas; 0 = all on one.
        wrong: a negative control: one bit of the restored state is changed.
        fault: (rank, step, label of `writer.POINTS`): that rank kills itself there.
    """

    path: str
    actor: MeshConfig
    critic: MeshConfig
    reference: MeshConfig
    stop: int
    end: str = "finish"
    options: Mapping[str, object] = field(default_factory=dict)
    ranks_per_node: int = 0
    fingerprint: str = "data"
    wrong: bool = False
    fault: tuple[int, int, str] | None = None

    @property
    def world_size(self) -> int:
        return max(m.tp * m.pp * m.dp for m in (self.actor, self.critic, self.reference))

    def config(self) -> RunConfig:
        return resolve(
            RunConfig(
                run_dir=self.path,
                model=ModelsConfig(actor=ACTOR, critic=CRITIC),
                invariance=InvarianceConfig(model_leaves=LEAVES, data_slots=SLOTS),
                mesh=MeshesConfig(
                    actor=self.actor,
                    critic=self.critic,
                    reference=self.reference,
                    rollout=MeshConfig(),
                ),
                rollout=RolloutConfig(max_prompt_tokens=12, max_response_tokens=36, temperature=0.8),
                stages=(StageConfig(num_steps=1000),),
                checkpoint=CheckpointConfig(**self.options),  # type: ignore[arg-type]
            )
        )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one rank saw."""

    digests: Digests
    state: TrainState
    source: str
    notes: tuple[str, ...]
    near_bytes: int
    far_bytes: int
    warnings: list[str]
    metrics: dict[str, float]


def run_plan(groups: GroupFactory, plan: Plan) -> Outcome:
    """Start or continue a run, train to `stop`, end as told."""
    with torch.no_grad():
        return _run(groups, plan)


def _run(groups: GroupFactory, plan: Plan) -> Outcome:
    rank, world = groups.rank, groups.world
    node = rank // plan.ranks_per_node if plan.ranks_per_node else 0
    cfg = plan.config()
    info = RankInfo(rank=rank, world_size=world.size, node_rank=node)
    roles = Roles(cfg, groups, ReferenceOps(), torch.device("cpu"))
    session = open_session(cfg, world, info)
    # Nodes of a test share one host; each gets a memory that the others do not see.
    memory = MemoryFolder(root=Path(plan.path) / f"memory-{node}", node=session.memory.node)
    session = replace(session, memory=memory)
    restored = restore(cfg, session, roles, world, plan.fingerprint)
    if restored is None:
        roles.prepare(critic=True, reference=True)
    elif plan.wrong and roles.actor.engine is not None:
        roles.actor.engine.optimizers[0].shard.exp_avg_sq.view(torch.int32)[:1] ^= 1
    state = restored.state if restored else TrainState()
    probe = Killer(plan.fault, rank) if plan.fault else no_probe
    checkpointer = Checkpointer(cfg, session, roles, groups, plan.fingerprint, restored=restored, probe=probe)
    digests: Digests = {}
    warnings: list[str] = []
    while state.step < plan.stop:
        state, digests[state.step] = train(roles, state, checkpointer)
        if isinstance(probe, Killer):
            probe.step = state.step
        checkpointer.after_step(state)
        warnings += checkpointer.take_warnings()
    if plan.end == "finish":
        checkpointer.finish(state)
    elif plan.end == "leave":
        leave(roles, state, checkpointer)
    else:
        checkpointer.fence()
        checkpointer.abandon()
    return Outcome(
        digests=digests,
        state=state,
        source=restored.source if restored else "",
        notes=restored.notes if restored else (),
        near_bytes=restored.near_bytes if restored else 0,
        far_bytes=restored.far_bytes if restored else 0,
        warnings=warnings,
        metrics=checkpointer.metrics(),
    )


def train(roles: Roles, state: TrainState, checkpointer: Checkpointer) -> tuple[TrainState, dict[str, str]]:
    """One update of actor and critic; digests of everything, the reference's scores among them."""
    assert roles.critic is not None and roles.reference is not None
    digests = {}
    scores = roles.reference.score(minibatch(case("lm"), state.step).samples)
    digests["reference"] = hash_tensor(torch.cat(scores))
    for role in (roles.actor, roles.critic):
        batch = minibatch(case(role.head), state.step)
        loss = batch.critic_loss(algorithm()) if role.head == "value" else batch.actor_loss(algorithm())
        report = learn(
            role, batch.samples, loss, OPTIM, OPTIM.lr, digest=True, before_reduce=checkpointer.fence
        )
        state = state.updated(role.name)
        digests |= {f"{role.name}/{name}": value for name, value in report.digests.items()}
    state = replace(
        state,
        step=state.step + 1,
        stage_step=state.stage_step + 1,
        prompts_seen=state.prompts_seen + SAMPLES,
        optimizer_steps=state.optimizer_steps + 1,
    )
    return state, digests


class Killer:
    """Kills the process of one rank at a labelled point of the save of one step."""

    def __init__(self, fault: tuple[int, int, str], rank: int) -> None:
        self.fault, self.rank, self.step = fault, rank, 0

    def __call__(self, label: str) -> None:
        if (self.rank, self.step, label) == self.fault:
            os.kill(os.getpid(), signal.SIGKILL)


def leave(roles: Roles, state: TrainState, checkpointer: Checkpointer) -> None:
    """What ranks do when they are told to go: the first half of them is a step ahead of the others."""
    state, _ = train(roles, state, checkpointer)
    if checkpointer.session.rank < checkpointer.world.size / 2:
        checkpointer.after_step(state)
    assert checkpointer.save_newest(20.0)


def case(head: str) -> Case:
    model = CRITIC if head == "value" else ACTOR
    return Case(model=model, leaves=LEAVES, slots=SLOTS, samples=SAMPLES, head=head)  # type: ignore[arg-type]


def lose_node(plan: Plan, node: int) -> None:
    """Its memory is gone."""
    shutil.rmtree(f"{plan.path}/memory-{node}")
