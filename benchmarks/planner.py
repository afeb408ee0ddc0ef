"""What planning costs and how good the plans are.

    python -m benchmarks.planner
    python -m benchmarks.planner --json out.json --ranks 16384

Each timed part runs in a process of its own, so that its peak memory is its own; times are wall clock of the
part alone, without imports. The goals stand beside the figures.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing as mp
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from unirl_scale.comm.cost import Tier, hierarchical
from unirl_scale.comm.cost_ordered import Memory, ordered_all_reduce
from unirl_scale.comm.plan import ACCELERATORS, Assumptions
from unirl_scale.comm.plan_allgather import BoxWires, build, measure
from unirl_scale.comm.plan_build import make_plan
from unirl_scale.comm.plan_file import read_plan, write_plan
from unirl_scale.comm.plan_search import search_layouts
from unirl_scale.comm.plan_verify import verify
from unirl_scale.comm.topology import MACHINES, cluster, read_topology
from unirl_scale.core.config import (
    HardwareConfig,
    InvarianceConfig,
    MeshConfig,
    MeshesConfig,
    ModelConfig,
    ModelsConfig,
    RolloutConfig,
    RunConfig,
    StageConfig,
)

TOLD = Assumptions(accelerator=ACCELERATORS["h100"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A figure beside its goal; `ok` is None where there is no goal."""

    what: str
    value: str
    goal: str
    ok: bool | None


def run_config(tp: int, pp: int, dp: int) -> RunConfig:
    """A 70B actor and critic, 4096 tokens a sample, two samples a data slot."""
    model = ModelConfig(
        hidden_size=8192,
        num_layers=64,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        ffn_size=28672,
        vocab_size=128256,
    )
    mesh = MeshConfig(tp=tp, pp=pp, dp=dp, sequence_parallel=True)
    return RunConfig(
        precision="bf16",
        hardware=HardwareConfig(vendor="cuda"),
        invariance=InvarianceConfig(model_leaves=8, data_slots=dp * pp),
        model=ModelsConfig(actor=model),
        mesh=MeshesConfig(actor=mesh),
        rollout=RolloutConfig(max_prompt_tokens=1024, max_response_tokens=3072),
        stages=(StageConfig(batch_size=2 * dp * pp),),
    )


def timed(part: Callable[[], str]) -> tuple[float, float, str]:
    """Seconds, peak MB of the process, and what the part returned."""
    start = time.perf_counter()
    result = part()
    seconds = time.perf_counter() - start
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, result


