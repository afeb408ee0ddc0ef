"""`unirl-scale launch`: the batch script for a scheduler, printed or submitted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from unirl_scale.comm.environment_rules import Environment
from unirl_scale.core.check import world_size_of
from unirl_scale.core.config import RunConfig
from unirl_scale.core.errors import ConfigError, UniRLError
from unirl_scale.core.load import load_config
from unirl_scale.launch import environment
from unirl_scale.launch.console import Console
from unirl_scale.launch.job import Job, Scheduler, merged
from unirl_scale.launch.mpirun import MpirunOptions, mpirun_script
from unirl_scale.launch.shrinking import layouts
from unirl_scale.launch.slurm import SlurmOptions, slurm_script
from unirl_scale.launch.torchrun import TorchrunOptions, torchrun_script
from unirl_scale.launch.training import read_legal


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """What the command line asked for.

    Attributes:
        config, overrides: as for `train`.
        scheduler: who starts the ranks.
        nodes, ranks_per_node: where; their product is the configuration's world. ranks_per_node 0 = that.
        min_nodes: nodes on which the run goes on when others fail; 0 = all.
        restarts, pause_s: attempts after the first, and seconds before the second.
        name: of the job; "" = the configuration file's.
        python: interpreter on the nodes.
        topology: files of the machine; () = none.
        product: of Ascend; "" = as the topology shows.
        render: print the script instead of submitting it.
    """

    config: str
    overrides: tuple[str, ...] = ()
    scheduler: Scheduler
    nodes: int = 1
    ranks_per_node: int = 0
    min_nodes: int = 0
    restarts: int = 3
    pause_s: int = 15
    name: str = ""
    python: str = sys.executable
    topology: tuple[str, ...] = ()
    product: str = ""
    render: bool = False
    slurm: SlurmOptions = field(default_factory=SlurmOptions)
    mpirun: MpirunOptions = field(default_factory=MpirunOptions)
    torchrun: TorchrunOptions = field(default_factory=TorchrunOptions)


def launch(request: LaunchRequest, console: Console) -> int:
    """Print the script, or write it next to the run directory and start it; the exit status.

    mpirun and torchrun replace this process: what ends them ends the job.

    Raises:
        ConfigError: whatever is wrong with the configuration, the request or the environment.
        UniRLError: the scheduler's program is missing or refused the job.
    """
    job = make_job(request, environment.current())
    script = render(request, job)
    if request.render:
        console.text(script)
        return 0
    program = {"slurm": "sbatch", "mpirun": "mpirun", "torchrun": request.python}[request.scheduler]
    if shutil.which(program) is None:
        raise UniRLError(
            f"--scheduler: got {request.scheduler}; needs {program} on this host; hint: --render"
        )
    path = Path(job.log_dir) / f"{request.scheduler}.sh"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script)
    path.chmod(0o755)
    if request.scheduler != "slurm":
        console.line(f"{path}: starting {job.layouts[0].ranks} ranks")
        os.execv("/bin/bash", ["bash", str(path)])
    result = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True, check=False)
    if result.returncode:
        raise UniRLError(f"sbatch: {result.stderr.strip() or 'failed'}; hint: see {path}")
    number = result.stdout.strip().split(";")[0]
    console.line(f"{path}: job {number}; output in {job.log_dir}/{job.name}-{number}.out")
    return 0


def make_job(request: LaunchRequest, environ: Mapping[str, str]) -> Job:
    """The job that a request describes.

    Raises:
        ConfigError: whatever is wrong with the configuration, the sizes or the environment.
    """
    from unirl_scale.launch.collectives import collective_environment  # numpy and a YAML parser

    cfg = read_legal(request.config, request.overrides)
    per_node = _ranks_per_node(cfg, request)
    asked = load_config(request.config, request.overrides)
    vendor = cfg.hardware.vendor
    run_dir = Path(cfg.run_dir).absolute()
    return Job(
        name=request.name or Path(request.config).stem,
        command=(
            request.python,
            *("-m", "unirl_scale", "train", str(Path(request.config).absolute())),
            *request.overrides,
        ),
        folder=str(Path.cwd()),
        log_dir=f"{run_dir}.launch",
        ranks_per_node=per_node,
        layouts=tuple(layouts(asked, request.nodes, per_node, request.min_nodes or request.nodes)),
        vendor=vendor,
        environment=merged(
            _numeric(environ, cfg.hardware.threads),
            collective_environment(cfg, request.nodes, per_node, request.topology, environ, request.product),
        ),
        restarts=request.restarts,
        pause_s=request.pause_s,
        # A plan is for one world; the ranks of an elastic job come and go.
        planner=() if cfg.elastic.enabled else _planner(request, per_node),
        elastic=cfg.elastic.enabled,
    )


def render(request: LaunchRequest, job: Job) -> str:
    """The script of the request's scheduler."""
    match request.scheduler:
        case "slurm":
            return slurm_script(job, request.slurm)
        case "mpirun":
            return mpirun_script(job, request.mpirun)
        case "torchrun":
            return torchrun_script(job, request.torchrun)


def _planner(request: LaunchRequest, per_node: int) -> tuple[str, ...]:
    if not request.topology:
        return ()
    return (
        request.python,
        *("-m", "unirl_scale", "plan", str(Path(request.config).absolute())),
        *request.overrides,
        "--quiet",
        f"--devices-per-node={per_node}",
        *("--topology", *(str(Path(file).absolute()) for file in request.topology)),
    )


def _ranks_per_node(cfg: RunConfig, request: LaunchRequest) -> int:
    world, nodes = world_size_of(cfg), request.nodes
    per_node = request.ranks_per_node or -(-world // nodes)
    if per_node * nodes != world:
        fitting = [n for n in range(1, world + 1) if world % n == 0 and world // n <= max(per_node, 8)]
        raise ConfigError(
            f"--nodes: got {nodes} of {per_node} ranks; must be the {world} ranks that the meshes span; "
            f"hint: {' or '.join(f'--nodes {n} --ranks-per-node {world // n}' for n in fitting[:3])}"
        )
    if not 0 <= request.min_nodes <= nodes:
        raise ConfigError(
            f"--min-nodes: got {request.min_nodes}; must be 1..{nodes}; hint: --min-nodes {nodes}"
        )
    return per_node


def _numeric(environ: Mapping[str, str], threads: int) -> Environment:
    reasons = {
        "MKL_CBWR": "one order of additions in MKL, whatever the shapes and threads",
        "OMP_NUM_THREADS": "hardware.threads",
        "MKL_NUM_THREADS": "hardware.threads",
        "PYTHONHASHSEED": "sets in one order on every rank",
    }
    values = environment.numeric_environment(environ, threads)
    return Environment(variables={name: values[name] for name in reasons}, reasons=reasons)
