"""A script that starts the ranks with Open MPI's mpirun, again if they fail."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from string import Template

from unirl_scale.core.errors import ConfigError
from unirl_scale.launch.job import NEXT_ATTEMPT, Job, array, exports, header


@dataclass(frozen=True, slots=True, kw_only=True)
class MpirunOptions:
    """Where mpirun starts the ranks.

    Attributes:
        hosts: names, as many as the job has nodes; () = this host, or what the surrounding scheduler gave.
        host_file: instead of `hosts`, in Open MPI's form.
        grace_s: seconds that ranks have to save and stop after a signal.
        passed: further variables that every rank inherits from the script's environment.
    """

    hosts: tuple[str, ...] = ()
    host_file: str = ""
    grace_s: int = 60
    passed: tuple[str, ...] = ()


def mpirun_script(job: Job, options: MpirunOptions) -> str:
    """The script's text.

    Raises:
        ConfigError: hosts that are not one a node.
    """
    if options.hosts and (options.host_file or len(set(options.hosts)) != job.nodes):
        raise ConfigError(
            f"--hosts: got {','.join(options.hosts)} for {job.nodes} nodes; must name each node once, and "
            "stand without --hostfile; hint: --hosts a,b"
        )
    per_node = job.ranks_per_node
    hosts = options.hosts or (("localhost",) if job.nodes == 1 else ())  # else: what the scheduler gave
    where: list[str] = []
    if options.host_file:
        where = ["--hostfile", options.host_file]
    elif hosts:
        where = ["--host", ",".join(f"{host}:{per_node}" for host in hosts)]
    names = [*job.environment.variables, *options.passed]
    words = [
        "mpirun",
        *("-np", str(job.layouts[0].ranks)),
        *("--map-by", f"ppr:{per_node}:node"),
        *("--bind-to", "none"),
        *where,
        *(word for name in names for word in ("-x", name)),
    ]
    return _SCRIPT.substitute(
        header=header(job, "run it on the first node."),
        exports=exports(job.environment),
        mpirun=array("mpirun", words),
        command=array("train", job.command),
        folder=shlex.quote(job.folder),
        logs=shlex.quote(job.log_dir),
        restarts=job.restarts,
        next_attempt=NEXT_ATTEMPT,
        pause_s=job.pause_s,
        grace_s=options.grace_s,
    )


_SCRIPT = Template(r"""#!/bin/bash
${header}
set -uo pipefail
cd ${folder} || exit 1

${exports}
# Time for the ranks to save after a signal, as Open MPI 4 and 5 call it.
export OMPI_MCA_odls_base_sigkill_timeout=${grace_s} PRTE_MCA_odls_base_sigkill_timeout=${grace_s}

${mpirun}
${command}
readonly logs=${logs} restarts=${restarts}
pause=${pause_s}

say() { printf '%s launch: %s\n' "$$(date +%FT%T)" "$$*" >&2; }

ending='' step=''
# shellcheck disable=SC2317 # the traps call it
leave() { # stopped from outside: pass it on, and start nothing again
  ending=yes
  [[ -z $$step ]] || kill -s "$$1" "$$step" 2>/dev/null
}
trap 'leave INT' INT
trap 'leave TERM' TERM

status=1
${next_attempt}
  out="$$logs/attempt-$$attempt"
  mkdir -p "$$out"
  "$${mpirun[@]}" --output-filename "$$out" "$${train[@]}" &
  step=$$!
  while kill -0 "$$step" 2>/dev/null; do wait "$$step"; done # a trapped signal ends wait early
  wait "$$step"
  status=$$?
  [[ $$status == 0 ]] || say "attempt $$attempt ended with status $$status; logs in $$out"
  [[ $$status != 0 && $$status != 2 ]] || break # done, or the configuration is wrong
done
exit "$$status"
""")
