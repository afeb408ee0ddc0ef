"""From the ranks that computed something to all ranks of the job. Bytes only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from unirl_scale.comm.groups import Group
from unirl_scale.comm.tree import split_contiguous
from unirl_scale.core.mesh import Mesh

T = TypeVar("T")


def slot_owners(mesh: Mesh, slots: int, samples: int) -> list[int]:
    """For each sample of a minibatch, the rank that holds its scores: tp 0 of the last stage of its dp
    rank."""
    owners = [0] * samples
    parts = split_contiguous(samples, slots)
    for dp, held in enumerate(split_contiguous(slots, mesh.dp)):
        rank = mesh.rank_at(tp=0, dp=dp, pp=mesh.pp - 1)
        for slot in held:
            for sample in parts[slot]:
                owners[sample] = rank
    return owners


def replicate(
    world: Group, mine: Mapping[int, Tensor], lengths: Sequence[int], owners: Sequence[int]
) -> list[Tensor]:
    """Every sample's fp32 values on every rank.

    Args:
        mine: sample number -> [lengths[sample]]; read only for samples this rank owns.
        lengths: values of each sample, known to all.
        owners: rank that holds each sample.
    """
    me = world.ranks[world.index]
    held: dict[int, list[int]] = {rank: [] for rank in world.ranks}
    for sample, owner in enumerate(owners):
        held[owner].append(sample)
    pieces = [mine[s].float() for s in held[me] if lengths[s]]
    flat = torch.cat(pieces) if pieces else torch.empty(0, device=world.device)
    sizes = [sum(lengths[s] for s in held[rank]) for rank in world.ranks]
    everything = world.all_gather_uneven(flat, sizes).cpu()
    out: list[Tensor] = [torch.empty(0)] * len(lengths)
    position = 0
    for rank in world.ranks:
        for sample in held[rank]:
            out[sample] = everything[position : position + lengths[sample]]
            position += lengths[sample]
    return out


def share(world: Group, mesh: Mesh, value: T | None) -> T:
    """A value that every rank of a mesh has, on every rank of the job."""
    if mesh.size == world.size:
        assert value is not None
        return value
    result = world.all_gather_object(value)[world.ranks.index(mesh.first_rank)]
    assert result is not None
    return result  # type: ignore[no-any-return]
