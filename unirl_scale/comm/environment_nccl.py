"""NCCL: which variables a plan needs, and which values of a user's are refused before anything starts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from unirl_scale.comm.environment_rules import (
    Check,
    Environment,
    apply_checks,
    one_of,
    problem,
    refuse,
    unknown_names,
    whole,
)
from unirl_scale.comm.plan import Plan
from unirl_scale.comm.topology import boxes
from unirl_scale.comm.topology.model import Box, Topology
from unirl_scale.comm.topology.slurm_levels import natural
from unirl_scale.core.problems import Problem

_FUNCTIONS = {
    "broadcast": ("ring",),
    "reduce": ("ring",),
    "allgather": ("ring", "nvls", "pat", "collnetdirect"),
    "reducescatter": ("ring", "nvls", "pat", "collnetdirect"),
    "allreduce": ("ring", "tree", "nvls", "nvlstree", "collnetdirect", "collnetchain"),
}
_ALGORITHMS = ("ring", "tree", "collnetdirect", "collnetchain", "nvls", "nvlstree", "pat")
_LEVELS = ("LOC", "NVL", "PIX", "PXB", "PHB", "SYS")
_KNOWN = (
    "NCCL_ALGO",
    "NCCL_BUFFSIZE",
    "NCCL_COLLNET_ENABLE",
    "NCCL_CROSS_NIC",
    "NCCL_CUMEM_ENABLE",
    "NCCL_DEBUG",
    "NCCL_DEBUG_FILE",
    "NCCL_DEBUG_SUBSYS",
    "NCCL_GRAPH_DUMP_FILE",
    "NCCL_GRAPH_FILE",
    "NCCL_IB_DISABLE",
    "NCCL_IB_GID_INDEX",
    "NCCL_IB_HCA",
    "NCCL_IB_MERGE_NICS",
    "NCCL_IB_QPS_PER_CONNECTION",
    "NCCL_IB_RETRY_CNT",
    "NCCL_IB_SL",
    "NCCL_IB_TC",
    "NCCL_IB_TIMEOUT",
    "NCCL_LAUNCH_MODE",
    "NCCL_MAX_CTAS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_CTAS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_MNNVL_ENABLE",
    "NCCL_NET",
    "NCCL_NET_GDR_LEVEL",
    "NCCL_NET_MERGE_LEVEL",
    "NCCL_NET_PLUGIN",
    "NCCL_NTHREADS",
    "NCCL_NVLS_ENABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_PROTO",
    "NCCL_PXN_DISABLE",
    "NCCL_SHM_DISABLE",
    "NCCL_SOCKET_FAMILY",
    "NCCL_SOCKET_IFNAME",
    "NCCL_SOCKET_NTHREADS",
    "NCCL_TOPO_DUMP_FILE",
    "NCCL_TOPO_FILE",
    "NCCL_TUNER_PLUGIN",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclJob:
    """What the limits depend on: the box of every node (None = unknown) and the number of nodes."""

    nodes: int
    box: Box | None = None

    @classmethod
    def of(cls, plan: Plan, topology: Topology) -> NcclJob:
        """The job that a plan describes."""
        return cls(nodes=len(plan.nodes), box=topology.boxes[0] if len(topology.boxes) == 1 else None)

    @property
    def has_nvlink(self) -> bool | None:
        """None = unknown."""
        if self.box is None or self.box.size < 2:
            return None
        kinds = {k for row in self.box.paths for k in row}
        return None if kinds <= {"X", "?"} else any(boxes.is_fast(k) for k in kinds)


def nccl_environment(
    plan: Plan, topology: Topology, given: Mapping[str, str] | None = None, *, deterministic: bool = False
) -> Environment:
    """Variables for the plan; the user's own win, and all are checked.

    Args:
        given: NCCL_* variables the user set.
        deterministic: vendor reductions must repeat (`invariance.mode: run`). In `layout` mode NCCL only
            moves bytes and may pick any algorithm.

    Raises:
        PlanError: a variable that the machine or another variable rules out.
    """
    job = NcclJob.of(plan, topology)
    chosen: dict[str, tuple[str, str]] = {}
    if job.nodes > 1:
        chosen["NCCL_IB_TIMEOUT"] = ("22", "about 17 s before a lost packet fails a job of many nodes")
        cards = compute_nics(job.box) if job.box else ()
        if cards and job.box is not None and len(cards) < len(job.box.nics):
            skipped = len(job.box.nics) - len(cards)
            chosen["NCCL_IB_HCA"] = (
                "=" + ",".join(cards),
                f"the NICs next to devices; {skipped} others are not",
            )
    if deterministic:
        chosen["NCCL_ALGO"] = ("Ring", "one algorithm at every size, so that sums repeat")
        chosen["NCCL_PROTO"] = ("Simple", "one protocol at every size, so that sums repeat")
        chosen["NCCL_NVLS_ENABLE"] = ("0", "switches add in an order of their own")
    own = {k: v for k, v in (given or {}).items() if k.startswith("NCCL_")}
    variables = {k: v for k, (v, _) in chosen.items()} | own
    reasons = {k: r for k, (_, r) in chosen.items()} | dict.fromkeys(own, "given by the user")
    refuse(check_nccl(variables, job, deterministic=deterministic))
    return Environment(variables=variables, reasons=reasons)


def compute_nics(box: Box) -> tuple[str, ...]:
    """Names of the NICs nearest to some device; merged ports are listed one by one. () when unknown."""
    near = sorted({k for d in box.devices for k in d.nics})
    names = sorted((part for k in near for part in box.nics[k].name.split("+")), key=natural)
    return tuple(names) if all(re.fullmatch(r"[A-Za-z][\w.\-]*", n) for n in names) else ()


def check_nccl(env: Mapping[str, str], job: NcclJob, *, deterministic: bool = False) -> list[Problem]:
    """Everything wrong with NCCL variables for this job; empty when it may start."""
    flag = one_of("0", "1")
    checks: dict[str, Check] = {
        "NCCL_NTHREADS": one_of("64", "128", "256", "512"),
        "NCCL_BUFFSIZE": whole(4096),
        "NCCL_CROSS_NIC": one_of("0", "1", "2"),
        "NCCL_IB_TIMEOUT": whole(1, 22),
        "NCCL_IB_RETRY_CNT": whole(0, 7),
        "NCCL_IB_TC": whole(0, 255),
        "NCCL_IB_SL": whole(0, 15),
        "NCCL_IB_GID_INDEX": whole(-1, 255),
        "NCCL_IB_QPS_PER_CONNECTION": whole(1, 128),
        "NCCL_IB_DISABLE": flag,
        "NCCL_P2P_DISABLE": flag,
        "NCCL_SHM_DISABLE": flag,
        "NCCL_PXN_DISABLE": flag,
        "NCCL_COLLNET_ENABLE": flag,
        "NCCL_NVLS_ENABLE": one_of("0", "1", "2"),
        "NCCL_DEBUG": one_of("VERSION", "WARN", "INFO", "TRACE", ignore_case=True),
        "NCCL_LAUNCH_MODE": one_of("PARALLEL", "GROUP"),
        "NCCL_SOCKET_FAMILY": one_of("AF_INET", "AF_INET6"),
        "NCCL_P2P_LEVEL": one_of(*_LEVELS, *"012345"),
        "NCCL_NET_GDR_LEVEL": one_of(*_LEVELS, *"012345"),
        "NCCL_MIN_CTAS": whole(1, 64),
        "NCCL_MAX_CTAS": whole(1, 64),
        "NCCL_MIN_NCHANNELS": whole(1, 64),
        "NCCL_MAX_NCHANNELS": whole(1, 64),
    }
    found = [*unknown_names(env, "NCCL_", _KNOWN), *apply_checks(env, checks)]
    for low, high in (("NCCL_MIN_CTAS", "NCCL_MAX_CTAS"), ("NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS")):
        a, b = env.get(low, ""), env.get(high, "")
        if a.isdigit() and b.isdigit() and int(a) > int(b):
            found.append(problem(low, a, f"must be at most {high}={b}", b))
    if "NCCL_ALGO" in env:
        found += algorithm_problems(env["NCCL_ALGO"])
    found += _protocol_problems(env, job)
    found += _reach_problems(env, job)
    if (
        deterministic
        and env.get("NCCL_NVLS_ENABLE", "1") != "0"
        and "nvls" in env.get("NCCL_ALGO", "nvls").lower()
    ):
        rule = "must be 0 in mode run: the switch adds in an order of its own"
        found.append(problem("NCCL_NVLS_ENABLE", env.get("NCCL_NVLS_ENABLE", "unset"), rule, "0"))
    return found


def algorithm_problems(text: str) -> list[Problem]:
    """Syntax of NCCL_ALGO, and algorithms that a function does not have.

    Either one list for all (`Ring,Tree`, `^NVLS`), or lists by function (`allreduce:tree;allgather:ring`).
    """
    found = []
    for part in text.split(";"):
        function, colon, names = part.strip().rpartition(":")
        function = function.lower()
        if colon and function not in _FUNCTIONS:
            legal = ", ".join(_FUNCTIONS)
            found.append(
                problem("NCCL_ALGO", part.strip(), f"must name functions of {legal}", "allreduce:ring")
            )
            continue
        if not colon and ";" in text:
            found.append(
                problem("NCCL_ALGO", part.strip(), "must name a function in each part", "allreduce:ring")
            )
            continue
        excluded = names.startswith("^")
        for name in names.removeprefix("^").split(","):
            low = name.strip().lower()
            if low not in _ALGORITHMS:
                found.append(problem("NCCL_ALGO", name, f"must be one of {', '.join(_ALGORITHMS)}"))
            elif colon and not excluded and low not in _FUNCTIONS[function]:
                fits = ", ".join(_FUNCTIONS[function])
                found.append(problem("NCCL_ALGO", part.strip(), f"must be an algorithm {function} has", fits))
    return found


def _protocol_problems(env: Mapping[str, str], job: NcclJob) -> list[Problem]:
    if "NCCL_PROTO" not in env:
        return []
    value, found = env["NCCL_PROTO"], []
    names = [n.strip().lower() for n in value.removeprefix("^").split(",")]
    if any(n not in ("ll", "ll128", "simple") for n in names):
        return [problem("NCCL_PROTO", value, "must list LL, LL128 and Simple, or exclude with ^", "Simple")]
    if "ll128" in names and not value.startswith("^") and job.has_nvlink is False:
        rule = "must not force LL128 without NVLink: stores of 128 bytes may tear, and data with them"
        found.append(problem("NCCL_PROTO", value, rule, "LL,Simple"))
    return found


def _reach_problems(env: Mapping[str, str], job: NcclJob) -> list[Problem]:
    """Variables that would leave devices or nodes unable to reach each other."""
    found = []
    if env.get("NCCL_P2P_DISABLE") == "1" and job.has_nvlink:
        found.append(problem("NCCL_P2P_DISABLE", "1", "must be 0: it turns NVLink off", "unset it"))
    wanted = env.get("NCCL_IB_HCA", "")
    if wanted and job.box is not None and job.box.nics and not wanted.startswith("^"):
        names = {part for nic in job.box.nics for part in nic.name.split("+")}
        exact = wanted.startswith("=")
        for name in wanted.removeprefix("=").split(","):
            card = name.split(":")[0]
            hit = card in names if exact else any(n.startswith(card) for n in names)
            if not hit and all(re.match(r"[A-Za-z]", n) for n in names):
                legal = ", ".join(sorted(names))
                found.append(problem("NCCL_IB_HCA", name, f"must name a NIC of the topology: {legal}"))
    return found
