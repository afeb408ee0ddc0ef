"""What the training loop talks to: after every step, before every first reduction, at the end.

checkpointer = Checkpointer(...)
checkpointer.fence            before gradients are first reduced in a step (see snapshot.py)
checkpointer.after_step(s)    snapshot or save when due
checkpointer.finish(s)        the last save, durable when it returns
checkpointer.abandon()        a failure: stop, commit nothing, leave the memory for the next start
"""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping

import torch

from unirl_scale import __version__
from unirl_scale.comm.groups import GroupFactory
from unirl_scale.core.config import RunConfig
from unirl_scale.core.errors import CheckpointError
from unirl_scale.core.typed import to_plain
from unirl_scale.train.checkpoint.entries import Slab, engine_slabs
from unirl_scale.train.checkpoint.keeping import Keeping
from unirl_scale.train.checkpoint.manifest import Head, SavedRole
from unirl_scale.train.checkpoint.replica import ReplicaLink, keeper_groups, replica_keepers
from unirl_scale.train.checkpoint.saves import Saves, agree_by_files
from unirl_scale.train.checkpoint.session import Session
from unirl_scale.train.checkpoint.shard import ShardPlan, plan_shards
from unirl_scale.train.checkpoint.sizes import slots_needed
from unirl_scale.train.checkpoint.snapshot import Snapshots
from unirl_scale.train.checkpoint.sources import Restored
from unirl_scale.train.checkpoint.writer import Probe, no_probe
from unirl_scale.train.roles import Role, Roles
from unirl_scale.train.state import TrainState


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
        restored: what the run continues from.
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
        restored: Restored | None = None,
        racks: Mapping[str, str] | None = None,
        probe: Probe = no_probe,
    ) -> None:
        self.cfg, self.session, self.roles, self.world = cfg, session, roles, factory.world
        self.saves = Saves(cfg.checkpoint, session, probe)
        self._data, self._config = data, to_plain(cfg)
        self._plan: tuple[tuple[int, ...], ShardPlan] | None = None
        self._taken = 0
        self._snapshots: Snapshots | None = None
        if session.speaks_for_node:
            session.memory.clear_older(session.incarnation, but=restored.when if restored else None)
        if restored is not None and restored.durable:
            self.saves.requested_step = self.saves.durable_step = restored.when[0]
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
        self.saves.note_ended()
        if save:
            save = self.saves.all_free(self.world, state.step)
        if save or snapshot:
            self._take(state, save=save)
        if save and not options.background:
            self.fence()
            self.saves.wait()

    def finish(self, state: TrainState) -> None:
        """The last save of a run that ended well, durable when it returns; memory is given back. Collective.

        Raises:
            CheckpointError: it could not be made durable; memory then keeps what it has.
        """
        if self._snapshots is None:
            return
        self.fence()
        self.saves.wait()
        if self.cfg.checkpoint.keep:
            if self.saves.requested_step != state.step:
                self._take(state, save=True)
                self.fence()
                self.saves.wait()
            self._require_durable(state)
        self.world.barrier()
        if self.session.speaks_for_node:
            self.session.memory.clear()

    def save_newest(self, deadline_s: float) -> bool:
        """Make the newest snapshot that every rank has durable, before the processes must go.

        Every rank calls it, at any moment and without collectives; the step is agreed through files.

        Returns:
            Whether this rank's part is durable, and on rank 0 the save.
        """
        if self._snapshots is None:
            return False
        end = time.monotonic() + deadline_s
        self._snapshots.fence(deadline_s / 2)
        self.saves.wait(end - time.monotonic())
        session = self.session
        whole = {snapshot.record.head.step: snapshot for snapshot in self._snapshots.whole()}
        step = agree_by_files(
            session.store,
            session.incarnation,
            session.rank,
            self.world.size,
            list(whole),
            end - time.monotonic(),
        )
        for other in whole.keys() - {step}:
            whole[other].release()
        if step is None:
            return False
        if step == self.saves.requested_step:  # done or failed; a save is never written twice
            whole[step].release()
            return self.saves.wait()
        self.saves.requested_step = step
        self.saves.start(whole[step], end - time.monotonic())
        return self.saves.wait()

    def abandon(self) -> None:
        """Stop saving and commit nothing more; snapshots in memory stay for the next start."""
        self.saves.cancel()

    # ---- what happened --------------------------------------------------------------------------------
    def metrics(self) -> dict[str, float]:
        """Cost of this rank's newest snapshot and the state of its saves."""
        if self._snapshots is None:
            return {}
        cost = self._snapshots.cost
        out = {
            "checkpoint/requested_step": float(self.saves.requested_step),
            "checkpoint/durable_step": float(self.saves.durable_step),
            "checkpoint/failed_saves": float(self.saves.failed),
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
        out, self.saves.warnings = self.saves.warnings, []
        if self._snapshots is not None and self._snapshots.error:
            out.append(self._snapshots.error)
            self._snapshots.error = ""
        return out

    # ---- inside ---------------------------------------------------------------------------------------
    def _take(self, state: TrainState, *, save: bool) -> None:
        assert self._snapshots is not None
        if not self._snapshots.fenced:
            # No gradient was reduced since the last one: do what that reduction would have done.
            self._snapshots.fence()
            self.world.barrier()
        if self._taken == 1 and self.session.speaks_for_node:
            # Every rank has a snapshot of this incarnation: nobody needs those of earlier ones.
            self.session.memory.clear_older(self.session.incarnation)
        self._taken += 1
        if save:
            self.saves.requested_step = state.step
        then = self.saves.start if save else None
        if not self._snapshots.take(self._head(state), self._shards(state), then):
            text = "no snapshot, saves that do not end hold every buffer"
            self.saves.warnings.append(f"step {state.step}: {text}")

    def _require_durable(self, state: TrainState) -> None:
        """Raise CheckpointError on every rank when rank 0 did not commit this step."""
        step, warnings = self.world.all_gather_object((self.saves.durable_step, self.saves.warnings))[0]
        if step != state.step:
            raise CheckpointError(f"the last checkpoint is not durable: {'; '.join(warnings)}")

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
