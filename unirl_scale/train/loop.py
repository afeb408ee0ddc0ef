"""The training of one rank on one mesh: build or restore, then stage by stage, step by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from unirl_scale.comm.breaker import Breaker
from unirl_scale.comm.groups import Group, GroupFactory, connect
from unirl_scale.comm.plan import Plan
from unirl_scale.core.config import RunConfig
from unirl_scale.core.errors import ConfigError, MembershipChanged, Stopped, UniRLError
from unirl_scale.core.progress import Progress
from unirl_scale.core.ranks import RankInfo
from unirl_scale.core.suspects import Stragglers, step_balance
from unirl_scale.train.boundary import Boundary, Wish
from unirl_scale.train.checkpoint.resume import restore
from unirl_scale.train.checkpoint.saving import Checkpointer
from unirl_scale.train.checkpoint.session import open_session
from unirl_scale.train.checkpoint.sizes import require_room
from unirl_scale.train.checkpoint.sources import Restored
from unirl_scale.train.evaluate import evaluate
from unirl_scale.train.metrics import Reporter, cut_after
from unirl_scale.train.out_of_memory import explained
from unirl_scale.train.planned import planned_reductions
from unirl_scale.train.recorder import Recorder
from unirl_scale.train.replicas import ReplicaCheck
from unirl_scale.train.roles import Roles
from unirl_scale.train.rundir import RunDir
from unirl_scale.train.setup import Setup, build_algorithm, prepare, transport
from unirl_scale.train.stage import StageRunner
from unirl_scale.train.state import TrainState
from unirl_scale.train.stopping import StopRequest
from unirl_scale.train.tasks.interface import Task

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_TIMEOUT = timedelta(minutes=10)
Meet = Callable[[Mapping[str, str]], "Store | None"]
"""Brings the ranks together: takes what must be equal on all of them (name -> value), refuses to go on where
it is not, and returns the store to build groups on; None for a world of one."""


def run(
    cfg: RunConfig,
    rank_info: RankInfo,
    reporter: Reporter,
    stop: StopRequest,
    meet: Meet,
    plan: Plan | None = None,
) -> TrainState:
    """Train a resolved, legal configuration as one rank of a job whose ranks stay.

    Args:
        reporter: what rank 0 tells the user; silent on other ranks.
        stop: a request to end in good order.
        meet: called once, when this rank is ready for the others.
        plan: says how the ordered sums run; None = flat.

    Raises:
        ConfigError: the ranks do not agree; on rank 0.
        InvarianceError: the platform cannot hold `invariance.mode: layout`.
        CommError: another rank is gone.
        Stopped: `stop` asked for it.
    """
    setup = prepare(cfg)
    progress, breaker = Progress(observers=(stop.observe,)), Breaker()
    stop.on_request = breaker.break_now
    store = meet({"kernels": setup.ops.name, "data": setup.task.fingerprint()})
    backend, device = transport(cfg.hardware)
    joined = connect(
        rank_info.rank,
        rank_info.world_size,
        backend,
        store=store,
        timeout=_TIMEOUT,
        device=device,
        progress=progress,
        breaker=breaker,
    )
    try:
        with joined as factory, torch.no_grad():
            return train(setup, setup.cfg, rank_info, factory, reporter, stop, Boundary(stop), plan=plan)
    except UniRLError as error:
        end_if_asked(stop, error)
        raise


def end_if_asked(stop: StopRequest, error: UniRLError) -> None:
    """Training ended with an error. If that is because the process was asked to stop, save.

    Raises:
        Stopped: the newest snapshot is durable, or cannot be made so.
    """
    if stop.signum and not isinstance(error, Stopped):
        saved = "its newest snapshot is durable" if stop.save_newest() else "nothing more could be saved"
        raise Stopped(f"stopped by {stop.name}; {saved}", stop.signum) from error


def train(
    setup: Setup,
    cfg: RunConfig,
    rank_info: RankInfo,
    factory: GroupFactory,
    reporter: Reporter,
    stop: StopRequest,
    boundary: Boundary,
    *,
    again: bool = False,
    plan: Plan | None = None,
) -> TrainState:
    """From what is saved, or from the start, to the last step; collective over the world.

    Args:
        cfg: as `setup.cfg`, with the meshes to train on.
        rank_info: this rank in the world of `factory`.
        again: this job has trained before, on another mesh: without anything saved it starts over.

    Raises:
        MembershipChanged: `boundary` wants another mesh; every rank has left at the same step.
        Stopped: `stop` asked for it; where checkpoints are kept, one of the last step is durable.
    """
    world, data = factory.world, setup.task.fingerprint()
    stop.save = None  # gives the memory of an earlier mesh back
    world.progress.enter("restore")
    reductions = planned_reductions(plan) if plan else None
    with explained(cfg, world.progress, setup.device):
        roles = Roles(cfg, factory, setup.ops, setup.device, reductions)
    session = open_session(cfg, world, rank_info)
    restored = restore(cfg, session, roles, world, data)
    state = restored.state if restored else TrainState()
    run_dir = RunDir(Path(cfg.run_dir))
    if not again:
        _require_fresh(run_dir, restored)
    needs = [build_algorithm(stage).needs for stage in cfg.stages]
    critic, reference = any(n.critic for n in needs), any(n.reference for n in needs)
    require_room(cfg, session, world, critic=critic, reference=reference)
    checkpointer = Checkpointer(cfg, session, roles, factory, data, restored=restored)
    stop.save, boundary.step = checkpointer.save_newest, state.step
    boundary.watch(world.progress)
    compare = ReplicaCheck(roles, session, cfg.digest.on_mismatch, state.step)
    recorder = None
    if rank_info.rank == 0:
        cut_after(run_dir, state.step, state.optimizer_steps)
        recorder = Recorder(cfg, reporter, {"kernels": setup.ops.name})
    _announce(cfg, state, restored, reporter)
    try:
        for number in range(state.stage, len(cfg.stages)):
            if number > state.stage:
                state = replace(state, stage=number, stage_step=0)
            with explained(cfg, world.progress, setup.device):
                state = run_stage(setup, cfg, state, roles, recorder, checkpointer, boundary, compare)
        world.progress.enter("finish")
        checkpointer.finish(state)
    except BaseException:
        checkpointer.abandon()
        raise
    reporter.end()
    if recorder is not None:
        recorder.warn(state, checkpointer.take_warnings())
        recorder.finish()
    return state


def run_stage(
    setup: Setup,
    cfg: RunConfig,
    state: TrainState,
    roles: Roles,
    recorder: Recorder | None,
    checkpointer: Checkpointer,
    boundary: Boundary,
    compare: ReplicaCheck,
) -> TrainState:
    """The steps of the state's stage that are left, with evaluation before, during and after."""
    stage = cfg.stages[state.stage]
    algorithm = build_algorithm(stage)
    if state.stage_step == 0:  # later on, the roles and the controller are what was restored
        roles.prepare(critic=algorithm.needs.critic, reference=algorithm.needs.reference)
        state = replace(state, kl=algorithm.initial_kl)
    runner = StageRunner(cfg, stage, algorithm, roles, setup.data, checkpointer.fence, compare)
    stragglers = Stragglers(cfg.elastic.straggler_ratio, roles.places())
    if setup.held_out is not None and state.step == 0:
        result = evaluate(roles, setup.held_out, cfg, state.step)
        if recorder is not None:
            recorder.evaluation(state, stage, result)
    while state.stage_step < stage.num_steps:
        state, log = runner.step(state)
        last = state.stage_step == stage.num_steps
        due = cfg.eval.every > 0 and state.stage_step % cfg.eval.every == 0
        if setup.held_out is not None and (last or due):
            result = evaluate(roles, setup.held_out, cfg, state.step)
            log.metrics |= result
            if recorder is not None:
                recorder.evaluation(state, stage, result)
        if recorder is not None:
            metrics = log.metrics | checkpointer.metrics() | step_balance(boundary.computing_s)
            recorder.step(state, stage, metrics, log.digests, log.warnings + checkpointer.take_warnings())
        # After its line is written: a run that continues from this step has the line.
        checkpointer.after_step(state)
        roles.world.progress.enter("boundary")
        wish = boundary.agree(roles.world, state.step)
        if recorder is not None:
            slow = stragglers.note(boundary.computing_s)
            recorder.warn(state, [s.text(checkpointer.session.nodes) for s in slow])
        if wish & Wish.STOP:
            checkpointer.finish(state)
            raise Stopped(f"stopped by a signal after step {state.step}", boundary.signum)
        if wish & Wish.REGROUP:
            checkpointer.fence()
            raise MembershipChanged(f"regrouping after step {state.step}")
    return state


