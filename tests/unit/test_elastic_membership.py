"""What the training thread gets from the control plane of one process."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from unirl_scale.core.errors import ElasticError
from unirl_scale.core.progress import Progress
from unirl_scale.train.elastic.directory import Directory
from unirl_scale.train.elastic.hub import Rules
from unirl_scale.train.elastic.membership import Membership, Pace, Seat


def membership(folder: Path, slot: int, wait_timeout_s: float) -> Membership:
    """A process of a job of one rank."""
    directory = Directory(folder)
    rules = Rules(
        world=1,
        min_ranks=1,
        usable=lambda ranks: min(ranks, 1),
        max_restarts_per_step=3,
        heartbeat_timeout_s=2.5,
        regroup_timeout_s=10.0,
        wait_timeout_s=wait_timeout_s,
        claim=directory.claim,
        open_store=lambda: "",
    )
    seat = Seat(slot=slot, node="node", run="job:1", meets_at="127.0.0.1")
    pace = Pace(interval_s=0.25, timeout_s=2.5, stall_timeout_s=0.0)
    return Membership(seat, pace, rules, directory, Progress())


def test_a_process_that_finds_nobody_gives_up_with_the_reason(tmp_path: Path) -> None:
    with (
        membership(tmp_path, slot=1, wait_timeout_s=0.2) as alone,
        pytest.raises(ElasticError, match=r"found no hub of job job:1 within 0\.2 s"),
    ):
        alone.next_view(0)


def test_control_the_founder_waits_for_nobody(tmp_path: Path) -> None:
    with membership(tmp_path, slot=0, wait_timeout_s=0.2) as founder:
        found = founder.next_view(0)
        assert found is not None and found[0].rank_of(founder.me.uid) == 0
        time.sleep(0.3)
        founder.check()
        founder.done(1.0)
