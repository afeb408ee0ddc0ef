"""The command as a user meets it: statuses, errors, ends. Arithmetic is not covered: a fake trainer runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAKE = Path(__file__).parent / "fake_trainer"
CONFIG = """\
mesh: {actor: {tp: 2, dp: 2}}
task: {name: fake}
stages: [{name: warm, num_steps: 2}, {name: rl, num_steps: 2}]
"""
# Launchers that may surround the tests themselves.
FOREIGN = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "GROUP_",
    "MASTER_",
    "OMPI_",
    "PMI",
    "SLURM_",
    "UNIRL_",
    "MKL_",
    "OMP_",
)


def environ(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    return {**kept, "PYTHONPATH": f"{FAKE}{os.pathsep}{ROOT}", **more}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.yaml").write_text(f"run_dir: {tmp_path}/run\n{CONFIG}")
    return tmp_path


def start(folder: Path, *args: str, **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "unirl_scale", *args],
        cwd=folder,
        env=environ(**more),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def unirl(folder: Path, *args: str, **more: str) -> tuple[int, str, str]:
    """(status, stdout, stderr) of one command."""
    process = start(folder, *args, **more)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def processes_of(folder: Path) -> list[int]:
    """Live processes that work in this test's folder."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            alive = (
                entry.name.isdecimal() and (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
            )
            if alive and os.readlink(entry / "cwd") == str(folder):
                found.append(int(entry.name))
        except OSError:  # ended meanwhile, or another user's
            continue
    return found


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(400):
        if condition():
            return
        time.sleep(0.05)
    pytest.fail("never happened")


def test_train_leaves_a_complete_run_directory(folder: Path) -> None:
    status, out, err = unirl(folder, "train", "run.yaml", "digest.every=1")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert [line.split("  ")[:2] for line in lines[:4]] == [
        ["step 1/4", "warm"], ["step 2/4", "warm"], ["step 3/4", "rl"], ["step 4/4", "rl"],
    ]  # fmt: skip
    assert lines[4] == "environment MKL_CBWR=AVX2,STRICT OMP_NUM_THREADS=1"
    names = {path.name for path in (folder / "run").iterdir()}
    assert {"config.yaml", "versions.json", "metrics.jsonl", "digests.jsonl", "logs"} <= names
    assert len(list((folder / "run" / "logs").iterdir())) == 4
    _, resolved, _ = unirl(folder, "config", "run.yaml", "digest.every=1")
    assert (folder / "run" / "config.yaml").read_text() == resolved


def test_a_finished_run_is_refused_and_then_overwritten(folder: Path) -> None:
    assert unirl(folder, "train", "run.yaml")[0] == 0
    status, out, err = unirl(folder, "train", "run.yaml")
    assert (status, out) == (2, "")
    assert err.startswith("error: run_dir: got ")
    assert "--overwrite" in err
    assert unirl(folder, "train", "run.yaml", "--overwrite")[0] == 0


def test_every_violation_is_listed_before_a_rank_starts(folder: Path) -> None:
    bad = ("mesh.actor.tp=3", "stages.0.batch_size=10", "stages.1.algorithm.gamma=2")
    status, out, err = unirl(folder, "train", "run.yaml", *bad)
    assert (status, out) == (2, "")
    lines = err.splitlines()
    assert lines[0] == "error: run.yaml: 3 problems"
    assert [line.split(":")[0].strip() for line in lines[1:]] == [
        "mesh.actor.tp", "stages[0].batch_size", "stages[1].algorithm.gamma",
    ]  # fmt: skip
    assert not (folder / "run").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["train", "rum.yaml"],
            "error: rum.yaml: got no such file; must be a YAML file; hint: did you mean run.yaml?",
        ),
        (
            ["train", "run.yaml", "mesh.actor.tpp=2"],
            "error: run.yaml: mesh.actor.tpp: got 2; unknown key; hint: did you mean mesh.actor.tp?",
        ),
        (
            ["config", "run.yaml", "task.fail_rnk=2"],
            "error: run.yaml: task.fail_rnk: got 2; unknown key; hint: did you mean task.fail_rank?",
        ),
        (
            ["config", "run.yaml", "stages.0.algorithm.name=pp0"],
            'error: run.yaml: stages[0].algorithm.name: got "pp0"; must be a known name; '
            "hint: did you mean ppo?",
        ),
        (["train", "run.yaml", "seed=x"], 'error: run.yaml: seed: got "x"; must be an integer'),
        (
            ["train", "run.yaml", "--nproc", "3"],
            "error: run.yaml: mesh.actor: got tp 2 x pp 1 x dp 2 from rank 0; needs ranks 0..3; "
            "the world has 3; hint: start 4 ranks or a smaller mesh",
        ),
        (["compare", "a", "b"], "error: a: got no such directory; must be a run directory"),
        (
            ["verify", "run.yaml", "invariance.mode=off"],
            "error: invariance.mode: got off; only `layout` promises equal bits; "
            "hint: invariance.mode=layout",
        ),
    ],
)
def test_a_users_mistake_is_one_line_without_traceback(folder: Path, args: list[str], message: str) -> None:
    status, out, err = unirl(folder, *args)
    assert (status, out, err) == (2, "", message + "\n")


