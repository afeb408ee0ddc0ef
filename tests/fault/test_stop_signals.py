"""The scheduler's SIGTERM: the run ends within the grace, and its continuation has the undisturbed bits.

Faults only hold one rank up for a moment, so that the signal comes in the phase that the test is about.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.fault.train_job import Ended, TrainJob, ended
from unirl_scale.launch.local_rank import free_port
from unirl_scale.train.checkpoint.names import SaveName
from unirl_scale.train.checkpoint.store import Store

DURABLE = "every rank: stopped by SIGTERM; its newest snapshot is durable"


def stop_in(job: TrainJob, phase: str, *options: str, signals: int = 1) -> Ended:
    """Ask the job to end when rank 1 is in a phase of step 3."""
    mark = job.fault(slot=1, step=3, phase=phase, action="linger")
    process = job.start(*options)
    job.until(lambda: mark.exists() or process.poll() is not None)
    for _ in range(signals):
        process.send_signal(signal.SIGTERM)
    return job.wait()


def continues(job: TrainJob, undisturbed: Path, *options: str) -> str:
    """Where the next start says that it goes on; its digests are the undisturbed run's."""
    ended = job.train_well(*options)
    job.require_equal(undisturbed)
    (line,) = (line for line in ended.out.splitlines() if line.startswith("continuing after "))
    return line


def elsewhere(job: TrainJob) -> str:
    """The option that keeps snapshots where none of this run are: only what is on disk counts."""
    memory = job.folder / "other memory"
    memory.mkdir()
    return f"checkpoint.memory_dir={memory}"


@pytest.mark.slow
def test_asked_to_stop_in_a_step_the_newest_snapshot_becomes_durable(
    job: TrainJob, undisturbed: Path
) -> None:
    ended = stop_in(job, "backward", "elastic.grace_s=30")
    assert ended.status == 128 + signal.SIGTERM
    assert ended.err == f"error: stopped by SIGTERM; every rank has ended\n{DURABLE}\n"
    assert job.processes() == []
    assert Store(job.run_dir / "checkpoints").names() == [SaveName(2, 1)]
    where = continues(job, undisturbed, elsewhere(job))
    assert where.startswith("continuing after step 2 of 5 from checkpoint ")


@pytest.mark.slow
@pytest.mark.parametrize("grace_s", [1, 5])
@pytest.mark.parametrize("phase", ["rollout", "reduce", "update", "boundary"])
def test_a_stop_anywhere_in_a_step_with_any_grace(
    job: TrainJob, undisturbed: Path, phase: str, grace_s: int
) -> None:
    """With a second of grace a busy machine may not get the save done: memory still has it."""
    ended = stop_in(job, phase, f"elastic.grace_s={grace_s}")
    assert ended.status == 128 + signal.SIGTERM
    assert job.processes() == []
    done = 3 if phase == "boundary" else 2
    if grace_s > 1:
        assert DURABLE in ended.err
        assert Store(job.run_dir / "checkpoints").names() == [SaveName(done, 1)]
    assert f"continuing after step {done} of 5" in continues(job, undisturbed)


@pytest.mark.slow
def test_without_snapshots_the_step_is_finished_and_saved(job: TrainJob, undisturbed: Path) -> None:
    options = ("elastic.enabled=false", "checkpoint.snapshot_every=0", "checkpoint.every=4")
    process = job.start(*options)
    job.until(lambda: bool(job.steps()))
    process.send_signal(signal.SIGTERM)
    ended = job.wait()
    done = job.steps()[-1]
    assert ended.status == 128 + signal.SIGTERM
    assert f"every rank: stopped by a signal after step {done}\n" in ended.err
    assert Store(job.run_dir / "checkpoints").names()[0] == SaveName(done, 1)
    assert f"continuing after step {done} of 5" in continues(job, undisturbed, *options)


@pytest.mark.slow
def test_a_second_signal_ends_at_once_and_the_save_before_stays(job: TrainJob, undisturbed: Path) -> None:
    ended = stop_in(job, "backward", "checkpoint.every=1", "elastic.grace_s=30", signals=2)
    assert ended.status == 128 + signal.SIGTERM
    assert job.processes() == []
    store = Store(job.run_dir / "checkpoints")
    newest = next(name for name in store.names() if (store.folder(name) / "manifest.json").exists())
    assert newest.step in (1, 2), "the save of step 2 may have been under way"
    store.read(newest)
    assert "continuing after step 2 of 5" in continues(job, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("slot", [0, 2], ids=["rank 0", "another rank"])
def test_one_rank_that_is_asked_to_stop_leaves_and_the_others_go_on_at_once(
    job: TrainJob, undisturbed: Path, slot: int
) -> None:
    """Ranks of another launcher, one of whose nodes must go: nobody is lost, no step either."""
    port, mark = free_port(), job.fault(slot=slot, step=3, phase="backward", action="linger")
    ranks = [job.start_rank(rank, 4, port, "elastic.grace_s=3") for rank in range(4)]
    job.until(mark.exists)
    ranks[slot].send_signal(signal.SIGTERM)
    outcomes = [ended(process) for process in ranks]
    assert [outcome.status for outcome in outcomes] == [143 if rank == slot else 0 for rank in range(4)]
    assert "stopped by SIGTERM" in outcomes[slot].err
    assert job.ranks() == [4, 3]
    assert job.events()[1]["losses"] == []
    assert job.steps() == [1, 2, 3, 4, 5]
    job.require_equal(undisturbed)
