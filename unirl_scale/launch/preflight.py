"""What must be equal, reachable and writable on every rank, checked before a process group exists.

Each rank posts its facts to the store; rank 0 judges and posts the verdict. A wrong host gets a line of its
own: torch, NCCL and HCCL notice most of these as a time-out without a name.
"""

from __future__ import annotations

import json
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Protocol

from unirl_scale.core.errors import CommError, ConfigError
from unirl_scale.core.ranks import RankInfo

MAX_SKEW_S = 5.0
"""Clocks further apart are refused: they break log order, and SLURM's and MUNGE's credentials soon after."""

_HINTS = {
    "config": "the same file and overrides on every host",
    "data": "the same data files and package versions on every host",
    "kernels": "the same hardware and numeric environment on every host",
    "device": "one kind of accelerator in a job",
}
_RANKS_SHOWN = 8
_SEEN = timedelta(seconds=10)


class Refused(ConfigError):  # noqa: N818 - it names an outcome
    """Rank 0 found that the job cannot start, and says why; this rank only follows."""


class Store(Protocol):
    """The part of torch's Store that is used here; `get` and `multi_get` wait for the keys."""

    def set(self, key: str, value: str, /) -> object: ...
    def get(self, key: str, /) -> bytes: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def check(self, keys: list[str], /) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> object: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a rank says of itself.

    Attributes:
        host: name of its host.
        machine: what tells hosts of one name apart, and one host from several.
        leads: it is the one that answers for its host.
        device: the accelerator it uses, unique on its host; "" = CPU.
        equal: name -> what must be the same on all ranks (versions, kernels, config, ...).
        problems: what is wrong on its host, each with its hint.
        unreachable: what is wrong where other hosts must reach this one; "" = nothing.
        marked: it wrote its mark into the shared directory.
    """

    host: str
    machine: str = ""
    leads: bool
    device: str = ""
    equal: Mapping[str, str] = field(default_factory=dict)
    problems: Sequence[str] = ()
    unreachable: str = ""
    marked: bool = False


def preflight(
    store: Store,
    info: RankInfo,
    facts: Facts,
    folder: Path,
    now: Callable[[], float] = time.time,
) -> None:
    """Compare the ranks; collective over the store.

    Args:
        folder: a directory that all hosts share and may write; made if need be.
        now: this host's wall clock in seconds.

    Raises:
        ConfigError: on rank 0, with one line for each host that fails.
        Refused: on the other ranks then.
        CommError: ranks are missing.
    """
    if info.rank == 0:
        _judge(store, info, facts, folder, now)
    else:
        _answer(store, info, facts, folder, now)


def _answer(store: Store, info: RankInfo, facts: Facts, folder: Path, now: Callable[[], float]) -> None:
    token = store.get("folder").decode()
    if facts.leads:
        problems = _leave_mark(folder / token, info.rank)
        facts = replace(facts, problems=[*facts.problems, *problems], marked=not problems)
    store.set(f"facts/{info.rank}", json.dumps(asdict(facts)))
    if facts.leads:
        store.get("ping")
        store.set(f"time/{info.rank}", repr(now()))
    verdict = store.get("verdict")
    store.set(f"seen/{info.rank}", "")
    if verdict != b"ok":
        raise Refused("pre-flight: rank 0 refused to start; its message names the hosts")


def _judge(store: Store, info: RankInfo, facts: Facts, folder: Path, now: Callable[[], float]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    marks = Path(tempfile.mkdtemp(prefix=".preflight-", dir=folder))
    try:
        store.set("folder", marks.name)
        others = range(1, info.world_size)
        gathered = [facts, *(Facts(**json.loads(text)) for text in _collect(store, "facts", others))]
        leaders = [rank for rank, other in enumerate(gathered) if other.leads and rank]
        lines = [
            *(f"{other.host}: {problem}" for other in gathered for problem in other.problems),
            *_unreachable(gathered),
            *_differences(gathered),
            *_shared_devices(gathered),
            *_unshared(marks, leaders, gathered),
            *_skews(store, leaders, gathered, now),
        ]
    finally:
        shutil.rmtree(marks, ignore_errors=True)
    store.set("verdict", "refused" if lines else "ok")
    if lines:
        _wait_until_seen(store, others)
        raise ConfigError("\n  ".join(["pre-flight: the job cannot start", *dict.fromkeys(lines)]))


def _collect(store: Store, kind: str, ranks: Sequence[int]) -> list[bytes]:
    """What these ranks posted under `kind`."""
    keys = [f"{kind}/{rank}" for rank in ranks]
    try:
        return store.multi_get(keys) if keys else []
    except RuntimeError as error:  # torch's stores time out so
        missing = [rank for rank, key in zip(ranks, keys, strict=True) if not store.check([key])]
        raise CommError(
            f"pre-flight: got no word from ranks {_some(missing)}; all must start; "
            "hint: see their logs, and whether they can reach this host"
        ) from error


def _wait_until_seen(store: Store, ranks: Sequence[int]) -> None:
    """The store ends with rank 0: let the others read the verdict first."""
    with suppress(RuntimeError):  # a rank that is gone needs no verdict
        store.wait([f"seen/{rank}" for rank in ranks], _SEEN)


def _some(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:_RANKS_SHOWN])
    return shown + (f" and {len(ranks) - _RANKS_SHOWN} more" if len(ranks) > _RANKS_SHOWN else "")


def _differences(gathered: Sequence[Facts]) -> list[str]:
    """One line a host whose ranks differ from rank 0's, with everything that differs."""
    first, by_host = gathered[0], dict[str, dict[str, str]]()
    for other in gathered[1:]:
        if other.equal != first.equal:
            found = by_host.setdefault(other.host, {})
            for name in sorted({*first.equal, *other.equal}):
                mine, here = first.equal.get(name, "none"), other.equal.get(name, "none")
                if mine != here:
                    found.setdefault(name, f"{name} {here} where rank 0 has {mine}")
    return [
        f"{host}: got {'; '.join(found.values())}; must be equal; "
        f"hint: {_HINTS.get(next(iter(found)), 'one software environment for all hosts')}"
        for host, found in by_host.items()
    ]


