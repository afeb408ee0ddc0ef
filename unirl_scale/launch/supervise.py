"""Local ranks of an elastic job: the survivors of a lost rank go on, and it is started again."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from unirl_scale.launch.environment import local_rank_environment
from unirl_scale.launch.local import SETTLE_S, Outcome, with_last_words
from unirl_scale.launch.local_rank import (
    POLL_S,
    LocalRank,
    Signals,
    end_all,
    first_failure,
    free_port,
    grace_after,
)
from unirl_scale.launch.rank_process import BAD_INPUT

# A rank that ends within this time of its start is started again later and later.
_SHORT_LIFE_S = 60.0
_LONGEST_PAUSE_S = 60.0
# From the first rank that completed the run to the last. They leave the world together, with everything
# saved, so what still runs has nothing to lose: it is on its way out, or waits for a rank it will not get.
_COMPLETE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to keep running.

    Attributes:
        command: a rank's program; it finds its slot in torchrun's variables.
        slots: processes: the ranks asked for, then spares.
        restart: start a lost rank again.
        max_restarts: of all ranks at once, without progress in between.
        grace_s: what the ranks get to save in when this process is asked to end.
        progress: grows whenever the job completes a step.
        say: tells the user what happens.
    """

    command: Sequence[str]
    slots: int
    environ: Mapping[str, str]
    log_dir: Path
    restart: bool
    max_restarts: int
    grace_s: float
    progress: Callable[[], int]
    say: Callable[[str], None]


def supervise(job: Job) -> Outcome:
    """Run the job until it is complete, cannot go on, or this process is asked to end.

    A rank that is killed, or fails by itself, is started again while the others go on without it. The job
    ends with the first rank's error when that is the user's, when the ranks say that they cannot go on, and
    when all of them fail together.
    """
    job.log_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="unirl-scale-") as reports, Signals() as signals:
        ranks = _Ranks(job, Path(reports))
        try:
            ranks.start_all()
            while not signals.received:
                outcome = ranks.look()
                if outcome is not None:
                    return outcome
                time.sleep(POLL_S)
        finally:
            end_all(ranks.all, signals, grace_after(signals, job.grace_s))
        return with_last_words(Outcome(signum=signals.received[0]), ranks.all)


class _Ranks:
    """The newest process of each slot."""

    def __init__(self, job: Job, reports: Path) -> None:
        self._job, self._reports, self._port = job, reports, free_port()
        self._ranks: dict[int, LocalRank] = {}
        self._start_at_s: dict[int, float] = {}  # of slots that wait to be started again
        self._pause_s: dict[int, float] = {}
        self._together = (-1, 0)  # (progress, restarts of all ranks since)
        self._complete_s: float | None = None

    @property
    def all(self) -> list[LocalRank]:
        return list(self._ranks.values())

    def start_all(self) -> None:
        for slot in range(self._job.slots):
            self._start(slot)

    def _start(self, slot: int) -> None:
        job, report = self._job, self._reports / f"rank-{slot}.json"
        variables = local_rank_environment(slot, job.slots, self._port, str(report))
        log = job.log_dir / f"rank-{slot}.log"
        # Any of them may become the rank that reports to the user.
        self._ranks[slot] = LocalRank(
            slot, job.command, {**job.environ, **variables}, log, report, inherit_stdout=True
        )

    def look(self) -> Outcome | None:
        """Act on what changed; how the job ended, None while it goes on."""
        if any(rank.returncode == 0 for rank in self.all):
            return self._complete()
        lost = [rank for rank in self.all if rank.failed and rank.rank not in self._start_at_s]
        if lost:
            time.sleep(SETTLE_S)
            outcome = self._after(lost)
            if outcome is not None:
                return outcome
        now_s = time.monotonic()
        for slot in [slot for slot, at_s in self._start_at_s.items() if at_s <= now_s]:
            del self._start_at_s[slot]
            self._start(slot)
        return None

    def _complete(self) -> Outcome | None:
        """A rank returned: training is complete, and the others return too."""
        now_s = time.monotonic()
        self._complete_s = self._complete_s or now_s
        if any(rank.running for rank in self.all) and now_s - self._complete_s < _COMPLETE_S:
            return None
        return Outcome()

    def _after(self, lost: Sequence[LocalRank]) -> Outcome | None:
        """Start lost ranks again, or end the job."""
        reports = [rank.report for rank in lost]
        final = any(report is not None and (report.final or report.status == BAD_INPUT) for report in reports)
        together = not any(rank.running for rank in self.all)
        by_themselves = any(report is not None and not report.follows for report in reports)
        if final or (together and by_themselves) or (together and not self._may_restart_all()):
            return Outcome(failure=first_failure([rank for rank in self.all if rank.failed]))
        for rank in lost:
            rank.end()
            self._schedule(rank, at_once=together)
        return None

    def _may_restart_all(self) -> bool:
        """Every rank was killed: allowed a few times in a row without progress."""
        progress, restarts = self._job.progress(), 0
        if self._together[0] == progress:
            restarts = self._together[1]
        self._together = (progress, restarts + 1)
        if self._job.restart and restarts >= self._job.max_restarts:
            times = f"{restarts + 1} times in a row without a step completed in between"
            self._job.say(f"all ranks were lost {times}; not started again")
        return self._job.restart and restarts < self._job.max_restarts

    def _schedule(self, rank: LocalRank, *, at_once: bool) -> None:
        slot, report = rank.rank, rank.report
        why = report.message.splitlines()[0] if report is not None else rank.ending().partition(";")[0]
        if not self._job.restart:
            self._start_at_s[slot] = float("inf")
            self._job.say(f"rank in slot {slot} is lost and not started again: {why}")
            return
        lived_s = time.monotonic() - rank.started_s
        pause_s = 0.0
        if lived_s < _SHORT_LIFE_S and not at_once:
            pause_s = self._pause_s.get(slot, 0.0)
            self._pause_s[slot] = min(max(2 * pause_s, 1.0), _LONGEST_PAUSE_S)
        else:
            self._pause_s[slot] = 0.0
        self._start_at_s[slot] = time.monotonic() + pause_s
        when = f" in {pause_s:g} s" if pause_s else ""
        self._job.say(f"rank in slot {slot} is lost and started again{when}: {why}")
