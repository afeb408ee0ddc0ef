"""A script that runs torchrun's agent; the same script starts on every node."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from string import Template

from unirl_scale.core.errors import ConfigError
from unirl_scale.launch.job import Job, array, exports, header

_ENDPOINT = re.compile(r"[\w.-]+:\d+|\[[\da-fA-F:]+\]:\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchrunOptions:
    """Where the agents meet.

    Attributes:
        endpoint: HOST:PORT, one of the nodes; "" = this host alone.
        min_nodes: agents that are enough to start or go on.
    """

    endpoint: str = ""
    min_nodes: int = 0


def torchrun_script(job: Job, options: TorchrunOptions) -> str:
    """The script's text.

    Raises:
        ConfigError: several nodes and no endpoint, or one that is not HOST:PORT.
    """
    if options.endpoint and not _ENDPOINT.fullmatch(options.endpoint):
        raise ConfigError(
            f"--endpoint: got {options.endpoint!r}; must be HOST:PORT; hint: --endpoint node1:29400"
        )
    if job.nodes > 1 and not options.endpoint:
        raise ConfigError(
            f"--endpoint: got none for {job.nodes} nodes; must name where the agents meet; "
            "hint: --endpoint FIRST_NODE:29400"
        )
    fewest = options.min_nodes or job.nodes
    python, *rest = job.command
    words = [
        python,
        "-m",
        "torch.distributed.run",
        f"--nnodes={job.nodes if fewest == job.nodes else f'{fewest}:{job.nodes}'}",
        f"--nproc-per-node={job.ranks_per_node}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={options.endpoint or 'localhost:0'}",
        f"--rdzv-id={job.name}",
        # Stock values wait half a minute before a lost node is noticed, and again before the rest start.
        "--rdzv-conf=last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3",
        f"--max-restarts={job.restarts}",
        "--monitor-interval=1",
        "--redirects=3",
        "--tee=0:1",
    ]
    return _SCRIPT.substitute(
        header=header(job, "run it on every node."),
        exports=exports(job.environment),
        torchrun=array("torchrun", words),
        train=array("train", rest),
        folder=shlex.quote(job.folder),
        logs=shlex.quote(job.log_dir),
    )


_SCRIPT = Template(r"""#!/bin/bash
${header}
set -euo pipefail
cd ${folder}

${exports}
# Each attempt gets a store of its own: the agents' shared one keeps addresses of ranks that are gone.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

${torchrun}
${train}
mkdir -p ${logs}
exec "$${torchrun[@]}" --log-dir=${logs} "$${train[@]}"
""")
