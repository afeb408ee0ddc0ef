"""YAML file plus `key=value` overrides -> RunConfig, and back.

Unknown keys, wrong types and unreadable text are all found in one pass and raised as one ConfigError;
the cross-field rules are in `check.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

from unirl_scale.core.config import MeshConfig, MeshesConfig, RunConfig, StageConfig
from unirl_scale.core.errors import ConfigError
from unirl_scale.core.overrides import apply_overrides
from unirl_scale.core.problems import Problem, nearest_name, raise_all, show
from unirl_scale.core.typed import Plugins, TypedReader, to_plain
from unirl_scale.core.yaml_text import dump_yaml, read_yaml

T = TypeVar("T")


def load_config(path: str | Path, overrides: Sequence[str] = (), plugins: Plugins | None = None) -> RunConfig:
    """Read a run configuration as it was asked; see `resolve` for the defaults of the other roles.

    Args:
        path: YAML file.
        overrides: `key=value` texts, applied in order over the file.
        plugins: options dataclasses of `task` and `algorithm` mappings, e.g.
            {"task": {"jsonl": JsonlOptions}}; a field that is not listed keeps its mapping unread.

    Raises:
        ConfigError: every problem of the file and the overrides at once, one a line.
    """
    return parse_config(_read_file(Path(path)), str(path), overrides, plugins)


def parse_config(
    text: str, name: str, overrides: Sequence[str] = (), plugins: Plugins | None = None
) -> RunConfig:
    """`load_config` on text in memory; `name` stands for the file in errors."""
    tree, problem = read_yaml(text, name)
    if problem is not None:
        raise ConfigError(str(problem))
    if not isinstance(tree, dict):
        hint = "write {} for a run with every default" if tree is None else "start with e.g. `seed: 0`"
        got = "nothing" if tree is None else show(tree)
        raise ConfigError(str(Problem(path=name, got=got, rule="must be a mapping of settings", hint=hint)))
    # YAML anchors share one object between places; an override must change only the place it names.
    tree = _unshare(tree)
    problems = apply_overrides(tree, overrides, RunConfig)
    if tree.get("mesh") == "auto":
        hint = "`unirl-scale plan` prints the best layouts for a machine; write one of them here"
        raise_all([Problem(path="mesh", got="auto", rule="must be a layout to run", hint=hint)], name)
    reader = TypedReader(RunConfig, plugins or {})
    cfg = reader.read_dataclass(RunConfig, tree, "")
    raise_all([*problems, *reader.problems], name)
    # Once more with everything spelt out: a plug-in that the file leaves to its default has options too.
    cfg = reader.read_dataclass(RunConfig, to_plain(cfg), "")
    raise_all(reader.problems, name)
    return cast(RunConfig, cfg)


def read_options(kind: type[T], mapping: Mapping[str, Any], path: str) -> T:
    """A plug-in's own mapping as its options dataclass; `name` is left out.

    Raises:
        ConfigError: unknown keys and wrong types, all at once.
    """
    reader = TypedReader(kind, {})
    options = reader.read_dataclass(kind, mapping, path, skip=("name",))
    raise_all(reader.problems)
    return cast(T, options)


def dump(cfg: RunConfig) -> str:
    """The configuration as YAML; `parse_config(dump(cfg))` gives an equal one."""
    return dump_yaml(to_plain(cfg))


def resolve(cfg: RunConfig) -> RunConfig:
    """Fill in what the file left to follow from the rest.

    Critic model and mesh are the actor's, the reference mesh is the actor's, minibatch 0 is the whole batch.
    The rollout mesh has the actor's tp and every other rank of the actor as dp, but never more dp than the
    smallest batch has samples.
    """
    model, mesh = cfg.model, cfg.mesh
    actor = mesh.actor
    return replace(
        cfg,
        model=replace(model, critic=model.critic or model.actor),
        mesh=MeshesConfig(
            actor=actor,
            critic=mesh.critic or actor,
            reference=mesh.reference or actor,
            rollout=mesh.rollout or _rollout_mesh(actor, cfg.stages),
        ),
        stages=tuple(replace(s, minibatch_size=s.minibatch_size or s.batch_size) for s in cfg.stages),
    )


def _rollout_mesh(actor: MeshConfig, stages: Sequence[StageConfig]) -> MeshConfig:
    dp = min([actor.dp * actor.pp, *(max(1, stage.batch_size) for stage in stages)])
    return MeshConfig(tp=actor.tp, dp=dp, first_rank=actor.first_rank)


def _read_file(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        hint = _nearest_file(path)
        problem = Problem(path=str(path), got="no such file", rule="must be a YAML file", hint=hint)
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        got = f"byte 0x{error.object[error.start]:02x}"
        problem = Problem(path=f"{path}:{line}", got=got, rule="must be UTF-8 text")
    except OSError as error:
        got = (error.strerror or type(error).__name__).lower()
        problem = Problem(path=str(path), got=got, rule="must be a readable YAML file")
    raise ConfigError(str(problem))


def _nearest_file(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"folder {folder} does not exist"
    names = sorted(item.name for item in folder.iterdir() if item.suffix in (".yaml", ".yml"))
    near = nearest_name(path.name, names)
    if near:
        return f"did you mean {folder / near}?"
    return f"YAML files there: {', '.join(names[:8])}" if names else f"no YAML file in {folder}"


def _unshare(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _unshare(item) for key, item in value.items()}
    return [_unshare(item) for item in value] if isinstance(value, list) else value
