"""Where ranks go: nodes, leaves, blocks of the canonical tree, degraded devices, odd sizes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.planning import run_config
from unirl_scale.comm.plan import Plan
from unirl_scale.comm.plan_build import make_plan
from unirl_scale.comm.plan_machine import survey
from unirl_scale.comm.plan_place import block_shape, tp_units
from unirl_scale.comm.topology import MACHINES, Link, cluster, make_box, read_topology
from unirl_scale.comm.topology.presets import HCCS, NDR400, NVLINK4
from unirl_scale.core.config import MeshConfig
from unirl_scale.core.errors import PlanError

H100 = MACHINES["h100-8"]


def groups(plan: Plan, axis: str) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Ranks of the actor's groups by the rule of MeshConfig: tp fastest, then dp, then pp."""
    mesh = plan.role("actor").mesh
    grid = np.arange(plan.world_size)[: mesh.tp * mesh.dp * mesh.pp].reshape(mesh.pp, mesh.dp, mesh.tp)
    order = {"tp": (0, 1, 2), "dp": (0, 2, 1), "pp": (1, 2, 0)}[axis]
    moved = grid.transpose(order)
    return moved.reshape(-1, moved.shape[-1])


@pytest.mark.parametrize(("tp", "dp", "pp"), [(1, 64, 1), (2, 16, 2), (4, 4, 4), (8, 8, 1), (8, 2, 4)])
def test_tp_stays_inside_a_node(tp: int, dp: int, pp: int) -> None:
    plan = make_plan(run_config(MeshConfig(tp=tp, dp=dp, pp=pp)), cluster(H100, 8, tiers=(4,)))
    assert (np.ptp(plan.node[groups(plan, "tp")], axis=1) == 0).all()
    assert plan.role("actor").group("tp").most_nodes == 1


def test_dp_of_a_node_is_a_block_of_the_tree() -> None:
    plan = make_plan(run_config(MeshConfig(tp=2, dp=32)), cluster(H100, 8, tiers=(4,)))
    assert plan.role("actor").group("dp").shape == (4, 4, 2)
    assert plan.role("actor").group("dp").blocks == (4, 16)
    blocks = plan.node[groups(plan, "dp")].reshape(-1, 8, 4)
    assert (blocks == blocks[:, :, :1]).all()


def test_a_tp_group_wider_than_a_node_stays_under_one_leaf_switch() -> None:
    plan = make_plan(run_config(MeshConfig(tp=16, dp=4), leaves=16), cluster(H100, 12, tiers=(3,)))
    leaf = plan.leaf[plan.node[groups(plan, "tp")]]
    assert (leaf == leaf[:, :1]).all()
    assert plan.role("actor").group("tp").most_leaves == 1


def test_a_tp_group_that_fits_no_leaf_is_refused_with_what_fits() -> None:
    with pytest.raises(PlanError, match=r"tp 12 on nodes of 8 devices.*hint: tp 8"):
        make_plan(run_config(MeshConfig(tp=12, dp=2), leaves=12), cluster(H100, 12, tiers=(3,)))


def test_seven_healthy_devices_give_three_pairs_and_the_dead_one_gets_no_rank() -> None:
    box = make_box(8, NVLINK4, nic=NDR400, off=[2])
    topology = cluster(box, 4, tiers=(2,))
    plan = make_plan(run_config(MeshConfig(tp=2, dp=8)), topology)
    assert 2 not in set(plan.device.tolist())
    assert len(plan.excluded) == 4
    assert (np.ptp(plan.node[groups(plan, "tp")], axis=1) == 0).all()
    # Two pairs a node where three would fit: blocks of two are subtrees, blocks of three are not.
    assert plan.role("actor").group("dp").shape[0] == 2


def test_all_three_pairs_are_used_when_they_are_needed() -> None:
    box = make_box(8, NVLINK4, nic=NDR400, off=[2])
    plan = make_plan(run_config(MeshConfig(tp=2, dp=12)), cluster(box, 4, tiers=(2,)))
    assert plan.role("actor").group("dp").shape[0] == 3


def test_degraded_devices_can_be_refused_or_kept() -> None:
    topology = cluster(make_box(8, NVLINK4, nic=NDR400, off=[2]), 2)
    cfg = run_config(MeshConfig(tp=4, dp=4))
    with pytest.raises(PlanError, match=r"GPU2 degraded.*on_degraded: refuse"):
        make_plan(cfg, topology, on_degraded="refuse")
    assert make_plan(cfg, topology, on_degraded="keep").excluded == ()
    with pytest.raises(PlanError, match=r"16 ranks; the machine has 14 usable devices, 2 excluded"):
        make_plan(cfg, topology)


