"""Which tile each product uses. Every choice here leaves the bits alone; check.py proves it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmTile:
    """Launch shape of a product kernel."""

    m: int
    n: int
    k: int = 64
    warps: int = 8
    stages: int = 3
    group_m: int = 8
    subtile: int = 1
    warp_specialize: bool = False
    flatten: bool = False