def test_overrides_may_stand_on_both_sides_of_an_option(folder: Path) -> None:
    status, out, _ = unirl(
        folder, "train", "run.yaml", "seed=1", "--nproc", "4", "seed=2", "stages.0.num_steps=1"
    )
    assert status == 0
    assert "step 3/3" in out
    assert "seed: 2\n" in (folder / "run" / "config.yaml").read_text()
    assert unirl(folder, "train", "run.yaml", "--nporc", "4")[0] == 2


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("user", "error: rank 2: op linear: got rows that move; must hold; hint: invariance.mode=run\n"),
        ("bug", "error: rank 2: ZeroDivisionError: a bug\nTraceback (most recent call last):\n"),
        ("kill", "error: rank 2: killed by SIGKILL; hint: "),
        ("exit", "error: rank 2: ended with exit status 3 and no error; hint: see "),
    ],
)
def test_the_first_failure_is_told_once_and_the_others_end(folder: Path, how: str, message: str) -> None:
    status, _, err = unirl(
        folder, "train", "run.yaml", "task.fail_rank=2", f"task.fail_how={how}", "task.child=true"
    )
    assert status == 1
    assert err.startswith(message)
    assert err.count("error:") == 1
    assert err.count("Traceback") == (1 if how == "bug" else 0)
    assert processes_of(folder) == []


def test_an_error_that_only_follows_another_is_not_the_one_shown(folder: Path) -> None:
    # rank 2 is killed; rank 0 notices and raises CommError before the launcher has looked
    status, _, err = unirl(
        folder, "train", "run.yaml", "task.fail_rank=2", "task.fail_how=kill", "task.follow=true"
    )
    assert status == 1
    assert err.startswith("error: rank 2: killed by SIGKILL")


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_every_rank_and_its_children(folder: Path, signum: int, status: int) -> None:
    process = start(folder, "train", "run.yaml", "task.step_s=60", "task.child=true", "elastic.grace_s=1")
    wait_for(lambda: len(processes_of(folder)) >= 6)  # the launcher, rank 0 and four children at least
    process.send_signal(signum)
    _, err = process.communicate(timeout=20)
    assert process.returncode == status
    assert err == f"error: stopped by {signal.Signals(signum).name}; every rank has ended\n"
    assert processes_of(folder) == []


def test_ranks_die_with_a_killed_launcher_and_the_directory_is_free(folder: Path) -> None:
    process = start(folder, "train", "run.yaml", "task.step_s=60")
    wait_for(lambda: (folder / "run" / "metrics.jsonl").exists())
    status, _, err = unirl(folder, "train", "run.yaml")
    assert status == 2
    assert f"in use by a live run (process {process.pid} on" in err
    process.kill()
    process.communicate(timeout=20)
    wait_for(lambda: processes_of(folder) == [])
    assert unirl(folder, "train", "run.yaml")[0] == 0


def rank_environment(rank: int, world: int) -> dict[str, str]:
    return {
        "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999",
    }  # fmt: skip


