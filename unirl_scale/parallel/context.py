"""ParallelContext: a role's place on its mesh, the groups it talks over and the op table it computes with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unirl_scale.comm.groups import Group
from unirl_scale.comm.ordered import Reducer
from unirl_scale.core.mesh import Coordinates, Mesh
from unirl_scale.kernels.table import Nodes, OpTable


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelContext:
    """Everything a layer needs to know about its rank.

    Attributes:
        leaves: W, model leaves in all.
        slots: D, data slots in all.
        pp_up, pp_down: the pipeline group twice, one communicator a direction: two ranks that send to each
            other on one NCCL communicator would wait for each other.
        round_leaf: round every model leaf to bf16 before the tree (`invariance.leaf_dtype: bf16`).
    """

    ops: OpTable
    mesh: Mesh
    at: Coordinates
    tp: Group
    dp: Group
    pp_up: Group
    pp_down: Group
    tp_reducer: Reducer
    dp_reducer: Reducer
    leaves: int
    slots: int
    sequence_parallel: bool
    dtype: torch.dtype
    device: torch.device
    round_leaf: bool = False

    @property
    def local_leaves(self) -> range:
        """Absolute numbers of the model leaves this rank holds."""
        each = self.leaves // self.tp.size
        return range(self.at.tp * each, (self.at.tp + 1) * each)

    @property
    def nodes(self) -> Nodes:
        return self.tp_reducer.local_nodes

    def all_reduce(self, nodes: Tensor) -> Tensor:
        """fp32 [n, M, N] nodes of this rank -> the whole sum [M, N] on every tp rank: in dtype, or where
        nothing travels the fp32 root, which the op that reads it rounds."""
        return self.tp_reducer.all_reduce(nodes, dtype=self.dtype if self.tp.size > 1 else None)

    def reduce_scatter(self, nodes: Tensor) -> Tensor:
        """fp32 [n, M, N], rows in rank-major order -> this rank's M / tp rows of the sum, fp32: the op that
        reads them rounds."""
        _, rows, width = nodes.shape
        mine = rows // self.tp.size
        flat = self.tp_reducer.reduce_scatter(nodes.flatten(1), [mine * width] * self.tp.size)
        return flat.view(mine, width)

    def all_gather_rows(self, x: Tensor) -> Tensor:
        """[m, ...] of each tp rank -> [tp * m, ...], rank-major."""
        return self.tp.all_gather(x.contiguous()).flatten(0, 1) if self.tp.size > 1 else x

    def all_gather_leaves(self, x: Tensor) -> Tensor:
        """[R, L, ...] of each tp rank -> [R, W, ...] in leaf order."""
        if self.tp.size == 1:
            return x
        return torch.cat(tuple(self.tp.all_gather(x.contiguous())), dim=1)
