"""A batch script for SLURM: the request, the environment, and a loop that starts the ranks until they finish.

The loop is for what SLURM does not do by itself: start again on the nodes that still answer, on a smaller
layout if need be, and go back into the queue before the time limit ends the job. The ranks of an elastic job
outlive each other: SLURM must not end a step for a rank or node that it lost; spare nodes run spare ranks.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from string import Template

from unirl_scale.core.errors import ConfigError
from unirl_scale.launch.job import NEXT_ATTEMPT, Job, array, exports, header, layout_cases
from unirl_scale.launch.shrinking import Layout

_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_SWITCHES = re.compile(r"[1-9]\d*(?:@[\d:-]+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmOptions:
    """What the job asks of SLURM beyond nodes and devices; "" and 0 = leave it to the site.

    Attributes:
        time: limit, in SLURM's forms: minutes, H:M:S or D-H:M:S.
        grace_s: seconds before the limit at which the ranks are told to save and stop.
        spare_nodes: more nodes than the layout needs, to take the place of those that fail.
        cpus_per_rank: cores of a rank.
        gres: name of the devices where it is not the vendor's usual one, e.g. gpu:h100 or ascend910b.
        segment: nodes that must lie in one block (topology/block).
        switches: leaf switches at most, and how long to wait for that: 1 or 1@2:00:00 (topology/tree).
        exclusive: whole nodes; None = where there are accelerators.
        partition, account, qos, reservation, constraint: as sbatch has them.
        more: further #SBATCH options, e.g. --comment=x.
    """

    time: str = ""
    grace_s: int = 300
    spare_nodes: int = 0
    cpus_per_rank: int = 1
    gres: str = ""
    segment: int = 0
    switches: str = ""
    exclusive: bool | None = None
    partition: str = ""
    account: str = ""
    qos: str = ""
    reservation: str = ""
    constraint: str = ""
    more: tuple[str, ...] = ()


def slurm_script(job: Job, options: SlurmOptions) -> str:
    """The script's text.

    Raises:
        ConfigError: an option that SLURM or the job's size rules out.
    """
    _check(job, options)
    layouts = [*(_spare_layouts(job, options) if job.elastic else ()), *job.layouts]
    directives = "\n".join(f"#SBATCH {option}" for option in _directives(job, options))
    return _SCRIPT.substitute(
        header=header(job, "submit with sbatch."),
        directives=directives,
        exports=exports(job.environment),
        command="\n".join(
            [array("train", job.command), *([array("planner", job.planner)] if job.planner else [])]
        ),
        place=_PLACE_PLANNED if job.planner else _PLACE_IN_ORDER.format(ranks_per_node=job.ranks_per_node),
        logs=shlex.quote(job.log_dir),
        restarts=job.restarts,
        next_attempt=NEXT_ATTEMPT,
        pause_s=job.pause_s,
        cpus_per_rank=options.cpus_per_rank,
        ending=_OUTLIVE if job.elastic else _TOGETHER,
        cases=layout_cases(layouts),
        most=layouts[0].nodes,
        fewest=job.layouts[-1].nodes,
    )


def _spare_layouts(job: Job, options: SlurmOptions) -> list[Layout]:
    """The full layout with spare ranks on 1, 2, ... spare nodes, most first."""
    each = job.ranks_per_node
    counts = range(job.nodes + options.spare_nodes, job.nodes, -1)
    return [Layout(nodes=nodes, ranks=nodes * each) for nodes in counts]


def _directives(job: Job, options: SlurmOptions) -> list[str]:
    per_node = job.ranks_per_node
    lines = [
        f"--job-name={job.name}",
        f"--nodes={job.nodes + options.spare_nodes}",
        f"--ntasks-per-node={per_node}",
        f"--cpus-per-task={options.cpus_per_rank}",
    ]
    if job.vendor == "cuda" and not options.gres:
        lines.append(f"--gpus-per-node={per_node}")
    elif job.vendor != "cpu":
        lines.append(f"--gres={options.gres or 'npu'}:{per_node}")
    if job.vendor != "cpu" if options.exclusive is None else options.exclusive:
        lines += ["--exclusive", "--mem=0"]
    if options.time:
        lines += [f"--time={options.time}", f"--signal=B:USR1@{options.grace_s}"]
    if options.segment:
        lines.append(f"--segment={options.segment}")
    if options.switches:
        lines.append(f"--switches={options.switches}")
    for name in ("partition", "account", "qos", "reservation", "constraint"):
        value = getattr(options, name)
        if value:
            lines.append(f"--{name}={value}")
    return [
        *lines,
        "--requeue",
        "--no-kill",
        "--open-mode=append",
        f"--chdir={job.folder}",
        f"--output={job.log_dir}/%x-%j.out",
        *options.more,
    ]


def _check(job: Job, options: SlurmOptions) -> None:
    limit_s = _seconds(options.time) if options.time else None
    if limit_s is not None and options.grace_s >= limit_s:
        raise ConfigError(
            f"--grace: got {options.grace_s} s with --time {options.time}; must be shorter than the limit; "
            f"hint: --grace {max(1, limit_s // 10)}"
        )
    nodes = job.nodes + options.spare_nodes
    if options.segment and nodes % options.segment:
        legal = [n for n in range(1, nodes + 1) if nodes % n == 0]
        raise ConfigError(
            f"--segment: got {options.segment} for {nodes} nodes; must divide them; "
            f"hint: one of {', '.join(map(str, legal))}"
        )
    if options.switches and not _SWITCHES.fullmatch(options.switches):
        raise ConfigError(f"--switches: got {options.switches!r}; must be like 1 or 1@2:00:00; hint: 1@60")
    for text in (job.folder, job.log_dir, *options.more):
        if re.search(r"\s|%", text):
            raise ConfigError(
                f"launch: got {text!r} for an #SBATCH line; must have no blanks and no %; "
                "hint: another directory"
            )


def _seconds(time: str) -> int:
    """SLURM's time forms: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S."""
    match = _TIME.fullmatch(time)
    if match is None:
        raise ConfigError(f"--time: got {time!r}; must be minutes, H:M:S or D-H:M:S; hint: --time 1-00:00:00")
    days, *parts = (None if part is None else int(part) for part in match.groups())
    given = [part for part in parts if part is not None]
    if days is not None:
        hours, minutes, seconds = (*given, 0, 0)[:3]
    elif len(given) == 3:
        hours, minutes, seconds = given
    else:
        hours, minutes, seconds = 0, *(*given, 0)[:2]
    return (days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds


_TOGETHER = "--kill-on-bad-exit=1 --wait=60"  # the others end with the first rank that fails
_OUTLIVE = "--kill-on-bad-exit=0 --wait=0 --no-kill"
_PLACE_IN_ORDER = """\
place() {{ # node after node, in SLURM's order
  where=(--nodelist="$2" --ntasks-per-node={ranks_per_node} --distribution=block)
}}"""
_PLACE_PLANNED = """\
place() { # ranks on devices as the switches and links say
  tr , '\\n' <<<"$2" >"$1/nodes"
  "${planner[@]}" "$1/nodes" --out "$1/plan.yaml" --hosts "$1/hosts" --hosts-form slurm "${overrides[@]}" ||
    return
  export SLURM_HOSTFILE="$1/hosts"
  where=(--distribution=arbitrary)
  use=(--plan "$1/plan.yaml")
}"""
_SCRIPT = Template(r"""#!/bin/bash
${header}
${directives}
set -uo pipefail

${exports}

${command}
readonly logs=${logs} restarts=${restarts}
pause=${pause_s}

say() { printf '%s launch: %s\n' "$$(date +%FT%T)" "$$*"; }

live_nodes() { # nodes of this job that answer
  sinfo --noheader --Node --nodes="$$SLURM_JOB_NODELIST" --format='%N %t' |
    awk '$$2 !~ /[*]|down|drain|drng|fail|boot|unk|inval/ && !seen[$$1]++ { print $$1 }'
}

layout() { # the largest one for $$1 nodes; all of them give the same bits
  local count=$$(($$1 > ${most} ? ${most} : $$1))
  case $$count in
${cases}
    *) return 1 ;;
  esac
}

ending='' step=''
# shellcheck disable=SC2317 # the trap calls it
leave() { # the time limit is near: the ranks save and stop, and the job goes back into the queue
  ending=yes
  say 'the time limit is near; telling the ranks to stop'
  scancel --signal=TERM "$$SLURM_JOB_ID" # without --batch: the ranks, not this script
}
trap leave USR1

where=() use=() # srun's and the ranks' options for the placement
${place}

run_ranks() { # one attempt; sets status
  local out="$$logs/$$SLURM_JOB_ID.$${SLURM_RESTART_COUNT:-0}.$$1" hosts
  mkdir -p "$$out"
  hosts=$$(printf '%s\n' "$${live[@]:0:$$nodes}" | paste -sd, -)
  say "attempt $$1: $$ranks ranks on $$hosts; logs in $$out"
  place "$$out" "$$hosts" || {
    status=2 # what the planner refuses once it refuses again
    return
  }
  srun --nodes="$$nodes" --ntasks="$$ranks" "$${where[@]}" \
    --cpus-per-task=${cpus_per_rank} --mpi=none ${ending} \
    --unbuffered --output="$$out/rank-%t.log" "$${train[@]}" "$${overrides[@]}" "$${use[@]}" &
  step=$$!
  while kill -0 "$$step" 2>/dev/null; do wait "$$step"; done # a trapped signal ends wait early
  wait "$$step"
  status=$$?
}

status=1
${next_attempt}
  mapfile -t live < <(live_nodes)
  if ! layout "$${#live[@]}"; then
    say "$${#live[@]} nodes answer, at least ${fewest} are needed"
    ending=yes
    break
  fi
  run_ranks "$$attempt"
  say "attempt $$attempt ended with status $$status"
  case $$status in
    0 | 2) break ;; # done, or the configuration is wrong: another attempt would not help
  esac
done

if [[ $$status != 0 && -n $$ending ]]; then
  say 'back into the queue'
  scontrol requeue "$$SLURM_JOB_ID" && exit 0
fi
exit "$$status"
""")
