"""Causal attention in fixed tiles, so that training, prefill and decode compute the same bits.

Every product is a [TILE, d] x [d, TILE] or [TILE, TILE] x [TILE, d] matmul, whatever the sequence length, the
number of heads or the batch: query tile i meets key tiles 0..i in order (online softmax, Milakov & Gimelshein
2018; Dao et al. 2022). Decode puts its one query row at the place it has in training's tile. Accumulators
start at +0 and are never -0 afterwards, so the exact zeros of padding change nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unirl_scale.kernels.spans import Spans

TILE = 32


def _tiles(x: Tensor, spans: Spans) -> Tensor:
    """[T, h, d] packed -> fp32 [B, h, n, TILE, d], zero-padded."""
    n = max(1, -(-spans.max_length // TILE))
    out = torch.zeros(len(spans), n * TILE, *x.shape[1:], device=x.device)
    for b, (start, stop) in enumerate(zip(spans.offsets, spans.offsets[1:])):
        out[b, : stop - start] = x[start:stop]
    return out.unflatten(1, (n, TILE)).permute(0, 3, 1, 2, 4).contiguous()


def _untile(x: Tensor, spans: Spans) -> Tensor:
    """Inverse of `_tiles`."""
    rows = x.permute(0, 2, 3, 1, 4).flatten(1, 2)
    return torch.cat([rows[b, :length] for b, length in enumerate(spans.lengths)])


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    """Batched product of tiles; leading dims are equal."""
    lead = a.shape[:-2]
    return torch.bmm(a.reshape(-1, *a.shape[-2:]), b.reshape(-1, *b.shape[-2:])).view(
        *lead, a.shape[-2], b.shape[-1]
    )


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[1], dim=1) if x.shape[1] != heads else x


def _causal(device: torch.device) -> Tensor:
    return torch.ones(TILE, TILE, dtype=torch.bool, device=device).triu(1)


def _absorb(
    state: tuple[Tensor, Tensor, Tensor], scores: Tensor, values: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One online-softmax step. scores [..., TILE, TILE], values [..., TILE, d]; state (max, sum, acc)."""
    top, total, acc = state
    new_top = torch.maximum(top, scores.amax(-1))
    shrink = torch.exp(top - new_top)
    p = torch.exp(scores - new_top.unsqueeze(-1))
    return (
        new_top,
        total * shrink + p.sum(-1),
        acc * shrink.unsqueeze(-1) + _bmm(p, values),
    )


