"""What layout invariance costs: one training step in `layout` mode against our own fast mode (`off`).

    python -m benchmarks.price --ranks 4                     # CPU, gloo
    python -m benchmarks.price --vendor cuda --ranks 2       # NCCL

The same model, batch and layout are built in both modes in one process group, and steps alternate (A B A B
...). The first rows are production layouts (TP = W, DP = D: one leaf a rank); the last ones use fewer ranks
than leaves. A step is forward, backward, reduction, clip and AdamW; its time is that of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor

from unirl_scale.comm.groups import Group, GroupFactory, connect
from unirl_scale.core.config import HardwareConfig, InvarianceConfig, MeshConfig, ModelConfig
from unirl_scale.core.mesh import Mesh
from unirl_scale.kernels.select import op_table, probe_shapes
from unirl_scale.parallel.build import RoleGroups, build_context
from unirl_scale.parallel.engine import NativeEngine
from unirl_scale.parallel.optimizer import AdamStep
from unirl_scale.parallel.samples import Sample

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line."""

    vendor: str
    ranks: int
    hidden: int
    layers: int
    tokens: int
    samples: int
    precision: str
    rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One comparison: a mesh, and how many leaves and slots the contract has."""

    mesh: MeshConfig
    leaves: int
    slots: int

    def __str__(self) -> str:
        m = self.mesh
        sp = " sp" if m.sequence_parallel else ""
        return f"tp{m.tp} pp{m.pp} dp{m.dp}{sp}, W={self.leaves} D={self.slots}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Medians of one layout."""

    layout: str
    kernels: str
    off_ms: float
    layout_ms: float

    @property
    def ratio(self) -> float:
        return self.layout_ms / self.off_ms


