"""The `unirl-scale` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from unirl_scale.core.errors import ConfigError, PlanError, UniRLError
from unirl_scale.core.load import dump
from unirl_scale.launch.arguments import parse
from unirl_scale.launch.console import Console
from unirl_scale.launch.launching import LaunchRequest, launch
from unirl_scale.launch.mpirun import MpirunOptions
from unirl_scale.launch.rank_process import BAD_INPUT, FAILED, INTERRUPTED
from unirl_scale.launch.slurm import SlurmOptions
from unirl_scale.launch.torchrun import TorchrunOptions
from unirl_scale.launch.training import TrainRequest, read_legal, train
from unirl_scale.launch.verifying import VerifyRequest, compare, verify


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status. A user's mistake prints one `error:` block and no traceback."""
    console = Console(sys.stdout, sys.stderr)
    try:
        return _run(parse(argv), console)
    except UniRLError as error:
        console.error(str(error))
        return BAD_INPUT if isinstance(error, ConfigError | PlanError) else FAILED
    except KeyboardInterrupt:
        console.error("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # e.g. `| head`; the interpreter would fail once more when it flushes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _run(args: argparse.Namespace, console: Console) -> int:
    match args.command:
        case "train":
            request = TrainRequest(
                config=args.config, overrides=args.overrides, nproc=args.nproc, overwrite=args.overwrite
            )
            return train(request, console)
        case "launch":
            return launch(_launch_request(args), console)
        case "compare":
            return compare(args.run_a, args.run_b, console)
        case "verify":
            return verify(_verify_request(args), console)
        case _:
            console.text(dump(read_legal(args.config, args.overrides)))
            return 0


def _verify_request(args: argparse.Namespace) -> VerifyRequest:
    return VerifyRequest(
        config=args.config,
        overrides=tuple(args.overrides),
        layouts=args.layouts,
        seed=args.seed,
        max_ranks=args.max_ranks,
        steps=args.steps,
    )


def _launch_request(args: argparse.Namespace) -> LaunchRequest:
    return LaunchRequest(
        config=args.config,
        overrides=tuple(args.overrides),
        scheduler=args.scheduler,
        nodes=args.nodes,
        ranks_per_node=args.ranks_per_node,
        min_nodes=args.min_nodes,
        restarts=args.restarts,
        name=args.name,
        python=args.python,
        topology=tuple(args.topology),
        render=args.render,
        slurm=SlurmOptions(
            time=args.time,
            grace_s=args.grace,
            spare_nodes=args.spare_nodes,
            cpus_per_rank=args.cpus_per_rank,
            gres=args.gres,
            segment=args.segment,
            switches=args.switches,
            exclusive=args.exclusive,
            partition=args.partition,
            account=args.account,
            qos=args.qos,
            reservation=args.reservation,
            constraint=args.constraint,
            more=tuple(args.sbatch),
        ),
        mpirun=MpirunOptions(
            hosts=tuple(args.hosts.split(",")) if args.hosts else (),
            host_file=args.hostfile,
            grace_s=args.grace,
        ),
        torchrun=TorchrunOptions(endpoint=args.endpoint, min_nodes=args.min_nodes),
    )
