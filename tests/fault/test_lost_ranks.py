"""Ranks are killed or hang at every part of a step: the others go on, and the bits are those of a run that
nothing happened to. The tests marked slow make the rest of the matrix."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.fault.train_job import LONG_STEPS, TrainJob, ended
from unirl_scale.launch.local_rank import free_port


def test_four_ranks_become_three_two_and_one_within_their_processes(job: TrainJob, undisturbed: Path) -> None:
    job.fault(slot=3, step=2, phase="forward")
    job.fault(slot=0, step=3, phase="reduce", collective=1)  # the hub, and the host of the store
    job.fault(slot=2, step=5, phase="update", collective=1)
    ended = job.train_well("elastic.restart=false")
    job.require_equal(undisturbed)
    assert job.ranks() == [4, 3, 2, 1]
    assert [event["after_step"] for event in job.events()] == [0, 1, 2, 4]  # no completed step was lost
    assert "warning: lost rank 3, slot 3 (node 0, pid " in ended.out
    assert job.processes() == []


def test_a_lost_rank_comes_back(job: TrainJob, undisturbed: Path) -> None:
    job.fault(slot=1, step=2, phase="backward")
    ended = job.train_well("elastic.min_ranks=4")
    job.require_equal(undisturbed)
    assert job.ranks() == [4, 4]
    assert "slot 1 is lost and started again: killed by SIGKILL" in ended.err


def test_a_rank_that_hangs_is_named_evicted_and_killed(job: TrainJob, undisturbed: Path) -> None:
    job.fault(slot=1, step=3, phase="update", action="hang")
    job.train_well("elastic.restart=false")
    job.require_equal(undisturbed)
    assert job.ranks() == [4, 3]
    (loss,) = job.events()[1]["losses"]
    assert loss.startswith("rank 1, slot 1 (node 0, pid ") and "silent for 3.5 s, last in step 3, " in loss


# ---- slow ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "collective"),
    [
        *(("rollout", n) for n in (0, 1)),
        ("score", 1),
        ("forward", 0),
        ("backward", 0),
        *(("reduce", n) for n in (1, 2)),
        *(("update", n) for n in (0, 1)),
        *(("boundary", n) for n in (0, 1)),
    ],
)
def test_a_kill_anywhere_in_a_step(job: TrainJob, undisturbed: Path, phase: str, collective: int) -> None:
    mark = job.fault(slot=2, step=3, phase=phase, collective=collective)
    job.train_well("elastic.restart=false")
    assert mark.exists()
    job.require_equal(undisturbed)
    assert job.ranks() == [4, 3]
    assert job.steps() == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_a_warm_spare_takes_the_place_of_a_lost_rank(job: TrainJob, undisturbed: Path) -> None:
    job.fault(slot=1, step=3, phase="backward")
    job.train_well("elastic.restart=false", "elastic.spares=1")
    job.require_equal(undisturbed)
    assert job.ranks() == [4, 4]


@pytest.mark.slow
def test_spares_that_were_used_up_are_replaced_by_new_ones(job: TrainJob, undisturbed_long: Path) -> None:
    """The first four processes that are ready train, so one of the faults may meet the spare on its bench."""
    marks = [job.fault(slot, step, "backward") for slot, step in ((1, 3), (2, 20), (3, 40))]
    job.slow_down(0, range(4, 40, 2))
    job.train_well("elastic.spares=1", "elastic.min_ranks=4", f"stages.0.num_steps={LONG_STEPS}")
    happened = sum(mark.exists() for mark in marks)
    assert happened >= 2
    assert job.ranks() == [4] * (1 + happened)
    job.require_equal(undisturbed_long)


@pytest.mark.slow
def test_a_rank_that_comes_back_is_taken_in_while_the_others_train(
    job: TrainJob, undisturbed_long: Path
) -> None:
    job.fault(slot=1, step=3, phase="backward")
    job.train_well(f"stages.0.num_steps={LONG_STEPS}")
    assert job.ranks() == [4, 3, 4]
    assert job.events()[2]["losses"] == [] and job.events()[2]["reason"] == "regrouping"
    job.require_equal(undisturbed_long)


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "asked to leave"])
def test_four_ranks_become_three_two_and_four_again_with_a_new_node(
    job: TrainJob, undisturbed_long: Path, signum: int
) -> None:
    """Ranks of another launcher. The new ones are of a node without snapshots: the others send the state."""
    port, options = free_port(), (f"stages.0.num_steps={LONG_STEPS}", "elastic.grace_s=2")
    job.slow_down(0, range(10, LONG_STEPS))
    ranks = [job.start_rank(slot, 4, port, *options) for slot in range(4)]
    job.until(lambda: len(job.steps()) >= 2)
    for slot, views in ((3, [4, 3]), (1, [4, 3, 2])):
        ranks[slot].send_signal(signum)
        assert ended(ranks[slot]).status in (-signal.SIGKILL, 128 + signal.SIGTERM)
        job.until(lambda views=views: job.ranks() == views)
    for slot in (1, 3):
        ranks[slot] = job.start_rank(slot, 4, port, *options, node=1)
    assert [end.status for end in map(ended, ranks)] == [0, 0, 0, 0]
    assert job.ranks()[:3] == [4, 3, 2] and job.ranks()[-1] == 4
    assert sum(len(event["losses"]) for event in job.events()) == (2 if signum == signal.SIGKILL else 0)
    job.require_equal(undisturbed_long)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["regroup", "restore"])
@pytest.mark.parametrize("slot", [0, 1])
def test_a_kill_during_the_recovery_itself(job: TrainJob, undisturbed: Path, phase: str, slot: int) -> None:
    job.fault(slot=3, step=3, phase="backward")
    # Both phases come before step 1 too; the step they are in is the last one that was begun.
    job.fault(slot=slot, step=3, phase=phase, collective=1 if phase == "restore" else 0)
    job.train_well("elastic.restart=false")
    job.require_equal(undisturbed)
    assert job.ranks() == [4, 2]  # the view in between completed no step


@pytest.mark.slow
def test_a_rank_that_is_stopped_for_two_seconds_stays(job: TrainJob, undisturbed: Path) -> None:
    port, mark = free_port(), job.fault(slot=2, step=3, phase="backward", action="hang")
    ranks = [job.start_rank(slot, 4, port) for slot in range(4)]
    job.until(lambda: mark.exists() and bool(mark.read_text()))
    time.sleep(2.0)
    ranks[2].send_signal(signal.SIGCONT)
    stopped_s = time.monotonic() - float(mark.read_text())
    assert [end.status for end in map(ended, ranks)][:2] == [0, 0]
    job.require_equal(undisturbed)
    if stopped_s > 3.0:
        pytest.skip(f"this busy machine made a pause of {stopped_s:.1f} s of it")
    assert job.ranks() == [4]


@pytest.mark.slow
def test_a_rank_that_hangs_in_the_restore_is_evicted(job: TrainJob, undisturbed: Path) -> None:
    job.fault(slot=3, step=3, phase="backward")
    job.fault(slot=1, step=3, phase="restore", collective=2, action="hang")
    job.train_well("elastic.restart=false")
    job.require_equal(undisturbed)
    assert job.ranks() == [4, 2]


@pytest.mark.slow
def test_a_rank_that_never_reaches_a_collective_is_evicted(job: TrainJob, undisturbed: Path) -> None:
    job.fault(slot=2, step=3, phase="backward", action="wait")
    job.train_well("elastic.restart=false", "elastic.stall_timeout_s=6")
    job.require_equal(undisturbed)
    (loss,) = job.events()[1]["losses"]
    assert "reached no collective for " in loss and loss.endswith("last in step 3, backward")


@pytest.mark.slow
def test_a_rank_that_fails_by_itself_is_replaced(job: TrainJob, undisturbed: Path) -> None:
    job.fault(slot=2, step=3, phase="backward", action="fail")
    ended = job.train_well("elastic.min_ranks=4")
    job.require_equal(undisturbed)
    assert "started again: RuntimeError: fault in slot 2, step 3, backward" in ended.err


@pytest.mark.slow
def test_all_ranks_killed_at_once_start_again(job: TrainJob, undisturbed: Path) -> None:
    for slot in range(4):
        job.fault(slot=slot, step=3, phase="score")
    ended = job.train_well()
    job.require_equal(undisturbed)
    assert job.ranks() == [4, 4] and "from snapshot of step 2" in ended.out


@pytest.mark.slow
def test_the_same_failure_over_and_over_stops_the_run_with_the_reason(job: TrainJob) -> None:
    for _ in range(5):
        job.fault(slot=1, step=2, phase="backward")
    ended = job.train("elastic.min_ranks=4")
    assert ended.status == 1
    assert "3 recoveries in a row completed no step after step 1; the last reason: rank 1" in ended.err
    assert job.processes() == []


@pytest.mark.slow
def test_all_ranks_killed_over_and_over_stop_the_run_with_the_reason(job: TrainJob) -> None:
    for _ in range(6):
        for slot in range(4):
            job.fault(slot=slot, step=2, phase="score")
    ended = job.train()
    assert ended.status == 1
    assert (
        "all ranks were lost 4 times in a row without a step completed in between; not started" in ended.err
    )
    assert "killed by SIGKILL" in ended.err
    assert job.steps() == [1] and job.processes() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("meshes", "ranks"),
    [
        (("mesh.actor.tp=2", "mesh.actor.pp=2", "mesh.actor.dp=1"), [4, 2]),
        (("mesh.actor.tp=2", "mesh.actor.dp=2", "mesh.actor.sequence_parallel=true"), [4, 2]),
        (("mesh.actor.tp=4", "mesh.actor.dp=1"), [4, 3]),
        (("mesh.actor.pp=2", "mesh.actor.dp=2", "mesh.actor.micro_batch_size=1"), [4, 3]),
    ],
)
def test_any_layout_goes_on_as_another(
    job: TrainJob, undisturbed: Path, meshes: tuple[str, ...], ranks: list[int]
) -> None:
    job.fault(slot=1, step=3, phase="backward")
    job.train_well("elastic.restart=false", *meshes)
    job.require_equal(undisturbed)
    assert job.ranks() == ranks


@pytest.mark.slow
def test_control_the_oracle_sees_a_step_that_trained_on_other_data(job: TrainJob, undisturbed: Path) -> None:
    job.train_well("elastic.enabled=false", "mesh.actor.dp=1", "seed=4")
    result = job.compare(undisturbed)
    assert not result.equal and result.first_difference.startswith("step 1: ")
