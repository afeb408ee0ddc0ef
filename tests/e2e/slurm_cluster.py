"""A real SLURM on this host: munged, slurmctld and one slurmd a node, all on loopback, nothing installed.

Needs the programs of Debian's `slurm-wlm` and `munge`, root (slurmd starts jobs as their user), and a slurmd
built for several daemons a host, as Debian's is. Nodes are called 127.0.0.N, which resolves everywhere.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "sinfo", "scontrol", "scancel")
NODES = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
_CPUS = 4  # that each node claims to have

_CONF = """\
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
TopologyPlugin=topology/tree
MpiDefault=none
GresTypes=gpu,npu
ReturnToService=2
JobRequeue=1
SlurmdTimeout=5
KillWait=3
SchedulerParameters=requeue_delay=0
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=60 State=UP
"""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running SLURM.

    Attributes:
        folder: configuration, state and logs.
        environ: variables that lead SLURM's commands to it.
    """

    folder: Path
    environ: Mapping[str, str]

    def run(self, *command: str, timeout_s: float = 120) -> str:
        """Standard output of one of SLURM's commands."""
        result = subprocess.run(
            command, env=dict(self.environ), capture_output=True, text=True, timeout=timeout_s, check=False
        )
        assert result.returncode == 0, f"{command}: {result.stderr}"
        return result.stdout

    def state(self, job: str) -> str:
        """JobState of a job, e.g. RUNNING."""
        words = dict(word.partition("=")[::2] for word in self.run("scontrol", "show", "job", job).split())
        return words["JobState"]

    def wait(self, job: str, *states: str, timeout_s: float = 120) -> str:
        """Wait until the job is in one of the states; which."""
        deadline_s = time.monotonic() + timeout_s
        while (state := self.state(job)) not in states:
            assert time.monotonic() < deadline_s, f"job {job} is {state}\n{self.logs()}"
            time.sleep(0.3)
        return state

    def lose_node(self, node: str, job: str) -> None:
        """Kill a node's daemon and the job's processes there, as if the host were gone."""
        os.kill(int((self.folder / f"slurmd-{node}.pid").read_text()), 9)
        for pid in _processes_with(f"SLURMD_NODENAME={node}", f"SLURM_JOB_ID={job}"):
            os.kill(pid, 9)

    def return_node(self, node: str) -> None:
        """Start a lost node's daemon again, and wait until it can be used."""
        self.run("slurmd", "-N", node)
        deadline_s = time.monotonic() + 60
        while self.run("sinfo", "--noheader", "--Node", f"--nodes={node}", "--format=%t").strip() != "idle":
            assert time.monotonic() < deadline_s, self.logs()
            time.sleep(0.3)

    def logs(self) -> str:
        """The end of every daemon's log."""
        return "\n".join(
            f"{path.name}:\n{path.read_text()[-2000:]}" for path in sorted(self.folder.glob("*.log"))
        )


def why_not() -> str:
    """Why no cluster can be started here; "" = it can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (apt-get install slurm-wlm munge)"
    return "" if os.geteuid() == 0 else "slurmd needs root to start jobs"


@contextmanager
def cluster(folder: Path, environ: Mapping[str, str]) -> Iterator[Cluster]:
    """Start the daemons, wait until every node is idle, and end them with the block."""
    folder.chmod(0o755)
    (folder / "state").mkdir()
    ports = _free_ports(1 + len(NODES))
    nodes = "\n".join(
        f"NodeName={node} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port} CPUs={_CPUS} "
        f"RealMemory=1000 Gres=gpu:2,npu:2"
        for node, port in zip(NODES, ports[1:], strict=True)
    )
    conf = folder / "slurm.conf"
    conf.write_text(_CONF.format(folder=folder, host=socket.gethostname(), port=ports[0], nodes=nodes))
    (folder / "topology.conf").write_text(
        f"SwitchName=leaf1 Nodes={','.join(NODES[:2])}\nSwitchName=leaf2 Nodes={NODES[2]}\n"
        "SwitchName=spine Switches=leaf[1-2]\n"
    )
    # Any character device passes for a GPU; a GRES without files is a plain count.
    (folder / "gres.conf").write_text(
        "\n".join(f"Name={name}" for name in ("gpu File=/dev/null", "gpu File=/dev/zero", "npu Count=2"))
        + "\n"
    )
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    found = Cluster(folder, {**environ, "SLURM_CONF": str(conf)})
    try:
        _start(found)
        yield found
    finally:
        _end(folder)


def _start(found: Cluster) -> None:
    folder = found.folder
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    found.run(
        "munged",
        "--force",
        f"--key-file={key}",
        f"--socket={folder}/munge.socket",
        f"--pid-file={folder}/munged.pid",
        f"--log-file={folder}/munged.log",
        f"--seed-file={folder}/munged.seed",
    )
    found.run("slurmctld", "-c")
    for node in NODES:
        found.run("slurmd", "-N", node)
    deadline_s = time.monotonic() + 60
    while found.run("sinfo", "--noheader", "--Node", "--format=%t").split() != ["idle"] * len(NODES):
        assert time.monotonic() < deadline_s, found.logs()
        time.sleep(0.3)


def _end(folder: Path) -> None:
    """End every daemon by its process id, and wait for it."""
    for path in sorted(folder.glob("*.pid"), key=lambda path: path.name == "munged.pid"):
        pid = int(path.read_text())
        try:
            os.kill(pid, 15)
            for _ in range(100):
                os.kill(pid, 0)
                time.sleep(0.05)
            os.kill(pid, 9)
        except ProcessLookupError:
            continue


def _processes_with(*variables: str) -> list[int]:
    """Processes that were started with these variables."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and set(variables) <= set(
                (entry / "environ").read_text(errors="replace").split("\0")
            ):
                found.append(int(entry.name))
        except OSError:  # ended meanwhile
            continue
    return found


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()
