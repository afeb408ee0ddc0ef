"""Which save to continue from, whether it belongs to this run, and the state it gives."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from unirl_scale.comm.groups import Group
from unirl_scale.core.config import RunConfig
from unirl_scale.core.errors import CheckpointError
from unirl_scale.core.problems import Problem, raise_all, show
from unirl_scale.core.typed import to_plain
from unirl_scale.train.checkpoint.entries import gather_frozen
from unirl_scale.train.checkpoint.loading import Loaded, Loader
from unirl_scale.train.checkpoint.manifest import Head
from unirl_scale.train.checkpoint.saving import rank_slabs, role_list
from unirl_scale.train.checkpoint.session import Session
from unirl_scale.train.checkpoint.sources import (
    Restored,
    Source,
    disk_source,
    memory_sources,
    newest_on_disk,
    shared_disk_source,
)
from unirl_scale.train.roles import Roles

MODES = ("auto", "never", "must")


def restore(cfg: RunConfig, session: Session, roles: Roles, world: Group, data: str) -> Restored | None:
    """Put the newest whole save into the roles; collective, equal on every rank.

    Snapshots in memory and durable checkpoints stand in one order, of steps, then incarnations; at equal
    rank memory is nearer. One that turns out damaged is named and the next one is tried.

    Args:
        data: fingerprint of the training data.

    Returns:
        None when there is nothing to continue from, or `checkpoint.resume` is never.

    Raises:
        ConfigError: the save belongs to another model, other data or other stages.
        CheckpointError: `checkpoint.resume` asks for a save that is not there.
    """
    if cfg.checkpoint.resume == "never":
        return None
    notes: list[str] = []
    trusted = world.all_gather_object(session.store.distrusted() if world.index == 0 else {})[0]
    for source, in_memory in _candidates(cfg, session, world, notes):
        step, incarnation = source.when
        if source.manifest.head.run == session.run and step > trusted.get(incarnation, step):
            notes.append(f"{source.what}: it may hold silent data corruption, found later by digest.every")
            continue
        require_same(cfg, source, data)
        started = time.perf_counter()
        try:
            loader = Loader(session, world, source, mapped=in_memory)
            loaded = _load(roles, source.manifest.head, loader)
        except CheckpointError as error:
            notes.append(str(error))
            continue
        state = source.manifest.head.state
        return Restored(
            state=state,
            when=source.when,
            durable=not in_memory,
            source=source.what,
            seconds=time.perf_counter() - started,
            near_bytes=loaded.near_bytes,
            far_bytes=loaded.far_bytes,
            notes=(*notes, *loaded.complaints, *changed_settings(source.manifest.head.config, cfg)),
        )
    if cfg.checkpoint.resume != "auto":
        reasons = "".join(f"\n  {note}" for note in notes)
        raise CheckpointError(
            f"checkpoint.resume: got {cfg.checkpoint.resume}; there is no whole checkpoint in "
            f"{session.store.path}; hint: checkpoint.resume=auto starts anew{reasons}"
        )
    if notes:
        raise CheckpointError(
            f"checkpoint.resume: no save in {session.store.path} is whole; "
            "hint: --overwrite starts anew" + "".join(f"\n  {note}" for note in notes)
        )
    return None


def _candidates(
    cfg: RunConfig, session: Session, world: Group, notes: list[str]
) -> Iterator[tuple[Source, bool]]:
    """(source, whether it is in memory), newest first, the same on every rank; each `next` is collective."""
    memory, wrong = memory_sources(session, world)
    notes += wrong
    below = None
    while True:
        found, skipped = newest_on_disk(session.store, below) if world.index == 0 else (None, [])
        notes += world.all_gather_object(skipped)[0]
        disk = shared_disk_source(world, found)
        while memory and (disk is None or memory[0].when >= disk.when):
            yield memory.pop(0), True
        if disk is None:
            break
        yield disk, False
        below = disk.when
    if cfg.checkpoint.resume not in MODES:
        yield _named(Path(cfg.checkpoint.resume), world), False


def _named(path: Path, world: Group) -> Source:
    """The checkpoint that the user names, where this run has none of its own.

    Raises:
        CheckpointError: on every rank.
    """
    found, error = None, ""
    if world.index == 0:
        try:
            found = disk_source(path)
        except CheckpointError as failure:
            error = str(failure)
    error = world.all_gather_object(error)[0]
    if error:
        raise CheckpointError(f"checkpoint.resume: {error}")
    source = shared_disk_source(world, found)
    assert source is not None
    return source


def _load(roles: Roles, head: Head, loader: Loader) -> Loaded:
    """Build the roles that the save has and fill them."""
    roles.build(critic="critic" in head.roles, reference="reference" in head.roles)
    loaded = loader.load(rank_slabs(roles))
    for role in role_list(roles):
        if role.engine is not None:
            role.engine.adam_steps = head.roles[role.name].adam_steps
            if not head.roles[role.name].trained:
                gather_frozen(role.engine)
            role.engine.publish()
    return loaded


# ---- does it belong here ------------------------------------------------------------------------------
def require_same(cfg: RunConfig, source: Source, data: str) -> None:
    """The save fits this configuration's models, stages and data.

    Raises:
        ConfigError: every difference that would make the state meaningless, at once.
    """
    head = source.manifest.head
    problems = [*_model_problems(cfg, head), *_stage_problems(cfg, head)]
    if head.data != data and not cfg.checkpoint.allow_data_change:
        problems.append(
            Problem(
                path="task",
                got=f"data with fingerprint {data[:16]}",
                rule=f"the run to continue was trained on {head.data[:16]}",
                hint="the same data and package versions, or checkpoint.allow_data_change=true",
            )
        )
    raise_all(problems, source.what)


def _model_problems(cfg: RunConfig, head: Head) -> Iterator[Problem]:
    for name, saved in head.roles.items():
        if name == "reference":
            continue  # the actor's model
        model = cfg.model.critic if name == "critic" else cfg.model.actor
        for field, value in to_plain(model).items():
            was = getattr(saved.model, field)
            if value != was and field != "init_std":
                path = f"model.{name}.{field}"
                yield Problem(path=path, got=show(value), rule="must be the saved run's", hint=show(was))
    leaves, field = cfg.invariance.model_leaves, "invariance.model_leaves"
    if cfg.invariance.mode == "off":
        leaves, field = cfg.mesh.actor.tp, "mesh.actor.tp"
    was = head.roles["actor"].leaves
    if leaves != was:
        rule = "must be the saved run's: stored parameters are cut into that many leaves"
        yield Problem(path=field, got=show(leaves), rule=rule, hint=show(was))


def _stage_problems(cfg: RunConfig, head: Head) -> Iterator[Problem]:
    saved = [stage["name"] for stage in head.config["stages"]]
    done = head.state.stage + 1
    names = [stage.name for stage in cfg.stages]
    if names[:done] != saved[:done]:
        rule = "must begin with the stages that the saved run went through"
        yield Problem(path="stages", got=show(names), rule=rule, hint=show(saved[:done]))
        return
    stage, path = cfg.stages[head.state.stage], f"stages[{head.state.stage}].num_steps"
    if stage.num_steps < head.state.stage_step:
        rule = f"must be at least the {head.state.stage_step} steps that are done"
        yield Problem(path=path, got=show(stage.num_steps), rule=rule, hint=show(head.state.stage_step))


_FREE = ("mesh", "hardware", "run_dir", "checkpoint", "eval", "digest")  # changes nothing that is trained


def changed_settings(saved: Mapping[str, Any], cfg: RunConfig) -> list[str]:
    """Settings that differ from the saved run's and take effect from here on."""
    out: list[str] = []
    plain = to_plain(cfg)
    for field in plain:
        if field not in _FREE:
            _differences(saved.get(field), plain[field], field, out)
    return out


def _differences(was: Any, now: Any, path: str, out: list[str]) -> None:
    if isinstance(was, dict) and isinstance(now, dict):
        for key in [*now, *(k for k in was if k not in now)]:
            _differences(was.get(key), now.get(key), f"{path}.{key}", out)
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for i, (a, b) in enumerate(zip(was, now, strict=True)):
            _differences(a, b, f"{path}[{i}]", out)
    elif was != now:
        out.append(f"changed setting {path}: {show(was)} -> {show(now)}")
