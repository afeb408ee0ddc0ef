"""The training run of one rank: build, then stage by stage, step by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from unirl_scale.comm.groups import connect
from unirl_scale.core.config import ModelConfig, ModelsConfig, RunConfig, StageConfig
from unirl_scale.core.errors import ConfigError
from unirl_scale.core.load import read_options
from unirl_scale.core.ranks import RankInfo
from unirl_scale.kernels.select import op_table, probe_shapes
from unirl_scale.rl.algorithms import ALGORITHMS, build
from unirl_scale.rl.interface import Algorithm
from unirl_scale.train.checkpoint.resume import restore
from unirl_scale.train.checkpoint.saving import Checkpointer
from unirl_scale.train.checkpoint.session import open_session
from unirl_scale.train.checkpoint.sizes import require_room
from unirl_scale.train.checkpoint.sources import Restored
from unirl_scale.train.data import PromptSource, build_task
from unirl_scale.train.evaluate import evaluate
from unirl_scale.train.metrics import MetricsWriter, Reporter, cut_after
from unirl_scale.train.roles import DTYPES, Roles
from unirl_scale.train.rundir import RunDir, write_versions
from unirl_scale.train.stage import StageRunner
from unirl_scale.train.state import TrainState

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
_TIMEOUT = timedelta(minutes=10)
Meet = Callable[[Mapping[str, str]], "Store | None"]
"""Brings the ranks together: takes what must be equal on all of them (name -> value), refuses to go on where
it is not, and returns the store to build groups on; None for a world of one."""


def run(cfg: RunConfig, rank_info: RankInfo, reporter: Reporter, meet: Meet) -> TrainState:
    """Train a resolved, legal configuration as one rank of the job.

    Args:
        reporter: what rank 0 tells the user; silent on other ranks.
        meet: called once, when this rank is ready for the others.

    Raises:
        ConfigError: the ranks do not agree; on rank 0.
        InvarianceError: the platform cannot hold `invariance.mode: layout`.
        CommError: another rank is gone.
    """
    torch.set_num_threads(cfg.hardware.threads)
    device = _device(cfg)
    task = build_task(cfg)
    supervised = any(not build_algorithm(stage).needs.rollout for stage in cfg.stages)
    train_data = PromptSource(task, cfg, "train", supervised=supervised)
    held_out = PromptSource(task, cfg, "heldout") if cfg.eval.num_prompts else None
    cfg = _with_vocabulary(cfg, task.tokenizer.vocab_size)
    leaves = cfg.invariance.model_leaves
    models = [m for m in (cfg.model.actor, cfg.model.critic) if m is not None]
    shapes = [probe_shapes(m, leaves) for m in dict.fromkeys(models)]
    ops = op_table(cfg.hardware, cfg.invariance.mode, shapes, DTYPES[cfg.precision], device)
    store = meet({"kernels": ops.name, "data": task.fingerprint()})
    rank, world_size, backend = rank_info.rank, rank_info.world_size, BACKENDS[cfg.hardware.vendor]
    joined = connect(rank, world_size, backend, store=store, timeout=_TIMEOUT, device=device)
    with joined as factory, torch.no_grad():
        roles = Roles(cfg, factory, ops, device)
        session = open_session(cfg, factory.world, rank_info)
        restored = restore(cfg, session, roles, factory.world, task.fingerprint())
        state = restored.state if restored else TrainState()
        run_dir = RunDir(Path(cfg.run_dir))
        _require_fresh(run_dir, restored)
        needs = [build_algorithm(stage).needs for stage in cfg.stages]
        critic, reference = any(n.critic for n in needs), any(n.reference for n in needs)
        require_room(cfg, session, factory.world, critic=critic, reference=reference)
        checkpointer = Checkpointer(cfg, session, roles, factory, task.fingerprint(), restored=restored)
        recorder = None
        if rank == 0:
            cut_after(run_dir, state.step, state.optimizer_steps)
            recorder = Recorder(cfg, reporter, {"kernels": ops.name})
        _announce(cfg, state, restored, reporter)
        for number in range(state.stage, len(cfg.stages)):
            if number > state.stage:
                state = replace(state, stage=number, stage_step=0)
            state = run_stage(cfg, state, roles, train_data, held_out, recorder, checkpointer)
        checkpointer.finish(state)
        reporter.end()
        if recorder is not None:
            recorder.warn(state, checkpointer.take_warnings())
            recorder.finish()
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


def run_stage(
    cfg: RunConfig,
    state: TrainState,
    roles: Roles,
    data: PromptSource,
    held_out: PromptSource | None,
    recorder: Recorder | None,
    checkpointer: Checkpointer,
) -> TrainState:
    """The steps of the state's stage that are left, with evaluation before, during and after."""
    stage = cfg.stages[state.stage]
    algorithm = build_algorithm(stage)
    if state.stage_step == 0:  # later on, the roles and the controller are what was restored
        roles.prepare(critic=algorithm.needs.critic, reference=algorithm.needs.reference)
        state = replace(state, kl=algorithm.initial_kl)
    runner = StageRunner(cfg, stage, algorithm, roles, data, checkpointer.fence)
    if held_out is not None and state.step == 0:
        _evaluate(roles, held_out, cfg, state, stage, recorder, {})
    while state.stage_step < stage.num_steps:
        state, log = runner.step(state)
        last = state.stage_step == stage.num_steps
        due = cfg.eval.every > 0 and state.stage_step % cfg.eval.every == 0
        if held_out is not None and (last or due):
            _evaluate(roles, held_out, cfg, state, stage, recorder, log.metrics)
        if recorder is not None:
            metrics = log.metrics | checkpointer.metrics()
            recorder.step(state, stage, metrics, log.digests, log.warnings + checkpointer.take_warnings())
        # After its line is written: a run that continues from this step has the line.
        checkpointer.after_step(state)
    return state


