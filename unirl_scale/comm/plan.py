"""A plan: which device every rank gets, which groups there are, how each collective runs and what it costs.

Values only. plan_build.py makes one, plan_verify.py checks one, plan_file.py writes and reads one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

import numpy as np

from unirl_scale.comm.cost import Tier
from unirl_scale.comm.plan_model import GIB, MIB, Memory
from unirl_scale.comm.plan_traffic import Axis, Call
from unirl_scale.comm.topology.model import IntArray
from unirl_scale.core.config import MeshConfig
from unirl_scale.core.errors import PlanError

Transport = Literal["nccl", "hccl", "gloo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """What one device can do; None = unknown, and whatever needs it is not predicted.

    Attributes:
        peak_flop_per_s: dense bf16.
        efficiency: share of the peak that the model's GEMMs and attention reach.
        memory_bytes, memory_gb_per_s: capacity and bandwidth of device memory.
        nvlink_gb_per_s: of one NVLink, one direction.
    """

    peak_flop_per_s: float | None = None
    efficiency: float = 0.55
    memory_bytes: float | None = None
    memory_gb_per_s: float | None = None
    nvlink_gb_per_s: float | None = None
    source: str = "unknown"


def _data_sheet(
    tflop_per_s: float, memory_gb: float, gb_per_s: float, source: str, nvlink: float | None = 25.0
) -> Accelerator:
    return Accelerator(
        peak_flop_per_s=tflop_per_s * 1e12,
        memory_bytes=memory_gb * 1e9,
        memory_gb_per_s=gb_per_s,
        nvlink_gb_per_s=nvlink,
        source=source,
    )


ACCELERATORS: Mapping[str, Accelerator] = MappingProxyType(
    {
        "a100": _data_sheet(312.0, 80, 2039.0, "A100 80 GB data sheet"),
        "a100-40": _data_sheet(312.0, 40, 1555.0, "A100 40 GB data sheet"),
        "h100": _data_sheet(989.5, 80, 3350.0, "H100 SXM data sheet"),
        "h200": _data_sheet(989.5, 141, 4800.0, "H200 SXM data sheet"),
        "b200": _data_sheet(2250.0, 180, 8000.0, "DGX B200 data sheet, an eighth", 50.0),
        "gb200": _data_sheet(2500.0, 186, 8000.0, "GB200 NVL72 data sheet, one of two GPUs", 50.0),
        "910c": _data_sheet(376.0, 64, 1600.0, "CloudMatrix384 paper (2025), one of two dies", None),
    }
)
"""Dense bf16; what no vendor publishes (910B) is not here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """What the planner is told beyond the configuration and the topology.

    Attributes:
        transport: whose algorithms carry the bytes.
        communicator_bytes: device memory a communicator takes. HCCL: two buffers of HCCL_BUFFSIZE, 200 MB.
        layer_us: measured forward-and-backward time of each layer for one micro-batch on one rank.
        memory_limit_bytes: what a rank may use; None = the accelerator's memory, or no limit.
    """

    transport: Transport = "nccl"
    accelerator: Accelerator = field(default_factory=Accelerator)
    communicator_bytes: float | None = None
    layer_us: tuple[float, ...] = ()
    memory_limit_bytes: float | None = None

    @property
    def communicator_cost(self) -> float:
        """Bytes a communicator, given or the transport's default (NCCL: 4 MiB each way on 16 channels)."""
        if self.communicator_bytes is not None:
            return self.communicator_bytes
        return {"hccl": 2 * 200 * MIB, "nccl": 2 * 16 * 4 * MIB, "gloo": 0}[self.transport]

    @property
    def limit_bytes(self) -> float | None:
        """Bytes a rank may use, when known."""
        return self.memory_limit_bytes or self.accelerator.memory_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeClass:
    """How the axis reduces messages up to `up_to_bytes`; the last class has no upper end (None)."""

    up_to_bytes: int | None
    algorithm: str
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """All groups of one axis of a role.

    Attributes:
        shape: members a node, nodes a leaf, leaves a tier, ...; their product is `size`.
        most_nodes, most_leaves: that any one group touches.
        tiers: cost of each entry of `shape`.
        classes: how an ordered all-reduce of this axis should run, by message size.
    """

    axis: Axis
    count: int
    size: int
    shape: tuple[int, ...]
    most_nodes: int
    most_leaves: int
    tiers: tuple[Tier, ...]
    classes: tuple[SizeClass, ...] = ()

    @property
    def blocks(self) -> tuple[int, ...]:
        """Members of a node, of a leaf, ...: the block sizes OrderedReducer takes as `inner_size`."""
        edges = np.cumprod(self.shape[:-1]).tolist()
        return tuple(dict.fromkeys(int(e) for e in edges if 1 < e < self.size))

    @property
    def gather_below_bytes(self) -> float:
        """Bytes of a member's nodes up to which an ordered all-reduce gathers them and adds locally."""
        if not self.classes or self.classes[0].algorithm != "gather_tree":
            return 0.0
        largest = self.classes[0].up_to_bytes
        return float("inf") if largest is None else largest


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPlan:
    """How one call runs.

    Attributes:
        blocks: block sizes of an ordered reduction; () = flat or not ordered.
        chunk_bytes: temporary of an ordered reduction.
        sent_bytes: what one rank sends in one call at each tier of its group.
        time_us, bound_us: of one call: predicted, and the least any algorithm needs; None = unknown.
    """

    call: Call
    algorithm: str
    blocks: tuple[int, ...]
    chunk_bytes: int
    sent_bytes: tuple[float, ...]
    time_us: float | None
    bound_us: float | None

    @property
    def step_us(self) -> float | None:
        """Of all calls of one optimizer step."""
        return None if self.time_us is None else self.time_us * self.call.count


