"""What every op table asks of a paged key-value cache."""

from __future__ import annotations

import torch
from torch import Tensor

from unirl_scale.core.errors import ShapeError


def check_pages(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, block_table: Tensor, lengths: Tensor, tile: int
) -> None:
    """Hold the arguments of `attention_decode` against its contract; reads no value of them.

    Args:
        tile: positions of a KV tile of the table at hand. A page holds whole tiles, or whole pages make up a
            tile, so that a tile is never cut in the middle of a page.

    Raises:
        ShapeError: naming what was given and the rule.
    """
    fits = (
        q.dim() == 3
        and k_pages.dim() == 4
        and k_pages.shape == v_pages.shape
        and k_pages.shape[3] == q.shape[2]
        and q.shape[1] % k_pages.shape[2] == 0
        and block_table.dim() == 2
        and block_table.shape[0] == q.shape[0] == lengths.shape[0]
        and block_table.dtype == torch.int32
        and lengths.dtype == torch.int64
    )
    if not fits:
        got = ", ".join(
            f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}"
            for t in (q, k_pages, v_pages, block_table, lengths)
        )
        raise ShapeError(
            f"attention_decode: got {got}; takes q [B, h, d], k and v pages [P, page, hk, d] with hk "
            "dividing h, block_table int32 [B, N], lengths int64 [B]"
        )
    laid_out = block_table.stride(1) == 1 and lengths.is_contiguous() and k_pages.stride() == v_pages.stride()
    if not laid_out:
        got = ", ".join(str(t.stride()) for t in (k_pages, v_pages, block_table, lengths))
        raise ShapeError(
            f"attention_decode: got strides {got} of k and v pages, block_table, lengths; the pages' must be "
            "equal, rows of block_table and lengths contiguous"
        )
    page = k_pages.shape[1]
    if page == 0 or (page % tile and tile % page):
        below = max(n for n in range(1, tile + 1) if tile % n == 0 and n <= max(page, 1))
        above = -(-page // tile) * tile or tile
        raise ShapeError(
            f"attention_decode: got pages of {page} positions; must be a multiple or a divisor of the KV "
            f"tile of {tile}\nhint: {below} or {above}"
        )
