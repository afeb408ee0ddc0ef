"""Numbers of views are taken once, and a part of a job that was cut off gets none."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from unirl_scale.train.elastic.directory import Directory
from unirl_scale.train.elastic.processes import has_ended, process_uid
from unirl_scale.train.elastic.view import Member, View


def view(incarnation: int, *uids: str) -> View:
    members = (
        Member(slot=i, uid=uid, node="n", host="h", pid=i, address=f"a:{i}") for i, uid in enumerate(uids)
    )
    return View(incarnation=incarnation, members=tuple(members))


def ended() -> str:
    """A process of this host that is no more."""
    child = subprocess.Popen(["sleep", "60"])
    uid = process_uid(child.pid)
    child.kill()
    child.wait()
    return uid


def test_a_process_is_known_to_have_ended_only_on_its_own_host() -> None:
    own = process_uid(os.getpid())
    host, pid, start = own.split(":")
    assert not has_ended(own)
    assert has_ended(f"{host}:{pid}:{int(start) - 1}")  # its id has passed on
    assert has_ended(ended())
    assert not has_ended(f"elsewhere:{pid}:1") and not has_ended("unreadable")


def test_numbers_follow_each_other_over_the_life_of_a_run_directory(tmp_path: Path) -> None:
    directory = Directory(tmp_path / "elastic")
    assert directory.newest() == 0
    assert directory.claim(None, ["a", "b"]) == 1
    assert directory.claim(view(1, "a", "b"), ["a"]) == 2
    assert Directory(tmp_path / "elastic").claim(None, ["c"]) == 3  # a job that starts anew
    assert directory.newest() == 3
    assert sorted(item.name for item in (tmp_path / "elastic" / "views").iterdir()) == [
        "000001",
        "000002",
        "000003",
    ]


def test_the_part_that_comes_second_gets_no_number(tmp_path: Path) -> None:
    directory = Directory(tmp_path)
    last = view(directory.claim(None, ["a", "b", "c", "d"]) or 0, "a", "b", "c", "d")
    assert directory.claim(last, ["a", "b"]) == 2
    # c and d cannot reach a and b, and take them for dead: that is no proof
    assert directory.claim(last, ["c", "d"]) is None
    assert directory.newest() == 2


def test_a_view_whose_hub_died_before_it_came_to_be_is_passed_over(tmp_path: Path) -> None:
    directory, hub = Directory(tmp_path), ended()
    last = view(directory.claim(None, [hub, "b", "c"]) or 0, hub, "b", "c")
    assert directory.claim(last, [hub, "b"]) == 2
    assert directory.claim(last, ["c"]) is None  # b may be training on
    assert directory.claim(last, ["b", "c"]) == 3


def test_an_unreadable_claim_is_somebody_elses(tmp_path: Path) -> None:
    directory = Directory(tmp_path)
    last = view(directory.claim(None, ["a", "b"]) or 0, "a", "b")
    (tmp_path / "views" / "000002").write_text("")
    assert directory.claim(last, ["a"]) is None


def test_newcomers_find_the_newest_members_and_nothing_else(tmp_path: Path) -> None:
    directory = Directory(tmp_path / "elastic")
    assert directory.addresses() == []
    directory.publish(["x:1", "y:2"])
    directory.publish(["z:3"])
    assert directory.addresses() == ["z:3"]
    (tmp_path / "elastic" / "members.json").write_text('["z:')
    assert directory.addresses() == []