@dataclass(frozen=True, slots=True, kw_only=True)
class SentBytes:
    """Bytes that a rank sends to others in an optimizer step over samples of full length, exactly.

    The trainer counts its own bytes and holds them against the same function, for the lengths it met.

    Attributes:
        rank: first of the ranks of its pipeline stage.
        pp: activations up and gradients down.
    """

    rank: int
    stage: int
    tp: int
    dp: int
    pp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RolePlan:
    """One role on its mesh.

    Attributes:
        chunks: layers of each pipeline chunk.
        memory: of the fullest stage.
        compute_us, bubble_us, comm_us: of one optimizer step (or of scoring, or decoding, a whole batch).
        mfu: model FLOP of the step over what all ranks could do in its time.
        sent: a rank of each kind of pipeline stage; () where it is not known (train/planned.py).
    """

    name: str
    phase: Literal["train", "score", "decode"]
    mesh: MeshConfig
    chunks: tuple[int, ...]
    groups: tuple[GroupPlan, ...]
    calls: tuple[CallPlan, ...]
    memory: Memory
    memory_stage: int
    compute_us: float | None
    bubble_us: float | None
    comm_us: float | None
    mfu: float | None
    sent: tuple[SentBytes, ...] = ()

    @property
    def step_us(self) -> float | None:
        """Predicted time of the phase."""
        parts = (self.compute_us, self.bubble_us, self.comm_us)
        return None if None in parts else sum(p or 0.0 for p in parts)

    def group(self, axis: Axis) -> GroupPlan:
        """The groups of an axis."""
        return next(g for g in self.groups if g.axis == axis)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """Everything decided before a process starts.

    Attributes:
        nodes: names of the nodes in use.
        node, device: int32 [ranks]: index into `nodes`, and the device's local id, of each rank.
        leaf: int32 [nodes]: finest switch group of each node, -1 without switches.
        communicators: groups of more than one member that a rank is in, all roles together, at most.
        transport: whose algorithms carry the bytes.
        data_slots, model_leaves: leaves of a reduction over dp and over tp.
    """

    nodes: tuple[str, ...]
    node: IntArray
    device: IntArray
    leaf: IntArray
    order: str
    roles: tuple[RolePlan, ...]
    communicators: int
    transport: Transport
    data_slots: int
    model_leaves: int
    excluded: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Ranks."""
        return len(self.node)

    @property
    def step_us(self) -> float | None:
        """Of one optimizer step of every role and one decoded batch, one after the other."""
        times = [role.step_us for role in self.roles]
        return None if None in times else sum(t or 0.0 for t in times)

    def role(self, name: str) -> RolePlan:
        """A role by name.

        Raises:
            PlanError: there is none.
        """
        for role in self.roles:
            if role.name == name:
                return role
        names = ", ".join(r.name for r in self.roles)
        raise PlanError(f"plan: got role {name!r}; must be one of {names}; hint: check the name")


def reduction_blocks(plan: Plan, role: str, axis: Axis) -> tuple[int, ...]:
    """Block sizes that the trainer hands to OrderedReducer as `inner_size`; () = flat."""
    for call in plan.role(role).calls:
        if call.call.axis == axis and call.call.ordered and call.algorithm != "gather_tree":
            return call.blocks
    return ()


def gib(value: float) -> float:
    """Bytes as GiB."""
    return value / GIB
