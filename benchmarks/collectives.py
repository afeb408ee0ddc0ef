"""What order costs: ordered reductions against the backend's own, on the ranks of one host.

    python -m benchmarks.collectives --backend gloo --ranks 4 --sizes 256K,4M
    python -m benchmarks.collectives --backend nccl --ranks 2 --sizes 256K,1M,16M,256M,1G --json out.json

Each row alternates plain and ordered (A B A B ...) and compares medians; a time is that of the slowest rank.
Size is that of the whole vector, as in nccl-tests. For bf16 every rank holds one rounded leaf, so the ordered
wire is bf16 too. The fit is time = alpha + size / beta over the sizes given.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from unirl_scale.comm.fast import FastReducer
from unirl_scale.comm.groups import Group, connect
from unirl_scale.comm.ordered import OrderedReducer
from unirl_scale.comm.tree import split_contiguous

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line."""

    backend: str
    ranks: int
    sizes_bytes: tuple[int, ...]
    dtypes: tuple[str, ...]
    rounds: int
    calls: int
    inner_size: int
    chunk_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Medians of one operation at one size."""

    op: str
    dtype: str
    size_bytes: int
    plain_us: float
    ordered_us: float | None  # None: a transport with no ordered counterpart

    @property
    def ratio(self) -> float | None:
        """Ordered time over plain time."""
        return None if self.ordered_us is None else self.ordered_us / self.plain_us


Call = Callable[[], object]


def pairs(
    group: Group, options: Options, dtype: torch.dtype, elements: int
) -> Iterator[tuple[str, Call, Call | None]]:
    """(operation, plain, ordered) on one vector a rank; all of them consume their input, so it is shared."""
    ranges = split_contiguous(group.size, group.size)
    inner = options.inner_size or None
    fast = FastReducer(group, ranges)
    ordered = OrderedReducer(
        group, ranges, inner_size=inner, wire_dtype=dtype, chunk_bytes=options.chunk_bytes
    )
    nodes = torch.ones(1, elements, dtype=dtype, device=group.device)
    sizes = [elements // group.size] * group.size
    piece = nodes[0, : sizes[0]]

    def plain_scatter() -> Tensor:
        return fast.reduce_scatter(nodes, sizes)

    def plain_reduce() -> Tensor:
        return fast.all_reduce(nodes, dtype)

    yield "reduce_scatter", plain_scatter, lambda: ordered.reduce_scatter(nodes, sizes)
    yield "all_reduce", plain_reduce, lambda: ordered.all_reduce(nodes, dtype)
    yield "all_gather", lambda: group.all_gather(piece), None
    yield "all_to_all", lambda: group.all_to_all(nodes[0], sizes, sizes), None


def seconds_a_call(group: Group, call: Call, calls: int) -> float:
    """Of the slowest rank."""
    group.barrier()
    synchronize(group.device)
    started = time.perf_counter()
    for _ in range(calls):
        call()
    synchronize(group.device)
    elapsed = torch.tensor((time.perf_counter() - started) / calls, dtype=torch.float64)
    return float(group.all_reduce_max(elapsed))


def synchronize(device: torch.device) -> None:
    """Wait for the device's queued work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def measure(group: Group, options: Options) -> list[Row]:
    """All rows; the same on every rank."""
    rows = []
    for dtype_name in options.dtypes:
        dtype = DTYPES[dtype_name]
        for size_bytes in options.sizes_bytes:
            elements = size_bytes // dtype.itemsize // group.size * group.size
            for op, plain, ordered in pairs(group, options, dtype, elements):
                calls = [plain] if ordered is None else [plain, ordered]
                for call in calls:
                    seconds_a_call(group, call, 2)  # first use allocates and connects
                times = [
                    [seconds_a_call(group, call, options.calls) for call in calls]
                    for _ in range(options.rounds)
                ]
                medians = [statistics.median(column) * 1e6 for column in zip(*times, strict=True)]
                ordered_us = medians[1] if ordered is not None else None
                rows.append(
                    Row(
                        op=op,
                        dtype=dtype_name,
                        size_bytes=size_bytes,
                        plain_us=medians[0],
                        ordered_us=ordered_us,
                    )
                )
    return rows


