"""From files and names to a verified plan, as the command line asks for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.planning import run_config
from unirl_scale.comm.plan_request import PlanRequest, describe_search, plan, search
from unirl_scale.core.config import MeshConfig
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