def plan_ranks(ranks: int) -> str:
    """Plan and write a cluster of 8-GPU nodes, 16 a leaf, 256 a spine; returns the plan's digest."""
    topology = cluster(MACHINES["h100-8"], ranks // 8, tiers=(16, 256))
    plan = make_plan(run_config(8, 4, ranks // 32), topology, TOLD)
    return hashlib.sha256(write_plan(plan).encode()).hexdigest()


def verify_ranks(ranks: int) -> str:
    """Plan, write, read back and verify."""
    topology = cluster(MACHINES["h100-8"], ranks // 8, tiers=(16, 256))
    plan = read_plan(write_plan(make_plan(run_config(8, 4, ranks // 32), topology, TOLD)))
    verify(plan, topology)
    groups = plan.role("actor").group("tp")
    return f"tp groups touch {groups.most_leaves} leaf and {groups.most_nodes} node"


def search_ranks(ranks: int) -> str:
    """`mesh: auto` for the same model."""
    topology = cluster(MACHINES["h100-8"], ranks // 8, tiers=(16, 256))
    return search_layouts(run_config(8, 4, ranks // 32), topology, TOLD)[0].reason


def slurm_tree(nodes: int) -> str:
    """A topology.conf of 20 nodes a leaf and 20 leaves a spine."""
    leaves, spines = nodes // 20, nodes // 400
    lines = [f"SwitchName=root Switches=spine[0-{spines - 1}]"]
    lines += [f"SwitchName=spine{s} Switches=leaf[{20 * s}-{20 * s + 19}]" for s in range(spines)]
    lines += [f"SwitchName=leaf{k} Nodes=node[{20 * k:05d}-{20 * k + 19:05d}]" for k in range(leaves)]
    return "\n".join(lines) + "\n"


def parse_tree(nodes: int) -> str:
    """Read such a tree."""
    return f"{len(read_topology(slurm_tree(nodes)).nodes)} nodes"


def in_process(part: Callable[[int], str], value: int) -> tuple[float, float, str]:
    """`timed(part(value))` in a fresh process."""
    with mp.get_context("spawn").Pool(1) as pool:
        return pool.apply(_timed_one, (part, value))


def _timed_one(part: Callable[[int], str], value: int) -> tuple[float, float, str]:
    return timed(lambda: part(value))


def planning_rows(sizes: Sequence[int]) -> list[Row]:
    """Time and memory of planning."""
    limits = {16384: (10.0, 1000.0), 65536: (60.0, None)}
    rows = []
    for ranks in sizes:
        seconds, memory, first = in_process(plan_ranks, ranks)
        *_, second = in_process(plan_ranks, ranks)
        most_s, most_mb = limits.get(ranks, (None, None))
        goal = f"<= {most_s:g} s" + (f", < {most_mb:g} MB" if most_mb else "") if most_s else ""
        ok = most_s is None or (seconds <= most_s and (most_mb is None or memory < most_mb))
        rows.append(
            Row(what=f"plan {ranks} ranks", value=f"{seconds:.3f} s, {memory:.0f} MB", goal=goal, ok=ok)
        )
        rows.append(Row(what="  same plan twice", value=first[:16], goal="equal", ok=first == second))
        seconds, memory, where = in_process(verify_ranks, ranks)
        rows.append(
            Row(what="  plan, file, verify", value=f"{seconds:.3f} s, {memory:.0f} MB", goal="", ok=None)
        )
        rows.append(Row(what="  tp", value=where, goal="1 leaf", ok="touch 1 leaf" in where))
    seconds, _, nodes = in_process(parse_tree, 10_000)
    rows.append(Row(what=f"SLURM tree, {nodes}", value=f"{seconds:.4f} s", goal="< 0.2 s", ok=seconds < 0.2))
    seconds, _, best = in_process(search_ranks, 256)
    rows.append(Row(what="mesh: auto on 256 ranks", value=f"{seconds:.2f} s", goal="", ok=None))
    rows.append(Row(what="  best", value=best, goal="", ok=None))
    return rows


def all_gather_rows() -> list[Row]:
    """Schedules against the closed-form bounds, loads counted edge by edge."""
    cases = [
        ("H100, NVSwitch 450, NIC 50", BoxWires.switched(8, 450, 50), (1, 2, 4, 8, 16), 0.98),
        ("A100, NVSwitch 300, NIC 25", BoxWires.switched(8, 300, 25), (1, 2, 4), 0.98),
        ("910B mesh, 28 a wire, NIC 25", BoxWires.mesh(8, 28, 25), (1, 2, 4, 8), 0.98),
        ("910B mesh, one wire down", BoxWires.mesh(8, 28, 25, down=[(0, 1)]), (1, 2), 0.95),
        ("H100 box, one GPU off NVLink", BoxWires.switched(8, 450, 50, off=[3]), (1,), 0.95),
    ]
    rows = []
    for name, box, counts, goal in cases:
        found = [measure(build(box, boxes), box, boxes) for boxes in counts]
        shown = ", ".join(f"x{b} {m.gb_per_s:.1f}/{m.optimal_gb_per_s:.1f}" for b, m in zip(counts, found))
        worst = min(m.ratio for m in found)
        rows.append(
            Row(
                what=f"all-gather {name}",
                value=f"{worst:.4f} ({shown} GB/s)",
                goal=f">= {goal}",
                ok=worst >= goal,
            )
        )
    return rows


def reduction_rows() -> list[Row]:
    """The ordered reductions against the modelled vendor hierarchy: 64 x 8 H100, 1 GiB a rank."""
    tiers = (
        Tier(name="node", size=8, alpha_us=3.4, beta_gb_per_s=360.0),
        Tier(name="net", size=64, alpha_us=14.0, beta_gb_per_s=50.0),
    )
    ring = frozenset({"ring"})
    memory = Memory(gb_per_s=0.8 * 3350)
    vendor = hierarchical("all_reduce", 2.0**30, tiers, ring).time_us or 0.0
    two = ordered_all_reduce(2.0**30, tiers, (8,), memory, allowed=ring).time_us or 0.0
    flat = ordered_all_reduce(2.0**30, tiers, (), memory, allowed=ring).time_us or 0.0
    return [
        Row(what="vendor hierarchical all-reduce", value=f"{vendor / 1e3:.2f} ms", goal="", ok=None),
        Row(
            what="ordered two-level",
            value=f"{two / 1e3:.2f} ms = {two / vendor:.3f}x",
            goal="<= 1.10x",
            ok=two <= 1.10 * vendor,
        ),
        Row(what="ordered flat", value=f"{flat / 1e3:.2f} ms = {flat / vendor:.3f}x", goal="", ok=None),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 1 when a goal is missed."""
    parser = argparse.ArgumentParser(description="What planning costs and how good the plans are.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[16384, 65536])
    parser.add_argument("--json", type=Path, help="write the rows here as well")
    options = parser.parse_args(argv)
    rows = [*planning_rows(options.ranks), *all_gather_rows(), *reduction_rows()]
    width = max(len(r.what) for r in rows if r.value)
    sys.stdout.write(f"{os.cpu_count()} CPUs, Python {sys.version.split()[0]}\n")
    for row in rows:
        mark = {True: "ok", False: "MISSED", None: ""}[row.ok]
        line = f"{row.what.ljust(width)}  {row.value}"
        sys.stdout.write(f"{line}  [{row.goal}] {mark}\n" if row.goal else f"{line}\n")
    if options.json:
        options.json.write_text(json.dumps([asdict(r) for r in rows], indent=1) + "\n")
    return int(any(row.ok is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
