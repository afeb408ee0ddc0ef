"""A trainer without arithmetic, put in front of the real one through PYTHONPATH.

The command line's promises (who ends whom, what is printed, which status) do not depend on what a rank
computes, and a rank without torch starts in a tenth of a second. Python imports this file by its name.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
import types
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeTaskOptions:
    """What should happen, and to whom."""

    fail_rank: int = -1
    fail_how: str = ""  # user | bug | kill | exit | hang
    step_s: float = 0.0
    unstable: bool = False  # digests that depend on the actor's tp
    child: bool = False  # every rank starts a process of its own
    follow: bool = False  # the other ranks notice the failure, as ranks in a collective do


class FakeTask:
    options_type: ClassVar[type] = FakeTaskOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class FakePpoOptions:
    clip: float = 0.2
    gamma: float = 1.0


class FakePpo:
    options_type: ClassVar[type] = FakePpoOptions
    needs = types.SimpleNamespace(min_group_size=1)

    def __init__(self, options: FakePpoOptions) -> None:
        from unirl_scale.core.errors import ConfigError

        if not 0 <= options.gamma <= 1:
            raise ConfigError(f"algorithm.gamma: got {options.gamma}, must lie in [0, 1]\nhint: gamma: 1")


def run(cfg: Any, info: Any, reporter: Any, stop: Any, meet: Any, plan: Any) -> None:
    """The loop's entry point: one file line and one progress line a step on rank 0."""
    from pathlib import Path

    from unirl_scale.train.metrics import KL, REWARD, MetricsWriter
    from unirl_scale.train.rundir import RunDir

    options = {name: value for name, value in cfg.task.items() if name != "name"}
    if options["child"]:
        import subprocess

        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    steps = [stage.name for stage in cfg.stages for _ in range(stage.num_steps)]
    if info.rank == options["fail_rank"]:
        time.sleep(0.1)
        fail(options["fail_how"])
    if 0 <= options["fail_rank"] < info.world_size:
        wait(options["follow"])
    if info.rank != 0:
        return
    reporter.begin(len(steps))
    with MetricsWriter(RunDir(Path(cfg.run_dir))) as writer:
        for step, stage in enumerate(steps, start=1):
            time.sleep(options["step_s"])
            metrics = {REWARD: step / len(steps), KL: 0.01 * step}
            writer.metrics(step, stage, metrics)
            if cfg.digest.every:
                salt = cfg.mesh.actor.tp if options["unstable"] and step > 1 else 0
                digest = hashlib.sha256(f"{step} {salt}".encode()).hexdigest()
                writer.digests(step, {"loss": "same", "actor/weight": digest})
            reporter.step(step, stage, metrics)
    reporter.end()
    reporter.note(
        f"environment MKL_CBWR={os.environ['MKL_CBWR']} OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}"
    )


def wait(follow: bool) -> None:
    """What ranks do while another fails: hang in a collective, or learn of it."""
    from unirl_scale.core.errors import CommError

    if follow:
        time.sleep(0.11)
        raise CommError("a peer is gone")
    time.sleep(600)


def fail(how: str) -> None:
    from unirl_scale.core.errors import InvarianceError

    if how == "user":
        raise InvarianceError("op linear: got rows that move; must hold; hint: invariance.mode=run")
    if how == "bug":
        raise ZeroDivisionError("a bug")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        os._exit(3)


def module(name: str, **contents: Any) -> None:
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(contents)


ALGORITHMS = {"ppo": FakePpo, "sft": FakePpo}
module(
    "unirl_scale.rl.algorithms", ALGORITHMS=ALGORITHMS, build=lambda name, options: ALGORITHMS[name](options)
)
module("unirl_scale.train.tasks.tasks", TASKS={"fake": FakeTask})
module("unirl_scale.train.loop", run=run)
