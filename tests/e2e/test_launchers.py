"""One configuration under mpirun, torchrun and SLURM, really run: all have the single rank's digests.

Slow: each run loads torch once a rank. A launcher that is not installed is skipped with that reason; SLURM is
started here, see `slurm_cluster.py`. GPUs and several physical hosts are not covered.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.slurm_cluster import Cluster, cluster, why_not
from tests.e2e.test_cli import FOREIGN, ROOT
from unirl_scale.comm.plan_file import read_plan
from unirl_scale.comm.topology import read_topology
from unirl_scale.core.digest_compare import compare_digests, read_digests
from unirl_scale.launch.mpi import free_port

pytestmark = pytest.mark.slow
PROGRAM = (sys.executable, "-m", "unirl_scale")
CONFIG = """\
model: {actor: {hidden_size: 32, num_layers: 2, num_heads: 4, num_kv_heads: 4, head_dim: 8, ffn_size: 32}}
mesh: {actor: {tp: 2, dp: 2, micro_batch_size: 4}}
rollout: {max_prompt_tokens: 12, max_response_tokens: 3}
task:
  name: reasoning_gym
  dataset: chain_sum
  options: {min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}
  prompt_template: "{expression}="
  drop_characters: " "
  size: 64
  heldout_size: 8
  tokenizer: {mode: charset, charset: "0123456789+-="}
digest: {every: 1}
stages: [{name: ppo, num_steps: 4, batch_size: 8, minibatch_size: 8, algorithm: {name: ppo}}]
"""
ALONE = ("mesh.actor.tp=1", "mesh.actor.dp=1")


def environ(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    # mpirun refuses root unless told twice that it may.
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**kept, **root, "PYTHONPATH": str(ROOT), **more}


def done(*command: str, cwd: Path, **more: str) -> str:
    """Both outputs of a command that must succeed."""
    result = subprocess.run(
        command,
        cwd=cwd,
        env=environ(**more),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


@dataclass(frozen=True, slots=True)
class Runs:
    """A folder with the configuration, and the digests that every run must have."""

    folder: Path

    def same(self, name: str) -> None:
        """The run `name` has the single rank's digests, step for step."""
        result = compare_digests(read_digests(self.folder / "alone"), read_digests(self.folder / name))
        assert result.equal, result
        assert result.steps == 4

    def launch(self, name: str, *args: str) -> tuple[str, ...]:
        return (*PROGRAM, "launch", "run.yaml", f"run_dir={name}", *args)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("launchers")
    (folder / "run.yaml").write_text(CONFIG)
    done(*PROGRAM, "train", "run.yaml", "run_dir=alone", *ALONE, cwd=folder)
    return Runs(folder)


def wait_for(condition: Callable[[], bool], what: Callable[[], str] = str) -> None:
    for _ in range(1200):
        if condition():
            return
        time.sleep(0.1)
    pytest.fail(f"never happened; {what()}")


# ---- mpirun --------------------------------------------------------------------------------------------
needs_mpirun = pytest.mark.skipif(
    shutil.which("mpirun") is None, reason="mpirun is not installed (apt-get install openmpi-bin)"
)


@needs_mpirun
def test_mpirun_starts_the_ranks(runs: Runs) -> None:
    out = done(
        *("mpirun", "-np", "4", "--oversubscribe", *PROGRAM, "train", "run.yaml", "run_dir=mpirun"),
        cwd=runs.folder,
    )
    assert "step 4/4" in out
    runs.same("mpirun")


@needs_mpirun
def test_the_mpirun_script_runs(runs: Runs) -> None:
    out = done(*runs.launch("mpi-script", "--scheduler", "mpirun"), cwd=runs.folder)
    assert "step 4/4" in out
    runs.same("mpi-script")
    logs = runs.folder / "mpi-script.launch" / "attempt-0"
    assert len(list(logs.rglob("stderr"))) == 4


