"""The planner's calls carry what the engine sends, within 0.2 % of parallel/traffic.py's exact count, which
the plan file then holds. Each rule of the calls has a layout on which leaving it out would show."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.planning import MODEL, run_config
from unirl_scale.comm.plan import RolePlan
from unirl_scale.comm.plan_build import make_plan
from unirl_scale.comm.plan_file import read_plan, write_plan
from unirl_scale.comm.plan_model import MicroBatches
from unirl_scale.comm.plan_table import plan_table
from unirl_scale.comm.topology import MACHINES, cluster
from unirl_scale.core.config import InvarianceConfig, MeshConfig, ModelsConfig, RunConfig
from unirl_scale.parallel.samples import Sample, plan_slots
from unirl_scale.parallel.traffic import Workload, step_traffic
from unirl_scale.train.planned import equal_samples_bytes, with_sent_bytes
from unirl_scale.train.sent import axis_bytes

LAYOUTS = {
    "tp 4": MeshConfig(tp=4, micro_batch_size=2),
    "tp 2 dp 2 sequence": MeshConfig(tp=2, dp=2, sequence_parallel=True, micro_batch_size=3),
    "tp 2 pp 2 recompute": MeshConfig(tp=2, pp=2, recompute="block"),
    "pp 2 dp 2 interleaved": MeshConfig(pp=2, dp=2, vpp=2),
    "pp 4": MeshConfig(pp=4),
    "dp 3, slots unlike the ranks": MeshConfig(dp=3),
    "tp 2 pp 4 sequence": MeshConfig(tp=2, pp=4, sequence_parallel=True),
}


def config(mesh: MeshConfig, *, tied: bool = False) -> RunConfig:
    cfg = run_config(mesh, slots=24, batch=50)
    return replace(cfg, model=ModelsConfig(actor=replace(MODEL, tie_embeddings=tied)))


def role_with_bytes(cfg: RunConfig, name: str) -> RolePlan:
    plan = make_plan(cfg, cluster(MACHINES["h100-8"], 1))
    return with_sent_bytes(plan, cfg).role(name)


def estimates(role: RolePlan) -> dict[str, float]:
    return {
        axis: sum(sum(c.sent_bytes) * c.call.count for c in role.calls if c.call.axis == axis)
        for axis in ("tp", "dp", "pp")
    }


@pytest.mark.parametrize("name", ["actor", "critic"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_estimated_bytes_are_those_of_the_busiest_rank(layout: str, name: str) -> None:
    role = role_with_bytes(config(LAYOUTS[layout]), name)
    for axis, estimate in estimates(role).items():
        exact = max(getattr(sent, axis) for sent in role.sent)
        assert estimate == pytest.approx(exact, rel=2e-3), axis
    assert sum(estimates(role).values()) > 0


def test_tied_embeddings_cross_the_pipeline() -> None:
    tied, apart = (role_with_bytes(config(LAYOUTS["pp 4"], tied=t), "actor") for t in (True, False))
    assert estimates(tied)["pp"] == pytest.approx(max(s.pp for s in tied.sent), rel=2e-3)
    assert estimates(tied)["pp"] > 1.1 * estimates(apart)["pp"]


@pytest.mark.parametrize("samples", [5, 48, 50])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_samples_are_counted_without_running_through_them(layout: str, samples: int) -> None:
    mesh = LAYOUTS[layout]
    work = Workload(
        model=replace(MODEL, num_layers=4, hidden_size=64, ffn_size=96),
        mesh=mesh,
        invariance=InvarianceConfig(model_leaves=8, data_slots=10),
        head="lm",
        itemsize=2,
        samples=(),
    )
    for rank in range(mesh.tp * mesh.dp * mesh.pp):
        through = step_traffic(replace(work, samples=[(5, 9)] * samples), rank)
        assert equal_samples_bytes(work, rank, (5, 9), samples) == axis_bytes(through)


def test_the_file_holds_the_exact_bytes_of_each_kind_of_stage() -> None:
    cfg = config(LAYOUTS["pp 4"])
    plan = with_sent_bytes(make_plan(cfg, cluster(MACHINES["h100-8"], 1)), cfg)
    sent = plan.role("actor").sent
    assert [(s.rank, s.stage) for s in sent] == [(0, 0), (1, 1), (3, 3)]  # stage 2 is as stage 1
    assert read_plan(write_plan(plan)).role("actor").sent == sent
    assert f"bytes rank 1 (stage 1) sends a step: pp {sent[1].pp}" in plan_table(plan)
    assert plan.role("reference").sent == ()


@pytest.mark.parametrize("change", ["vocabulary", "mode"])
def test_bytes_that_are_not_known_are_left_out(change: str) -> None:
    cfg = config(LAYOUTS["tp 4"])
    if change == "mode":
        cfg = replace(cfg, invariance=replace(cfg.invariance, mode="off"))
    else:
        cfg = replace(cfg, model=ModelsConfig(actor=replace(MODEL, vocab_size=0)))
    assert role_with_bytes(cfg, "actor").sent == ()


@pytest.mark.parametrize(("samples", "slots", "dp", "size"), [(50, 24, 3, 4), (64, 4, 2, 64), (5, 8, 2, 1)])
def test_micro_batches_end_with_the_data_slot(samples: int, slots: int, dp: int, size: int) -> None:
    found = MicroBatches.of(samples, slots, dp, size)
    run = plan_slots([Sample((0,), (0,))] * samples, slots, dp, 0, size).micros
    assert (found.count, found.samples) == (len(run), sum(map(len, run)))
    assert found.largest == max(map(len, run))