def forward(q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float) -> tuple[Tensor, Tensor]:
    """q [T, h, d], k/v [T, hk, d] -> (o [T, h, d] in q's dtype, lse fp32 [T, h])."""
    heads = q.shape[1]
    qt = _tiles(q, spans)
    kt, vt = (_repeat_heads(_tiles(t, spans), heads) for t in (k, v))
    n = qt.shape[2]
    top = torch.full(qt.shape[:-1], -torch.inf, device=q.device)
    total, acc = torch.zeros_like(top), torch.zeros_like(qt)
    for j in range(n):
        active = qt[:, :, j:]
        kj = kt[:, :, j : j + 1].expand(-1, -1, n - j, -1, -1)
        vj = vt[:, :, j : j + 1].expand(-1, -1, n - j, -1, -1)
        scores = _bmm(active, kj.transpose(-1, -2)) * scale
        scores[:, :, 0].masked_fill_(_causal(q.device), -torch.inf)
        state = _absorb((top[:, :, j:], total[:, :, j:], acc[:, :, j:]), scores, vj)
        top[:, :, j:], total[:, :, j:], acc[:, :, j:] = state
    o = acc / total.unsqueeze(-1)
    lse = top + torch.log(total)
    return _untile(o, spans).to(q.dtype), _untile(lse.unsqueeze(-1), spans).squeeze(-1)


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, spans: Spans, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `forward`; dk and dv of a kv head add query tiles, then query heads, in order."""
    heads, kv_heads = q.shape[1], k.shape[1]
    qt, ot, dot = (_tiles(t, spans) for t in (q, o, do))
    kt, vt = (_repeat_heads(_tiles(t, spans), heads) for t in (k, v))
    lt = _tiles(lse.unsqueeze(-1), spans)
    delta = (dot * ot).sum(-1, keepdim=True)
    dq, dk, dv = torch.zeros_like(qt), torch.zeros_like(kt), torch.zeros_like(vt)
    n = qt.shape[2]
    for i in range(n):
        for j in range(i + 1):
            scores = _bmm(qt[:, :, i], kt[:, :, j].transpose(-1, -2)) * scale
            if i == j:
                scores.masked_fill_(_causal(q.device), -torch.inf)
            p = torch.exp(scores - lt[:, :, i])
            dv[:, :, j] += _bmm(p.transpose(-1, -2), dot[:, :, i])
            dp = _bmm(dot[:, :, i], vt[:, :, j].transpose(-1, -2))
            ds = p * (dp - delta[:, :, i]) * scale
            dq[:, :, i] += _bmm(ds, kt[:, :, j])
            dk[:, :, j] += _bmm(ds.transpose(-1, -2), qt[:, :, i])
    dk, dv = _sum_groups(dk, kv_heads), _sum_groups(dv, kv_heads)
    return (
        _untile(dq, spans).to(q.dtype),
        _untile(dk, spans).to(k.dtype),
        _untile(dv, spans).to(v.dtype),
    )


def _sum_groups(x: Tensor, kv_heads: int) -> Tensor:
    """Add the query heads of each kv head, first to last."""
    if x.shape[1] == kv_heads:
        return x
    grouped = x.unflatten(1, (kv_heads, -1))
    out = torch.zeros_like(grouped[:, :, 0])
    for g in range(grouped.shape[2]):
        out += grouped[:, :, g]
    return out


def decode(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, block_table: Tensor, lengths: Tensor, scale: float
) -> Tensor:
    """q [B, h, d], pages [P, page, hk, d], block_table int32 [B, N], lengths [B] with the new token -> [B, h,
    d].

    Products have training's tiles, with the query in training's row; the rest is done for that row alone.
    """
    batch, heads, d = q.shape
    n = -(-int(lengths.max()) // TILE)
    samples, row = torch.arange(batch, device=q.device), (lengths - 1) % TILE
    qt = torch.zeros(batch, heads, TILE, d, device=q.device)
    qt[samples, :, row] = q.float()
    pt = torch.zeros(batch, heads, TILE, TILE, device=q.device)
    hidden = torch.arange(n * TILE, device=q.device) >= lengths.unsqueeze(1)
    units = _tile_units(block_table, lengths, k_pages.shape[1], n)
    top = torch.full((batch, heads), -torch.inf, device=q.device)
    total, acc = torch.zeros_like(top), torch.zeros(batch, heads, d, device=q.device)
    for j in range(n):
        past = hidden[:, j * TILE : (j + 1) * TILE]
        kj, vj = _page_tile(k_pages, units[:, j]), _page_tile(v_pages, units[:, j])
        # Rows past the length may hold anything: the mask hides their scores, but 0 * NaN is NaN.
        vj = vj.masked_fill_(past.unsqueeze(2), 0.0)
        kt, vt = (_repeat_heads(t.unflatten(2, (-1, d)).transpose(1, 2), heads) for t in (kj, vj))
        scores = _bmm(qt, kt.transpose(-1, -2))[samples, :, row] * scale
        scores = scores.masked_fill_(past.unsqueeze(1), -torch.inf)
        new_top = torch.maximum(top, scores.amax(-1))
        shrink = torch.exp(top - new_top)
        p = torch.exp(scores - new_top.unsqueeze(-1))
        pt[samples, :, row] = p
        top, total = new_top, total * shrink + p.sum(-1)
        acc = acc * shrink.unsqueeze(-1) + _bmm(pt, vt)[samples, :, row]
    return (acc / total.unsqueeze(-1)).to(q.dtype)


def _tile_units(block_table: Tensor, lengths: Tensor, page: int, tiles: int) -> Tensor:
    """Where the tiles of each sample lie, in units of the smaller of page and tile: int64 [B, tiles, units of
    a tile]. Units past a sample's length point at unit 0."""
    unit = min(page, TILE)
    number = torch.arange(tiles * (TILE // unit), device=block_table.device)
    column, place = number // (page // unit), number % (page // unit)
    entries = block_table[:, column.clamp(max=block_table.shape[1] - 1)].long()
    units = entries * (page // unit) + place
    used = number * unit < lengths.unsqueeze(1)
    return torch.where(used, units, torch.zeros_like(units)).view(len(lengths), tiles, -1)


def _page_tile(pages: Tensor, units: Tensor) -> Tensor:
    """One tile of each sample as fp32 [B, TILE, hk * d], a copy."""
    cut = pages.view(-1, TILE // units.shape[1] * pages.shape[2] * pages.shape[3])
    rows = cut.index_select(0, units.flatten()).float()
    return rows.view(units.shape[0], TILE, -1)
