"""Recovery: from a SIGKILL or SIGSTOP to the next completed step, phase by phase, beside stock torchrun.

    python -m benchmarks.recovery --json recovery.json
    python -m benchmarks.recovery --only shrink,pause --stock ""

Every row is a real run of `unirl-scale train` on 4 CPU ranks of this host, snapshots every step, in which one
rank sends itself the signal in the backward pass of a step. The stock rows are torchrun with
torch.distributed.checkpoint after every step and a toy with as many parameters, see recovery_stock.py.

    detect      until the new rank 0 has heard that the view is over
    agree       until the next view is formed: the others have stopped, a replacement is there
    rebuild     until its process groups are connected
    restore     until the state of training is loaded
    first step  until a step is complete
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import recovery_stock

ROOT = Path(__file__).parents[1]
RANKS, STEP, PAUSE_S = 4, 4, 2.0  # the fault is in step STEP
END_S = 300.0  # far above what a run takes
PHASES = ("detect", "agree", "rebuild", "restore", "first step")
CONFIG = """\
seed: 3
model:
  actor: {{hidden_size: {hidden}, num_layers: {layers}, num_heads: 4, num_kv_heads: 4, head_dim: {head},
    ffn_size: {ffn}}}
mesh: {{actor: {{dp: 4, micro_batch_size: 4}}}}
rollout: {{max_prompt_tokens: 8, max_response_tokens: 4}}
task:
  name: reasoning_gym
  dataset: chain_sum
  options: {{min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}}
  prompt_template: "{{expression}}="
  drop_characters: " "
  size: 100
  heldout_size: 0
  tokenizer: {{mode: charset, charset: "0123456789+-="}}
stages:
  - {{name: ppo, num_steps: 6, batch_size: 8, algorithm: {{name: ppo}}, optim: {{lr: 0.001}}}}
checkpoint: {{snapshot_every: 1, keep: 1}}
elastic: {{enabled: true, wait_timeout_s: 120}}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One failure.

    Attributes:
        slot: of the rank that fails.
        action: see `train/elastic/faults.py`.
        resume_s: seconds after which a stopped rank goes on; None = never.
        ranks: of each view.
        goal_s: from the signal to the next completed step.
    """

    what: str
    slot: int
    action: str
    options: tuple[str, ...]
    ranks: tuple[int, ...]
    goal_s: float | None
    resume_s: float | None = None


SCENARIOS = {
    "shrink": Scenario(
        what="rank killed, three go on in their processes",
        slot=2,
        action="kill",
        options=("elastic.restart=false",),
        ranks=(4, 3),
        goal_s=3.0,
    ),
    "spare": Scenario(
        what="rank killed, a warm spare takes its place",
        slot=2,
        action="kill",
        options=("elastic.restart=false", "elastic.spares=1"),
        ranks=(4, 4),
        goal_s=2.0,
    ),
    "restart": Scenario(
        what="rank killed, a new process takes its place",
        slot=2,
        action="kill",
        options=("elastic.min_ranks=4",),
        ranks=(4, 4),
        goal_s=5.0,
    ),
    "hang": Scenario(
        what="rank stopped for ever, evicted",
        slot=2,
        action="hang",
        options=("elastic.restart=false",),
        ranks=(4, 3),
        goal_s=6.0,
    ),
    "rendezvous": Scenario(
        what="rank 0 killed: hub and host of the store",
        slot=0,
        action="kill",
        options=("elastic.restart=false",),
        ranks=(4, 3),
        goal_s=8.0,
    ),
    "pause": Scenario(
        what=f"rank stopped for {PAUSE_S:g} s, not evicted",
        slot=2,
        action="hang",
        options=("elastic.restart=false",),
        ranks=(4,),
        goal_s=None,
        resume_s=PAUSE_S,
    ),
}
STOCK = {"shrink": "node", "restart": "worker", "hang": "hang", "rendezvous": "rendezvous"}  # scenario -> run


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one run showed.

    Attributes:
        ranks: of each view that completed a step.
        phases_s: name -> seconds; empty where no view ended.
        total_s: from the signal to the next completed step; None = never.
        steps_lost: completed steps that were trained again; None = not known.
    """

    name: str
    what: str
    ranks: tuple[int, ...]
    phases_s: dict[str, float]
    total_s: float | None
    steps_lost: int | None
    goal_s: float | None

    @property
    def good(self) -> bool:
        """Whether issue 3's numbers hold."""
        if self.goal_s is None:
            return len(self.ranks) == 1
        return self.total_s is not None and self.total_s <= self.goal_s and self.steps_lost == 0


def environ(**more: str) -> dict[str, str]:
    """This process's without a launcher's variables."""
    foreign = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "SLURM_", "OMPI_", "PMI", "UNIRL_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return {**kept, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **more}


