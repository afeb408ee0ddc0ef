"""What the collective library is told: chosen where the machine is known, the user's own checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unirl_scale.comm.environment_hccl import HcclJob, check_hccl, hccl_environment
from unirl_scale.comm.environment_hccl_algorithms import DEFAULT_EXPANSION, Product
from unirl_scale.comm.environment_nccl import NcclJob, check_nccl, nccl_environment
from unirl_scale.comm.environment_rules import Environment, refuse
from unirl_scale.comm.plan import Plan
from unirl_scale.comm.plan_request import PlanRequest, plan
from unirl_scale.comm.topology import Topology
from unirl_scale.core.config import RunConfig
from unirl_scale.core.errors import ConfigError
from unirl_scale.core.problems import name_hint

_PREFIXES = {"cuda": "NCCL_", "npu": "HCCL_"}
# Links that only one product has, most telling first.
_PRODUCT_LINKS: tuple[tuple[str, Product], ...] = (
    ("HCCS_SW", "A3"),
    ("SIO", "A3"),
    ("UB", "950"),
    ("HCCS", "A2"),
)


def planned_environment(
    cfg: RunConfig, made: Plan, topology: Topology, environ: Mapping[str, str], product: str = ""
) -> Environment:
    """Variables for a plan; what the user exported wins, and all are checked.

    Args:
        product: of Ascend; "" = as the topology shows.

    Raises:
        PlanError: a variable that the machine or another variable rules out.
        ConfigError: the Ascend product is not known.
    """
    vendor, deterministic = cfg.hardware.vendor, cfg.invariance.mode == "run"
    if vendor == "cuda":
        return nccl_environment(made, topology, _given(vendor, environ), deterministic=deterministic)
    if vendor == "npu":
        known = product_of(product, topology)
        return hccl_environment(made, known, _given(vendor, environ), deterministic=deterministic)
    return Environment(variables={}, reasons={})


def collective_environment(
    cfg: RunConfig,
    nodes: int,
    ranks_per_node: int,
    topology: Sequence[str],
    environ: Mapping[str, str],
    product: str = "",
) -> Environment:
    """Variables for a job of which no rank runs yet.

    Args:
        topology: files of the machine; without them only what the user exported is checked and passed on.

    Raises:
        PlanError, ConfigError: as `planned_environment`; or the files do not fit the job.
    """
    vendor = cfg.hardware.vendor
    if vendor not in _PREFIXES:
        return Environment(variables={}, reasons={})
    if topology:
        made, machine, _ = plan(cfg, PlanRequest(files=tuple(topology), devices_per_node=ranks_per_node))
        return planned_environment(cfg, made, machine, environ, product)
    given = _given(vendor, environ)
    if vendor == "cuda":
        refuse(check_nccl(given, NcclJob(nodes=nodes), deterministic=cfg.invariance.mode == "run"))
    elif given:
        job = HcclJob(product=product_of(product, None), ranks_per_node=(ranks_per_node,) * nodes)
        refuse(check_hccl(given, job))
    return Environment(variables=given, reasons=dict.fromkeys(given, "given by the user"))


def product_of(name: str, topology: Topology | None) -> Product:
    """The Ascend product, by name or by the links in the topology.

    Raises:
        ConfigError: neither tells.
    """
    legal: tuple[Product, ...] = tuple(DEFAULT_EXPANSION)
    for product in legal:
        if name == product:
            return product
    if name:
        raise ConfigError(f"--product: got {name!r}; must be a known product; hint: {name_hint(name, legal)}")
    kinds = {kind for box in (topology.boxes if topology else ()) for row in box.paths for kind in row}
    for link, product in _PRODUCT_LINKS:
        if link in kinds:
            return product
    raise ConfigError(
        f"--product: got none, and no file shows the links of one; must be one of {', '.join(legal)}; "
        "hint: --product A2 for 910B, A3 for 910C"
    )


def _given(vendor: str, environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(_PREFIXES[vendor])}
