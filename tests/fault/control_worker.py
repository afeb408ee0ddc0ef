"""A process of a job that trains nothing: the control plane alone, without torch. Reports JSON lines."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from unirl_scale.core.errors import ElasticError, MembershipChanged
from unirl_scale.core.progress import Progress
from unirl_scale.train.elastic.directory import Directory
from unirl_scale.train.elastic.hub import Rules
from unirl_scale.train.elastic.membership import Membership, Pace, Seat

STEP_S = 0.02
REPORT_EVERY = 10  # steps
PAUSE_S = 0.5  # a step that takes longer is reported: this process was stopped, or got no processor
TIMEOUT_S = 2.5
SAVE_S = 1.0  # what a process that leaves still does


def report(**event: object) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def train(membership: Membership, folder: Path) -> None:
    """Views until the folder holds `finish`; in each, steps that take a moment."""
    step, error = 0, ""
    while (found := membership.next_view(step, error)) is not None:
        view, _ = found
        report(
            view=view.incarnation,
            slots=[member.slot for member in view.members],
            rank=view.rank_of(membership.me.uid),
            losses=[str(loss) for loss in view.losses],
            attempts=view.attempts,
            reason=view.reason,
        )
        step, error = max(step, view.step), ""
        try:
            while not (folder / "finish").exists():
                if (folder / f"fail-{membership.me.slot}").exists():
                    error = "asked to fail"
                    break
                if (folder / f"leave-{membership.me.slot}").exists():
                    membership.leave()
                    time.sleep(SAVE_S)
                    return
                if membership.regroup:
                    break
                membership.progress.enter("compute", step=step + 1)
                began_s = time.monotonic()
                time.sleep(STEP_S)
                step += 1
                if (took_s := time.monotonic() - began_s) > PAUSE_S:
                    report(paused_s=took_s)
                if step % REPORT_EVERY == 0:
                    report(step=step)
            else:
                membership.done(5.0)
                return
        except MembershipChanged:
            pass


def main(folder: Path, slot: int, world: int, min_ranks: int, host: str) -> None:
    directory = Directory(folder / "elastic")
    rules = Rules(
        world=world,
        min_ranks=min_ranks,
        usable=lambda ranks: min(ranks, world),
        max_restarts_per_step=3,
        heartbeat_timeout_s=TIMEOUT_S,
        regroup_timeout_s=10.0,
        wait_timeout_s=15.0,
        claim=directory.claim,
        open_store=lambda: "",
    )
    seat = Seat(slot=slot, node=host, run="job", meets_at="127.0.0.1")
    pace = Pace(interval_s=0.25, timeout_s=TIMEOUT_S, stall_timeout_s=0.0)
    with Membership(seat, pace, rules, directory, Progress()) as membership:
        report(pid=membership.me.pid)
        try:
            train(membership, folder)
            report(ended="done")
        except ElasticError as error:
            report(ended=str(error))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
