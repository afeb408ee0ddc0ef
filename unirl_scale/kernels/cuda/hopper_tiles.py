"""What the persistent Hopper kernels share: barriers of their rings, and tiles of unequal length.

The producer warp of a program draws the next tile from a counter and passes its number to the consumers
through shared memory, so that a program that got short tiles takes more of them. Which program computes a
tile cannot show in its bits.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def ring(STAGES: gl.constexpr):
    """Barriers of a ring that one producer fills and two consumer warpgroups empty: (full, empty)."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)
    return full, empty


@gluon.jit
def tile_slots():
    """(slots, drawn, taken) of `draw_tile` and `take_tile`: two turns fit."""
    slots = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    drawn, taken = ring(2)
    return slots, drawn, taken


@gluon.jit
def draw_tile(counter_ptr, slots, drawn, taken, turn):
    """Producer: draw the tile of this turn and pass it on."""
    tile = gl.atomic_add(counter_ptr, 1)
    slot = turn % 2
    mbarrier.wait(taken.index(slot), (turn // 2 & 1) ^ 1)
    slots.index(slot).store(gl.full([1], tile, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.arrive(drawn.index(slot))
    return tile


@gluon.jit
def take_tile(slots, drawn, taken, turn):
    """Consumer warpgroup: the tile of this turn."""
    slot = turn % 2
    mbarrier.wait(drawn.index(slot), turn // 2 & 1)
    tile = gl.max(slots.index(slot).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
    mbarrier.arrive(taken.index(slot))
    return tile


@gluon.jit
def banded(tile, tiles, HEAD_BAND: gl.constexpr):
    """Tile number -> (rank of the tile within its head, head): a band of heads that fits in L2 at a time."""
    band = tile // (tiles * HEAD_BAND)
    rest = tile % (tiles * HEAD_BAND)
    return rest // HEAD_BAND, band * HEAD_BAND + rest % HEAD_BAND


def head_band(heads: int, group: int, row_bytes: int, longest: int, l2_bytes: int) -> int:
    """Heads worked on together: whole groups, a divisor of `heads`, their rows within half of L2.

    Args:
        row_bytes: of what a head reads for one token, half of it K (or q) and half V (or do).
        longest: tokens of the longest sample.
    """
    fitting = max(1, l2_bytes // 2 // max(1, 2 * row_bytes * longest)) * group
    band = group
    for size in range(group, min(heads, fitting) + 1, group):
        if heads % size == 0:
            band = size
    return band
