"""The launcher alone is killed: nothing of the job lives on, and a start anew has the undisturbed bits."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.fault.train_job import TrainJob

WITHIN_S = 5.0


def kill_launcher(job: TrainJob) -> None:
    assert job.process is not None
    job.process.kill()
    job.process.wait()
    killed_s = time.monotonic()
    while job.processes() and time.monotonic() - killed_s < WITHIN_S:
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize(("action", "spares"), [("linger", 0), ("hang", 0), ("wait", 1)])
def test_no_child_outlives_a_killed_launcher(
    job: TrainJob, undisturbed: Path, action: str, spares: int
) -> None:
    """In a step that goes on, with a rank that is stopped, and with one that never reaches a collective."""
    mark = job.fault(slot=1, step=3, phase="backward", action=action)
    job.start(f"elastic.spares={spares}")
    job.until(mark.exists)
    assert len(job.processes()) == 1 + 4 + spares, "the control: they are seen while they live"
    kill_launcher(job)
    assert job.processes() == []
    ended = job.train_well()
    assert "continuing after step 2 of 5" in ended.out
    job.require_equal(undisturbed)
