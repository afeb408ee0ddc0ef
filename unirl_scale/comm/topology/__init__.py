"""Topology readers: whatever file an operator has becomes one `Topology`."""

from unirl_scale.comm.topology.merge import merge
from unirl_scale.comm.topology.model import Box, Device, Level, Link, Nic, Note, RankMap, Topology
from unirl_scale.comm.topology.native_write import write_yaml
from unirl_scale.comm.topology.presets import MACHINES, cluster, machine, make_box, spread
from unirl_scale.comm.topology.recognise import READERS, read_topology, recognise

__all__ = [
    "MACHINES",
    "READERS",
    "Box",
    "Device",
    "Level",
    "Link",
    "Nic",
    "Note",
    "RankMap",
    "Topology",
    "cluster",
    "machine",
    "make_box",
    "merge",
    "read_topology",
    "recognise",
    "spread",
    "write_yaml",
]
