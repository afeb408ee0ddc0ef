"""`unirl-scale verify` and `compare`: the same bits from every layout, or the first tensor that differs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from unirl_scale.core.check import world_size_of
from unirl_scale.core.config import (
    CheckpointConfig,
    DigestConfig,
    ElasticConfig,
    EvalConfig,
    MeshesConfig,
    RunConfig,
)
from unirl_scale.core.digest_compare import Comparison, compare_digests, read_digests
from unirl_scale.core.errors import ConfigError
from unirl_scale.core.lottery import describe_layout, draw_layouts
from unirl_scale.launch import environment
from unirl_scale.launch.console import Console
from unirl_scale.launch.rank_process import FAILED
from unirl_scale.launch.training import read_legal, show_outcome, train_local

_MISSING_SHOWN = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyRequest:
    """What the command line asked for.

    Attributes:
        config: YAML file.
        overrides: `key=value` texts over the file.
        layouts: layouts to run, the single rank included.
        seed: of the lottery.
        max_ranks: most ranks of a layout.
        steps: training steps of each stage.
    """

    config: str
    overrides: tuple[str, ...]
    layouts: int
    seed: int
    max_ranks: int
    steps: int


def compare(run_a: str, run_b: str, console: Console) -> int:
    """Print the first step and tensor that differ between two run directories; 0 when all are equal.

    Raises:
        ConfigError: a run is missing, or has no digests or damaged ones.
    """
    result = compare_digests(read_digests(Path(run_a)), read_digests(Path(run_b)))
    if result.equal:
        console.line(f"equal: {result.steps} steps, {result.tensors} digests")
        return 0
    if result.differing:
        console.line(f"different: first at {result.first_difference}")
    for sentence in result.missing[:_MISSING_SHOWN]:
        console.line(f"missing: {sentence}")
    if len(result.missing) > _MISSING_SHOWN:
        console.line(f"missing: {len(result.missing) - _MISSING_SHOWN} more")
    same = result.tensors - len(result.differing)
    console.line(f"A = {run_a}, B = {run_b}; {same} of {result.tensors} shared digests are equal")
    return FAILED


def verify(request: VerifyRequest, console: Console) -> int:
    """Run the layout lottery and print its table; 0 when every layout gave the first one's digests.

    Raises:
        ConfigError: the configuration is wrong, or has fewer legal layouts than asked for.
    """
    cfg = read_legal(request.config, request.overrides)
    if cfg.invariance.mode != "layout":
        raise ConfigError(
            f"invariance.mode: got {cfg.invariance.mode}; only `layout` promises equal bits; "
            "hint: invariance.mode=layout"
        )
    layouts = draw_layouts(cfg, request.layouts, request.seed, request.max_ranks)
    folder = Path(f"{cfg.run_dir}-verify-{request.seed}")
    rows = [("layout", "ranks", "digests equal", "first difference")]
    environ = environment.current()
    ok = True
    for number, layout in enumerate(layouts):
        run = _prepare(cfg, layout, folder / f"layout-{number:02d}", request.steps)
        started_s = time.monotonic()
        status, verdict = _run_one(run, folder / "layout-00", environ, console)
        if status >= 128:  # stopped by a signal
            return status
        ok = ok and status == 0
        console.line(
            f"layout {number + 1}/{len(layouts)}: {verdict[0]}  {time.monotonic() - started_s:.1f} s"
        )
        rows.append((describe_layout(layout), str(world_size_of(run)), *verdict))
        if number == 0 and status:
            break  # nothing to compare with
    console.line()
    console.table(rows)
    return 0 if ok else FAILED


def _prepare(cfg: RunConfig, layout: MeshesConfig, run_dir: Path, steps: int) -> RunConfig:
    """The run with this layout: a few steps a stage, digests at every one, no evaluation, no checkpoint."""
    stages = tuple(
        replace(
            stage,
            num_steps=min(stage.num_steps, steps),
            critic_warmup_steps=min(stage.critic_warmup_steps, steps),
        )
        for stage in cfg.stages
    )
    return replace(
        cfg,
        mesh=layout,
        stages=stages,
        run_dir=str(run_dir),
        digest=DigestConfig(every=1),
        eval=EvalConfig(),
        elastic=ElasticConfig(),
        # Of its own, and none: these runs are overwritten, and their checkpoints would be with them.
        checkpoint=CheckpointConfig(keep=0),
    )


def _run_one(
    run: RunConfig, first: Path, environ: Mapping[str, str], console: Console
) -> tuple[int, tuple[str, str]]:
    """Train one layout: exit status, and (digests equal, first difference) of the table."""
    run_dir = Path(run.run_dir)
    outcome = train_local(run, environ, console, overwrite=True, quiet=True)
    if outcome.status:
        show_outcome(outcome, console, f"{run_dir}: ")
        return (FAILED if outcome.failure else outcome.status), ("failed", f"see {run_dir}/logs")
    result = compare_digests(read_digests(first), read_digests(run_dir))
    if run_dir == first:
        return 0, ("reference", f"{result.steps} steps, {result.tensors} digests")
    return (0 if result.equal else FAILED), _verdict(result)


def _verdict(result: Comparison) -> tuple[str, str]:
    return ("yes", "") if result.equal else ("NO", result.first_difference)
