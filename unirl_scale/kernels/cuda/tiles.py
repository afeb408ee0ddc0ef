"""Launch shapes of the Hopper products. No choice here can move a bit; check.py and the device tests prove
it.

Measured on an H200 (benchmarks/gemm.py prints the table); BLOCK_K is not a choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

GEMM_ROWS = 128
INSTRUCTION_ROWS = 64  # height of a tensor-core instruction
NARROW_COLUMNS = 64
# Time of a tile relative to a 128 x 256 one, K being equal.
_TILE_COST = {256: 1.0, 128: 0.53, 64: 0.31}
_WEIGHT_GRAD_COST = {256: 1.0, 128: 0.515, 64: 0.3}
SHARED_BYTES = 225 * 1024  # of a program, less barriers


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmTile:
    """A persistent product kernel: 128 x n tiles with `stages` tiles of a and b in flight, each `k` deep; a
    store hands over `store` columns."""

    n: int
    k: int = 64
    stages: int
    store: int
    group_m: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTile:
    """A decode product: w rows of the weight by x of the activations, k columns a step."""

    w: int
    x: int
    k: int
    stages: int


def _stages(n: int, store_bytes: int) -> int:
    return min(8, (SHARED_BYTES - store_bytes) // ((GEMM_ROWS + n) * 64 * 2))


@lru_cache(maxsize=4096)
def gemm_tile(rows: int, columns: int, groups: int, leaves: int, out_bytes: int, programs: int) -> GemmTile:
    """The tile that finishes first: waves of programs times the cost of a tile.

    Args:
        leaves: summed in one program; from three on, a finished node waits in the fp32 store buffer.
        out_bytes: of an element of the result.
    """
    widths = (256, 128, 64) if leaves == 1 else (128, 64)

    def cost(n: int) -> float:
        tiles = -(-rows // GEMM_ROWS) * -(-columns // n) * groups
        return -(-tiles // programs) * _TILE_COST[n]

    n = min(widths, key=cost)
    store = min(n, 128) if out_bytes == 4 else n
    return GemmTile(n=n, stages=_stages(n, GEMM_ROWS * store * out_bytes), store=store)


@lru_cache(maxsize=4096)
def weight_grad_tile(rows: int, columns: int, leaves: int, programs: int) -> GemmTile:
    """The running sum of a tile stays in shared memory in fp32: half of it for the widest tile, whose
    operands then come in shallow steps."""

    def cost(n: int) -> float:
        tiles = -(-rows // GEMM_ROWS) * -(-columns // n) * leaves
        return -(-tiles // programs) * _WEIGHT_GRAD_COST[n]

    n = min(_WEIGHT_GRAD_COST, key=cost)
    k = 32 if n == 256 else 64
    stages = min(8, (SHARED_BYTES - GEMM_ROWS * n * 4) // ((GEMM_ROWS + n) * k * 2))
    return GemmTile(n=n, k=k, stages=stages, store=n)


@lru_cache(maxsize=4096)
def decode_tile(rows: int, weight_rows: int, programs: int) -> DecodeTile:
    """Tiles that keep two thirds of the programs busy; as many bytes in flight as shared memory holds, in
    steps as wide as leave four stages.

    Args:
        rows: of the activations, at most INSTRUCTION_ROWS.
        weight_rows: of all leaves that run side by side.
    """
    x = next(n for n in (16, 32, INSTRUCTION_ROWS) if rows <= n)
    w = INSTRUCTION_ROWS
    while x == INSTRUCTION_ROWS and w > 16 and 3 * -(-weight_rows // w) < 2 * programs:
        w //= 2
    for k in (256, 128):
        stages = SHARED_BYTES // ((w + x) * k * 2)
        if stages >= 4:
            break
    return DecodeTile(w=w, x=x, k=k, stages=min(stages, 8))
