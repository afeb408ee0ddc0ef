"""Figures for link classes, each with where it comes from. A measured file overrides every one of them."""

from __future__ import annotations

from unirl_scale.comm.topology.model import Link

NVLINK_GB_PER_S = 25.0
"""One NVLink 2, 3 or 4, one direction. NVLink 1 has 20, NVLink 5 has 50; `topo -m` does not say which."""

NVLINK_BY_SM = {60: 20.0, 70: 25.0, 80: 25.0, 89: 25.0, 90: 25.0, 100: 50.0, 103: 50.0}
"""Compute capability x 10 -> GB/s of one NVLink, one direction, from the vendor's data sheets."""

XGMI_BY_GFX = {"90a": 50.0, "942": 64.0, "910": 50.0}
"""AMD gfx name (910 is how RCCL writes gfx90a) -> GB/s of one xGMI link, one direction."""

NVLINK_ALPHA_US = 3.4
CALL_FLOOR_US = 17.0
RDMA_ALPHA_US = 14.0
HCCS_ALPHA_US = 20.0
HCCS_GB_PER_S = 28.0
A3_SWITCH_GB_PER_S = 196.0

_PCIE_GB_PER_LANE = {5.0: 0.5, 8.0: 0.9846, 16.0: 1.969, 32.0: 3.938, 64.0: 7.563}
"""GT/s -> GB/s of a lane after line coding. 2.5 is absent: it is what an idle device reports."""


_ASCEND = {
    "HCCS": (HCCS_GB_PER_S, "910B HCCS: 28 GB/s a link, about 20 us with launch"),
    "HCCS_SW": (A3_SWITCH_GB_PER_S, "910C super pod: 392 GB/s an NPU of two dies"),
}


def nvlink(count: int, sm: int | None = None) -> Link:
    """`count` NVLinks side by side. Without `sm` the figure holds for A100, H100 and H200 only."""
    each = NVLINK_GB_PER_S if sm is None else NVLINK_BY_SM.get(sm)
    if sm is None:
        source = (
            f"{count} NVLinks x 25 GB/s (NVLink 2-4; a part with NVLink 5 has twice, the file does not say)"
        )
    elif each is None:
        source = f"{count} NVLinks of compute capability {sm}: rate unknown"
    else:
        source = f"{count} NVLinks x {each:g} GB/s (compute capability {sm})"
    return Link(
        kind=f"NV{count}",
        alpha_us=NVLINK_ALPHA_US,
        beta_gb_per_s=None if each is None else count * each,
        source=source,
    )


def xgmi(count: int, gfx: str) -> Link:
    """`count` AMD xGMI links side by side."""
    each = XGMI_BY_GFX.get(gfx.removeprefix("gfx").split(":")[0])
    source = f"{count} xGMI links of gfx {gfx or '?'}" + ("" if each else ": rate unknown")
    return Link(kind=f"XGMI{count}", beta_gb_per_s=None if each is None else count * each, source=source)


def ascend(kind: str) -> Link:
    """HCCS, HCCS_SW, SIO or UB, as `npu-smi` names them."""
    if kind not in _ASCEND:
        return Link(kind=kind, source=f"{kind}: no public figure")
    rate, source = _ASCEND[kind]
    return Link(kind=kind, alpha_us=HCCS_ALPHA_US, beta_gb_per_s=rate, source=source)


def pcie(kind: str, gt_per_s: float | None = None, width: int | None = None) -> Link:
    """A PCIe path; bandwidth only where the slowest hop's speed and width are known."""
    lane = _PCIE_GB_PER_LANE.get(gt_per_s) if gt_per_s else None
    if kind in ("NODE", "SYS"):
        return Link(kind=kind, source="crosses the CPU's own interconnect, whose rate no file states")
    if lane is None or not width:
        return Link(kind=kind, source="PCIe path of unstated speed")
    return Link(
        kind=kind, beta_gb_per_s=round(lane * width, 3), source=f"PCIe {gt_per_s:g} GT/s x{width} as reported"
    )


def ethernet(gbit_per_s: float | None, source: str) -> Link:
    """A network port from its line rate in Gbit/s."""
    if not gbit_per_s or gbit_per_s <= 0:
        return Link(kind="nic", source="line rate not stated")
    return Link(kind="nic", alpha_us=RDMA_ALPHA_US, beta_gb_per_s=gbit_per_s / 8, source=source)
