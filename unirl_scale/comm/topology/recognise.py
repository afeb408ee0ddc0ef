"""One reader for all: tell the format by content, never by the file's name."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from unirl_scale.comm.topology import (
    fabrics,
    hostfile,
    native,
    nccl_xml,
    npu_smi,
    nvidia_smi,
    rank_table,
    rank_table_v2,
    simulators,
    slurm_address,
    slurm_conf,
    slurm_yaml,
    topograph,
)
from unirl_scale.comm.topology.model import Topology
from unirl_scale.comm.topology.source import Source, load

Reader = Callable[[Source], Topology]

READERS: dict[str, tuple[Callable[[Source], bool], Reader]] = {
    "our YAML": (native.looks_like, native.read),
    "NCCL/RCCL/FlagCX topology XML": (nccl_xml.looks_like, nccl_xml.read),
    "HCCL topology file": (rank_table_v2.looks_like_edges, rank_table_v2.read_edges),
    "HCCL rank table": (rank_table.looks_like, rank_table.read),
    "TACCL topology": (simulators.looks_like_taccl, simulators.read_taccl),
    "ASTRA-sim network": (simulators.looks_like_astra, simulators.read_astra),
    "SLURM topology.conf or scontrol show topology": (slurm_conf.looks_like, slurm_conf.read),
    "SLURM_TOPOLOGY_ADDR": (slurm_address.looks_like, slurm_address.read),
    "SLURM topology.yaml": (slurm_yaml.looks_like, slurm_yaml.read),
    "topograph model": (topograph.looks_like, topograph.read),
    "htsim topology": (fabrics.looks_like_htsim, fabrics.read_htsim),
    "ns-3 topology": (fabrics.looks_like_ns3, fabrics.read_ns3),
    "nvidia-smi topo -m": (nvidia_smi.looks_like, nvidia_smi.read),
    "npu-smi info -t topo": (npu_smi.looks_like, npu_smi.read),
    "host file": (hostfile.looks_like, hostfile.read),
}
"""Format -> (recogniser, reader), tried in this order."""

_RUN_TOPO_M = "run `nvidia-smi topo -m`"
_RUN_TOPO = "run `npu-smi info -t topo`"
_SHOW_TOPOLOGY = "give topology.conf, or the output of `scontrol show topology`"
_NEAR_MISSES = (
    (
        r"No topology information available",
        "what scontrol prints without a topology plug-in",
        "ask the administrator",
    ),
    (r"^unirl_scale_plan\b", "a plan", "give the topology files that it was made from"),
    (r"^(stages|model):", "a run configuration", "give it as CONFIG; --topology takes files of the machine"),
    (r"^\S+: .*\b(GPU|NPU|Phy-ID)\d", "lines with their host's name in front", "give one machine's output"),
    (r"NVIDIA-SMI has failed", "an error of nvidia-smi", f"fix the driver, then {_RUN_TOPO_M}"),
    (r"\bLink \d+: .*(GB/s|inactive)", "the link list of `nvidia-smi nvlink`", _RUN_TOPO_M),
    (r"\(UUID: (GPU|MIG)-", "the device list of `nvidia-smi -L`", _RUN_TOPO_M),
    (r"Driver Version\s*:", "the device list of nvidia-smi", _RUN_TOPO_M),
    (r"Hugepages-Usage|^\s*(NPU|Chip) ID\s*:", "the device list of npu-smi", _RUN_TOPO),
    (r"NCCL INFO", "an NCCL log", "set NCCL_TOPO_DUMP_FILE and give that file"),
    (r"PartitionName=", "a slurm.conf", "give topology.conf"),
    (r"^NodeName=", "the node list of SLURM", _SHOW_TOPOLOGY),
    (r"^PARTITION\s.*NODELIST", "the output of sinfo", _SHOW_TOPOLOGY),
    (r"SLURM_(JOB_|STEP_)?NODELIST=", "SLURM's variables", "scontrol show hostnames > hosts; give that file"),
    (r"^(switchguid|caguid)=", "the output of ibnetdiscover", "write SLURM's topology.conf from it"),
    (r"^[\d.]+\s+[A-Za-z]\S*", "addresses with names, as in /etc/hosts", "one host a line"),
    (r"busbw", "an nccl-tests log", "fit it (docs/planning.md), it is no topology"),
    (r"aveg_time", "an hccl_test log", "fit it (docs/planning.md), it is no topology"),
)


def recognise(source: Source) -> str:
    """Name of the format, a key of READERS.

    Raises:
        PlanError: none fits; the message says what the text looks like instead, where that can be told.
    """
    for name, (looks_like, _) in READERS.items():
        if looks_like(source):
            return name
    for pattern, got, hint in _NEAR_MISSES:
        for number, line in enumerate(source.lines, 1):
            if re.search(pattern, line):
                raise source.error(number, got, "a topology", hint)
    if hostfile.looks_damaged(source):
        return "host file"
    first = next(line for line in source.lines if line.strip())
    formats = ", ".join(READERS)
    raise source.error(
        1, repr(first.strip()[:60]), f"one of: {formats}", "give the unchanged output of the tool"
    )


def read_topology(path_or_text: str | os.PathLike[str]) -> Topology:
    """Read any supported topology file, or its text.

    Args:
        path_or_text: a path, or text that contains a line break or starts like a document.

    Raises:
        PlanError: the file is unreadable, of no known kind, cut, or contradicts itself; the message has
            file, line, what was there, what was expected and what would fix it.
    """
    source = load(path_or_text)
    return READERS[recognise(source)][1](source)
