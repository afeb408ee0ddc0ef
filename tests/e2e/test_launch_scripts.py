"""Rendered scripts as programs: bash accepts them, shellcheck finds nothing, and the SLURM loop does what it
says. SLURM's commands are stand-ins here; `test_launchers.py` runs the real ones."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.test_cli import CONFIG, environ

MACHINE = "host1 slots=2\nhost2 slots=2\n"
RENDERED = (
    ("--scheduler", "slurm", "--nodes", "2"),
    ("--scheduler", "slurm", "--nodes", "2", "--min-nodes", "1", "--time", "60", "--topology", "hosts"),
    (
        *(
            "--scheduler",
            "slurm",
            "--nodes",
            "2",
            "--spare-nodes",
            "1",
            "--time",
            "60",
            "--topology",
            "hosts",
        ),
        *("elastic.enabled=true", "checkpoint.every=1"),
    ),
    ("--scheduler", "mpirun", "--nodes", "2", "--hosts", "a,b"),
    ("--scheduler", "torchrun", "--nodes", "2", "--endpoint", "a:29400", "--min-nodes", "1"),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.yaml").write_text(f"run_dir: {tmp_path}/run\n{CONFIG}")
    (tmp_path / "hosts").write_text(MACHINE)
    return tmp_path


def unirl(folder: Path, *args: str) -> str:
    """Standard output of a command that must succeed."""
    result = subprocess.run(
        [sys.executable, "-m", "unirl_scale", *args],
        cwd=folder,
        env=environ(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("args", RENDERED, ids=" ".join)
def test_shells_and_linters_accept_every_script(folder: Path, args: Sequence[str]) -> None:
    script = unirl(folder, "launch", "run.yaml", *args, "--render")
    assert not (folder / "run").exists() and not (folder / "run.launch").exists()
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    if shutil.which("shellcheck"):
        checked = subprocess.run(
            ["shellcheck", "-"], input=script, text=True, capture_output=True, check=False
        )
        assert checked.stdout == ""
    planned = "--topology" in args and "elastic.enabled=true" not in args
    assert ("planner=" in script) == planned


@dataclass(frozen=True)
class FakeSlurm:
    """Stand-ins for SLURM's commands, which note how they are called."""

    folder: Path

    def prepare(self, nodes: str, statuses: Sequence[str]) -> None:
        """`nodes` is what sinfo prints; each srun takes the next status, or runs it where it is a command."""
        tools = self.folder / "tools"
        tools.mkdir()
        (tools / "nodes").write_text(nodes)
        for number, status in enumerate(statuses):
            (tools / f"srun-{number}").write_text(f"exit {status}" if status.isdecimal() else status)
        for name, body in {
            "sinfo": f"cat {tools}/nodes",
            "srun": f"n=$(grep -c ^srun {tools}/calls); . {tools}/srun-$((n - 1))",
            "scontrol": "",
            "scancel": f"touch {tools}/cancelled",
        }.items():
            path = tools / name
            path.write_text(f'#!/bin/bash\necho "{name} $*" >>{tools}/calls\n{body}\n')
            path.chmod(0o755)

    def start(self, *args: str) -> subprocess.Popen[str]:
        script = self.folder / "job.sh"
        script.write_text(
            unirl(
                self.folder, "launch", "run.yaml", "--scheduler", "slurm", "--pause", "0", *args, "--render"
            )
        )
        paths = f"{self.folder}/tools{os.pathsep}{os.environ['PATH']}"
        job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "host[1-2]"}
        return subprocess.Popen(
            ["bash", str(script)],
            env=environ(PATH=paths, **job),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def run(self, *args: str) -> tuple[int, str]:
        process = self.start(*args)
        out, _ = process.communicate(timeout=60)
        return process.returncode, out

    def calls(self, program: str) -> list[str]:
        lines = (self.folder / "tools" / "calls").read_text().splitlines()
        return [line for line in lines if line.startswith(program)]


@pytest.fixture
def slurm(folder: Path) -> FakeSlurm:
    return FakeSlurm(folder)


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(400):
        if condition():
            return
        time.sleep(0.05)
    pytest.fail("never happened")


def test_a_run_that_finishes_is_started_once(slurm: FakeSlurm) -> None:
    slurm.prepare("host1 alloc\nhost2 alloc\n", ["0"])
    assert slurm.run("--nodes", "2")[0] == 0
    (call,) = slurm.calls("srun")
    assert "--nodes=2 --ntasks=4 --nodelist=host1,host2 --ntasks-per-node=2 --distribution=block" in call
    assert slurm.calls("scontrol") == []


def test_a_failed_attempt_is_started_again_and_the_last_status_is_the_jobs(slurm: FakeSlurm) -> None:
    slurm.prepare("host1 alloc\nhost2 alloc\n", ["1", "9"])
    status, out = slurm.run("--nodes", "2", "--restarts", "1")
    assert (status, len(slurm.calls("srun"))) == (9, 2)
    assert "attempt 1 ended with status 9" in out
    assert len(list((slurm.folder / "run.launch").glob("7.0.*"))) == 2


def test_bad_input_is_not_tried_again(slurm: FakeSlurm) -> None:
    slurm.prepare("host1 alloc\nhost2 alloc\n", ["2"])
    assert slurm.run("--nodes", "2")[0] == 2
    assert len(slurm.calls("srun")) == 1


@pytest.mark.parametrize("state", ["down*", "alloc*", "drng", "fail"])
def test_the_nodes_that_are_left_run_a_smaller_layout(slurm: FakeSlurm, state: str) -> None:
    # a node in two partitions is listed twice
    slurm.prepare(f"host1 {state}\nhost2 mix\nhost2 mix\n", ["0"])
    assert slurm.run("--nodes", "2", "--min-nodes", "1")[0] == 0
    (call,) = slurm.calls("srun")
    assert "--nodes=1 --ntasks=2 --nodelist=host2 " in call
    assert call.endswith("mesh.actor.dp=1")


def test_too_few_nodes_send_the_job_back_into_the_queue(slurm: FakeSlurm) -> None:
    slurm.prepare("host1 down*\nhost2 mix\n", [])
    status, out = slurm.run("--nodes", "2")
    assert status == 0
    assert "1 nodes answer, at least 2 are needed" in out
    assert slurm.calls("srun") == []
    assert slurm.calls("scontrol") == ["scontrol requeue 7"]


def test_near_the_time_limit_the_ranks_stop_and_the_job_goes_back(slurm: FakeSlurm) -> None:
    tools = slurm.folder / "tools"
    slurm.prepare(
        "host1 alloc\nhost2 alloc\n", [f"until [ -e {tools}/cancelled ]; do sleep .05; done; exit 143"]
    )
    process = slurm.start("--nodes", "2", "--time", "60")
    wait_for(lambda: (tools / "calls").exists() and len(slurm.calls("srun")) == 1)
    process.send_signal(signal.SIGUSR1)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert slurm.calls("scancel") == ["scancel --signal=TERM 7"]
    assert slurm.calls("scontrol") == ["scontrol requeue 7"]
    assert len(slurm.calls("srun")) == 1
    assert "back into the queue" in out


def test_with_a_topology_the_job_plans_itself_on_the_nodes_it_got(slurm: FakeSlurm) -> None:
    slurm.prepare("host1 alloc\nhost2 alloc\n", ["0"])
    status, out = slurm.run("--nodes", "2", "--topology", "hosts")
    assert status == 0, out
    placed = slurm.folder / "run.launch" / "7.0.0"
    assert (placed / "hosts").read_text().split() == ["host1"] * 2 + ["host2"] * 2
    (call,) = slurm.calls("srun")
    assert "--distribution=arbitrary" in call
    assert call.endswith(f"--plan {placed}/plan.yaml")
    assert "--nodelist" not in call


def test_submitting_needs_the_schedulers_program(folder: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "unirl_scale", "launch", "run.yaml", "--scheduler", "slurm", "--nodes", "2"],
        cwd=folder,
        env=environ(PATH="/nowhere"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stderr) == (
        1,
        "error: --scheduler: got slurm; needs sbatch on this host; hint: --render\n",
    )


def test_the_world_must_be_the_meshes(folder: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "unirl_scale", "launch", "run.yaml", "--scheduler", "slurm", "--nodes", "3"],
        cwd=folder,
        env=environ(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr.startswith(
        "error: --nodes: got 3 of 2 ranks; must be the 4 ranks that the meshes span; hint: --nodes 1 "
    )
