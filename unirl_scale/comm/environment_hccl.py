"""HCCL: which variables a plan needs, and which values of a user's are refused before anything starts.

The limits are those of the CANN 8.5 documentation of each variable; the algorithms that a product has are in
environment_hccl_algorithms.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from unirl_scale.comm.environment_hccl_algorithms import DEFAULT_EXPANSION, Product, algorithm_problems
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
from unirl_scale.comm.plan_model import MIB
from unirl_scale.core.problems import Problem

_EXPANSION: dict[Product, tuple[str, ...]] = {
    "910": (),
    "A2": ("HOST", "HOST_TS", "AI_CPU", "AIV"),
    "A3": ("AI_CPU", "AICPU_CacheDisable", "AIV"),
    "950": ("AI_CPU", "AICPU_TS", "AIV", "CCU_MS", "CCU_SCHED"),
}
_KNOWN = (
    "HCCL_ALGO",
    "HCCL_BUFFSIZE",
    "HCCL_CONNECT_TIMEOUT",
    "HCCL_DEBUG_CONFIG",
    "HCCL_DETERMINISTIC",
    "HCCL_DFS_CONFIG",
    "HCCL_ENTRY_LOG_ENABLE",
    "HCCL_EXEC_TIMEOUT",
    "HCCL_HOST_SOCKET_PORT_RANGE",
    "HCCL_IF_BASE_PORT",
    "HCCL_IF_IP",
    "HCCL_INTER_HCCS_DISABLE",
    "HCCL_INTRA_PCIE_ENABLE",
    "HCCL_INTRA_ROCE_ENABLE",
    "HCCL_LOGIC_SUPERPOD_ID",
    "HCCL_MULTI_QP_THRESHOLD",
    "HCCL_NPU_SOCKET_PORT_RANGE",
    "HCCL_OP_EXPANSION_MODE",
    "HCCL_OP_RETRY_ENABLE",
    "HCCL_OP_RETRY_PARAMS",
    "HCCL_RDMA_QPS_PER_CONNECTION",
    "HCCL_RDMA_RETRY_CNT",
    "HCCL_RDMA_SL",
    "HCCL_RDMA_TC",
    "HCCL_RDMA_TIMEOUT",
    "HCCL_SOCKET_FAMILY",
    "HCCL_SOCKET_IFNAME",
    "HCCL_WHITELIST_DISABLE",
    "HCCL_WHITELIST_FILE",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HcclJob:
    """What the limits depend on.

    Attributes:
        ranks_per_node: of each node.
        communicators: that one rank is in.
        memory_bytes: of a device, if known; the buffers must leave at least half of it.
    """

    product: Product
    ranks_per_node: tuple[int, ...]
    communicators: int = 1
    memory_bytes: float | None = None

    @classmethod
    def of(cls, plan: Plan, product: Product, memory_bytes: float | None = None) -> HcclJob:
        """The job that a plan describes."""
        counts = np.bincount(plan.node, minlength=len(plan.nodes))
        return cls(
            product=product,
            ranks_per_node=tuple(counts.tolist()),
            communicators=plan.communicators,
            memory_bytes=memory_bytes,
        )

    @property
    def ranks(self) -> int:
        """All of them."""
        return sum(self.ranks_per_node)

    @property
    def symmetric(self) -> bool:
        """Every node has as many ranks."""
        return len(set(self.ranks_per_node)) == 1


def hccl_environment(
    plan: Plan, product: Product, given: Mapping[str, str] | None = None, *, deterministic: bool = False
) -> Environment:
    """Variables for the plan; the user's own win, and all are checked.

    Args:
        given: HCCL_* variables the user set.
        deterministic: vendor reductions must repeat (`invariance.mode: run`). In `layout` mode HCCL only
            moves bytes, and no reduction of its own is used.

    Raises:
        PlanError: a variable that the product, the job's shape or another variable rules out.
    """
    job = HcclJob.of(plan, product)
    wait = min(7200, 120 + 2 * int(np.ceil(job.ranks / 8)))
    largest = max((c.chunk_bytes for r in plan.roles for c in r.calls), default=0)
    buffer_mb = max(32, min(200, -(-largest // MIB)))
    chosen = {
        "HCCL_CONNECT_TIMEOUT": (str(wait), f"{job.ranks} ranks set up links; 120 s is the least"),
        "HCCL_EXEC_TIMEOUT": (
            str(7200 // 68 * 68),
            "a rank may wait for another's rollout; a multiple of 68 is kept exactly on every product",
        ),
        "HCCL_BUFFSIZE": (
            str(buffer_mb),
            f"MB, fits the largest chunk; {plan.communicators} communicators hold two each",
        ),
    }
    if deterministic and product != "910":
        chosen["HCCL_DETERMINISTIC"] = ("true", "vendor reductions repeat bit for bit")
    if product in ("A2", "A3"):
        chosen["HCCL_OP_EXPANSION_MODE"] = (DEFAULT_EXPANSION[product], "the product's mode for training")
    own = {k: v for k, v in (given or {}).items() if k.startswith("HCCL_")}
    if own.get("HCCL_OP_EXPANSION_MODE") == "AIV":
        chosen["HCCL_EXEC_TIMEOUT"] = ("1091", "the longest that AIV allows")
    variables = {k: v for k, (v, _) in chosen.items()} | own
    reasons = {k: r for k, (_, r) in chosen.items()} | dict.fromkeys(own, "given by the user")
    refuse(check_hccl(variables, job))
    return Environment(variables=variables, reasons=reasons)


def check_hccl(env: Mapping[str, str], job: HcclJob) -> list[Problem]:
    """Everything wrong with HCCL variables for this job; empty when it may start."""
    checks: dict[str, Check] = {
        "HCCL_CONNECT_TIMEOUT": whole(120, 7200),
        "HCCL_EXEC_TIMEOUT": whole(1, 17340) if job.product == "910" else whole(0, 2147483647),
        "HCCL_BUFFSIZE": whole(1),
        "HCCL_IF_BASE_PORT": whole(1024, 65520),
        "HCCL_RDMA_TC": whole(0, 255, 4),
        "HCCL_RDMA_SL": whole(0, 7),
        "HCCL_RDMA_TIMEOUT": whole(5, 24),
        "HCCL_RDMA_RETRY_CNT": whole(1, 7),
        "HCCL_INTRA_PCIE_ENABLE": one_of("0", "1"),
        "HCCL_INTRA_ROCE_ENABLE": one_of("0", "1"),
        "HCCL_WHITELIST_DISABLE": one_of("0", "1"),
        "HCCL_DETERMINISTIC": one_of("false", "true", "strict", ignore_case=True),
        "HCCL_INTER_HCCS_DISABLE": one_of("TRUE", "FALSE", ignore_case=True),
        "HCCL_SOCKET_FAMILY": one_of("AF_INET", "AF_INET6"),
    }
    return [
        *unknown_names(env, "HCCL_", _KNOWN),
        *apply_checks(env, checks),
        *_ports(env, job),
        *_pairs(env, job),
        *_determinism(env, job),
        *(algorithm_problems(env["HCCL_ALGO"], env, job.product) if "HCCL_ALGO" in env else []),
    ]


def _pairs(env: Mapping[str, str], job: HcclJob) -> list[Problem]:
    """Variables that are legal alone and not together, or not for this job."""
    found = []
    if env.get("HCCL_INTRA_PCIE_ENABLE") == "1" and env.get("HCCL_INTRA_ROCE_ENABLE") == "1":
        found.append(
            problem(
                "HCCL_INTRA_ROCE_ENABLE",
                "1",
                "must be 0 beside HCCL_INTRA_PCIE_ENABLE=1",
                "keep one of the two",
            )
        )
    mode = env.get("HCCL_OP_EXPANSION_MODE")
    if mode is not None and mode not in _EXPANSION[job.product]:
        legal = ", ".join(_EXPANSION[job.product]) or "unset"
        found.append(problem("HCCL_OP_EXPANSION_MODE", mode, f"must be one of {legal} on {job.product}"))
    elif mode == "AIV":
        if job.communicators > 1:
            hint = f"use {DEFAULT_EXPANSION[job.product]}"
            rule = f"must not be AIV with {job.communicators} communicators: AIV serves one at a time"
            found.append(problem("HCCL_OP_EXPANSION_MODE", mode, rule, hint))
        seconds = env.get("HCCL_EXEC_TIMEOUT", "")
        if seconds.isdigit() and (int(seconds) > 1091 or seconds == "0"):
            found.append(problem("HCCL_EXEC_TIMEOUT", seconds, "must be 1 to 1091 with AIV", "1091"))
    size = env.get("HCCL_BUFFSIZE", "200")
    if size.isdigit() and job.memory_bytes:
        used = 2 * int(size) * MIB * job.communicators
        if used > job.memory_bytes / 2:
            fits = int(job.memory_bytes / 2 / (2 * MIB * job.communicators))
            taken = f"{job.communicators} communicators take {used / 2**30:.1f} GiB"
            rule = f"must leave half of the memory: {taken}"
            found.append(problem("HCCL_BUFFSIZE", size, rule, f"at most {fits}"))
    return found


def _ports(env: Mapping[str, str], job: HcclJob) -> list[Problem]:
    found = []
    for name in ("HCCL_HOST_SOCKET_PORT_RANGE", "HCCL_NPU_SOCKET_PORT_RANGE"):
        if name not in env:
            continue
        if job.product == "910":
            found.append(problem(name, env[name], "must be unset on 910", "use HCCL_IF_BASE_PORT"))
        verdict = port_range_problem(env[name])
        if verdict:
            found.append(problem(name, env[name], verdict, "e.g. 61000-61050, or auto"))
    if "HCCL_HOST_SOCKET_PORT_RANGE" in env and "HCCL_IF_BASE_PORT" in env:
        rule = "must be unset beside HCCL_HOST_SOCKET_PORT_RANGE, which makes HCCL ignore it"
        found.append(problem("HCCL_IF_BASE_PORT", env["HCCL_IF_BASE_PORT"], rule, "keep one of the two"))
    return found


def port_range_problem(text: str) -> str:
    """What is wrong with a list of ports and ranges; "" when it is legal."""
    if text == "auto":
        return ""
    taken: list[tuple[int, int]] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if not match:
            return f"must be ports and ranges between commas; {part!r} is neither"
        low, high = int(match[1]), int(match[2] or match[1])
        if low > high or high > 65535:
            return f"must be ascending ports up to 65535; {part} is not"
        if low < 1024:
            return f"must leave the system's ports 1 to 1023 alone; {part} does not"
        if any(low <= b and a <= high for a, b in taken):
            return f"must name each port once; {part} overlaps another"
        taken.append((low, high))
    return ""


def _determinism(env: Mapping[str, str], job: HcclJob) -> list[Problem]:
    value = env.get("HCCL_DETERMINISTIC", "false").lower()
    if value == "false":
        return []
    name, found = "HCCL_DETERMINISTIC", []
    if job.product == "910":
        found.append(problem(name, value, "must be unset on 910, which has no deterministic reductions"))
    if value != "strict":
        return found
    if job.product in ("A2", "A3") and len(job.ranks_per_node) < 2:
        found.append(
            problem(name, value, f"must be true on one node: strict on {job.product} needs several", "true")
        )
    if job.product in ("A2", "A3") and not job.symmetric:
        counts = sorted(set(job.ranks_per_node))
        rule = f"must be true: strict needs as many ranks on every node, there are {counts}"
        found.append(problem(name, value, rule, "true, or equal nodes"))
    if job.product in ("A3", "950") and job.ranks < 3:
        found.append(problem(name, value, "must be true below 3 ranks", "true"))
    if job.product == "A3" and env.get("HCCL_INTER_HCCS_DISABLE", "").upper() == "TRUE":
        found.append(problem(name, value, "must be true beside HCCL_INTER_HCCS_DISABLE=TRUE", "unset one"))
    if env.get("INF_NAN_MODE_ENABLE") == "0":
        found.append(problem(name, value, "must be true in saturation mode", "INF_NAN_MODE_ENABLE=1"))
    if job.product == "A2" and "HCCL_ALGO" in env:
        found.append(
            problem("HCCL_ALGO", env["HCCL_ALGO"], "must be unset with strict order on A2", "unset it")
        )
    return found