def _shared_devices(gathered: Sequence[Facts]) -> list[str]:
    users: dict[tuple[str, str, str], list[int]] = {}
    for rank, facts in enumerate(gathered):
        if facts.device:
            users.setdefault((facts.host, facts.machine, facts.device), []).append(rank)
    return [
        f"{host}: got ranks {_some(ranks)} on device {device}; each must have its own; "
        "hint: let CUDA_VISIBLE_DEVICES or ASCEND_RT_VISIBLE_DEVICES list a device for each rank of the host"
        for (host, _, device), ranks in users.items()
        if len(ranks) > 1
    ]


def _unreachable(gathered: Sequence[Facts]) -> list[str]:
    """Hosts that the others cannot reach; nothing when all ranks are on one."""
    if len({facts.machine for facts in gathered}) == 1:
        return []
    return [f"{facts.host}: {facts.unreachable}" for facts in gathered if facts.unreachable]


def _leave_mark(marks: Path, rank: int) -> list[str]:
    """Write a file next to rank 0's; the problem if that fails."""
    try:
        (marks / str(rank)).touch()
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        return [
            f"got {marks.parent}; must be the directory of rank 0 and writable ({reason}); "
            "hint: a run_dir or checkpoint.dir on a file system that all hosts share"
        ]
    return []


def _unshared(marks: Path, leaders: Sequence[int], gathered: Sequence[Facts]) -> list[str]:
    """Hosts that wrote a mark which does not arrive here: a directory of the same name, but their own."""
    return [
        f"{gathered[rank].host}: got {marks.parent}; rank 0 must see what is written there and does not; "
        "hint: a run_dir or checkpoint.dir on a file system that all hosts share"
        for rank in leaders
        if gathered[rank].marked and not (marks / str(rank)).exists()
    ]


def _skews(
    store: Store, leaders: Sequence[int], gathered: Sequence[Facts], now: Callable[[], float]
) -> list[str]:
    """Hosts whose clock cannot agree with rank 0's.

    Each answer was made between the two readings around it, so a sound clock is never accused, however slow
    the store is.
    """
    before = now()
    store.set("ping", "")
    answers = [float(text) for text in _collect(store, "time", leaders)]
    after = now()
    lines = []
    for rank, answer in zip(leaders, answers, strict=True):
        off = answer - after if answer > after else min(0.0, answer - before)
        if abs(off) > MAX_SKEW_S:
            way = "ahead of" if off > 0 else "behind"
            lines.append(
                f"{gathered[rank].host}: got a clock {abs(off):.1f} s {way} rank 0's; must be within "
                f"{MAX_SKEW_S:g} s; hint: synchronise it (chrony, ntp)"
            )
    return lines


def name_problem(host: str, resolve: Callable[[str], list[str]]) -> str:
    """Why other hosts cannot reach this one by its name, whose address the backend gives them; "" = they can.

    Args:
        resolve: host name -> addresses; raises OSError.
    """
    try:
        addresses = resolve(host)
    except OSError:
        return "got a host name without address; must resolve; hint: DNS or /etc/hosts"
    if not all(a.startswith("127.") or a == "::1" for a in addresses):
        return ""
    return (
        f"got {', '.join(addresses)} for its own name; other hosts must reach it; "
        "hint: correct /etc/hosts, or export GLOO_SOCKET_IFNAME"
    )


def port_problem(ports: Sequence[int]) -> str:
    """Which of the ports that the collective library will listen on are taken; "" = none."""
    taken = [port for port in ports if not port_is_free(port)]
    if not taken:
        return ""
    return (
        f"got ports {_some(taken)} in use; must be free for the collective library; "
        "hint: end the other job, or export HCCL_IF_BASE_PORT"
    )


def port_is_free(port: int) -> bool:
    """Whether a listener could be opened on this host now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


def resolve(host: str) -> list[str]:
    """Addresses of a host name.

    Raises:
        OSError: there is none.
    """
    return sorted({str(found[4][0]) for found in socket.getaddrinfo(host, None)})
