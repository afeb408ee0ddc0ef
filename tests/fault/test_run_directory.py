"""Who may work in a run directory, whatever happens to the process that holds it."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.fault.train_job import LONG_STEPS, TrainJob, ended
from unirl_scale.launch.local_rank import free_port


@pytest.mark.slow
@pytest.mark.parametrize("option", [(), ("--overwrite",)], ids=["as it is", "to overwrite"])
def test_the_same_job_started_twice_is_refused_and_the_first_goes_on(
    job: TrainJob, undisturbed_long: Path, option: tuple[str, ...]
) -> None:
    job.start(f"stages.0.num_steps={LONG_STEPS}")
    job.until(lambda: bool(job.steps()))
    second = subprocess.run(
        job.arguments(*option), cwd=job.folder, env=job.environ(), capture_output=True, text=True, check=False
    )
    assert second.returncode == 2
    assert f"in use by a live run (process {job.process.pid if job.process else 0} on " in second.stderr
    assert job.wait().status == 0
    job.require_equal(undisturbed_long)
    assert job.ranks() == [4]


@pytest.mark.slow
def test_a_new_rank_0_holds_the_directory_and_lets_its_own_job_in(
    job: TrainJob, undisturbed_long: Path
) -> None:
    """Ranks of another launcher, where rank 0 holds the directory. It is killed; the next rank 0 turns a
    second job away and takes the first one's replacement in."""
    port, steps = free_port(), f"stages.0.num_steps={LONG_STEPS}"
    ranks = [job.start_rank(slot, 4, port, steps) for slot in range(4)]
    job.until(lambda: len(job.steps()) >= 2)
    os.kill(ranks[0].pid, signal.SIGKILL)
    assert ended(ranks[0]).status == -signal.SIGKILL
    job.until(lambda: job.ranks() == [4, 3])
    other = ended(job.start_rank(0, 4, free_port(), steps, "--overwrite"))
    assert other.status == 2
    assert f"in use by a live run (process {ranks[1].pid} on " in other.err
    assert f", job 127.0.0.1:{port})" in other.err
    ranks[0] = job.start_rank(0, 4, port, steps)
    assert [end.status for end in map(ended, ranks)] == [0, 0, 0, 0]
    assert job.ranks() == [4, 3, 4]
    job.require_equal(undisturbed_long)


@pytest.mark.slow
def test_a_directory_with_steps_and_nothing_to_continue_from_is_refused(job: TrainJob) -> None:
    plain = ("elastic.enabled=false", "mesh.actor.dp=1", "checkpoint.snapshot_every=0", "checkpoint.keep=0")
    job.train_well(*plain)
    metrics = (job.run_dir / "metrics.jsonl").read_bytes()
    again = job.train(*plain, "checkpoint.resume=auto")
    assert again.status == 2
    assert "holds a run already and its results are kept, and no checkpoint to continue it from" in again.err
    assert (job.run_dir / "metrics.jsonl").read_bytes() == metrics
