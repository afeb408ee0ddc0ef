"""Several GPUs: our step in `layout` mode against `off`, and against transformers under DDP and FSDP.

    python -m benchmarks.several --ranks 2 --models 1.1b,2b --json out.json
    python -m benchmarks.several --vendor cpu --ranks 2 --models tiny --length 64 --rounds 2    # a rehearsal

Every contender trains on the same global batch of random tokens: `--batch` sequences a rank, cut over
data-parallel ranks, whole on tensor-parallel ones. Contenders meet in pairs (A B A B ..., medians of the
slowest rank), so that two models are in memory at a time. DDP and FSDP2 keep bf16 weights; FSDP shards every
layer and the optimizer state.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.price import Layout, build, rows_of_ranks
from benchmarks.step import MODELS, Step, engine_step, flop_per_token, peer_model, peer_step
from unirl_scale.comm.groups import GroupFactory
from unirl_scale.core.config import HardwareConfig, MeshConfig, ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line."""

    vendor: str
    ranks: int
    models: tuple[str, ...]
    batch: int
    length: int
    rounds: int


def meshes(ranks: int) -> list[MeshConfig]:
    """All ranks along one axis, and for four or more both."""
    found = [MeshConfig(dp=ranks), MeshConfig(tp=ranks, sequence_parallel=True), MeshConfig(pp=ranks)]
    if ranks % 4 == 0:
        found.append(MeshConfig(tp=2, sequence_parallel=True, dp=ranks // 2))
    return found


def ours(groups: GroupFactory, model: ModelConfig, mesh: MeshConfig, mode: str, ids: Tensor) -> Step:
    """A step on the whole global batch `ids` [B, S]; the engine takes its own slots of it."""
    # One sequence a micro-batch fills a pipeline; elsewhere a rank takes its whole share at once.
    micro = 1 if mesh.pp > 1 else ids.shape[0] // mesh.dp
    layout = Layout(
        mesh=MeshConfig(
            tp=mesh.tp,
            pp=mesh.pp,
            dp=mesh.dp,
            sequence_parallel=mesh.sequence_parallel,
            micro_batch_size=micro,
        ),
        leaves=mesh.tp,
        slots=mesh.dp,
    )
    device = groups.world.device
    hardware = HardwareConfig(vendor=device.type)  # type: ignore[arg-type]
    engine = build(groups, model, layout, mode, hardware, torch.bfloat16, max_tokens=ids.shape[1])
    return engine_step(engine, ids)


def ddp(model: ModelConfig, ids: Tensor) -> Step:
    """transformers' Llama under DistributedDataParallel; `ids` are this rank's."""
    from torch.nn.parallel import DistributedDataParallel

    return peer_step(DistributedDataParallel(peer_model(model, ids)), ids)


def fsdp(model: ModelConfig, ids: Tensor) -> Step:
    """The same under FSDP2, a layer a unit."""
    from torch.distributed.fsdp import fully_shard

    net = peer_model(model, ids)
    for layer in net.model.layers:
        fully_shard(layer)
    fully_shard(net)
    return peer_step(net, ids)


def seconds(groups: GroupFactory, step: Step) -> float:
    """One step of the slowest rank."""
    world = groups.world
    world.barrier()
    started = time.perf_counter()
    step()
    if world.device.type != "cpu":
        torch.accelerator.synchronize(world.device)
    return float(world.all_reduce_max(torch.tensor(time.perf_counter() - started, dtype=torch.float64)))


def duel(groups: GroupFactory, rounds: int, makers: Sequence[Callable[[], Step]]) -> list[float]:
    """Median seconds of each contender, taking turns; their memory is free afterwards."""
    steps = [make() for make in makers]
    for step in steps:
        for _ in range(2):
            seconds(groups, step)
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(rounds):
        for step, values in zip(steps, times):
            values.append(seconds(groups, step))
    del steps, step
    gc.collect()
    if groups.world.device.type == "cuda":
        torch.cuda.empty_cache()
    return [statistics.median(values) for values in times]


def measure(options: Options, groups: GroupFactory) -> list[dict[str, Any]]:
    """All rows; the same on every rank."""
    rows, world = [], groups.world
    for name in options.models:
        model, count = MODELS[name], options.batch * options.ranks
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, model.vocab_size, (count, options.length), generator=generator)
        ids = ids.to(world.device)
        own = ids[world.index * options.batch : (world.index + 1) * options.batch]
        for mesh in meshes(options.ranks):

            def layout(mesh: MeshConfig = mesh) -> Step:
                return ours(groups, model, mesh, "layout", ids)  # noqa: B023 - called before the next turn

            rivals: dict[str, Callable[[], Step]] = {
                "off": lambda: ours(groups, model, mesh, "off", ids),  # noqa: B023
                "ddp": lambda: ddp(model, own),  # noqa: B023
                "fsdp": lambda: fsdp(model, own),  # noqa: B023
            }
            for rival, make in rivals.items():
                ours_s, rival_s = duel(groups, options.rounds, (layout, make))
                tokens = ids.numel()
                rows.append(
                    {
                        "model": name,
                        "mesh": f"tp{mesh.tp} pp{mesh.pp} dp{mesh.dp}",
                        "rival": rival,
                        "layout_ms": ours_s * 1e3,
                        "rival_ms": rival_s * 1e3,
                        "speedup": rival_s / ours_s,
                        "tokens_per_s": tokens / ours_s,
                        "flop_per_s_a_rank": flop_per_token(model, options.length)
                        * tokens
                        / ours_s
                        / options.ranks,
                    }
                )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vendor", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--models", default="1.1b,2b")
    parser.add_argument("--batch", type=int, default=2, help="sequences a rank")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", default="", help="also write the rows here")
    args = vars(parser.parse_args())
    out = args.pop("json")
    options = Options(**args | {"models": tuple(args["models"].split(","))})
    rows = rows_of_ranks(partial(measure, options), options.ranks, options.vendor)
    print(
        f"{'model':6} {'mesh':14} {'rival':6} {'layout ms':>10} {'rival ms':>9} {'x rival':>8} {'tok/s':>9}"
    )
    for r in rows:
        print(
            f"{r['model']:6} {r['mesh']:14} {r['rival']:6} {r['layout_ms']:10.1f} {r['rival_ms']:9.1f} "
            f"{r['speedup']:8.2f} {r['tokens_per_s']:9.0f}"
        )
    if out:
        Path(out).write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
