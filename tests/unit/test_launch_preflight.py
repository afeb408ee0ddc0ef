"""The pre-flight names each host that may not take part, and never accuses a sound one."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from unirl_scale.core.errors import CommError, ConfigError
from unirl_scale.core.ranks import RankInfo
from unirl_scale.launch.preflight import (
    MAX_SKEW_S,
    Facts,
    Refused,
    name_problem,
    port_is_free,
    port_problem,
    preflight,
)


class ThreadStore:
    """torch's Store among threads; a key that does not come within `timeout_s` raises as torch does."""

    def __init__(self, timeout_s: float = 5.0) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._timeout_s = timeout_s

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value.encode()
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        with self._changed:
            if not self._changed.wait_for(lambda: self.check(keys), self._timeout_s):
                raise RuntimeError("wait timeout")
            return [self._values[key] for key in keys]

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self.multi_get(keys)

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)


# Two ranks on each of two hosts.
FACTS = [
    Facts(
        host=f"host-{rank // 2}",
        machine=f"boot-{rank // 2}",
        leads=rank % 2 == 0,
        device=str(rank % 2),
        equal={"torch": "2.13"},
    )
    for rank in range(4)
]


def fly(
    folders: list[Path],
    facts: list[Facts] = FACTS,
    clocks: dict[int, Callable[[], float]] | None = None,
    come: int = 4,
    timeout_s: float = 5.0,
) -> list[BaseException | None]:
    """What each rank's pre-flight raised; only the first `come` ranks take part."""
    store = ThreadStore(timeout_s)

    def one(rank: int) -> None:
        info = RankInfo(rank=rank, world_size=4, local_rank=rank % 2, local_world_size=2)
        now = (clocks or {}).get(rank, lambda: 1000.0)
        preflight(store, info, facts[rank], folders[rank // 2], now)

    with ThreadPoolExecutor(4) as pool:
        return [future.exception() for future in [pool.submit(one, rank) for rank in range(come)]]


def refusal(raised: list[BaseException | None]) -> str:
    """Rank 0's message; the other ranks must refer to it."""
    assert isinstance(raised[0], ConfigError)
    assert all(isinstance(error, Refused) for error in raised[1:])
    assert all("rank 0 refused" in str(error) for error in raised[1:])
    return str(raised[0])


def changed(rank: int, **fields: object) -> list[Facts]:
    return [replace(facts, **fields) if r == rank else facts for r, facts in enumerate(FACTS)]  # type: ignore[arg-type]


def test_equal_ranks_pass_and_leave_nothing_behind(tmp_path: Path) -> None:
    assert fly([tmp_path, tmp_path]) == [None] * 4
    assert list(tmp_path.iterdir()) == []


def test_another_version_is_told_once_a_host_with_both_values(tmp_path: Path) -> None:
    other = [*FACTS[:2], *(replace(facts, equal={"torch": "2.11", "numpy": "2"}) for facts in FACTS[2:])]
    message = refusal(fly([tmp_path, tmp_path], other))
    assert message.splitlines() == [
        "pre-flight: the job cannot start",
        "  host-1: got numpy 2 where rank 0 has none; torch 2.11 where rank 0 has 2.13; must be equal; "
        "hint: one software environment for all hosts",
    ]


def test_another_kernel_table_has_its_own_hint(tmp_path: Path) -> None:
    facts = [
        replace(f, equal={"kernels": "blocked" if rank == 3 else "whole"}) for rank, f in enumerate(FACTS)
    ]
    assert (
        "host-1: got kernels blocked where rank 0 has whole; must be equal; hint: the same hardware"
        in refusal(fly([tmp_path, tmp_path], facts))
    )


def test_problems_of_a_host_are_passed_on(tmp_path: Path) -> None:
    message = refusal(fly([tmp_path, tmp_path], changed(2, problems=["got no name; must have one"])))
    assert message.splitlines()[1:] == ["  host-1: got no name; must have one"]


def test_two_ranks_on_one_device_are_named(tmp_path: Path) -> None:
    message = refusal(fly([tmp_path, tmp_path], changed(3, device="0")))
    assert "host-1: got ranks 2, 3 on device 0; each must have its own" in message
    assert "host-0" not in message


def test_a_directory_of_its_own_is_not_shared(tmp_path: Path) -> None:
    """Same path on both hosts, but another file system: there, rank 0's marks are missing."""
    own = tmp_path / "own"
    own.mkdir()
    assert "host-1: got " in refusal(fly([tmp_path, own]))


def test_a_directory_whose_writes_do_not_arrive_is_not_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "touch", lambda self: None)
    message = refusal(fly([tmp_path, tmp_path]))
    assert "host-1: got " in message and "rank 0 must see what is written there" in message


@pytest.mark.parametrize(("off", "words"), [(60.0, "60.0 s ahead of"), (-60.0, "60.0 s behind")])
def test_a_wrong_clock_is_named(tmp_path: Path, off: float, words: str) -> None:
    message = refusal(fly([tmp_path, tmp_path], clocks={2: lambda: 1000.0 + off}))
    assert f"host-1: got a clock {words} rank 0's; must be within {MAX_SKEW_S:g} s" in message


def test_a_slow_store_does_not_accuse_a_clock(tmp_path: Path) -> None:
    """Rank 0 reads its clock a minute apart around the answers; an answer from in between is sound."""
    readings = iter([1000.0, 1060.0])
    clocks: dict[int, Callable[[], float]] = {0: lambda: next(readings), 2: lambda: 1030.0}
    assert fly([tmp_path, tmp_path], clocks=clocks) == [None] * 4


def test_ranks_that_never_came_are_named(tmp_path: Path) -> None:
    raised = fly([tmp_path, tmp_path], come=2, timeout_s=0.2)
    assert isinstance(raised[0], CommError)
    assert "got no word from ranks 2, 3" in str(raised[0])
    assert list(tmp_path.iterdir()) == []


def unresolved(host: str) -> list[str]:
    raise socket.gaierror("unknown")


@pytest.mark.parametrize(
    ("resolve", "words"),
    [
        (lambda host: ["127.0.1.1"], "got 127.0.1.1 for its own name"),
        (unresolved, "got a host name without address"),
        (lambda host: ["10.0.0.1", "127.0.1.1"], ""),
    ],
)
def test_a_name_that_leads_nowhere(resolve: Callable[[str], list[str]], words: str) -> None:
    problem = name_problem("host-1", resolve)
    assert words in problem
    assert bool(words) == bool(problem)


def test_a_host_must_be_reachable_only_where_there_are_others(tmp_path: Path) -> None:
    message = refusal(fly([tmp_path, tmp_path], changed(2, unreachable="got a bad name")))
    assert message.splitlines()[1:] == ["  host-1: got a bad name"]
    # two agents of torchrun on one machine: each is a host of its own in the ranks' variables
    one = [replace(facts, machine="boot-0", unreachable="got a bad name") for facts in FACTS]
    assert fly([tmp_path, tmp_path], one) == [None] * 4


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert not port_is_free(port)
        assert port_problem([port]).startswith(f"got ports {port} in use")
    assert port_is_free(port)
    assert port_problem([port]) == ""