def _evaluate(
    roles: Roles,
    held_out: PromptSource,
    cfg: RunConfig,
    state: TrainState,
    stage: StageConfig,
    recorder: Recorder | None,
    metrics: dict[str, float],
) -> None:
    result = evaluate(roles, held_out, cfg, state.step)
    metrics |= result
    if recorder is not None:
        recorder.evaluation(state, stage, result)


def build_algorithm(stage: StageConfig) -> Algorithm:
    """The stage's algorithm with its options read from the plug-in mapping."""
    name = str(stage.algorithm["name"])
    options = read_options(ALGORITHMS[name].options_type, stage.algorithm, "algorithm")
    return build(name, options)


def _with_vocabulary(cfg: RunConfig, size: int) -> RunConfig:
    """`vocab_size: 0` takes the tokenizer's."""

    def sized(model: ModelConfig) -> ModelConfig:
        return model if model.vocab_size else replace(model, vocab_size=size)

    critic = cfg.model.critic
    models = ModelsConfig(actor=sized(cfg.model.actor), critic=sized(critic) if critic else None)
    return replace(cfg, model=models)


def _device(cfg: RunConfig) -> torch.device:
    if cfg.hardware.vendor == "cpu":
        return torch.device("cpu")
    return torch.device(cfg.hardware.vendor, 0)  # the launcher shows each rank its own device only


class Recorder:
    """Rank 0's files and words."""

    def __init__(self, cfg: RunConfig, reporter: Reporter, versions: Mapping[str, str]) -> None:
        run_dir = RunDir(Path(cfg.run_dir))
        write_versions(run_dir, versions)
        self.writer, self.reporter = MetricsWriter(run_dir), reporter
        self.evaluations: list[tuple[str, int, dict[str, float]]] = []

    def step(
        self,
        state: TrainState,
        stage: StageConfig,
        metrics: Mapping[str, float],
        digests: Mapping[int, Mapping[str, str]],
        warnings: list[str],
    ) -> None:
        self.writer.metrics(state.step, stage.name, metrics)
        for number, tensors in digests.items():
            self.writer.digests(number, tensors)
        self.reporter.step(state.step, stage.name, metrics)
        self.warn(state, warnings)

    def warn(self, state: TrainState, warnings: list[str]) -> None:
        for text in warnings:
            self.reporter.warn(f"step {state.step}: {text}")

    def evaluation(self, state: TrainState, stage: StageConfig, result: dict[str, float]) -> None:
        self.evaluations.append((stage.name, state.step, result))
        if state.step == 0:
            self.writer.metrics(0, stage.name, result)

    def finish(self) -> None:
        if self.evaluations:
            rows = [["held-out after", "step", "accuracy", "reward"]]
            for i, (stage, step, r) in enumerate(self.evaluations):
                name = "initial weights" if i == 0 and step == 0 else stage
                rows.append([name, str(step), f"{r['eval/accuracy']:.1%}", f"{r['eval/reward']:.3f}"])
            self.reporter.table(rows)
        self.writer.close()