def run(name: str, scenario: Scenario, config: str, folder: Path) -> Row:
    """Train with one failure.

    Raises:
        RuntimeError: the run failed, or had other views than meant.
    """
    mark = folder / "fault"
    place = {"slot": scenario.slot, "step": STEP, "phase": "backward", "once": str(mark)}
    (folder / "run.yaml").write_text(config)
    process = subprocess.Popen(
        [sys.executable, "-m", "unirl_scale", "train", "run.yaml", "run_dir=run", *scenario.options],
        cwd=folder,
        env=environ(UNIRL_SCALE_FAULTS=json.dumps([{**place, "action": scenario.action}])),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        if scenario.resume_s is not None:
            until(lambda: mark.exists() and bool(mark.read_text()), process)
            time.sleep(max(0.0, float(mark.read_text()) + scenario.resume_s - time.monotonic()))
            for pid in ranks_of(folder, scenario.slot):
                os.kill(pid, signal.SIGCONT)
        out, _ = process.communicate(timeout=END_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    events = [json.loads(line) for line in (folder / "run/elastic/events.jsonl").read_text().splitlines()]
    ranks = tuple(event["ranks"] for event in events)
    if process.returncode or (scenario.goal_s is not None and ranks != scenario.ranks):
        raise RuntimeError(f"{name}: exit status {process.returncode}, views of {ranks} ranks\n{out}")
    phases = phases_of(events[-1], float(mark.read_text())) if len(events) > 1 else {}
    resumed = re.findall(r"continuing after step (\d+)", out)
    return Row(
        name=name,
        what=scenario.what,
        ranks=ranks,
        phases_s=phases,
        total_s=sum(phases.values()) if phases else None,
        steps_lost=STEP - 1 - int(resumed[-1]) if resumed else 0,
        goal_s=scenario.goal_s,
    )


def phases_of(event: dict[str, Any], signal_s: float) -> dict[str, float]:
    """Seconds of each phase, from a line of events.jsonl; see `train/elastic/timeline.py`."""
    marks = ("stopped_s", "formed_s", "connected_s", "restored_s", "first_step_s")
    times = [signal_s, *(event[mark] for mark in marks)]
    return {name: after - before for name, before, after in zip(PHASES, times, times[1:])}


def until(happened: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Raises RuntimeError when the process ends first."""
    while not happened():
        if process.poll() is not None:
            raise RuntimeError(f"ended early\n{process.communicate()[0]}")
        time.sleep(0.01)


def ranks_of(folder: Path, slot: int) -> list[int]:
    """Processes of a slot of the job in this folder."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            here = entry.name.isdecimal() and os.readlink(entry / "cwd") == str(folder)
            if here and f"RANK={slot}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:  # ended meanwhile, or another user's
            continue
    return found


def parameters(hidden: int, layers: int) -> int:
    """Of actor and critic, roughly: attention, a gated feed-forward layer of 4 x hidden."""
    return 2 * layers * (4 + 12) * hidden**2


def table(rows: Sequence[Row], stock: dict[str, recovery_stock.Row]) -> list[str]:
    """Seconds; `-` where there is nothing to say."""
    head = [*PHASES, "total", "goal", "lost", "", "stock"]
    lines = [f"{'':12}" + "".join(f"{name:>11}" for name in head)]
    for row in rows:
        cells = [f"{row.phases_s[name]:.2f}" if row.phases_s else "-" for name in PHASES]
        cells += ["-" if row.total_s is None else f"{row.total_s:.2f}"]
        cells += ["no loss" if row.goal_s is None else f"<= {row.goal_s:g}"]
        cells += [str(row.steps_lost), "met" if row.good else "MISSED"]
        peer = stock.get(row.name)
        cells += ["-" if peer is None else "dies" if peer.total_s is None else f"{peer.total_s:.2f}"]
        lines.append(f"{row.name:12}" + "".join(f"{cell:>11}" for cell in cells))
    lines += ["", *(f"{row.name:12}{row.what}" for row in rows)]
    lines += [f"stock {name:12}{row.what}" for name, row in stock.items()]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(SCENARIOS), help="scenarios, separated by commas")
    parser.add_argument("--stock", default=",".join(STOCK), help="those with a stock run beside them")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--json", default="", help="also write the rows here")
    args = parser.parse_args()
    config = CONFIG.format(hidden=args.hidden, layers=args.layers, head=args.hidden // 4, ffn=4 * args.hidden)
    size = parameters(args.hidden, args.layers)
    rows, stock = [], {}
    for name in filter(None, args.only.split(",")):
        with tempfile.TemporaryDirectory(prefix="recovery-") as folder:
            rows.append(run(name, SCENARIOS[name], config, Path(folder)))
        if name in STOCK and name in args.stock.split(","):
            with tempfile.TemporaryDirectory(prefix="recovery-") as folder:
                stock[name] = recovery_stock.run(STOCK[name], size, environ(), Path(folder))
    print("\n".join(table(rows, stock)))
    if args.json:
        ours = [{**asdict(row), "good": row.good} for row in rows]
        both = {"ours": ours, "stock": {name: asdict(row) for name, row in stock.items()}}
        Path(args.json).write_text(json.dumps(both, indent=2) + "\n")


if __name__ == "__main__":
    main()
