"""Training state -> the bytes of a shard in host memory, with checksums."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unirl_scale.train.checkpoint.checksum import CHUNK_BYTES, chunk_sum, chunk_sums
from unirl_scale.train.checkpoint.shard import ShardLayout


def fill(layout: ShardLayout, data: Tensor) -> list[str]:
    """Copy state that lives in host memory, chunk by chunk, each summed while it is still in the cache.

    Args:
        data: uint8 [>= layout.num_bytes].

    Returns:
        Checksum of each chunk.
    """
    pieces = _pieces(layout)
    sums: list[str] = []
    first = 0
    for start in range(0, layout.num_bytes, CHUNK_BYTES):
        stop = min(start + CHUNK_BYTES, layout.num_bytes)
        while first < len(pieces) and pieces[first][0] + pieces[first][1].numel() <= start:
            first += 1
        for offset, source in pieces[first:]:
            if offset >= stop:
                break
            a, b = max(offset, start), min(offset + source.numel(), stop)
            data[a:b].copy_(source[a - offset : b - offset])
        sums.append(chunk_sum(data[start:stop]))
    return sums


class DeviceCopy:
    """Copies state from a CUDA device into pinned memory on a stream of its own.

    The copy starts behind the work already queued on the current stream and runs beside what is queued later.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream, self._done = stream, torch.cuda.Event()

    def start(self, layouts: Sequence[tuple[ShardLayout, Tensor]]) -> None:
        """Queue the copies; returns at once."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            for layout, data in layouts:
                for offset, source in _pieces(layout):
                    data[offset : offset + source.numel()].copy_(source, non_blocking=True)
            self._done.record()

    def finish(self, layouts: Sequence[tuple[ShardLayout, Tensor]]) -> list[list[str]]:
        """Wait for the bytes and sum them; called on another thread."""
        self._done.synchronize()
        return [chunk_sums(data[: layout.num_bytes]) for layout, data in layouts]


def _pieces(layout: ShardLayout) -> list[tuple[int, Tensor]]:
    """(byte offset, bytes) of the header and every slab, in order."""
    header = torch.frombuffer(bytearray(layout.header), dtype=torch.uint8)
    slabs = [(offset, slab.tensor.detach().view(torch.uint8)) for slab, offset in layout.slabs]
    return [(0, header), *slabs]