def _require_fresh(run_dir: RunDir, restored: Restored | None) -> None:
    """Raise ConfigError when the directory holds steps of a run but nothing to continue it from."""
    if restored is None and run_dir.has_steps:
        raise ConfigError(
            f"run_dir: got {run_dir.path}; it holds a run, but no checkpoint to continue it from; "
            "hint: another run_dir=..., or --overwrite to delete that run"
        )


def _announce(cfg: RunConfig, state: TrainState, restored: Restored | None, reporter: Reporter) -> None:
    """Say where the run starts."""
    total = sum(s.num_steps for s in cfg.stages)
    reporter.begin(total, state.step)
    if restored is None:
        return
    for note in restored.notes:
        reporter.warn(note)
    reporter.note(f"continuing after step {state.step} of {total} from {restored.source}")
    if state.step == total:
        reporter.note("nothing left to do: every step is done")


def agree(world: Group, task: Task) -> None:
    """Every rank must read the same data.

    Raises:
        ConfigError: naming the ranks that differ.
    """
    prints = world.all_gather_object(task.fingerprint())
    other = [rank for rank, value in zip(world.ranks, prints) if value != prints[0]]
    if other:
        raise ConfigError(
            f"task: got other data on ranks {other[:8]} than on rank 0 (fingerprints {prints[other[0]][:12]} "
            f"and {prints[0][:12]}); every rank must read the same; "
            "hint: the same files and package versions on every host"
        )
