"""Trains a tiny model with failures, and holds its digests against those of an undisturbed run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unirl_scale.core.digest_compare import Comparison, compare_digests, read_digests

ROOT = Path(__file__).parents[2]
LONG_STEPS = 60  # of a run that is to last while a process starts
DEADLINE_S = 240.0  # far above what anything takes, for a busy machine
CONFIG = """\
seed: 3
model:
  actor: {hidden_size: 32, num_layers: 2, num_heads: 4, num_kv_heads: 4, head_dim: 8, ffn_size: 64}
mesh: {actor: {dp: 4, micro_batch_size: 4}}
rollout: {max_prompt_tokens: 8, max_response_tokens: 4}
task:
  name: reasoning_gym
  dataset: chain_sum
  options: {min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}
  prompt_template: "{expression}="
  drop_characters: " "
  size: 100
  heldout_size: 0
  tokenizer: {mode: charset, charset: "0123456789+-="}
stages:
  - {name: ppo, num_steps: 5, batch_size: 8, algorithm: {name: ppo}, optim: {lr: 0.001}}
digest: {every: 1}
checkpoint: {snapshot_every: 1, keep: 1}
elastic: {wait_timeout_s: 120}
"""
# Launchers and settings that may surround the tests themselves.
FOREIGN = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "GROUP_",
    "MASTER_",
    "OMPI_",
    "PMI",
    "SLURM_",
    "UNIRL_",
    "MKL_",
    "OMP_",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A run that is over."""

    status: int
    out: str
    err: str


def ended(process: subprocess.Popen[str]) -> Ended:
    """Wait for the end of a process."""
    out, err = process.communicate(timeout=DEADLINE_S)
    return Ended(status=process.returncode, out=out, err=err)


@dataclass(slots=True)
class TrainJob:
    """One run directory and the commands run on it.

    Attributes:
        folder: holds the configuration, `run/` and marks of faults that happened.
        options: settings of every command.
    """

    folder: Path
    options: tuple[str, ...] = ()
    faults: list[dict[str, Any]] = field(default_factory=list)
    process: subprocess.Popen[str] | None = None

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    def fault(self, slot: int, step: int, phase: str, action: str = "kill", collective: int = 0) -> Path:
        """Inject a failure; the returned file appears when it happens, and says when."""
        mark = self.folder / f"fault-{len(self.faults)}"
        place = {"slot": slot, "step": step, "phase": phase, "collective": collective}
        self.faults.append({**place, "action": action, "once": str(mark)})
        return mark

    def slow_down(self, slot: int, steps: range) -> None:
        """Make these steps last long enough for something else to happen meanwhile."""
        for step in steps:
            self.fault(slot, step, "rollout", action="linger")

    def environ(self, **more: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        faults = {"UNIRL_SCALE_FAULTS": json.dumps(self.faults)} if self.faults else {}
        return {**kept, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", **faults, **more}

    def arguments(self, *options: str) -> list[str]:
        """Of a command that trains in this directory."""
        config = self.folder / "run.yaml"
        config.write_text(CONFIG)
        settings = [f"run_dir={self.run_dir}", *self.options, *options]
        return [sys.executable, "-m", "unirl_scale", "train", str(config), *settings]

    def start(self, *options: str, **environ: str) -> subprocess.Popen[str]:
        """Start training on local ranks."""
        self.process = subprocess.Popen(
            self.arguments(*options),
            cwd=self.folder,
            env=self.environ(**environ),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        return self.process

    def start_rank(
        self, slot: int, slots: int, port: int, *options: str, node: int = 0
    ) -> subprocess.Popen[str]:
        """Start one rank as another launcher does; `end` finds it by its working directory."""
        place = {"RANK": slot, "LOCAL_RANK": slot, "WORLD_SIZE": slots, "LOCAL_WORLD_SIZE": slots}
        meeting = {"GROUP_RANK": str(node), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        numbers = {"MKL_CBWR": "AVX2,STRICT", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        return subprocess.Popen(
            self.arguments(*options),
            cwd=self.folder,
            env=self.environ(**{k: str(v) for k, v in place.items()}, **meeting, **numbers),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def wait(self) -> Ended:
        """Wait for the end of what was started."""
        assert self.process is not None
        try:
            out, err = self.process.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGINT)
            out, err = self.process.communicate()
            raise AssertionError(f"the run does not end\n{out}\n{err}\n{self.logs()}") from None
        return Ended(status=self.process.returncode, out=out, err=err)

    def train(self, *options: str) -> Ended:
        """Train to the end."""
        self.start(*options)
        return self.wait()

    def train_well(self, *options: str) -> Ended:
        """Train to an end without errors."""
        ended = self.train(*options)
        assert ended.status == 0, f"{ended}\n{self.logs()}"
        return ended

    def logs(self) -> str:
        """The end of what every rank wrote."""
        logs = sorted(self.run_dir.glob("logs/*.log"))
        return "\n".join(f"{log.name}: {log.read_text(errors='replace')[-3000:]}" for log in logs)

    # ---- what happened --------------------------------------------------------------------------------
    def until(self, happened: Callable[[], bool]) -> None:
        """Wait for something that a live run does."""
        deadline = time.monotonic() + DEADLINE_S
        while not happened():
            assert self.process is None or self.process.poll() is None, self.wait()
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.01)

    def steps(self) -> list[int]:
        """Steps in metrics.jsonl."""
        file = self.run_dir / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [json.loads(line)["step"] for line in lines if line.endswith("\n")]

    def events(self) -> list[Mapping[str, Any]]:
        """Views that completed a step."""
        file = self.run_dir / "elastic" / "events.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def ranks(self) -> list[int]:
        """Ranks of each view, in turn."""
        return [event["ranks"] for event in self.events()]

    def compare(self, undisturbed: Path) -> Comparison:
        return compare_digests(read_digests(undisturbed), read_digests(self.run_dir))

    def require_equal(self, undisturbed: Path) -> None:
        """Every digest of every step is the undisturbed run's."""
        result = self.compare(undisturbed)
        assert result.equal and result.steps > 0, result.first_difference

    def processes(self) -> list[int]:
        """Live processes that work in this folder."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                running = (
                    entry.name.isdecimal()
                    and (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
                )
                if running and os.readlink(entry / "cwd") == str(self.folder):
                    found.append(int(entry.name))
            except OSError:  # ended meanwhile, or another user's
                continue
        return found

    def end(self) -> None:
        """Leave no process behind, whatever failed."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.communicate()
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
