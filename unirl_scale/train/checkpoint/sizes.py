"""How much a run's saves will take: refused with the arithmetic before step 1, not found out at step 1000."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from unirl_scale.comm.groups import Group
from unirl_scale.core.config import CheckpointConfig, MeshConfig, ModelConfig, RunConfig
from unirl_scale.core.errors import ConfigError
from unirl_scale.core.mesh import Mesh
from unirl_scale.parallel.chunk import Head
from unirl_scale.train.checkpoint.entries import TRAINED_KINDS, chunk_spans, whole_spans
from unirl_scale.train.checkpoint.names import save_names
from unirl_scale.train.checkpoint.session import Session

_MASTER_BYTES = 4  # master weights and both moments are fp32
_MEMINFO = Path("/proc/meminfo")
_CGROUP_LIMIT, _CGROUP_USED = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    model: ModelConfig
    mesh: MeshConfig
    head: Head
    leaves: int
    trained: bool


def _models(cfg: RunConfig, *, critic: bool, reference: bool) -> Iterable[_Model]:
    assert cfg.model.critic and cfg.mesh.critic and cfg.mesh.reference
    rows: list[tuple[ModelConfig, MeshConfig, Head, bool]] = [(cfg.model.actor, cfg.mesh.actor, "lm", True)]
    if critic:
        rows.append((cfg.model.critic, cfg.mesh.critic, "value", True))
    if reference:
        rows.append((cfg.model.actor, cfg.mesh.reference, "lm", False))
    for model, mesh, head, trained in rows:
        leaves = mesh.tp if cfg.invariance.mode == "off" else cfg.invariance.model_leaves
        yield _Model(model=model, mesh=mesh, head=head, leaves=leaves, trained=trained)


def slots_needed(cfg: CheckpointConfig) -> int:
    """Snapshots there is room for: one being written and one whole, one more while a save reads a third; only
    one where snapshots serve saves alone."""
    if not cfg.snapshot_every:
        return 1
    return 3 if cfg.keep and cfg.every else 2


def save_bytes(cfg: RunConfig, *, critic: bool, reference: bool) -> int:
    """Tensor bytes of one durable checkpoint."""
    total = 0
    for m in _models(cfg, critic=critic, reference=reference):
        elements = sum(whole_spans(m.model, m.head, m.leaves).values())
        total += elements * _element_bytes(cfg, trained=m.trained)
    return total


def rank_bytes(cfg: RunConfig, rank: int, *, critic: bool, reference: bool) -> tuple[int, int]:
    """(train, frozen) tensor bytes that one rank writes."""
    sizes = {True: 0, False: 0}
    for m in _models(cfg, critic=critic, reference=reference):
        at = Mesh.from_config(m.mesh).coordinates(rank)
        if at is None:
            continue
        for chunk in chunk_spans(m.model, m.head, m.mesh, m.leaves, at):
            elements = chunk.owned.numel
            elements += sum(s.numel for s in chunk.replicated) * chunk.writes_replicated
            sizes[m.trained] += elements * _element_bytes(cfg, trained=m.trained)
    return sizes[True], sizes[False]


def _element_bytes(cfg: RunConfig, *, trained: bool) -> int:
    return len(TRAINED_KINDS) * _MASTER_BYTES if trained else {"fp32": 4, "bf16": 2}[cfg.precision]


# ---- is there room ------------------------------------------------------------------------------------
def require_room(cfg: RunConfig, session: Session, world: Group, *, critic: bool, reference: bool) -> None:
    """The newest checkpoints and the one being written fit on the disk, and snapshots in each node's memory.

    Collective: every rank raises or none.

    Args:
        critic, reference: whether any stage needs one.

    Raises:
        ConfigError: with the sum that does not fit.
    """
    problem = ""
    if cfg.checkpoint.keep and world.index == 0:
        problem = _disk_problem(cfg, session, save_bytes(cfg, critic=critic, reference=reference))
    if cfg.checkpoint.snapshot_every:
        train, frozen = rank_bytes(cfg, session.rank, critic=critic, reference=reference)
        copies = len(set(session.nodes)) > 1
        # A replica has two buffers; of frozen weights there may be those of two stages.
        need = train * (slots_needed(cfg.checkpoint) + 2 * copies) + 2 * frozen * (1 + copies)
        needs = world.all_gather_object(need)
        problem = problem or _memory_problem(cfg, session, needs)
    said = [text for text in world.all_gather_object(problem) if text]
    if said:
        raise ConfigError(said[0])


def _disk_problem(cfg: RunConfig, session: Session, one: int) -> str:
    path = session.store.path
    there = len([n for n in save_names(path) if (path / str(n) / "manifest.json").exists()])
    room = cfg.checkpoint.keep + 1  # what is kept stays until the next one is durable
    missing = max(0, room - there)
    free = shutil.disk_usage(path).free
    if missing * one <= free:
        return ""
    fitting = free // one + there - 1
    hint = (
        f"checkpoint.keep={fitting}" if fitting >= 1 else "another checkpoint.dir=..., or checkpoint.keep=0"
    )
    return (
        f"checkpoint.keep: got {cfg.checkpoint.keep}; {room} checkpoints of {_size(one)} must fit in {path}, "
        f"which has {_size(free)} free and holds {there}; hint: {hint}"
    )


def _memory_problem(cfg: RunConfig, session: Session, needs: Sequence[int]) -> str:
    node = session.nodes[session.rank]
    need = sum(n for n, where in zip(needs, session.nodes, strict=True) if where == node)
    held = sum(f.stat().st_size for f in session.memory.root.glob("*/*"))  # makes room as it is replaced
    folder = Path(cfg.checkpoint.memory_dir)
    for what, free in ((str(folder), shutil.disk_usage(folder).free), ("its memory", available_memory())):
        if need > free + held:
            return (
                f"checkpoint.snapshot_every: got {cfg.checkpoint.snapshot_every}; snapshots need "
                f"{_size(need)} on {node} and {what} has {_size(free)} free; "
                "hint: checkpoint.snapshot_every=0, or more nodes, or a larger tmpfs"
            )
    return ""


def available_memory() -> int:
    """Bytes that this host, or this container, can still give; a very large number where nobody can tell."""
    limits = [1 << 62]
    if _MEMINFO.exists():
        fields = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        limits.append(int(fields["MemAvailable"].split()[0]) * 1024)
    if _CGROUP_LIMIT.exists() and (text := _CGROUP_LIMIT.read_text().strip()).isdecimal():
        limits.append(int(text) - int(_CGROUP_USED.read_text()))
    return min(limits)


def _size(n: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n >= scale:
            return f"{n / scale:.1f} {unit}"
    return f"{n} B"
