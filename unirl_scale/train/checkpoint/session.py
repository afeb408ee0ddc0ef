"""What all ranks agree on before anything is saved or restored: the run, this start of it, who is where."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from unirl_scale.comm.groups import Group
from unirl_scale.core.config import RunConfig
from unirl_scale.core.errors import CheckpointError
from unirl_scale.core.ranks import RankInfo
from unirl_scale.train.checkpoint.memory import MemoryFolder
from unirl_scale.train.checkpoint.names import checkpoint_dir, was_run
from unirl_scale.train.checkpoint.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One start of a run, seen from one rank.

    Attributes:
        run: id of the run.
        incarnation: number of this start; later ones fence earlier ones off.
        rank: of the world.
        nodes: node of each rank.
    """

    run: str
    incarnation: int
    rank: int
    nodes: tuple[str, ...]
    store: Store
    memory: MemoryFolder

    @property
    def speaks_for_node(self) -> bool:
        """Whether this is the first rank of its node."""
        return self.nodes.index(self.nodes[self.rank]) == self.rank


def open_session(cfg: RunConfig, world: Group, info: RankInfo) -> Session:
    """Count this start of the run; collective over the world. A run that saves nothing leaves no trace.

    Raises:
        CheckpointError: some ranks do not see the checkpoint directory that rank 0 sees; names them.
    """
    store = Store(checkpoint_dir(cfg))
    saves = bool(cfg.checkpoint.keep or cfg.checkpoint.snapshot_every) or was_run(store.path)
    node = f"node-{info.node_rank}" if info.node_rank is not None else socket.gethostname()
    mine = ("", 0)
    if world.index == 0 and saves:
        run = store.run_id()
        mine = (run, store.claim_incarnation(f"{socket.gethostname()} process {os.getpid()}"))
    said = world.all_gather_object((mine, node))
    run, incarnation = said[0][0]
    nodes = tuple(node for _, node in said)
    seen = world.all_gather_object((store.run_id_or_none() or "") == run)
    blind = [rank for rank, ok in enumerate(seen) if not ok]
    if blind:
        raise CheckpointError(
            f"checkpoint.dir: got {store.path}, which ranks {blind[:8]} do not share with rank 0; "
            "must be on storage that every rank sees; "
            f"hint: nodes {sorted({nodes[r] for r in blind})[:4]} need the mount"
        )
    memory = MemoryFolder.of(cfg.checkpoint.memory_dir, store.path, node)
    if incarnation == 1 and nodes.index(node) == world.index:
        memory.clear()  # of a run that was here and is deleted
    return Session(
        run=run, incarnation=incarnation, rank=world.index, nodes=nodes, store=store, memory=memory
    )
