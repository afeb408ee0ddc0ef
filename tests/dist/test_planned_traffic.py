"""What a step is planned to send equals what its groups count, byte for byte, on every rank and axis.

The sums run by a plan's blocks too, and the trainer refuses a step that sends anything else. Not covered:
rollout, scores and digests, which the trainer does not count; mode `off`; other backends than gloo (the count
is of payload, whatever the backend).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.dist.engine_ranks import GQA, MHA, Case, algorithm, build_role, minibatch, train_step
from tests.dist.run_ranks import RankPool
from unirl_scale.comm.groups import GroupFactory
from unirl_scale.comm.plan import Plan
from unirl_scale.comm.plan_build import make_plan
from unirl_scale.comm.topology import Link, cluster, make_box
from unirl_scale.core.config import (
    InvarianceConfig,
    MeshConfig,
    MeshesConfig,
    ModelConfig,
    ModelsConfig,
    RunConfig,
    StageConfig,
)
from unirl_scale.core.errors import PlanError
from unirl_scale.core.mesh import Mesh
from unirl_scale.kernels.reference import ReferenceOps
from unirl_scale.parallel.build import Reductions, RoleGroups, build_context
from unirl_scale.parallel.engine import NativeEngine
from unirl_scale.parallel.optimizer import AdamStep
from unirl_scale.parallel.traffic import StepTraffic, Workload, step_traffic
from unirl_scale.train.planned import planned_reductions
from unirl_scale.train.roles import DTYPES
from unirl_scale.train.sent import is_ordered

Planned = dict[str, Reductions]
ADAM = AdamStep(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, count=1)


def run_step(groups: GroupFactory, case: Case, planned: Planned | None) -> StepTraffic:
    """Bytes that this rank's groups count in one optimizer step."""
    mesh = Mesh.from_config(case.mesh)
    context = build_context(
        RoleGroups(groups, [mesh]),
        case.mesh,
        InvarianceConfig(model_leaves=case.leaves, data_slots=case.slots),
        ReferenceOps("blocked"),
        DTYPES[case.precision],
        torch.device("cpu"),
        planned,
    )
    assert context is not None
    engine = NativeEngine(case.model, case.mesh, context, case.head, max_tokens=64)
    engine.initialise(7)
    batch = minibatch(case, 0)
    loss = batch.critic_loss(algorithm()) if case.head == "value" else batch.actor_loss(algorithm())
    parts = (context.tp, context.dp, context.pp_up, context.pp_down)
    before = [group.traffic.sent_bytes for group in parts]
    with torch.no_grad():
        engine.accumulate(batch.samples, loss)
        assert engine.step(lambda count: replace(ADAM, count=count), 1.0, engine.reduce()).applied
    sent = [group.traffic.sent_bytes - b for group, b in zip(parts, before, strict=True)]
    return StepTraffic(tp=sent[0], dp=sent[1], pp_up=sent[2], pp_down=sent[3])


def predicted(case: Case, rank: int, planned: Planned | None = None, *, samples_of: int = 0) -> StepTraffic:
    samples = [(len(s.prompt), len(s.response)) for s in minibatch(case, samples_of).samples]
    work = Workload(
        model=case.model,
        mesh=case.mesh,
        invariance=InvarianceConfig(model_leaves=case.leaves, data_slots=case.slots),
        head=case.head,  # type: ignore[arg-type]
        itemsize=DTYPES[case.precision].itemsize,
        samples=samples,
        planned=planned,
    )
    return step_traffic(work, rank)


