"""The `unirl-scale` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from unirl_scale.core.errors import ConfigError, PlanError, UniRLError
from unirl_scale.core.goodput import Machine
from unirl_scale.core.load import dump
from unirl_scale.launch import environment
from unirl_scale.launch.arguments import parse
from unirl_scale.launch.console import Console
from unirl_scale.launch.goodput import COLD, SHRINK, SPARE, GoodputCommand, goodput_command
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
                config=args.config,
                overrides=args.overrides,
                nproc=args.nproc,
                overwrite=args.overwrite,
                plan=args.plan,
            )
            return train(request, console)
        case "plan":
            return _run_plan(args, console)
        case "probe":
            return _run_probe(args, console)
        case "launch":
            return launch(_launch_request(args), console)
        case "compare":
            return compare(args.run_a, args.run_b, console)
        case "verify":
            return verify(_verify_request(args), console)
        case "checkpoint":
            return _checkpoint(args, console)
        case "goodput":
            return goodput_command(_goodput_command(args), console)
        case _:
            console.text(dump(read_legal(args.config, args.overrides)))
            return 0


def _checkpoint(args: argparse.Namespace, console: Console) -> int:
    # Reading checkpoints needs torch, which takes seconds to load; other commands do without.
    from unirl_scale.launch import checkpoints

    match args.action:
        case "ls":
            return checkpoints.list_saves(args.path, console)
        case "verify":
            return checkpoints.verify_saves(args.path, console)
        case _:
            return checkpoints.export_save(args.path, args.out, args.role, args.dtype, console)


def _goodput_command(args: argparse.Namespace) -> GoodputCommand:
    return GoodputCommand(
        ranks=tuple(args.ranks),
        machine=Machine(
            device_mtbf_h=args.mtbf,
            lost_devices=args.lost_devices,
            repair_h=args.repair,
            step_s=args.step,
        ),
        snapshot_stall_s=args.snapshot_stall,
        snapshot_interval_s=args.snapshot_interval,
        checkpoint_stall_s=args.checkpoint_stall,
        checkpoint_interval_s=args.checkpoint_interval,
        phases_s={SHRINK: args.shrink, SPARE: args.spare, COLD: args.cold},
        measured=args.measured,
    )


def _run_plan(args: argparse.Namespace, console: Console) -> int:
    from unirl_scale.comm.plan_request import PlanRequest
    from unirl_scale.launch.planning import PlanCommand, plan_command

    command = PlanCommand(
        config=args.config,
        overrides=tuple(args.overrides),
        request=PlanRequest(
            files=tuple(args.topology),
            machine=args.machine,
            ranks=args.ranks,
            accelerator=args.accelerator,
            memory_bytes=args.memory * float(1 << 30) if args.memory else None,
            on_degraded=args.on_degraded,
            devices_per_node=args.devices_per_node,
        ),
        search=args.search,
        out=args.out,
        draw=args.draw,
        draw_axis=args.draw_axis,
        hosts=args.hosts,
        hosts_form=args.hosts_form,
        rank_table=args.rank_table,
        exports=args.exports,
        product=args.product,
        quiet=args.quiet,
    )
    return plan_command(command, environment.current(), console)


def _run_probe(args: argparse.Namespace, console: Console) -> int:
    from unirl_scale.launch.probing import ProbeCommand, probe_command

    command = ProbeCommand(
        out=args.out,
        topology=tuple(args.topology),
        vendor=args.vendor,
        nproc=args.nproc,
        sizes=args.sizes,
        repeats=args.repeats,
    )
    return probe_command(command, console)


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
        pause_s=args.pause,
        name=args.name,
        python=args.python,
        topology=tuple(args.topology),
        product=args.product,
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
