"""The `unirl-scale` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from unirl_scale import __version__
from unirl_scale.core.errors import ConfigError, UniRLError
from unirl_scale.core.load import dump
from unirl_scale.launch.console import Console
from unirl_scale.launch.rank_process import BAD_INPUT, FAILED, INTERRUPTED
from unirl_scale.launch.training import TrainRequest, read_legal, train
from unirl_scale.launch.verifying import VerifyRequest, compare, verify

_OVERRIDES = (
    "settings over the file: dotted keys with list indices, YAML values, "
    "e.g. mesh.actor.tp=2 stages.1.num_steps=5"
)
_STATUS = "exit status: 0 done or equal, 1 failed or different, 2 bad input, 130 stopped by Ctrl-C"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status. A user's mistake prints one `error:` block and no traceback."""
    console = Console(sys.stdout, sys.stderr)
    try:
        return _run(_parse(argv), console)
    except UniRLError as error:
        console.error(str(error))
        return BAD_INPUT if isinstance(error, ConfigError) else FAILED
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
        case "compare":
            return compare(args.run_a, args.run_b, console)
        case "verify":
            return verify(
                VerifyRequest(
                    config=args.config,
                    overrides=tuple(args.overrides),
                    layouts=args.layouts,
                    seed=args.seed,
                    max_ranks=args.max_ranks,
                    steps=args.steps,
                ),
                console,
            )
        case _:
            console.text(dump(read_legal(args.config, args.overrides)))
            return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
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

    train_parser = commands.add_parser(
        "train",
        help="train a configuration",
        description="Train on local ranks of its own, or on the ones that torchrun, mpirun or srun started. "
        "Leaves metrics.jsonl, digests.jsonl, config.yaml, versions.json, plot.png and logs/ in run_dir.",
        epilog=_STATUS,
    )
    _add_config(train_parser)
    train_parser.add_argument(
        "--nproc",
        type=_positive,
        metavar="N",
        help="local ranks to start (default: as many as the meshes span)",
    )
    train_parser.add_argument(
        "--overwrite", action="store_true", help="delete the run that run_dir holds; by default it is refused"
    )

    compare_parser = commands.add_parser(
        "compare",
        help="name the first step and tensor whose digests differ",
        description="Compare the digests of two runs that were trained with digest.every > 0.",
        epilog=_STATUS,
    )
    compare_parser.add_argument("run_a", metavar="RUN_A", help="run directory")
    compare_parser.add_argument("run_b", metavar="RUN_B", help="run directory")

    verify_parser = commands.add_parser(
        "verify",
        help="run random layouts and compare their bits",
        description="The layout lottery: draw random legal layouts, run a few steps of each on local ranks, "
        "compare every digest with the single rank's. Runs go to RUN_DIR-verify-SEED.",
        epilog=_STATUS,
    )
    _add_config(verify_parser)
    add = verify_parser.add_argument
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

    config_parser = commands.add_parser(
        "config",
        help="print the resolved configuration",
        description="Check a configuration and print it with every default filled in.",
        epilog=_STATUS,
    )
    _add_config(config_parser)
    return parser


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=_OVERRIDES)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, must be a whole number >= 1")
    return int(text)
