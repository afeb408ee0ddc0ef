"""The command line: every command, its options and their help."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from unirl_scale import __version__

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # argparse has no public name for it

_OVERRIDES = (
    "settings over the file: dotted keys with list indices, YAML values, "
    "e.g. mesh.actor.tp=2 stages.1.num_steps=5"
)
_STATUS = "exit status: 0 done or equal, 1 failed or different, 2 bad input, 130 stopped by Ctrl-C"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of one command; exits with status 2 where they are wrong."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    # argparse takes positionals in one stretch only; `train CONFIG a=1 --nproc 2 b=2` leaves b=2 here.
    settings = [text for text in rest if "=" in text and not text.startswith("-")]
    if len(settings) < len(rest) or (settings and not hasattr(args, "overrides")):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if settings:
        args.overrides = [*args.overrides, *settings]
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="unirl-scale",
        description="Actor-critic RL training whose bits do not depend on the parallel layout.",
        epilog=_STATUS,
    )
    parser.add_argument("--version", action="version", version=f"unirl-scale {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (_train, _launch, _compare, _verify, _config):
        add(commands)
    return parser


def _train(commands: _Commands) -> None:
    parser = commands.add_parser(
        "train",
        help="train a configuration",
        description="Train on local ranks of its own, or on the ones that torchrun, mpirun or srun started. "
        "Leaves metrics.jsonl, digests.jsonl, config.yaml, versions.json, plot.png and logs/ in run_dir.",
        epilog=_STATUS,
    )
    _add_config(parser)
    parser.add_argument(
        "--nproc",
        type=_positive,
        metavar="N",
        help="local ranks to start (default: as many as the meshes span)",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="delete the run that run_dir holds; by default it is refused"
    )


def _launch(commands: _Commands) -> None:
    parser = commands.add_parser(
        "launch",
        help="write or submit a batch script",
        description="Write the batch script that starts a configuration on a cluster to RUN_DIR.launch/, "
        "then submit it (slurm) or run it here (mpirun, torchrun).",
        epilog=_STATUS,
    )
    _add_config(parser)
    add = parser.add_argument
    add("--scheduler", required=True, choices=("slurm", "mpirun", "torchrun"), help="who starts the ranks")
    add("--nodes", type=_positive, default=1, metavar="N", help="nodes (default 1)")
    add("--ranks-per-node", type=_positive, default=0, metavar="N", help="default: the world over the nodes")
    add("--render", action="store_true", help="print the script and do nothing")
    add("--restarts", type=_natural, default=3, metavar="N", help="attempts after the first (default 3)")
    add(
        "--min-nodes",
        type=_positive,
        default=0,
        metavar="N",
        help="go on with fewer data-parallel replicas on as few nodes when others fail (default: all)",
    )
    add("--name", default="", help="of the job (default: the configuration's)")
    add(
        "--python",
        default=sys.executable,
        metavar="PATH",
        help="interpreter on the nodes (default: this one)",
    )
    add(
        "--topology",
        nargs="+",
        default=[],
        metavar="FILE",
        help="files of the machine, for the collective library's settings and the placement of nodes",
    )
    _slurm_options(parser.add_argument_group("slurm"))
    mpirun = parser.add_argument_group("mpirun")
    mpirun.add_argument("--hosts", default="", metavar="A,B", help="hosts, one a node (default: this one)")
    mpirun.add_argument("--hostfile", default="", metavar="FILE", help="instead, in Open MPI's form")
    torchrun = parser.add_argument_group("torchrun")
    torchrun.add_argument("--endpoint", default="", metavar="HOST:PORT", help="where the agents meet")


def _slurm_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--time", default="", metavar="LIMIT", help="minutes, H:M:S or D-H:M:S")
    add(
        "--grace",
        type=_positive,
        default=300,
        metavar="S",
        help="seconds before the limit to save, stop and go back into the queue (default 300); also the time "
        "that mpirun's ranks have after a signal",
    )
    add("--spare-nodes", type=_natural, default=0, metavar="N", help="more nodes, for those that fail")
    add("--cpus-per-rank", type=_positive, default=1, metavar="N", help="cores of a rank (default 1)")
    add("--gres", default="", metavar="NAME", help="the devices' name on this site, e.g. gpu:h100")
    add("--segment", type=_positive, default=0, metavar="N", help="nodes that must share a block")
    add("--switches", default="", metavar="N[@WAIT]", help="leaf switches at most, and how long to wait")
    add(
        "--exclusive",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="whole nodes (default: where there are accelerators)",
    )
    for name in ("partition", "account", "qos", "reservation", "constraint"):
        add(f"--{name}", default="", help="as for sbatch")
    add(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="a further #SBATCH option, e.g. --sbatch=--comment=x; may be repeated",
    )


def _compare(commands: _Commands) -> None:
    parser = commands.add_parser(
        "compare",
        help="name the first step and tensor whose digests differ",
        description="Compare the digests of two runs that were trained with digest.every > 0.",
        epilog=_STATUS,
    )
    parser.add_argument("run_a", metavar="RUN_A", help="run directory")
    parser.add_argument("run_b", metavar="RUN_B", help="run directory")


def _verify(commands: _Commands) -> None:
    parser = commands.add_parser(
        "verify",
        help="run random layouts and compare their bits",
        description="The layout lottery: draw random legal layouts, run a few steps of each on local ranks, "
        "compare every digest with the single rank's. Runs go to RUN_DIR-verify-SEED.",
        epilog=_STATUS,
    )
    _add_config(parser)
    add = parser.add_argument
    add(
        "--layouts",
        type=_positive,
        default=6,
        metavar="N",
        help="layouts, one of one rank (default 6)",
    )
    add("--seed", type=int, default=0, metavar="S", help="which layouts are drawn (default 0)")
    add("--max-ranks", type=_positive, default=4, metavar="N", help="most ranks of a layout (default 4)")
    add("--steps", type=_positive, default=3, metavar="N", help="steps of each stage (default 3)")


def _config(commands: _Commands) -> None:
    parser = commands.add_parser(
        "config",
        help="print the resolved configuration",
        description="Check a configuration and print it with every default filled in.",
        epilog=_STATUS,
    )
    _add_config(parser)


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=_OVERRIDES)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, must be a whole number >= 1")
    return int(text)


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"got {text!r}, must be a whole number >= 0")
    return int(text)
