"""A job as every scheduler sees it, and the parts that all batch scripts share."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from unirl_scale.comm.environment_rules import Environment
from unirl_scale.core.errors import ConfigError
from unirl_scale.launch.shrinking import Layout

Scheduler = Literal["slurm", "mpirun", "torchrun"]
NEXT_ATTEMPT = """\
for ((attempt = 0; attempt <= restarts; attempt++)); do
  if ((attempt)); then # a lost node is noticed late
    sleep "$pause" &
    wait "$!"
    pause=$((2 * pause))
  fi
  [[ -z $ending ]] || break"""
"""Head of a script's loop, in bash: longer and longer pauses, and none once the job is ending."""
_NAME = re.compile(r"[\w.-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to start, whoever starts it.

    Attributes:
        name: for the queue and the logs.
        command: program and arguments of a rank, without layout overrides.
        folder: working directory.
        log_dir: for the script and the output of every rank.
        ranks_per_node: most ranks a node.
        layouts: the full one, then those for fewer nodes.
        vendor: "cpu", "cuda" or "npu".
        environment: exported to every rank, with reasons.
        restarts: attempts after the first.
        pause_s: before the second attempt, twice as long before each further one: schedulers notice a lost
            node late.
        planner: command that plans the job on nodes whose names are in the file that is put behind it; () =
            nodes in the scheduler's order.
        elastic: ranks that live on go on without those that were lost; ranks beyond the layout's are spares.
    """

    name: str
    command: tuple[str, ...]
    folder: str
    log_dir: str
    ranks_per_node: int
    layouts: tuple[Layout, ...]
    vendor: str = "cpu"
    environment: Environment = field(default_factory=lambda: Environment(variables={}, reasons={}))
    restarts: int = 0
    pause_s: int = 15
    planner: tuple[str, ...] = ()
    elastic: bool = False

    @property
    def nodes(self) -> int:
        """Nodes of the full layout."""
        return self.layouts[0].nodes

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"--name: got {self.name!r}; must be letters, digits, '.', '-' and '_'; hint: --name train"
            )


def exports(environment: Environment) -> str:
    """`export NAME=VALUE  # reason` lines."""
    return "\n".join(environment.lines())


def array(name: str, words: Sequence[str]) -> str:
    """A bash array; a word with a comma is quoted too, as readers and linters expect."""
    quoted = (
        f"'{word}'" if "," in word and shlex.quote(word) == word else shlex.quote(word) for word in words
    )
    return f"{name}=({' '.join(quoted)})"


def layout_cases(layouts: Sequence[Layout]) -> str:
    """Body of a bash `case` over the number of nodes, setting `nodes`, `ranks` and `overrides`.

    Layouts are in falling order, and each also serves the node counts above it that have none of their own.
    """
    lines = []
    for i, layout in enumerate(layouts):
        most = layouts[i - 1].nodes - 1 if i else layout.nodes
        counts = "|".join(str(n) for n in range(layout.nodes, most + 1))
        overrides = " ".join(shlex.quote(text) for text in layout.overrides)
        lines.append(f"    {counts}) nodes={layout.nodes} ranks={layout.ranks} overrides=({overrides}) ;;")
    return "\n".join(lines)


def header(job: Job, how: str) -> str:
    """The comment at a script's top."""
    full = job.layouts[0]
    where = "1 node" if full.nodes == 1 else f"{full.nodes} nodes"
    return f"# {job.name}: {full.ranks} ranks on {where}. Written by `unirl-scale launch`; {how}"


def merged(*parts: Environment) -> Environment:
    """All variables; later parts win."""
    return Environment(
        variables={name: value for part in parts for name, value in part.variables.items()},
        reasons={name: reason for part in parts for name, reason in part.reasons.items()},
    )
