"""Files that are no topology are named for what they are, with what to give instead; sizes that nothing has
are refused before they fill the memory."""

from __future__ import annotations

import pytest

from unirl_scale.comm.plan_machine import survey
from unirl_scale.comm.topology import read_topology
from unirl_scale.core.errors import PlanError

WRONG = {
    "GPU 0: NVIDIA A100-SXM4 (UUID: GPU-1)\n  MIG 3g.40gb  Device 0: (UUID: MIG-2)\n": (
        1,
        "nvidia-smi -L",
        "nvidia-smi topo -m",
    ),
    "GPU 0: NVIDIA H100\n\t Link 0: 26.562 GB/s\n": (2, "nvidia-smi nvlink", "nvidia-smi topo -m"),
    "\tGPU0\tGPU1\nGPU0\tX\tNS\nGPU1\tNS\tX\n": (1, "peer-to-peer", "nvidia-smi topo -m"),
    "     GPU0  GPU1\nGPU0 0     XGMI\nGPU1 XGMI  0\n": (3, "'XGMI' is not a path", "nvidia-smi topo"),
    "n1: \tGPU0\tGPU1\nn1: GPU0\t X \tNV18\n": (1, "host's name in front", "one machine's output"),
    "\tNPU ID   : 0\n\tChip ID  : 0\n": (1, "npu-smi", "npu-smi info -t topo"),
    "PARTITION AVAIL NODES STATE NODELIST\nmain up 4 idle n[1-4]\n": (1, "sinfo", "scontrol show"),
    "NodeName=n1 Arch=x86_64 CoresPerSocket=48\n   CPUAlloc=0\n": (1, "node list of SLURM", "topology.conf"),
    "SLURM_JOB_ID=7\nSLURM_JOB_NODELIST=n[1-4]\n": (2, "SLURM's variables", "scontrol show hostnames"),
    "vendid=0x2c9\nswitchguid=0x1(1)\nSwitch\t41 \"S-1\"\n": (2, "ibnetdiscover", "topology.conf"),
    "127.0.0.1 localhost\n10.0.0.1 n1\n": (1, "/etc/hosts", "one host a line"),
    "unirl_scale_plan: 1\nworld_size: 4\n": (1, "a plan", "topology files"),
    "seed: 1\nmodel: {}\nstages: []\n": (2, "a run configuration", "CONFIG"),
    "n1 slots=8\nn2 slots=8 and more\nn3 slots=8\n": (2, "'n2 slots=8 and more'", "one host a line"),
}  # fmt: skip


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_file_is_named_with_the_right_one(text: str) -> None:
    line, got, hint = WRONG[text]
    with pytest.raises(PlanError) as caught:
        read_topology(text)
    message = str(caught.value)
    assert message.startswith(f"<text>:{line}: got ")
    assert got in message.split("; must be ")[0]
    assert hint in message.split("; hint: ")[1]


BOX = "unirl_scale_topology: 1\nboxes:\n  b: {vendor: cuda, devices: 100000, link: NV18}\n"
KEY = "unirl_scale_topology: 1\n"
TORUS = "- topology: t\n  torus3d:\n    toruses:\n      - {{name: p, dims: {}, nodes: 'n[1-4]'}}\n"
HTSIM = "Nodes 999999999\nTiers 1\nPodsize 1\nTier 0\nRadix_Down 4\n"
ASTRA = "topology: [Ring, Ring]\nnpus_count: [4, 99999999999]\nbandwidth: [1, 1]\nlatency: [1, 1]\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOX, "<text>:3: got 100000; must be a whole number from 1 to 1024"),
        ("n1 slots=999999999\n", "<text>:1: got 999999999 slots; must be a whole number from 1 to 1024"),
        ("n[1-99999999]\n", "<text>:1: got range '1-99999999' in 'n[1-99999999]' is too long"),
        (HTSIM, "<text>:1: got Nodes 999999999; must be at most 4000000"),
        ("999999999 1 1\n5\n0 5 1Gbps 1us 0\n", "<text>:1: got 999999999 nodes; must be at most 4000000"),
        (ASTRA, "<text>:2: got npus_count [4, 99999999999]; must be at most 1024 in the first dimension"),
        (TORUS.format("{x: two, y: 2}"), "<text>:4: got dims {'x': 'two', 'y': 2}; must be whole numbers"),
        (TORUS.format("[2, 2]"), "<text>:4: got dims [2, 2]; must be whole numbers"),
        (BOX.replace("100000", "[]"), "<text>:3: got 0; must be a whole number from 1 to 1024"),
        (KEY + "nodes: [{names: }]\n", "<text>:2: got None; must be a host list"),
        (KEY + "links: {nic: {alpha_us: 1" + "0" * 400 + "}}\n", "<text>:2: got 1"),
        ("n1 slots=\u00b2\n", "<text>:1: got \u00b2 slots; must be a whole number"),
        (HTSIM.replace("999999999", "1.2.3"), "<text>:1: got 'Nodes 1.2.3'; must be `Key number`"),
    ],
)
def test_sizes_that_nothing_has_are_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        read_topology(text)
    assert str(caught.value).startswith(message)


def test_devices_a_node_on_the_command_line_are_bounded_too() -> None:
    with pytest.raises(PlanError, match="topology: got 8000000 devices; must be at most 4000000"):
        survey(read_topology("n1\nn2\n"), devices_per_node=4_000_000)


@pytest.mark.parametrize("fabric", ["mesh", "switch"])
def test_a_device_kept_without_its_fast_link_sets_the_pace(fabric: str) -> None:
    """Of unknown rate, where the path that is left has none; never 0, never the switch's."""
    paths = "[[X, HCCS, SYS], [HCCS, X, SYS], [SYS, SYS, X]]"
    text = (
        "unirl_scale_topology: 1\nlinks: {HCCS: {alpha_us: 2, beta_gb_per_s: 28}}\n"
        f"boxes: {{b: {{vendor: npu, devices: 3, fabric: {fabric}, paths: {paths}}}}}\n"
    )
    assert survey(read_topology(text), on_degraded="keep").inner.beta_gb_per_s is None
    assert survey(read_topology(text)).inner.beta_gb_per_s == 28.0