def fit(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Least squares of time_us = alpha_us + bytes / beta, each point weighted by 1 / time (relative error).

    Returns:
        alpha in us, beta in GB/s.
    """
    weights = [1.0 / (us * us) for _, us in points]
    total = sum(weights)
    mean_x = sum(w * size for w, (size, _) in zip(weights, points)) / total
    mean_y = sum(w * us for w, (_, us) in zip(weights, points)) / total
    spread = sum(w * (size - mean_x) ** 2 for w, (size, _) in zip(weights, points))
    slope = sum(w * (size - mean_x) * (us - mean_y) for w, (size, us) in zip(weights, points)) / spread
    return mean_y - slope * mean_x, 1e-3 / slope


def table(rows: Sequence[Row], options: Options) -> str:
    """The rows and, for two sizes or more, the fits."""
    lines = [
        f"{'op':<15}{'dtype':<7}{'size':>9}{'plain us':>13}{'ordered us':>13}{'ratio':>8}{'plain GB/s':>12}"
    ]
    for row in rows:
        ordered = "-" if row.ordered_us is None else f"{row.ordered_us:.1f}"
        ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
        rate = row.size_bytes / row.plain_us / 1e3
        lines.append(
            f"{row.op:<15}{row.dtype:<7}{in_units(row.size_bytes):>9}{row.plain_us:>13.1f}{ordered:>13}{ratio:>8}{rate:>12.2f}"
        )
    if len(options.sizes_bytes) > 1:
        lines += ["", f"{'fit':<15}{'dtype':<7}{'alpha us':>12}{'beta GB/s':>12}"]
        for op, dtype in dict.fromkeys((row.op, row.dtype) for row in rows):
            alpha_us, beta = fit([(r.size_bytes, r.plain_us) for r in rows if (r.op, r.dtype) == (op, dtype)])
            lines.append(f"{op:<15}{dtype:<7}{alpha_us:>12.1f}{beta:>12.2f}")
    return "\n".join(lines)


def in_units(size_bytes: int) -> str:
    """256K, 1M, ..."""
    for unit, factor in reversed(UNITS.items()):
        if size_bytes % factor == 0:
            return f"{size_bytes // factor}{unit}"
    return str(size_bytes)


def from_units(text: str) -> int:
    """The inverse of `in_units`."""
    return int(text[:-1]) * UNITS[text[-1]] if text[-1:] in UNITS else int(text)


def rank_main(rank: int, options: Options, rendezvous: str, json_path: str) -> None:
    """One rank; rank 0 prints."""
    device = torch.device("cpu")
    if options.backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.ranks) if device.type == "cpu" else 4)
    store = dist.FileStore(rendezvous, options.ranks)
    with connect(
        rank, options.ranks, options.backend, store=store, timeout=timedelta(minutes=5), device=device
    ) as groups:
        rows = measure(groups.world, options)
    if rank == 0:
        print(table(rows, options))
        if json_path:
            where = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
            record = {
                "torch": torch.__version__,
                "device": where,
                **asdict(options),
                "rows": [asdict(r) for r in rows],
            }
            Path(json_path).write_text(json.dumps(record, indent=1))


def main() -> None:
    """Parse the command line and start the ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", default="256K,4M", help="bytes of the whole vector, e.g. 256K,1M,1G")
    parser.add_argument("--dtypes", default="fp32,bf16")
    parser.add_argument("--rounds", type=int, default=7, help="A B pairs a row")
    parser.add_argument("--calls", type=int, default=10, help="calls a timing")
    parser.add_argument("--inner-size", type=int, default=0, help="members of a node; 0 = flat")
    parser.add_argument("--chunk", default="64M", help="bound on the ordered reductions' temporaries")
    parser.add_argument("--json", default="", help="also write the rows here")
    given = parser.parse_args()
    options = Options(
        backend=given.backend,
        ranks=given.ranks,
        sizes_bytes=tuple(from_units(size) for size in given.sizes.split(",")),
        dtypes=tuple(given.dtypes.split(",")),
        rounds=given.rounds,
        calls=given.calls,
        inner_size=given.inner_size,
        chunk_bytes=from_units(given.chunk),
    )
    if options.ranks < 2:
        parser.error(f"--ranks: got {options.ranks}; a collective needs at least 2")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options, str(Path(folder) / "store"), given.json)
        mp.spawn(rank_main, args=arguments, nprocs=options.ranks, join=True)


if __name__ == "__main__":
    main()