def layouts(ranks: int, micro: int) -> list[Layout]:
    """Production layouts of this many ranks first, then ones with several leaves a rank."""
    out = []
    tp = 2 if ranks % 2 == 0 else ranks
    for sp in (False, True):
        mesh = MeshConfig(tp=tp, dp=ranks // tp, sequence_parallel=sp, micro_batch_size=micro)
        out.append(Layout(mesh=mesh, leaves=tp, slots=ranks // tp))
    if ranks > 1:
        out.append(Layout(mesh=MeshConfig(dp=ranks, micro_batch_size=micro), leaves=1, slots=ranks))
        out.append(
            Layout(mesh=MeshConfig(tp=tp, dp=ranks // tp, micro_batch_size=micro), leaves=2 * tp, slots=ranks)
        )
    out.append(Layout(mesh=MeshConfig(dp=ranks, micro_batch_size=micro), leaves=4, slots=2 * ranks))
    return out


def model_of(options: Options) -> ModelConfig:
    heads = max(4, options.hidden // 64)
    return ModelConfig(
        hidden_size=options.hidden,
        num_layers=options.layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=options.hidden // heads,
        ffn_size=4 * options.hidden,
        vocab_size=1000,
    )


def build(
    groups: GroupFactory,
    model: ModelConfig,
    layout: Layout,
    mode: str,
    hardware: HardwareConfig,
    dtype: torch.dtype,
    max_tokens: int,
) -> NativeEngine:
    """An actor on this rank in one mode; collective."""
    device = groups.world.device
    ops = op_table(hardware, mode, [probe_shapes(model, layout.leaves)], dtype, device)
    invariance = InvarianceConfig(
        mode=mode,  # type: ignore[arg-type]
        model_leaves=layout.leaves,
        data_slots=layout.slots,
    )
    roles = RoleGroups(groups, [Mesh.from_config(layout.mesh)])
    context = build_context(roles, layout.mesh, invariance, ops, dtype, device)
    assert context is not None
    engine = NativeEngine(model, layout.mesh, context, "lm", max_tokens=max_tokens)
    for optimizer in engine.optimizers:  # speed does not depend on the values, as long as they are random
        std = model.init_std
        leafed = torch.randn(optimizer.chunk.leafed.numel, device=device) * std
        optimizer.load(leafed, torch.ones(optimizer.chunk.replicated.numel, device=device))
    engine.publish()
    return engine


def batch(options: Options) -> list[Sample]:
    """Uneven lengths around --tokens: a quarter prompt, the rest response."""
    rng = random.Random(0)
    out = []
    for _ in range(options.samples):
        length = rng.randrange(options.tokens // 2, options.tokens)
        ids = tuple(rng.randrange(1000) for _ in range(length))
        out.append(Sample(ids[: length // 4], ids[length // 4 :]))
    return out


def step_seconds(group: Group, engine: NativeEngine, samples: Sequence[Sample]) -> float:
    """One training step of the slowest rank."""
    scale = 1.0 / sum(len(s.response) for s in samples)

    def loss(numbers: Sequence[int], scores: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        return scores[0] * -scale, {}

    group.barrier()
    started = time.perf_counter()
    with torch.no_grad():
        engine.accumulate(samples, loss)
        sumsq = engine.reduce()
        engine.step(_adam, 1.0, sumsq)
    if group.device.type != "cpu":
        torch.accelerator.synchronize(group.device)
    elapsed = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
    return float(group.all_reduce_max(elapsed))


def _adam(count: int) -> AdamStep:
    return AdamStep(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, count=count)


def measure(options: Options, groups: GroupFactory) -> list[dict[str, Any]]:
    """All rows; the same on every rank."""
    rows, samples, model = [], batch(options), model_of(options)
    for layout in layouts(options.ranks, micro=max(1, options.samples // (2 * options.ranks))):
        hardware = HardwareConfig(vendor=options.vendor)  # type: ignore[arg-type]
        engines = {
            mode: build(
                groups, model, layout, mode, hardware, DTYPES[options.precision], max_tokens=options.tokens
            )
            for mode in ("off", "layout")
        }
        for engine in engines.values():
            step_seconds(groups.world, engine, samples)
        times: dict[str, list[float]] = {mode: [] for mode in engines}
        for _ in range(options.rounds):
            for mode, engine in engines.items():
                times[mode].append(step_seconds(groups.world, engine, samples))
        medians = {mode: statistics.median(values) * 1e3 for mode, values in times.items()}
        rows.append(
            Row(
                layout=str(layout),
                kernels=engines["layout"].ctx.ops.name,
                off_ms=medians["off"],
                layout_ms=medians["layout"],
            )
        )
    return [{**asdict(row), "ratio": row.ratio} for row in rows]


def rows_of_ranks(
    body: Callable[[GroupFactory], list[dict[str, Any]]], ranks: int, vendor: str
) -> list[dict[str, Any]]:
    """Run `body` on fresh ranks, one a GPU on `cuda`; what it returned on the first."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (body, ranks, vendor == "cuda", folder), nprocs=ranks)
        rows: list[dict[str, Any]] = json.loads(Path(folder, "rows.json").read_text())
    return rows


def _rank(
    rank: int, body: Callable[[GroupFactory], list[dict[str, Any]]], ranks: int, cuda: bool, folder: str
) -> None:
    torch.set_num_threads(1)
    if cuda:
        torch.cuda.set_device(rank)
    with connect(
        rank,
        ranks,
        "nccl" if cuda else "gloo",
        init_method=f"file://{folder}/store" if ranks > 1 else None,
        timeout=timedelta(minutes=5),
        device=torch.device("cuda", rank) if cuda else "cpu",
    ) as groups:
        rows = body(groups)
        if rank == 0:
            Path(folder, "rows.json").write_text(json.dumps(rows))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vendor", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128, help="longest sample")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--precision", default="fp32", choices=tuple(DTYPES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", default="", help="also write the rows here")
    args = vars(parser.parse_args())
    out = args.pop("json")
    options = Options(**args)
    rows = rows_of_ranks(partial(measure, options), options.ranks, options.vendor)
    print(f"{'layout':34} {'kernels':20} {'off ms':>9} {'layout ms':>10} {'ratio':>6}")
    for row in rows:
        print(
            f"{row['layout']:34} {row['kernels']:20} {row['off_ms']:9.1f} "
            f"{row['layout_ms']:10.1f} {row['ratio']:6.2f}"
        )
    if out:
        Path(out).write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