@needs_mpirun
def test_mpi_tells_the_meeting_point_and_is_hidden_from_children(runs: Runs) -> None:
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed (pip install 'unirl-scale[mpi]')")
    code = """
import subprocess, sys
from unirl_scale.launch import environment
from unirl_scale.launch.mpi import ask_mpi
from unirl_scale.launch.ranks import discover
info = discover(environment.current(), ask_mpi)
environment.hide_mpi()
child = "import os; print(any(name.startswith(('OMPI_', 'PMIX_')) for name in os.environ))"
seen = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stdout.strip()
sys.stdout.write(f"rank {info.rank}/{info.world_size} node {info.node_rank} at {info.master_addr} {seen}\\n")
"""
    out = done("mpirun", "-np", "3", "--oversubscribe", sys.executable, "-c", code, cwd=runs.folder)
    assert sorted(out.splitlines()) == [f"rank {rank}/3 node 0 at 127.0.0.1 False" for rank in range(3)]


@needs_mpirun
def test_a_rank_that_differs_is_refused_before_training(runs: Runs) -> None:
    command = f"PYTHONHASHSEED=$OMPI_COMM_WORLD_RANK exec {' '.join(PROGRAM)} train run.yaml run_dir=differs"
    result = subprocess.run(
        ["mpirun", "-np", "4", "--oversubscribe", "bash", "-c", command],
        cwd=runs.folder,
        env=environ(),
        text=True,
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 2
    assert "error: rank 0: pre-flight: the job cannot start" in result.stderr
    assert "got PYTHONHASHSEED 1 where rank 0 has 0; must be equal" in result.stderr
    assert not (runs.folder / "differs" / "metrics.jsonl").exists()


@needs_mpirun
def test_a_probe_under_mpirun_writes_a_topology_that_plans(runs: Runs) -> None:
    sizes = ("--sizes", "1K,256K,4M", "--repeats", "4")
    done("mpirun", "-np", "4", "--oversubscribe", *PROGRAM, "probe", *sizes, cwd=runs.folder)
    topology = read_topology(runs.folder / "probed.yaml")
    assert topology.num_devices == 4
    assert topology.constants["node"].beta_gb_per_s
    done(*PROGRAM, "plan", "run.yaml", "--topology", "probed.yaml", "--out", "plan.yaml", cwd=runs.folder)
    done(
        *("mpirun", "-np", "4", "--oversubscribe", *PROGRAM, "train", "run.yaml"),
        *("run_dir=planned", "--plan", "plan.yaml"),
        cwd=runs.folder,
    )
    runs.same("planned")


# ---- torchrun ------------------------------------------------------------------------------------------
def test_two_torchrun_agents_of_this_host_run_one_job(runs: Runs) -> None:
    script = done(
        *runs.launch("torchrun", "--scheduler", "torchrun", "--nodes", "2", "--restarts", "0"),
        *("--endpoint", f"localhost:{free_port()}", "--render"),
        cwd=runs.folder,
    )
    (runs.folder / "torchrun.sh").write_text(script)
    agents = [
        subprocess.Popen(
            ["bash", "torchrun.sh"],
            cwd=runs.folder,
            env=environ(),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        for _ in range(2)
    ]
    try:
        outputs = [agent.communicate(timeout=300)[0] for agent in agents]
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    runs.same("torchrun")


# ---- SLURM ---------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if why_not():
        pytest.skip(why_not())
    with cluster(tmp_path_factory.mktemp("slurm"), environ()) as found:
        yield found


def submit(slurm: Cluster, runs: Runs, name: str, *args: str, **more: str) -> str:
    """Number of the submitted job; `more` variables reach its ranks."""
    command = runs.launch(name, "--scheduler", "slurm", "--nodes", "2", "--pause", "6", *args)
    out = done(*command, cwd=runs.folder, SLURM_CONF=slurm.environ["SLURM_CONF"], **more)
    return out.split(": job ")[1].split(";")[0]


def output(runs: Runs, name: str, job: str) -> str:
    path = runs.folder / f"{name}.launch" / f"run-{job}.out"
    return path.read_text() if path.exists() else ""


def first_step(runs: Runs, name: str) -> bool:
    return (runs.folder / name / "metrics.jsonl").exists()


def test_srun_starts_the_ranks_on_two_nodes(slurm: Cluster, runs: Runs) -> None:
    run_dir = runs.folder / "srun"
    slurm.run(
        *("srun", "--nodes=2", "--ntasks-per-node=2", *PROGRAM, "train", str(runs.folder / "run.yaml")),
        f"run_dir={run_dir}",
    )
    runs.same("srun")


def test_a_gpu_job_sees_its_own_device_on_each_rank(slurm: Cluster) -> None:
    """The GPUs are not real: what a rank would see is asked for, torch is not."""
    code = (
        "import sys; from unirl_scale.core.config import HardwareConfig; from unirl_scale.launch import "
        "environment as e; from unirl_scale.launch.ranks import discover; i = discover(e.current()); "
        "v = e.device_environment(HardwareConfig(vendor='cuda'), i, e.current()); "
        "sys.stdout.write(f'{i.node_rank} {i.local_rank} {v}\\n')"
    )
    tasks = ("--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2")
    out = slurm.run("srun", *tasks, sys.executable, "-c", code)
    assert sorted(out.splitlines()) == [
        f"{node} {local} {{'CUDA_VISIBLE_DEVICES': '{local}'}}" for node in (0, 1) for local in (0, 1)
    ]


def test_a_submitted_job_plans_itself_on_the_nodes_it_got(slurm: Cluster, runs: Runs) -> None:
    topology = str(slurm.folder / "topology.conf")
    job = submit(slurm, runs, "sbatch", "--topology", topology, "--switches", "1@10:00", "--time", "10")
    slurm.wait(job, "COMPLETED")
    runs.same("sbatch")
    plan = read_plan(str(runs.folder / "sbatch.launch" / f"{job}.0.0" / "plan.yaml"))
    assert (plan.nodes, plan.node.tolist()) == (("127.0.0.1", "127.0.0.2"), [0, 0, 1, 1])


def test_a_job_that_lost_a_node_goes_on_with_what_is_left(slurm: Cluster, runs: Runs) -> None:
    job = submit(slurm, runs, "lost", "--min-nodes", "1", "checkpoint.every=1", "stages.0.num_steps=4")
    wait_for(lambda: first_step(runs, "lost"), lambda: output(runs, "lost", job))
    slurm.lose_node("127.0.0.2", job)
    try:
        slurm.wait(job, "COMPLETED", timeout_s=240)
    finally:
        slurm.return_node("127.0.0.2")
    runs.same("lost")
    said = output(runs, "lost", job)
    assert "attempt 0: 4 ranks on 127.0.0.1,127.0.0.2" in said
    assert "2 ranks on 127.0.0.1; logs" in said


def test_the_ranks_of_an_elastic_job_outlive_one(slurm: Cluster, runs: Runs) -> None:
    """One rank of four is killed: the others finish in the same step of SLURM's, with the same bits. SLURM
    calls the step failed, so the job looks once more, and finds every step done."""
    elastic = ("elastic.enabled=true", "checkpoint.snapshot_every=1", "checkpoint.every=1")
    fault = {"slot": 3, "step": 2, "phase": "accumulate", "once": str(runs.folder / "killed")}
    job = submit(slurm, runs, "elastic", *elastic, UNIRL_SCALE_FAULTS=json.dumps([fault]))
    slurm.wait(job, "COMPLETED", timeout_s=240)
    runs.same("elastic")
    events = (runs.folder / "elastic" / "elastic" / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["reason"] for line in events] == ["", "rank 3 lost"]
    logs = [runs.folder / "elastic.launch" / f"{job}.0.{attempt}" / "rank-0.log" for attempt in range(2)]
    assert "step 4/4" in logs[0].read_text()
    assert "nothing left to do: every step is done" in logs[1].read_text()


def test_a_job_near_its_limit_goes_back_and_finishes_later(slurm: Cluster, runs: Runs) -> None:
    job = submit(slurm, runs, "requeued", "--time", "10", "checkpoint.every=1")
    wait_for(lambda: first_step(runs, "requeued"), lambda: output(runs, "requeued", job))
    slurm.run("scancel", "--batch", "--signal=USR1", job)  # as --signal=B:USR1@300 does
    wait_for(lambda: "back into the queue" in output(runs, "requeued", job))
    slurm.wait(job, "COMPLETED", timeout_s=240)
    runs.same("requeued")