def outcomes(processes: Sequence[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    return [(p.returncode, out, err) for p in processes for out, err in [p.communicate(timeout=60)]]


def test_ranks_of_another_launcher_are_used(folder: Path) -> None:
    ranks = [start(folder, "train", "run.yaml", **rank_environment(rank, 4)) for rank in range(4)]
    results = outcomes(ranks)
    assert [status for status, _, _ in results] == [0, 0, 0, 0]
    assert "step 4/4" in results[0][1]
    assert "environment MKL_CBWR=AVX2,STRICT" in results[0][1]
    assert [out for _, out, _ in results[1:]] == ["", "", ""]


def test_a_rank_of_another_launcher_tells_its_own_error(folder: Path) -> None:
    failing = ("task.fail_rank=1", "task.fail_how=user", "mesh.actor.dp=1")
    rank = start(folder, "train", "run.yaml", *failing, **rank_environment(1, 2))
    _, err = rank.communicate(timeout=60)
    assert rank.returncode == 1
    assert err.startswith("error: rank 1: op linear: ")


def test_a_world_of_the_wrong_size_is_refused_by_each_rank(folder: Path) -> None:
    status, _, err = unirl(folder, "train", "run.yaml", **rank_environment(0, 3))
    assert status == 2
    assert "the world has 3" in err
    status, _, err = unirl(folder, "train", "run.yaml", "--nproc", "4", **rank_environment(0, 3))
    assert err.startswith("error: --nproc: got 4, but torchrun started 3 ranks already; ")


def test_compare_names_the_first_step_and_tensor(folder: Path) -> None:
    steady = ("digest.every=1", "task.unstable=true")
    unirl(folder, "train", "run.yaml", *steady)
    unirl(folder, "train", "run.yaml", *steady, f"run_dir={folder}/same", "seed=5")
    unirl(folder, "train", "run.yaml", *steady, f"run_dir={folder}/other", "mesh.actor.tp=1")
    assert unirl(folder, "compare", "run", "same")[:2] == (0, "equal: 4 steps, 8 digests\n")
    status, out, _ = unirl(folder, "compare", "run", "other")
    assert status == 1
    assert out.splitlines() == [
        "different: first at step 2: actor/weight (and 2 more)",
        "A = run, B = other; 5 of 8 shared digests are equal",
    ]
    kept = (folder / "same" / "digests.jsonl").read_text().splitlines(keepends=True)[:3]
    (folder / "same" / "digests.jsonl").write_text("".join(kept))
    status, out, _ = unirl(folder, "compare", "run", "same")
    assert status == 1
    assert out.splitlines()[0] == "missing: step 4 only in A"


def test_verify_runs_layouts_and_finds_the_one_that_differs(folder: Path) -> None:
    status, out, err = unirl(folder, "verify", "run.yaml", "--layouts", "3", "--seed", "3", "--steps", "2")
    assert (status, err) == (0, "")
    table = out.partition("\n\n")[2].splitlines()
    assert table[0].split("  ")[0] == "layout"
    assert [row.split("  ")[0] for row in table[2:3]] == ["tp1 pp1 dp1 mb1"]
    assert len(table) == 5
    assert all(" yes" in row for row in table[3:])
    for record in (folder / "run-verify-3" / "layout-01" / "digests.jsonl").read_text().splitlines():
        assert json.loads(record)["step"] <= 4
    status, out, _ = unirl(
        folder, "verify", "run.yaml", "--layouts", "3", "--seed", "3", "task.unstable=true"
    )
    assert status == 1
    assert "NO" in out
    assert "step 2: actor/weight" in out


def test_verify_says_when_a_layout_fails(folder: Path) -> None:
    fails = (
        "task.fail_rank=1",
        "task.fail_how=user",
    )  # the single rank sleeps in vain only when rank 1 exists
    status, out, err = unirl(folder, "verify", "run.yaml", "--layouts", "2", "--seed", "3", *fails)
    assert status == 1
    assert "rank 1: op linear" in err
    assert "failed" in out


def test_help_and_version_say_what_there_is(folder: Path) -> None:
    status, out, _ = unirl(folder, "--help")
    assert status == 0
    assert all(word in out for word in ("train", "compare", "verify", "config", "exit status"))
    assert unirl(folder, "--version")[1].startswith("unirl-scale 0.")
    assert unirl(folder)[0] == 2
