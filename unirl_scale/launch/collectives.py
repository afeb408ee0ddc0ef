"""What the collective library is told: chosen where the machine is known, the user's own checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unirl_scale.core.config import RunConfig


def collective_environment(
    cfg: RunConfig, nodes: int, ranks_per_node: int, topology: Sequence[str], environ: Mapping[str, str]
) -> dict[str, tuple[str, str]]:
    return {}
