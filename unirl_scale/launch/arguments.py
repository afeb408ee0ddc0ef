"""The command line: every command, its options and their help."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from unirl_scale import __version__

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # argparse has no public name for it

_OVERRIDES = (
    "settings over the file: dotted keys with list indices, YAML values, "
    "e.g. mesh.actor.tp=2 stages.1.num_steps=5"
)
_STATUS = "exit status: 0 done or equal, 1 failed or different, 2 bad input, 130 stopped by Ctrl-C"


_SETTING = re.compile(r"[A-Za-z_][\w.]*=")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of one command; exits with status 2 where they are wrong."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    # argparse takes positionals in one stretch only; `train CONFIG a=1 --nproc 2 b=2` leaves b=2 here.
    settings = [text for text in rest if "=" in text and not text.startswith("-")]
    # `--topology a b mesh.actor.tp=2` takes the setting for a third file.
    files = getattr(args, "topology", None) or []
    taken = [text for text in files if _SETTING.match(text) and not Path(text).exists()]
    if taken and hasattr(args, "overrides"):
        args.topology = [text for text in files if text not in taken]
        settings, rest = [*taken, *settings], [*taken, *rest]
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
    for add in (_train, _launch, _plan, _probe, _compare, _verify, _checkpoint, _config):
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
        "--overwrite", action="store_true", help="delete the run in run_dir; by default it is continued"
    )
    parser.add_argument(
        "--plan",
        default="",
        metavar="FILE",
        help="run the sums and place the ranks as this plan says (unirl-scale plan --out)",
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
        "--pause",
        type=_natural,
        default=15,
        metavar="S",
        help="seconds before the second attempt, doubled for each further one (default 15)",
    )
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
        help="files of the machine: the collective library is set for it, and a SLURM job plans itself on "
        "the nodes it got",
    )
    _add_product(parser)
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


def _plan(commands: _Commands) -> None:
    parser = commands.add_parser(
        "plan",
        help="plan groups, algorithms, times and memory for a machine",
        description="Decide from topology files, before any process starts, which ranks form which groups, "
        "how each collective runs, what it costs and which variables to export; check, print and write it.",
        epilog=_STATUS,
    )
    _add_config(parser)
    add = parser.add_argument
    add("--topology", nargs="+", default=[], metavar="FILE", help="any files that describe the machine")
    add("--machine", default="", metavar="NAME", help="instead: a known machine, e.g. h100-8, 910b-8")
    add(
        "--ranks",
        type=_positive,
        metavar="N",
        help="ranks to plan for; where the meshes span others, the best layout is searched",
    )
    add("--search", type=_natural, default=0, metavar="N", help="print the N best layouts and plan the first")
    add(
        "--accelerator",
        default="",
        metavar="NAME",
        help="a100, a100-40, h100, h200, b200, gb200 or 910c: predicts times and MFU",
    )
    add("--memory", type=_positive, metavar="GIB", help="a rank may use (default: the accelerator's)")
    add("--devices-per-node", type=_positive, metavar="N", help="where no file says")
    add(
        "--on-degraded",
        choices=("exclude", "refuse", "keep"),
        default="exclude",
        help="devices short of links",
    )
    add("--out", default="", metavar="FILE", help="write the plan, .yaml or .json")
    add("--draw", default="", metavar="FILE", help="draw the machine and its groups, .svg or .png")
    add("--draw-axis", choices=("tp", "dp", "pp"), default="pp", help="what the colours show (default pp)")
    add("--hosts", default="", metavar="FILE", help="write a host file")
    add(
        "--hosts-form",
        choices=("openmpi", "mpich", "slurm", "rankfile"),
        default="openmpi",
        help="of --hosts",
    )
    add("--rank-table", default="", metavar="FILE", help="write an HCCL rank table")
    add("--exports", default="", metavar="FILE", help="write `export` lines for NCCL or HCCL")
    _add_product(parser)
    add("--quiet", action="store_true", help="print no table")


def _probe(commands: _Commands) -> None:
    parser = commands.add_parser(
        "probe",
        help="measure the links between ranks",
        description="Measure latency and bandwidth between ranks, local ones or those that torchrun, mpirun "
        "or srun started, and write a topology YAML for `plan --topology`.",
        epilog=_STATUS,
    )
    add = parser.add_argument
    add("--out", default="probed.yaml", metavar="FILE", help="the YAML (default probed.yaml)")
    add("--topology", nargs="+", default=[], metavar="FILE", help="files whose figures are replaced")
    add("--vendor", choices=("cpu", "cuda", "npu"), default="cpu", help="what is measured (default cpu)")
    add("--nproc", type=_positive, default=2, metavar="N", help="local ranks to start (default 2)")
    add("--sizes", type=_sizes, default=(), metavar="A,B", help="bytes of a message (default 1K to 64M)")
    add("--repeats", type=_positive, default=20, metavar="N", help="exchanges a size (default 20)")


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


def _checkpoint(commands: _Commands) -> None:
    parser = commands.add_parser(
        "checkpoint",
        help="list, verify or export checkpoints",
        description="Look at the durable checkpoints of a run.",
        epilog=_STATUS,
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    path_help = "run directory, its directory of checkpoints, or one checkpoint"
    listing = actions.add_parser("ls", help="one line a checkpoint, newest first", epilog=_STATUS)
    listing.add_argument("path", metavar="PATH", help=path_help)
    checking = actions.add_parser("verify", help="read every byte and compare checksums", epilog=_STATUS)
    checking.add_argument("path", metavar="PATH", help=path_help)
    exporting = actions.add_parser("export", help="write a Hugging Face directory", epilog=_STATUS)
    exporting.add_argument("path", metavar="PATH", help=f"{path_help}; of several, the newest sound one")
    exporting.add_argument("out", metavar="OUT", help="directory to make")
    roles, dtypes = ("actor", "critic", "reference"), ("float32", "bfloat16", "float16")
    exporting.add_argument("--role", choices=roles, default="actor", help="default actor")
    exporting.add_argument("--dtype", choices=dtypes, default="float32", help="default float32")


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


def _add_product(parser: argparse.ArgumentParser) -> None:
    what = "Ascend product: 910, A2, A3, 950 (default: as files show)"
    parser.add_argument("--product", default="", metavar="NAME", help=what)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, must be a whole number >= 1")
    return int(text)


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"got {text!r}, must be a whole number >= 0")
    return int(text)


def _sizes(text: str) -> tuple[int, ...]:
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    sizes = []
    for part in text.split(","):
        number, unit = (part[:-1], units[part[-1]]) if part[-1:] in units else (part, 1)
        if not number.isdecimal() or int(number) < 1:
            raise argparse.ArgumentTypeError(f"got {part!r}, must be bytes such as 4096, 64K or 1M")
        sizes.append(int(number) * unit)
    if len(set(sizes)) < 2:
        raise argparse.ArgumentTypeError(f"got {text!r}, must be two sizes or more")
    return tuple(sorted(set(sizes)))
