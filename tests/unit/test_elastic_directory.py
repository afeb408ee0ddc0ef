"""Numbers of views are taken once, and a part of a job that was cut off gets none."""

from __future__ import annotations

from pathlib import Path

from unirl_scale.train.elastic.directory import Directory
from unirl_scale.train.elastic.view import Member, View


def view(incarnation: int, *uids: str) -> View:
    members = (
        Member(slot=i, uid=uid, node="n", host="h", pid=i, address=f"a:{i}") for i, uid in enumerate(uids)
    )
    return View(incarnation=incarnation, members=tuple(members))


def test_numbers_follow_each_other_over_the_life_of_a_run_directory(tmp_path: Path) -> None:
    directory = Directory(tmp_path / "elastic")
    assert directory.newest() == 0
    assert directory.claim(None, ["a", "b"], []) == 1
    assert directory.claim(view(1, "a", "b"), ["a"], ["b"]) == 2
    assert Directory(tmp_path / "elastic").claim(None, ["c"], []) == 3  # a job that starts anew
    assert directory.newest() == 3


def test_the_part_that_comes_second_gets_no_number(tmp_path: Path) -> None:
    directory = Directory(tmp_path)
    last = view(directory.claim(None, ["a", "b", "c", "d"], []) or 0, "a", "b", "c", "d")
    assert directory.claim(last, ["a", "b"], ["c", "d"]) == 2
    # c and d cannot reach a and b, and take them for dead: they are members of view 2 all the same
    assert directory.claim(last, ["c", "d"], []) is None
    assert directory.newest() == 2


def test_a_view_whose_hub_died_before_it_came_to_be_is_passed_over(tmp_path: Path) -> None:
    directory = Directory(tmp_path)
    last = view(directory.claim(None, ["a", "b", "c"], []) or 0, "a", "b", "c")
    assert directory.claim(last, ["a", "b"], ["c"]) == 2  # and then a, the hub, dies
    assert directory.claim(last, ["b"], ["a", "c"]) == 3


def test_an_unreadable_claim_is_somebody_elses(tmp_path: Path) -> None:
    directory = Directory(tmp_path)
    last = view(directory.claim(None, ["a", "b"], []) or 0, "a", "b")
    (tmp_path / "views" / "000002").write_text("")
    assert directory.claim(last, ["a"], ["b"]) is None


def test_newcomers_find_the_newest_members_and_nothing_else(tmp_path: Path) -> None:
    directory = Directory(tmp_path / "elastic")
    assert directory.addresses() == []
    directory.publish(["x:1", "y:2"])
    directory.publish(["z:3"])
    assert directory.addresses() == ["z:3"]
    (tmp_path / "elastic" / "members.json").write_text('["z:')
    assert directory.addresses() == []
