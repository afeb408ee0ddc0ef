"""What the training loop talks to: after every step, before every first reduction, at the end.

checkpointer = Checkpointer(...)
checkpointer.fence            before gradients are first reduced in a step (see snapshot.py)
checkpointer.after_step(s)    snapshot or save when due
checkpointer.finish(s)        the last save, durable when it returns
checkpointer.abandon()        a failure: stop, commit nothing, leave the memory for the next start
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from unirl_scale import __version__
from unirl_scale.comm.groups import GroupFactory
from unirl_scale.core.config import CheckpointConfig, RunConfig
from unirl_scale.core.typed import to_plain
from unirl_scale.train.checkpoint.entries import Slab, engine_slabs
from unirl_scale.train.checkpoint.keeping import Keeping
from unirl_scale.train.checkpoint.manifest import Head, SavedRole
from unirl_scale.train.checkpoint.replica import ReplicaLink, keeper_groups, replica_keepers
from unirl_scale.train.checkpoint.session import Session
from unirl_scale.train.checkpoint.shard import ShardPlan, plan_shards
from unirl_scale.train.checkpoint.snapshot import Snapshot, Snapshots
from unirl_scale.train.checkpoint.writer import FileJob, Probe, SaveJob, SaveThread, no_probe, shard_name
from unirl_scale.train.roles import Role, Roles
from unirl_scale.train.state import TrainState

_GROUPS = ("train", "frozen")


def slots_needed(cfg: CheckpointConfig) -> int:
    """Snapshots there is room for: one being written and one whole, one more while a save reads a third; only
    one where snapshots serve saves alone."""
    if not cfg.snapshot_every:
        return 1
    return 3 if cfg.keep and cfg.every else 2


def role_list(roles: Roles) -> list[Role]:
    """The roles that have state now."""
    return [r for r in (roles.actor, roles.critic, roles.reference) if r is not None]


def rank_slabs(roles: Roles) -> list[Slab]:
    """Everything this rank holds of the training state."""
    return [
        s
        for role in role_list(roles)
        if role.engine is not None
        for s in engine_slabs(role.name, role.engine)
    ]


def saved_roles(cfg: RunConfig, roles: Roles, state: TrainState) -> dict[str, SavedRole]:
    """What a save says about its roles; equal on every rank, also outside a role's mesh."""
    out = {}
    for role in role_list(roles):
        model = cfg.model.critic if role.name == "critic" else cfg.model.actor
        assert model is not None
        out[role.name] = SavedRole(
            model=model,
            head=role.head,
            leaves=role.mesh.tp if cfg.invariance.mode == "off" else cfg.invariance.model_leaves,
            adam_steps={"actor": state.actor_updates, "critic": state.critic_updates}.get(role.name, 0),
            trained=role.name != "reference",
        )
    return out


def software() -> dict[str, str]:
    return {"unirl_scale": __version__, "torch": torch.__version__, "python": platform.python_version()}


