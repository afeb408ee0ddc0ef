"""Predicted against measured: probe the links, give the YAML to the planner, and time each collective.

    python -m benchmarks.predicted --ranks 4
    python -m benchmarks.predicted --backend nccl --ranks 8 --sizes 64K,1M,16M,256M --json out.json

The probe times pairs, an all-gather and an all-to-all; the rest is the cost model's. A time is the median of
the slowest rank; the error is predicted / measured - 1. All ranks are of one host.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.collectives import from_units, in_units, seconds_a_call, synchronize
from unirl_scale.comm.cost import Collective
from unirl_scale.comm.groups import Group, connect
from unirl_scale.comm.ordered import OrderedReducer
from unirl_scale.comm.plan import Assumptions, GroupPlan, Transport
from unirl_scale.comm.plan_calls import plan_call, size_classes
from unirl_scale.comm.plan_machine import survey
from unirl_scale.comm.plan_traffic import Call
from unirl_scale.comm.probe import probe_groups, probe_rounds, probe_yaml
from unirl_scale.comm.probe_ranks import probe, probe_collectives
from unirl_scale.comm.topology import read_topology
from unirl_scale.comm.tree import split_contiguous
from unirl_scale.launch.probing import hosts_topology

TRANSPORTS: dict[str, Transport] = {"gloo": "gloo", "nccl": "nccl"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One collective at one size."""

    op: str
    size_bytes: int
    algorithm: str
    predicted_us: float
    measured_us: float

    @property
    def error(self) -> float:
        """Relative, positive where the prediction is too slow."""
        return self.predicted_us / self.measured_us - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A collective as the planner and as the group know it."""

    op: str
    collective: Collective
    run: Callable[[], object]
    ordered: bool = False


def cases(group: Group, gather_below_bytes: float, elements: int) -> list[Case]:
    """What the trainer issues, on one fp32 vector of S bytes a rank."""
    ranges = split_contiguous(group.size, group.size)
    most = int(min(gather_below_bytes * group.size, 1 << 62))
    reducer = OrderedReducer(group, ranges, gather_below_bytes=most)
    nodes = torch.ones(1, elements, device=group.device)
    sizes = [elements // group.size] * group.size
    piece, whole = nodes[0, : sizes[0]], nodes[0]
    return [
        Case(op="all_gather", collective="all_gather", run=lambda: group.all_gather(piece)),
        Case(op="all_to_all", collective="all_to_all", run=lambda: group.all_to_all(whole, sizes, sizes)),
        Case(op="broadcast", collective="broadcast", run=lambda: group.broadcast(whole, 0)),
        Case(
            op="ordered reduce_scatter",
            collective="reduce_scatter",
            run=lambda: reducer.reduce_scatter(nodes, sizes),
            ordered=True,
        ),
        Case(
            op="ordered all_reduce",
            collective="all_reduce",
            run=lambda: reducer.all_reduce(nodes, torch.float32),
            ordered=True,
        ),
    ]


def measure(group: Group, yaml: str, options: argparse.Namespace) -> list[Row]:
    """All rows; the same on every rank."""
    told = Assumptions(transport=TRANSPORTS[options.backend])
    tiers = survey(read_topology(yaml)).tiers((group.size, 1))
    plan = GroupPlan(
        axis="dp", count=1, size=group.size, shape=(group.size, 1), most_nodes=1, most_leaves=1, tiers=tiers
    )
    plan = replace(plan, classes=size_classes(plan, told))
    rows = []
    for size_bytes in options.sizes:
        elements = size_bytes // 4 // group.size * group.size
        for case in cases(group, plan.gather_below_bytes, elements):
            call = Call(
                name=case.op,
                axis="dp",
                collective=case.collective,
                size_bytes=4.0 * elements,
                count=1,
                ordered=case.ordered,
            )
            predicted = plan_call(call, plan, told)
            seconds_a_call(group, case.run, 2)  # first use allocates and connects
            times = [seconds_a_call(group, case.run, options.calls) for _ in range(options.rounds)]
            rows.append(
                Row(
                    op=case.op,
                    size_bytes=size_bytes,
                    algorithm=predicted.algorithm,
                    predicted_us=predicted.time_us or float("nan"),
                    measured_us=statistics.median(times) * 1e6,
                )
            )
    return rows


def table(rows: list[Row]) -> str:
    """The rows, then the mean and largest error of each collective."""
    lines = [f"{'op':<24}{'size':>6}  {'algorithm':<18}{'predicted us':>14}{'measured us':>14}{'error':>9}"]
    for r in rows:
        what = f"{r.op:<24}{in_units(r.size_bytes):>6}  {r.algorithm:<18}"
        lines.append(f"{what}{r.predicted_us:>14.1f}{r.measured_us:>14.1f}{100 * r.error:>8.1f}%")
    for op in dict.fromkeys(r.op for r in rows):
        errors = [abs(r.error) for r in rows if r.op == op]
        mean, most = statistics.mean(errors), max(errors)
        lines.append(f"{op:<24}mean |error| {100 * mean:.1f} %, largest {100 * most:.1f} %")
    return "\n".join(lines) + "\n"


def rank_main(rank: int, options: argparse.Namespace, rendezvous: str) -> None:
    """One rank; rank 0 prints."""
    device = torch.device("cpu") if options.backend == "gloo" else torch.device("cuda", rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    store = dist.FileStore(rendezvous, options.ranks)
    timeout = timedelta(minutes=5)
    with connect(rank, options.ranks, options.backend, store=store, timeout=timeout, device=device) as groups:
        hosts = ["here"] * options.ranks
        wait = partial(synchronize, device)
        samples = probe(groups.world, probe_rounds(hosts), synchronize=wait)
        collectives = probe_collectives(groups, probe_groups(hosts), synchronize=wait)
        yaml = probe_yaml(hosts_topology(hosts, "unknown"), samples, collectives)
        rows = measure(groups.world, groups.world.all_gather_object(yaml)[0], options)
    if rank == 0:
        sys.stdout.write(table(rows))
        if options.json:
            record = {"torch": torch.__version__, "probed": yaml, "rows": [asdict(r) for r in rows]}
            Path(options.json).write_text(json.dumps(record, indent=1) + "\n")


def sizes(text: str) -> tuple[int, ...]:
    """Bytes from "4K,1M"."""
    return tuple(from_units(part) for part in text.split(","))


def main() -> None:
    """Parse the command line and start the ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", choices=tuple(TRANSPORTS), default="gloo")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--sizes", type=sizes, default=sizes("16K,256K,4M,16M"), help="bytes S of the vector")
    parser.add_argument("--rounds", type=int, default=7, help="timings a row")
    parser.add_argument("--calls", type=int, default=10, help="calls a timing")
    parser.add_argument("--json", default="", help="also write the rows here")
    options = parser.parse_args()
    if options.ranks < 2:
        parser.error(f"--ranks: got {options.ranks}; a collective needs at least 2")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, args=(options, str(Path(folder) / "store")), nprocs=options.ranks, join=True)


if __name__ == "__main__":
    main()
