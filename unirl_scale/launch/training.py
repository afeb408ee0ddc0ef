"""`unirl-scale train`: as the launcher of local ranks, and as one rank."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from unirl_scale.core.check import check, require_legal, world_size_of
from unirl_scale.core.config import HardwareConfig, RunConfig
from unirl_scale.core.errors import ConfigError, PlanError
from unirl_scale.core.load import dump, load_config, resolve
from unirl_scale.core.pretrained import with_pretrained
from unirl_scale.core.problems import raise_all
from unirl_scale.core.progress import Progress
from unirl_scale.core.ranks import RankInfo
from unirl_scale.launch import environment
from unirl_scale.launch.console import Console
from unirl_scale.launch.local import Outcome, run_local
from unirl_scale.launch.meeting import Meeting
from unirl_scale.launch.mpi import ask_mpi
from unirl_scale.launch.plugins import algorithm_problems, plugin_options
from unirl_scale.launch.rank_process import run_as_rank, show_error
from unirl_scale.launch.ranks import discover
from unirl_scale.launch.stop_signals import stop_signals
from unirl_scale.launch.supervise import Job, supervise
from unirl_scale.train.checkpoint.names import checkpoint_dir
from unirl_scale.train.elastic.faults import fault_observer, read_faults
from unirl_scale.train.metrics import SilentReporter
from unirl_scale.train.rundir import RunDir, claim, write_config, write_versions
from unirl_scale.train.stopping import StopRequest

if TYPE_CHECKING:
    from unirl_scale.comm.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRequest:
    """What the command line asked for.

    Attributes:
        config: YAML file.
        overrides: `key=value` texts over the file.
        nproc: local ranks to start; None = as many as the meshes span.
        overwrite: delete the run that is in run_dir.
        plan: file that `unirl-scale plan --out` wrote; "" = none.
    """

    config: str
    overrides: Sequence[str] = ()
    nproc: int | None = None
    overwrite: bool = False
    plan: str = ""


def train(request: TrainRequest, console: Console) -> int:
    """Train on the ranks that a launcher started, or on local ranks of our own; the exit status.

    Raises:
        ConfigError: everything that is wrong, before any rank is started.
    """
    environ, nproc = environment.current(), request.nproc
    info = discover(environ, ask_mpi)
    if info.launcher == "none" or (nproc is not None and info.world_size == 1):
        cfg = read_legal(request.config, request.overrides, nproc)
        outcome = train_local(cfg, environ, console, overwrite=request.overwrite, plan=request.plan)
        show_outcome(outcome, console)
        return outcome.status
    if nproc is not None:
        raise ConfigError(
            f"--nproc: got {nproc}, but {info.launcher} started {info.world_size} ranks already; "
            "hint: leave --nproc out, or start without that launcher"
        )
    return run_as_rank(partial(_train_rank, request, info, environ, console), info.rank, environ, console)


def read_legal(config: str, overrides: Sequence[str], world_size: int | None = None) -> RunConfig:
    """The resolved configuration after every check that needs no rank.

    Raises:
        ConfigError: all violations at once.
    """
    asked = with_pretrained(load_config(config, overrides, plugin_options()))
    raise_all([*check(asked, world_size), *algorithm_problems(asked)], config)
    return resolve(asked)


def show_outcome(outcome: Outcome, console: Console, prefix: str = "") -> None:
    """Say why the ranks did not finish; nothing when they did."""
    if outcome.signum is not None:
        console.error(f"{prefix}stopped by {signal.Signals(outcome.signum).name}; every rank has ended")
        if outcome.last_words:
            console.detail(outcome.last_words)
    elif outcome.failure is not None:
        failure = outcome.failure
        show_error(console, f"{prefix}rank {failure.rank}: {failure.message}", failure.detail)


def train_local(
    cfg: RunConfig,
    environ: Mapping[str, str],
    console: Console,
    *,
    overwrite: bool,
    quiet: bool = False,
    plan: str = "",
) -> Outcome:
    """Run a legal, resolved configuration on fresh local ranks; its run directory is held meanwhile.

    Raises:
        ConfigError: the run directory is in use, holds a run already or cannot be made.
    """
    run_dir = RunDir(Path(cfg.run_dir))
    with _claimed(cfg, run_dir, overwrite=overwrite):
        write_config(run_dir, dump(cfg))
        write_versions(run_dir, {})
        variables = {**environ, **environment.numeric_environment(environ, cfg.hardware.threads)}
        command = [sys.executable, "-m", "unirl_scale", "train", str(run_dir.config)]
        command += ["--plan", plan] if plan else []
        ranks, elastic = world_size_of(cfg), cfg.elastic
        if not elastic.enabled:
            return run_local(command, ranks, variables, run_dir.logs, grace_s=elastic.grace_s, quiet=quiet)
        job = Job(
            command=command,
            slots=ranks + elastic.spares,
            environ={**variables, **environment.elastic_environment(environ)},
            log_dir=run_dir.logs,
            restart=elastic.restart,
            max_restarts=elastic.max_restarts_per_step,
            grace_s=elastic.grace_s,
            progress=lambda: run_dir.metrics.stat().st_size if run_dir.has_steps else 0,
            say=console.warn,
        )
        return supervise(job)


def _claimed(
    cfg: RunConfig, run_dir: RunDir, *, overwrite: bool, job: str = ""
) -> AbstractContextManager[bool]:
    resume = cfg.checkpoint.resume != "never"
    return claim(run_dir, checkpoint_dir(cfg), overwrite=overwrite, resume=resume, job=job)


def _train_rank(request: TrainRequest, info: RankInfo, environ: Mapping[str, str], console: Console) -> None:
    """The work of one rank, from its configuration to the last step."""
    # The plug-ins load torch, and the variables must be there before it.
    hardware = _hardware(request)
    environment.hide_mpi()
    environment.apply(environment.numeric_environment(environ, hardware.threads))
    plan = _read_plan(request.plan)
    device = int(plan.device[info.rank]) if plan is not None and info.rank < plan.world_size else None
    environment.apply(environment.device_environment(hardware, info, environ, device))
    cfg = read_legal(request.config, request.overrides)
    if not cfg.elastic.enabled:
        require_legal(cfg, info.world_size, request.config)
    if plan is not None:
        _require_planned(cfg, plan, info, environ)
    run_dir = RunDir(Path(cfg.run_dir))
    if info.launcher == "local" or info.rank != 0:  # held by our launcher, or by rank 0
        _run_loop(cfg, run_dir, info, console, plan)
        return
    job = info.job if cfg.elastic.enabled else ""
    with _claimed(cfg, run_dir, overwrite=request.overwrite, job=job) as first:
        if first:
            write_config(run_dir, dump(cfg))
            write_versions(run_dir, {})
        _run_loop(cfg, run_dir, info, console, plan)


def _read_plan(path: str) -> Plan | None:
    if not path:
        return None
    from unirl_scale.comm.plan_file import read_plan

    return read_plan(path)


def _require_planned(cfg: RunConfig, plan: Plan, info: RankInfo, environ: Mapping[str, str]) -> None:
    """The plan is for this run, and this rank is where it says.

    Raises:
        PlanError: it is not.
    """
    from unirl_scale.train.planned import require_planned

    require_planned(cfg, plan, info.world_size)
    planned = plan.nodes[plan.node[info.rank]]
    here = environ.get("SLURMD_NODENAME") or socket.gethostname()
    several = len(plan.nodes) > 1 and info.world_size > info.local_world_size
    if several and here != planned and here.split(".")[0] != planned.split(".")[0]:
        raise PlanError(
            f"plan.placement: got rank {info.rank} on {planned}; it runs on {here}; must be the same; "
            "hint: start the ranks with the plan's host file (unirl-scale plan --hosts)"
        )


def _hardware(request: TrainRequest) -> HardwareConfig:
    """What the file says of the hardware; the defaults when it is wrong, which the full reading will say."""
    try:
        found = load_config(request.config, request.overrides).hardware
    except ConfigError:
        return HardwareConfig()
    return replace(found, threads=max(1, found.threads))


def _run_loop(cfg: RunConfig, run_dir: RunDir, info: RankInfo, console: Console, plan: Plan | None) -> None:
    from unirl_scale.train.plot import plot_run

    environ = environment.current()
    # Open MPI gives every rank a terminal of its own, whose output it then passes on line by line.
    reporter = console.reporter(live=info.launcher in ("local", "none"))
    stop = StopRequest(cfg.elastic.grace_s, at_once=cfg.checkpoint.snapshot_every > 0)
    with stop_signals(stop):
        if cfg.elastic.enabled:
            from unirl_scale.train.elastic.session import run_elastic

            faults = read_faults(environ.get(environment.FAULTS, ""))
            progress = Progress(observers=(fault_observer(faults, info.rank),))
            last_rank = run_elastic(cfg, info, reporter, stop, progress)
        else:
            from unirl_scale.train.loop import run

            mine = reporter if info.rank == 0 else SilentReporter()
            run(cfg, info, mine, stop, Meeting(cfg, info, environ), plan)
            last_rank = info.rank
    if last_rank == 0:
        plot_run(run_dir, reporter)