class Checkpointer:
    """Saves of one rank during one start of a run.

    Args:
        data: fingerprint of the training data.
        racks: rack of each node, as far as known.
        probe: called at labelled points of a save.
    """

    def __init__(
        self,
        cfg: RunConfig,
        session: Session,
        roles: Roles,
        factory: GroupFactory,
        data: str,
        *,
        racks: Mapping[str, str] | None = None,
        probe: Probe = no_probe,
    ) -> None:
        self.cfg, self.session, self.roles, self.world = cfg, session, roles, factory.world
        self.requested_step = self.durable_step = -1
        self.failed_saves = 0
        self._data, self._probe = data, probe
        self._config = to_plain(cfg)
        self._plan: tuple[tuple[int, ...], ShardPlan] | None = None
        self._save: SaveThread | None = None
        self._frozen_files: dict[str, Path] = {}
        self._warnings: list[str] = []
        self._snapshots: Snapshots | None = None
        options = cfg.checkpoint
        if options.keep or options.snapshot_every:
            self._snapshots = Snapshots(
                session.memory if options.snapshot_every else None,
                session.rank,
                session.incarnation,
                slots=slots_needed(options),
                device=roles.device,
                keeping=self._keeping(factory, racks) if options.snapshot_every else None,
            )

    def _keeping(self, factory: GroupFactory, racks: Mapping[str, str] | None) -> Keeping | None:
        keepers = replica_keepers(self.session.nodes, racks)
        groups = factory.build_groups(keeper_groups(keepers), channel="replica", host=True)
        if not groups:
            return None
        (group,) = groups.values()
        return Keeping(ReplicaLink(group, keepers), self.session.memory, self.session.incarnation)

    # ---- the loop's calls -----------------------------------------------------------------------------
    def fence(self) -> None:
        """Wait until the running snapshot needs the state no more. Every rank calls it in every step that
        reduces gradients, before a collective over the world."""
        if self._snapshots is not None:
            self._snapshots.fence()

    def after_step(self, state: TrainState) -> None:
        """Snapshot or save what is due; collective over the world when something is."""
        options = self.cfg.checkpoint
        save = bool(options.keep and options.every and state.step % options.every == 0)
        snapshot = bool(options.snapshot_every and state.step % options.snapshot_every == 0)
        self._note_ended()
        if save:
            save = self._nobody_saves(state.step)
        if save or snapshot:
            self._take(state, save=save)
        if save and not options.background:
            self._wait_for_save()

    def finish(self, state: TrainState) -> None:
        """The last save of a run that ended well; durable when it returns. Memory is given back."""
        if self._snapshots is None:
            return
        self._wait_for_save()
        if self.cfg.checkpoint.keep and self.requested_step != state.step:
            self._take(state, save=True)
            self._wait_for_save()
        self.fence()
        self.world.barrier()
        if self.cfg.checkpoint.snapshot_every:
            self.session.memory.clear()

    def save_newest(self, deadline_s: float) -> bool:
        """Make the newest whole snapshot durable before the process must go. Every rank calls it; no
        collective.

        Returns:
            Whether this rank's part is durable (on rank 0: the save).
        """
        if self._snapshots is None:
            return False
        if self._save is not None and self._save.running:
            self._save.wait(deadline_s)
        snapshot = self._snapshots.newest()
        if snapshot is None:
            return False
        if snapshot.record.head.step == self.durable_step:
            snapshot.release()
            return True
        self._start_save(snapshot, deadline_s)
        assert self._save is not None
        self._save.wait(deadline_s)
        self._note_ended()
        return not self._save.running and not self._save.error

    def abandon(self) -> None:
        """Stop saving and commit nothing more; snapshots in memory stay for the next start."""
        if self._save is not None:
            self._save.cancel()

    # ---- what happened --------------------------------------------------------------------------------
    def metrics(self) -> dict[str, float]:
        """Cost of this rank's newest snapshot and the state of its saves."""
        if self._snapshots is None:
            return {}
        cost = self._snapshots.cost
        out = {
            "checkpoint/requested_step": float(self.requested_step),
            "checkpoint/durable_step": float(self.durable_step),
            "checkpoint/failed_saves": float(self.failed_saves),
            "snapshot/start_s": cost.start_s,
            "snapshot/wait_s": cost.wait_s,
            "snapshot/copy_s": cost.copy_s,
            "snapshot/bytes": float(cost.num_bytes),
        }
        if cost.replica_bytes:
            out |= {"snapshot/replica_s": cost.replica_s, "snapshot/replica_bytes": float(cost.replica_bytes)}
        return out

    def take_warnings(self) -> list[str]:
        """What went wrong since the last call."""
        if self._snapshots is not None and self._snapshots.error:
            self._warnings.append(self._snapshots.error)
            self._snapshots.error = ""
        out, self._warnings = self._warnings, []
        return out

    # ---- inside ---------------------------------------------------------------------------------------
    def _take(self, state: TrainState, *, save: bool) -> None:
        assert self._snapshots is not None
        if (
            not self._snapshots.fenced
        ):  # no gradient was reduced since: do what that reduction would have done
            self._snapshots.fence()
            self.world.barrier()
        head = self._head(state)
        if save:
            self.requested_step = state.step
        if not self._snapshots.take(head, self._shards(state), self._start_save if save else None):
            self._warnings.append(
                f"step {state.step}: not saved, every buffer is held by a save that does not end"
            )

    def _shards(self, state: TrainState) -> ShardPlan:
        engines = [r.engine for r in role_list(self.roles) if r.engine is not None]
        key = (state.stage, *(id(e) for e in engines))
        if self._plan is None or self._plan[0] != key:
            self._plan = key, plan_shards(rank_slabs(self.roles), f"stage-{state.stage}")
        return self._plan[1]

    def _head(self, state: TrainState) -> Head:
        return Head(
            run=self.session.run,
            step=state.step,
            incarnation=self.session.incarnation,
            writers=self.world.size,
            state=state,
            roles=saved_roles(self.cfg, self.roles, state),
            data=self._data,
            config=self._config,
            versions=software(),
        )

    def _start_save(self, snapshot: Snapshot, deadline_s: float | None = None) -> None:
        """Runs on the snapshot's thread."""
        record = snapshot.record
        files = []
        for part, data, group in zip(record.parts, snapshot.data, _GROUPS):
            file = replace(part, file=shard_name(self.session.rank, group))
            files.append(FileJob(part=file, data=data, same_as=self._frozen_files.get(part.version)))
        job = SaveJob(
            head=record.head,
            files=files,
            rank=self.session.rank,
            deadline_s=self.cfg.checkpoint.deadline_s if deadline_s is None else deadline_s,
            keep=self.cfg.checkpoint.keep,
        )
        self._save = SaveThread(self.session.store, job, self._probe, release=snapshot.release)

    def _nobody_saves(self, step: int) -> bool:
        """Whether every rank is free to save; one that is not is named. Collective."""
        busy = self._save is not None and self._save.running
        writing = self._save.job.head.step if busy and self._save is not None else -1
        answers = self.world.all_gather_object(writing)
        slow = [rank for rank, other in enumerate(answers) if other >= 0]
        if slow:
            self.failed_saves += 1
            self._warnings.append(
                f"step {step}: checkpoint skipped, ranks {slow[:8]} still write that of step {answers[slow[0]]}"
            )
        return not slow

    def _wait_for_save(self) -> None:
        self.fence()
        if self._save is not None and not self._save.wait():
            self._save.cancel()
        self._note_ended()

    def _note_ended(self) -> None:
        """Take notice of a save that ended, or that ran past its deadline."""
        save = self._save
        if save is None or save.noted or (save.running and save.left_s > 0):
            return
        save.noted = True
        step = save.job.head.step
        if save.written:
            self._frozen_files = {
                f.part.version: self.session.store.folder(save.job.name) / f.part.file
                for f in save.job.files
                if f.part.version
            }
        if save.durable:
            self.durable_step = step
        error = save.error or (f"not done within {save.job.deadline_s:g} s" if save.running else "")
        if error:
            save.cancel()
            self.failed_saves += not save.durable
            what = "saved, but" if save.durable else "checkpoint FAILED:"
            self._warnings.append(
                f"step {step}: {what} {error}; training goes on, durable is step {self.durable_step}"
            )
