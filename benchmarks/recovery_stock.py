"""The same failures under torchrun and torch.distributed.checkpoint: the baseline of recovery.py.

A toy of the same size trains with DistributedDataParallel and Adam and saves a checkpoint after every step,
each into a directory of its own, which a rank that starts again loads. As `python -m` it is a rank.

    worker       torchrun --standalone --max-restarts, one worker killed
    node         one agent a rank, --nnodes 3:4, one agent and its worker killed; set to notice it fast
    hang         as worker, one worker stopped; the group's timeout is 10 s
    rendezvous   as node, the agent that hosts the rendezvous and its worker killed
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

WIDTH = 128
STEPS, STEP, STEP_S = 8, 4, 0.1
GIVE_UP_S = 90.0  # without a step after the failure
GROUP_TIMEOUT_S = 10
FAST = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
WHAT = {
    "worker": "torchrun --standalone --max-restarts=3, a worker killed (with an agent store of its own)",
    "node": f"torchrun --nnodes=3:4, an agent and its worker killed ({FAST})",
    "hang": f"torchrun --standalone, a worker stopped for ever, group timeout {GROUP_TIMEOUT_S} s",
    "rendezvous": "torchrun --nnodes=3:4, the agent that hosts the rendezvous and its worker killed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """From the signal to the next completed step; None = never."""

    what: str
    total_s: float | None


def run(kind: str, parameters: int, environ: Mapping[str, str], folder: Path) -> Row:
    """One run with the failure `kind` at the end of step STEP."""
    victim = 0 if kind == "rendezvous" else 2
    variables = {
        **environ,
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # without it, the workers never meet again
        "TOY": json.dumps({"kind": kind, "victim": victim, "folder": str(folder), "parameters": parameters}),
    }
    agents = []
    program = ["-m", "benchmarks.recovery_stock"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--max-restarts=3", "--monitor-interval=0.1"]
    if kind in ("worker", "hang"):
        commands = [[*torchrun, "--standalone", "--nproc-per-node=4", *program]]
    else:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-conf={FAST}"]
        commands = [[*torchrun, "--nnodes=3:4", "--nproc-per-node=1", *meeting, *program]] * 4
    with (folder / "log").open("wb") as log:
        for command in commands:
            agents.append(
                subprocess.Popen(command, env=variables, stdout=log, stderr=log, start_new_session=True)
            )
            time.sleep(1.0 if len(commands) > 1 and len(agents) == 1 else 0.0)  # the first is the host
    try:
        return Row(what=WHAT[kind], total_s=_recovered(folder, agents))
    finally:
        for agent in agents:
            _kill_group(agent.pid)
            agent.wait()
        for mark in folder.glob("pid-*"):
            _kill_group(int(mark.name.partition("-")[2]))


def _recovered(folder: Path, agents: list[subprocess.Popen[bytes]]) -> float | None:
    """Seconds from the failure to the next completed step."""
    fault, steps = folder / "fault", folder / "steps"
    deadline_s = time.monotonic() + GIVE_UP_S
    while time.monotonic() < deadline_s:
        time.sleep(0.02)
        if not (fault.exists() and fault.read_text()):
            if all(agent.poll() is not None for agent in agents):
                raise RuntimeError(f"stock run ended early\n{(folder / 'log').read_text()[-3000:]}")
            continue
        failed_s = float(fault.read_text())
        deadline_s = min(deadline_s, failed_s + GIVE_UP_S)
        done = [float(line) for line in steps.read_text().splitlines(keepends=True) if line.endswith("\n")]
        after = [when for when in done if when > failed_s]
        if after:
            return after[0] - failed_s
        if all(agent.poll() is not None for agent in agents):
            return None
    return None


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


# ---- a rank --------------------------------------------------------------------------------------------
def train(kind: str, victim: int, folder: Path, parameters: int, rank: int) -> None:
    """Steps of the toy, from the newest checkpoint on."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.nn.parallel import DistributedDataParallel

    (folder / f"pid-{os.getpid()}").touch()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=GROUP_TIMEOUT_S if kind == "hang" else 600))
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(max(1, parameters // WIDTH**2))]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    adam, step = torch.optim.Adam(model.parameters()), 0

    def train_one() -> None:
        adam.zero_grad()
        model(torch.randn(8, WIDTH)).square().mean().backward()
        adam.step()

    saves = sorted(
        (int(path.name), path) for path in (folder / "saves").glob("*") if (path / ".metadata").exists()
    )
    if saves:
        train_one()  # so that Adam has the state that is loaded
        step, newest = saves[-1]
        state = {"model": model.state_dict(), "adam": adam.state_dict()}
        dcp.load(state, checkpoint_id=newest)
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["adam"])
    while step < STEPS:
        train_one()
        time.sleep(STEP_S)  # what a step of ours takes
        step += 1
        if step == STEP and rank == victim and _first_time(folder / "fault"):
            _fail(kind)
        dcp.save(
            {"model": model.state_dict(), "adam": adam.state_dict()},
            checkpoint_id=folder / "saves" / str(step),
        )
        if rank == 0:
            with (folder / "steps").open("a") as file:
                file.write(f"{time.monotonic()!r}\n")
    dist.destroy_process_group()


def _first_time(path: Path) -> bool:
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    partial = path.with_suffix(".part")
    partial.write_text(repr(time.monotonic()))
    partial.replace(path)
    return True


def _fail(kind: str) -> None:
    if kind in ("node", "rendezvous"):
        os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGSTOP if kind == "hang" else signal.SIGKILL)


if __name__ == "__main__":
    toy = json.loads(os.environ["TOY"])
    train(toy["kind"], toy["victim"], Path(toy["folder"]), toy["parameters"], int(os.environ["RANK"]))
