"""From files and names to a verified plan, as the command line asks for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.planning import run_config
from unirl_scale.comm.plan_request import PlanRequest, describe_search, plan, search
from unirl_scale.comm.topology import read_topology, write_yaml
from unirl_scale.core.config import HardwareConfig, MeshConfig
from unirl_scale.core.errors import PlanError

FIXTURES = Path(__file__).parent / "fixtures" / "topology"


def test_one_box_is_repeated_until_it_holds_the_ranks() -> None:
    cfg = run_config(MeshConfig(tp=4, dp=8))
    made, topology, shown = plan(cfg, PlanRequest(files=(FIXTURES / "smi_quad_shuffled_ansi.txt",)))
    assert (made.world_size, len(topology.nodes)) == (32, 8)
    assert any("each leaf exactly once" in s for s in shown)


def test_a_box_with_a_dead_device_is_repeated_by_its_healthy_ones() -> None:
    cfg = run_config(MeshConfig(tp=1, dp=14))
    made, topology, _ = plan(cfg, PlanRequest(files=(FIXTURES / "smi_cut_gpu5_dead.txt",)))
    assert len(topology.nodes) == 2
    assert 5 not in set(made.device.tolist())


def test_files_of_one_cluster_are_joined() -> None:
    cfg = run_config(MeshConfig(tp=4, dp=3))
    files = tuple(FIXTURES / name for name in ("tree.conf", "smi_quad_shuffled_ansi.txt", "hosts.txt"))
    made, _, _ = plan(cfg, PlanRequest(files=files))
    assert made.nodes == ("gpu.a008", "gpu.a009", "gpu.b1n0")


def test_a_machine_by_name_and_the_search_on_it() -> None:
    cfg = run_config(MeshConfig(tp=8, dp=2), slots=16, batch=16)
    request = PlanRequest(machine="h100-8", accelerator="h100")
    made, _, _ = plan(cfg, request)
    assert made.step_us is not None
    text = describe_search(search(cfg, request, best=2))
    assert text.startswith("1. tp ")
    assert len(text.splitlines()) == 2


RACKS = """\
unirl_scale_topology: 1
links:
  block.inside: {alpha_us: 3.4, beta_gb_per_s: 900, source: NVLink 5 through the rack's switches}
  nic: {alpha_us: 14, beta_gb_per_s: 50, source: a NIC a GPU}
"""
TRAYS = """\
        GPU0    GPU1    GPU2    GPU3    CPU Affinity    NUMA Affinity   GPU NUMA ID
GPU0     X      NV18    NV18    NV18    0-71    0               N/A
GPU1    NV18     X      NV18    NV18    0-71    0               N/A
GPU2    NV18    NV18     X      NV18    72-143  1               N/A
GPU3    NV18    NV18    NV18     X      72-143  1               N/A
"""


@pytest.mark.parametrize("racks", [1, 2])
def test_a_rack_of_wired_nodes_carries_tensor_parallelism(racks: int) -> None:
    """tp 8 on nodes of four: over the rack's own wires, not over NICs."""
    names = ("A", "B")[:racks]
    blocks = "".join(f"BlockName={name} Nodes={name}[1-4]\n" for name in names) + "BlockSizes=4\n"
    cfg = run_config(MeshConfig(tp=8, dp=2 * racks))
    wired, _, _ = plan(cfg, PlanRequest(files=(RACKS, TRAYS, blocks), accelerator="gb200"))
    tiers = wired.role("actor").group("tp").tiers
    assert [(t.name, t.size, t.beta_gb_per_s) for t in tiers[:2]] == [
        ("node", 4, 900.0),
        ("block.inside", 2, 900.0),
    ]
    assert not any("assumed" in note for note in wired.notes)
    over_nics = RACKS.replace("block.inside", "other")
    apart, _, _ = plan(cfg, PlanRequest(files=(over_nics, TRAYS, blocks), accelerator="gb200"))
    block_outputs = [p.role("actor").calls[0].time_us or 0.0 for p in (wired, apart)]
    assert block_outputs[1] > 2 * block_outputs[0]


def test_a_super_pod_of_a_rank_table_is_wired_inside() -> None:
    cfg = replace(run_config(MeshConfig(tp=1, dp=6)), hardware=HardwareConfig(vendor="npu"))
    made, topology, _ = plan(cfg, PlanRequest(files=(FIXTURES / "rank_v12.json",)))
    tier = made.role("actor").group("dp").tiers[1]
    assert (tier.name, tier.beta_gb_per_s) == ("pod.inside", 196.0)
    again = read_topology(write_yaml(topology))
    assert again.levels[0].inside is not None and again.levels[0].inside.beta_gb_per_s == 196.0


def test_nvlinks_are_those_of_the_named_accelerator_unless_stated() -> None:
    cfg = run_config(MeshConfig(tp=4))
    betas = {}
    for name in ("", "h100", "gb200"):
        _, topology, _ = plan(cfg, PlanRequest(files=(TRAYS,), accelerator=name))
        betas[name] = topology.boxes[0].links["NV18"].beta_gb_per_s
    assert betas == {"": 450.0, "h100": 450.0, "gb200": 900.0}
    stated = "unirl_scale_topology: 1\nlinks: {NV18: {alpha_us: 3, beta_gb_per_s: 333, source: me}}\n"
    _, topology, _ = plan(cfg, PlanRequest(files=(TRAYS, stated), accelerator="gb200"))
    assert topology.boxes[0].links["NV18"].beta_gb_per_s == 333.0


def test_a_machine_of_another_vendor_is_refused() -> None:
    cfg = replace(run_config(MeshConfig(tp=4)), hardware=HardwareConfig(vendor="npu"))
    with pytest.raises(PlanError) as caught:
        plan(cfg, PlanRequest(files=(TRAYS,)))
    assert str(caught.value) == (
        "hardware.vendor: got npu for a machine of cuda devices; must be the machine's; "
        "hint: hardware.vendor=cuda"
    )


def test_more_ranks_than_any_machine_has_are_refused() -> None:
    with pytest.raises(PlanError, match=r"plan\.ranks: got 999999999; must be at most 4000000"):
        search(run_config(MeshConfig(tp=8)), PlanRequest(machine="h100-8", ranks=999_999_999))


def test_roles_that_an_algorithm_lacks_are_left_out() -> None:
    request = PlanRequest(machine="h100-8", roles=("actor", "rollout"))
    made, _, _ = plan(run_config(MeshConfig(tp=8, dp=2)), request)
    assert [r.name for r in made.roles] == ["actor", "rollout"]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (PlanRequest(machine="h100"), r"plan\.machine: got 'h100'.*did you mean h100-8"),
        (PlanRequest(machine="h100-8", accelerator="h1000"), r"plan\.accelerator.*did you mean h100"),
        (PlanRequest(machine="h100-8", files=("x",)), "must be one"),
        (PlanRequest(), "got no file"),
    ],
)
def test_wrong_requests_are_named(request_: PlanRequest, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan(run_config(MeshConfig(tp=8, dp=2)), request_)