LAYOUTS = {
    "tp4": MeshConfig(tp=4, micro_batch_size=2),
    "tp3": MeshConfig(tp=3, micro_batch_size=3),
    "tp2 dp2": MeshConfig(tp=2, dp=2, micro_batch_size=2),
    "tp2 dp2 sequence": MeshConfig(tp=2, dp=2, sequence_parallel=True, micro_batch_size=3),
    "tp2 pp2 recompute": MeshConfig(tp=2, pp=2, micro_batch_size=2, recompute="block"),
    "pp2 dp2 interleaved": MeshConfig(pp=2, dp=2, vpp=2),
    "dp4": MeshConfig(dp=4, micro_batch_size=4),
    "dp3": MeshConfig(dp=3),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("head", ["lm", "value"])
def test_counted_bytes_equal_the_prediction(run_ranks: RankPool, name: str, head: str) -> None:
    mesh = LAYOUTS[name]
    case = (
        Case(model=GQA, leaves=6, mesh=mesh, head=head)
        if mesh.tp == 3
        else Case(model=MHA, mesh=mesh, head=head)
    )
    world = mesh.tp * mesh.pp * mesh.dp
    counted = run_ranks(run_step, world, case, None)
    assert counted == [predicted(case, rank) for rank in range(world)]
    assert sum(c.tp + c.dp + c.pp_up + c.pp_down for c in counted) > 0


def test_tied_embeddings_and_bf16(run_ranks: RankPool) -> None:
    tied = replace(MHA, tie_embeddings=True)
    case = Case(model=tied, mesh=MeshConfig(pp=2, dp=2, micro_batch_size=2), precision="bf16")
    assert run_ranks(run_step, 4, case, None) == [predicted(case, rank) for rank in range(4)]


def plan_of(case: Case) -> Plan:
    """A plan for ranks on two nodes of two devices, by links that make a second level worth it."""
    fast = Link(kind="NV1", alpha_us=1.0, beta_gb_per_s=100.0)
    slow = Link(kind="nic", alpha_us=5.0, beta_gb_per_s=1.0)
    cfg = RunConfig(
        model=ModelsConfig(actor=case.model),
        mesh=MeshesConfig(actor=case.mesh),
        invariance=InvarianceConfig(model_leaves=case.leaves, data_slots=case.slots),
        stages=(StageConfig(batch_size=case.samples, minibatch_size=case.samples),),
    )
    return make_plan(cfg, cluster(make_box(2, fast, nic=slow), 2))


def test_the_planned_levels_are_run_and_send_what_was_planned(run_ranks: RankPool) -> None:
    # 10 slots on 4 ranks: two ranks of a node together hold other nodes of the tree than each alone
    case = Case(model=MHA, mesh=MeshConfig(dp=4, micro_batch_size=4), slots=10)
    planned = planned_reductions(plan_of(case))["actor"]
    assert planned["dp"].blocks == (2,)
    counted = run_ranks(run_step, 4, case, planned)
    assert counted == [predicted(case, rank, planned) for rank in range(4)]
    assert counted != [predicted(case, rank) for rank in range(4)]  # the plan makes a difference


def learn_counting(groups: GroupFactory, case: Case, stray_bytes: int) -> str:
    """Two steps of the trainer; with stray bytes, a transfer on the dp group that no plan knows."""
    role = build_role(groups, case)
    assert role.engine is not None and is_ordered(role.engine)
    reports = [train_step(role, case, step) for step in range(2)]
    assert [r.sent for r in reports] == [predicted(case, groups.rank, samples_of=step) for step in range(2)]
    reduce = role.engine.reduce

    def with_stray() -> float:
        role.engine.ctx.dp.all_gather(torch.zeros(stray_bytes, dtype=torch.uint8))  # type: ignore[union-attr]
        return reduce()

    role.engine.reduce = with_stray  # type: ignore[method-assign]
    try:
        train_step(role, case, 2)
    except PlanError as error:
        return str(error)
    return ""


def test_the_trainer_counts_and_refuses_what_was_not_planned(run_ranks: RankPool) -> None:
    case = Case(model=MHA, mesh=MeshConfig(tp=2, dp=2, micro_batch_size=2))
    assert run_ranks(learn_counting, 4, case, 0) == [""] * 4
    for rank, message in enumerate(run_ranks(learn_counting, 4, case, 1)):
        assert message.startswith("comm.dp: got ")
        assert f"sent by rank {rank} in an optimizer step of actor; planned were " in message


def test_the_prediction_depends_on_what_it_should() -> None:
    """A negative control of the equality: each change must move it."""
    case = Case(model=MHA, mesh=MeshConfig(tp=2, dp=2, micro_batch_size=2))
    base = predicted(case, 0)
    other: list[tuple[str, ModelConfig | MeshConfig]] = [
        ("model", replace(MHA, num_layers=MHA.num_layers + 1)),
        ("model", replace(MHA, ffn_size=2 * MHA.ffn_size)),
        ("mesh", replace(case.mesh, micro_batch_size=1, sequence_parallel=True)),
        ("mesh", replace(case.mesh, recompute="block")),
    ]
    for field, value in other:
        assert predicted(replace(case, **{field: value}), 0) != base  # type: ignore[arg-type]
