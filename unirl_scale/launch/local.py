"""Ranks of this host: fresh processes, started together and ended together."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from unirl_scale.launch.environment import local_rank_environment
from unirl_scale.launch.local_rank import (
    POLL_S,
    TERMINATE_S,
    Failure,
    LocalRank,
    Signals,
    end_all,
    first_failure,
    free_port,
    grace_after,
)

# A rank that dies takes others with it within moments: wait that long before deciding who was first.
SETTLE_S = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How the ranks ended. With neither failure nor signal all of them returned 0.

    Attributes:
        signum: the signal that stopped the launcher.
        last_words: of the ranks that it stopped: what they could still save.
    """

    failure: Failure | None = None
    signum: int | None = None
    last_words: str = ""

    @property
    def status(self) -> int:
        """Exit status: 0, the failure's, or 128 + signal (130 for Ctrl-C)."""
        if self.signum is not None:
            return 128 + self.signum
        return self.failure.status if self.failure else 0


def run_local(
    command: Sequence[str],
    world_size: int,
    environ: Mapping[str, str],
    log_dir: Path,
    *,
    grace_s: float = TERMINATE_S,
    quiet: bool = False,
) -> Outcome:
    """Run `command` once a rank and wait for all of them.

    Each rank is a process of its own session that dies with this one. When one fails, the others are ended
    within seconds; a signal that ends this process ends all of them first.

    Args:
        command: the rank's program; it finds its place in torchrun's variables.
        world_size: ranks to start.
        environ: environment of the ranks, to which the rank variables are added.
        log_dir: gets `rank-N.log` with what a rank writes; rank 0's standard output stays this process's.
        grace_s: what the ranks get to save in when this process is asked to end.
        quiet: rank 0's standard output goes to its log too.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="unirl-scale-") as reports, Signals() as signals:
        ranks: list[LocalRank] = []
        outcome = Outcome()
        try:
            port = free_port()
            for rank in range(world_size):
                report = Path(reports) / f"rank-{rank}.json"
                variables = {**environ, **local_rank_environment(rank, world_size, port, str(report))}
                log = log_dir / f"rank-{rank}.log"
                ranks.append(
                    LocalRank(rank, command, variables, log, report, inherit_stdout=rank == 0 and not quiet)
                )
            while any(rank.running for rank in ranks):
                if signals.received or any(rank.failed for rank in ranks):
                    break
                time.sleep(POLL_S)
            if signals.received:
                outcome = Outcome(signum=signals.received[0])
            elif any(rank.failed for rank in ranks):
                time.sleep(SETTLE_S)
                outcome = Outcome(failure=first_failure(ranks))
        finally:
            end_all(ranks, signals, grace_after(signals, grace_s))
        return with_last_words(outcome, ranks)


def with_last_words(outcome: Outcome, ranks: Sequence[LocalRank]) -> Outcome:
    """What ranks that were stopped by a signal reported, once they have ended; others did not get to it."""
    if outcome.signum is None or all(rank.report is None for rank in ranks):
        return outcome
    words = {
        rank.rank: rank.report.message.splitlines()[0] if rank.report else "had to be killed"
        for rank in ranks
        if rank.returncode != 0
    }
    if len(set(words.values())) == 1:
        return replace(outcome, last_words=f"every rank: {next(iter(words.values()))}")
    return replace(outcome, last_words="\n".join(f"rank {rank}: {said}" for rank, said in words.items()))
