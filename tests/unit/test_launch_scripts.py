"""Batch scripts ask for what the job needs, in each scheduler's own words, and refuse what cannot start."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from unirl_scale.comm.environment_rules import Environment
from unirl_scale.core.check import check, world_size_of
from unirl_scale.core.config import MeshConfig, MeshesConfig, RunConfig, StageConfig
from unirl_scale.core.errors import ConfigError
from unirl_scale.core.load import parse_config
from unirl_scale.launch.job import Job, array, layout_cases
from unirl_scale.launch.mpirun import MpirunOptions, mpirun_script
from unirl_scale.launch.shrinking import Layout, layouts
from unirl_scale.launch.slurm import SlurmOptions, slurm_script
from unirl_scale.launch.torchrun import TorchrunOptions, torchrun_script

JOB = Job(
    name="run-1",
    command=("python", "-m", "unirl_scale", "train", "/shared/my run.yaml", "seed=3"),
    folder="/shared",
    log_dir="/shared/runs/a.launch",
    ranks_per_node=8,
    layouts=(Layout(nodes=4, ranks=32), Layout(nodes=2, ranks=16, overrides=("mesh.actor.dp=4",))),
    vendor="cuda",
    environment=Environment(variables={"NCCL_ALGO": "Ring"}, reasons={"NCCL_ALGO": "why not"}),
    restarts=2,
)


def directives(job: Job = JOB, **options: object) -> list[str]:
    script = slurm_script(job, SlurmOptions(**options))  # type: ignore[arg-type]
    return re.findall(r"^#SBATCH (.*)$", script, re.M)


def test_slurm_asks_for_nodes_devices_and_a_way_back() -> None:
    asked = directives(
        time="1-00:00:00", grace_s=600, cpus_per_rank=12, partition="gpu", more=("--comment=x",)
    )
    assert asked == [
        "--job-name=run-1",
        "--nodes=4",
        "--ntasks-per-node=8",
        "--cpus-per-task=12",
        "--gpus-per-node=8",
        "--exclusive",
        "--mem=0",
        "--time=1-00:00:00",
        "--signal=B:USR1@600",
        "--partition=gpu",
        "--requeue",
        "--no-kill",
        "--open-mode=append",
        "--chdir=/shared",
        "--output=/shared/runs/a.launch/%x-%j.out",
        "--comment=x",
    ]


def test_slurm_names_devices_as_the_vendor_or_the_site_does() -> None:
    assert "--gres=npu:8" in directives(replace(JOB, vendor="npu"))
    assert "--gres=ascend910b:8" in directives(replace(JOB, vendor="npu"), gres="ascend910b")
    assert "--gres=gpu:h100:8" in directives(gres="gpu:h100")
    on_cpu = directives(replace(JOB, vendor="cpu"))
    assert not any(word.startswith(("--gres", "--gpus", "--exclusive")) for word in on_cpu)
    assert "--exclusive" in directives(replace(JOB, vendor="cpu"), exclusive=True)
    assert "--exclusive" not in directives(exclusive=False)


def test_slurm_keeps_spares_and_places_on_the_network() -> None:
    asked = directives(spare_nodes=2, segment=3, switches="1@2:00:00")
    assert {"--nodes=6", "--segment=3", "--switches=1@2:00:00"} <= set(asked)


def test_the_ranks_of_an_elastic_job_outlive_each_other() -> None:
    alone = slurm_script(JOB, SlurmOptions(spare_nodes=2))
    assert "--kill-on-bad-exit=1 --wait=60" in alone and "--kill-on-bad-exit=0" not in alone
    script = slurm_script(replace(JOB, elastic=True), SlurmOptions(spare_nodes=2))
    assert "--mpi=none --kill-on-bad-exit=0 --wait=0 --no-kill \\\n" in script
    assert "--kill-on-bad-exit=1" not in script


def test_spare_nodes_of_an_elastic_job_run_spare_ranks() -> None:
    job = replace(JOB, elastic=True)
    script = slurm_script(job, SlurmOptions(spare_nodes=2))
    assert "$1 > 6 ? 6 : $1" in script and "at least 2 are needed" in script
    assert "    6) nodes=6 ranks=48 overrides=() ;;\n    5) nodes=5 ranks=40 overrides=() ;;\n" in script
    assert "    4) nodes=4 ranks=32 overrides=() ;;" in script
    assert "ranks=48" not in slurm_script(JOB, SlurmOptions(spare_nodes=2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"time": "5:00", "grace_s": 300}, "--grace: got 300 s with --time 5:00; must be shorter"),
        ({"time": "1-2x"}, "--time: got '1-2x'; must be minutes, H:M:S or D-H:M:S"),
        ({"segment": 3}, "--segment: got 3 for 4 nodes; must divide them; hint: one of 1, 2, 4"),
        ({"switches": "0"}, "--switches: got '0'; must be like 1 or 1@2:00:00"),
        ({"more": ("--comment=a b",)}, "launch: got '--comment=a b' for an #SBATCH line"),
    ],
)
def test_slurm_options_that_cannot_be_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        directives(**options)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("10", 600), ("10:30", 630), ("1:00:00", 3600), ("2-3", 183600), ("2-3:30", 185400), ("1-0:0:1", 86401)],
)
def test_slurms_time_forms_are_read_as_slurm_does(time: str, seconds: int) -> None:
    """The grace is compared with the limit in seconds."""
    assert directives(time=time, grace_s=seconds - 1)
    with pytest.raises(ConfigError, match="--grace"):
        directives(time=time, grace_s=seconds)


def test_the_environment_is_exported_with_reasons_and_words_are_quoted() -> None:
    for script in (
        slurm_script(JOB, SlurmOptions()),
        mpirun_script(JOB, MpirunOptions(hosts=("a", "b", "c", "d"))),
        torchrun_script(JOB, TorchrunOptions(endpoint="a:29400")),
    ):
        assert "export NCCL_ALGO=Ring  # why not" in re.sub(" +#", "  #", script)
        assert "'/shared/my run.yaml'" in script
    assert array("x", ["a,b", "c d", "e"]) == "x=('a,b' 'c d' e)"


def test_fewer_nodes_take_the_next_smaller_layout() -> None:
    assert layout_cases(JOB.layouts).splitlines() == [
        "    4) nodes=4 ranks=32 overrides=() ;;",
        "    2|3) nodes=2 ranks=16 overrides=(mesh.actor.dp=4) ;;",
    ]


def test_mpirun_passes_variables_and_places_ranks() -> None:
    script = mpirun_script(JOB, MpirunOptions(hosts=("a", "b", "c", "d"), passed=("PYTHONPATH",)))
    (line,) = re.findall(r"^mpirun=\((.*)\)$", script, re.M)
    assert line == (
        "mpirun -np 32 --map-by ppr:8:node --bind-to none --host 'a:8,b:8,c:8,d:8' -x NCCL_ALGO -x PYTHONPATH"
    )
    alone = replace(JOB, layouts=(Layout(nodes=1, ranks=8),))
    assert "--host localhost:8" in mpirun_script(alone, MpirunOptions())
    assert "--host" not in mpirun_script(JOB, MpirunOptions())  # the surrounding scheduler's nodes
    with pytest.raises(ConfigError, match="--hosts: got a,b for 4 nodes; must name each node once"):
        mpirun_script(JOB, MpirunOptions(hosts=("a", "b")))


def test_torchrun_meets_at_the_endpoint() -> None:
    script = torchrun_script(JOB, TorchrunOptions(endpoint="n1:29400", min_nodes=2))
    assert "--nnodes=2:4 --nproc-per-node=8" in script
    assert "--rdzv-endpoint=n1:29400" in script
    with pytest.raises(ConfigError, match="--endpoint: got none for 4 nodes"):
        torchrun_script(JOB, TorchrunOptions())
    with pytest.raises(ConfigError, match="--endpoint: got 'n1'; must be HOST:PORT"):
        torchrun_script(JOB, TorchrunOptions(endpoint="n1"))


def test_a_name_is_one_word() -> None:
    with pytest.raises(ConfigError, match="--name: got 'a b'; must be letters"):
        replace(JOB, name="a b")


# ---- layouts for fewer nodes ---------------------------------------------------------------------------
def config(mesh: MeshesConfig) -> RunConfig:
    return RunConfig(mesh=mesh, stages=(StageConfig(batch_size=16),))


def test_smaller_layouts_are_legal_and_fill_their_ranks() -> None:
    cfg = config(MeshesConfig(actor=MeshConfig(tp=2, dp=4), critic=MeshConfig(tp=1, dp=4)))
    found = layouts(cfg, nodes=4, ranks_per_node=2, min_nodes=1)
    assert found[0] == Layout(nodes=4, ranks=8)
    assert found[1:] == [
        Layout(nodes=3, ranks=6, overrides=("mesh.actor.dp=3",)),
        Layout(nodes=2, ranks=4, overrides=("mesh.actor.dp=2",)),
        Layout(nodes=1, ranks=2, overrides=("mesh.actor.dp=1", "mesh.critic.dp=2")),
    ]
    for layout in found:
        smaller = parse_config("mesh: {actor: {tp: 2, dp: 4}, critic: {tp: 1, dp: 4}}", "x", layout.overrides)
        assert world_size_of(smaller) == layout.ranks
        assert check(smaller, layout.ranks) == []


def test_a_model_that_needs_all_nodes_has_one_layout() -> None:
    cfg = config(MeshesConfig(actor=MeshConfig(tp=4, pp=2)))
    assert layouts(cfg, nodes=2, ranks_per_node=4, min_nodes=1) == [Layout(nodes=2, ranks=8)]


def test_roles_on_ranks_of_their_own_shrink_only_where_they_can() -> None:
    apart = MeshesConfig(
        actor=MeshConfig(dp=4),
        critic=MeshConfig(dp=4, first_rank=4),
        reference=MeshConfig(dp=4),
        rollout=MeshConfig(dp=4),
    )
    found = layouts(config(apart), nodes=4, ranks_per_node=2, min_nodes=1)
    assert [layout.overrides for layout in found] == [(), ("mesh.critic.dp=2",)]