def test_one_end_of_a_broken_wire_is_enough_to_leave_out() -> None:
    box = make_box(8, HCCS, fabric="mesh", vendor="npu", down=[(1, 4)])
    assert sorted(box.degraded) == [1, 4]
    machine = survey(cluster(box, 1))
    assert machine.slots == 7
    assert machine.inner.mesh


def test_the_node_order_follows_the_tree_not_the_file() -> None:
    tree = "SwitchName=top Switches=a,b\nSwitchName=a Nodes=n1,n3\nSwitchName=b Nodes=n2,n4\n"
    machine = survey(read_topology(tree), devices_per_node=2)
    names = [machine.topology.nodes[n] for n in machine.node[::2]]
    assert names == ["n1", "n3", "n2", "n4"]


def test_pipeline_neighbours_share_a_leaf_when_dp_can_be_cut_into_blocks() -> None:
    plan = make_plan(run_config(MeshConfig(tp=8, dp=16, pp=4)), cluster(H100, 64, tiers=(16,)))
    leaf = plan.leaf[plan.node[groups(plan, "pp")]]
    assert (leaf == leaf[:, :1]).all()
    assert plan.role("actor").group("dp").shape == (1, 4, 4)


def test_roles_on_other_ranks_get_other_devices() -> None:
    cfg = run_config(MeshConfig(tp=8, dp=2))
    critic = MeshConfig(tp=4, dp=4, first_rank=16)
    meshes = type(cfg.mesh)(actor=cfg.mesh.actor, critic=critic, rollout=cfg.mesh.rollout)
    plan = make_plan(type(cfg)(**{**_fields(cfg), "mesh": meshes}), cluster(H100, 4))
    assert plan.world_size == 32
    assert not set(plan.node[:16].tolist()) & set(plan.node[16:].tolist())
    assert plan.role("critic").group("tp").most_nodes == 1


def _fields(cfg: object) -> dict[str, object]:
    return {name: getattr(cfg, name) for name in cfg.__slots__}  # type: ignore[attr-defined]


def test_block_shape_is_the_common_divisor_of_all_moves() -> None:
    places = np.array([[0, 0, 0, 0, 1, 1, 2, 2]], np.int32)
    together = np.arange(8, dtype=np.int32)[None]
    assert block_shape(places, together) == (2, 4)
    assert block_shape(np.array([[0, 0, 0, 1, 1, 1, 1, 1]], np.int32), together) == (1, 8)


def test_units_never_straddle_a_node() -> None:
    machine = survey(cluster(make_box(6, NVLINK4, nic=NDR400), 3))
    units = tp_units(machine, np.arange(machine.slots, dtype=np.int32), 4)
    assert units.shape == (3, 4)
    assert (np.ptp(machine.node[units], axis=1) == 0).all()


def test_an_unknown_number_of_devices_is_asked_for() -> None:
    tree = read_topology("SwitchName=a Nodes=n[1-2]\n")
    with pytest.raises(PlanError, match=r"node n1 with an unknown number of devices.*nvidia-smi topo -m"):
        make_plan(run_config(MeshConfig(tp=2)), tree)
    assert make_plan(run_config(MeshConfig(tp=2, dp=2)), tree, devices_per_node=2).world_size == 4


def test_unlike_pairs_are_kept_together() -> None:
    """NV2 pairs of a hybrid cube become TP pairs, whatever their numbers."""
    strong, weak = Link(kind="NV2", beta_gb_per_s=50.0, alpha_us=3.0), Link(kind="NV1", beta_gb_per_s=25.0)
    box = make_box(4, weak, fabric="mesh")
    rows = [list(row) for row in box.paths]
    for a, b in ((0, 2), (1, 3)):
        rows[a][b] = rows[b][a] = "NV2"
    better = type(box)(
        devices=box.devices, paths=tuple(map(tuple, rows)), links={"NV1": weak, "NV2": strong}, fabric="mesh"
    )
    machine = survey(cluster(better, 1))
    assert {frozenset(machine.device[k : k + 2].tolist()) for k in (0, 2)} == {
        frozenset({0, 2}),
        frozenset({1, 3}),
    }
