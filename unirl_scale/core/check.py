"""Every rule between fields of RunConfig, checked before any process starts.

Vocabulary and sequences have no rule here: the vocabulary is padded to a multiple of the model leaves, and
sequence parallelism pads each sample to one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from unirl_scale.core.config import MeshConfig, ModelConfig, RolloutConfig, RunConfig, StageConfig
from unirl_scale.core.load import resolve
from unirl_scale.core.problems import Problem, raise_all, show
from unirl_scale.core.ranges import range_problems


@dataclass(frozen=True, slots=True, kw_only=True)
class _Role:
    """A role's mesh with the model it runs, and where the file says so."""

    name: str
    mesh: MeshConfig
    model: ModelConfig
    given: bool  # False: the mesh follows from the actor's, and so do its problems

    @property
    def path(self) -> str:
        return f"mesh.{self.name}"

    @property
    def size(self) -> int:
        return self.mesh.tp * self.mesh.pp * self.mesh.dp

    @property
    def end(self) -> int:
        return self.mesh.first_rank + self.size


def check(cfg: RunConfig, world_size: int | None = None) -> list[Problem]:
    """All violations of the cross-field rules at once.

    Args:
        cfg: as loaded or resolved.
        world_size: ranks there are; None = as many as the meshes span.

    Returns:
        Problems with the nearest legal values; empty when the run may start. A rule that rests on a number
        outside its own range is not judged; a role that the file leaves out is not reported beside the
        actor it follows.
    """
    if not cfg.stages:
        return [Problem(path="stages", got="[]", rule="must have at least one stage")]
    problems, legal = range_problems(cfg)
    rules = [
        *_plain_problems(legal),
        *_cache_problems(legal.rollout),
        *_graph_problems(legal),
        *_model_problems(legal),
        *_all_mesh_problems(legal, world_size),
        *(problem for i in range(len(legal.stages)) for problem in _stage_problems(legal, i)),
    ]
    unsound = tuple(prefix for problem in problems for prefix in _resting_on(problem.path))
    return problems + [rule for rule in rules if not rule.path.startswith(unsound)]


def _resting_on(path: str) -> tuple[str, ...]:
    """Path prefixes whose rules cannot be judged while the number at `path` is illegal."""
    block, _, _ = path.rpartition(".")
    root = path.split(".")[0].split("[")[0]
    if root == "invariance":
        return ("model", "mesh", "stages")
    if root == "model":
        return (block, "mesh")
    if root == "mesh":
        return ("mesh",)
    if root == "stages" and "." not in block:
        return (f"{block}.", "mesh.rollout")
    return (f"{block}.",) if block else ()


def require_legal(cfg: RunConfig, world_size: int | None = None, source: str = "") -> None:
    """Raise ConfigError with every violation of `check`; `source` names the file."""
    raise_all(check(cfg, world_size), source)


def world_size_of(cfg: RunConfig) -> int:
    """Ranks that the meshes span."""
    return max(role.end for role in _roles(cfg))


def _roles(cfg: RunConfig) -> list[_Role]:
    full = resolve(cfg)
    actor_model, critic_model = full.model.actor, full.model.critic or full.model.actor
    actor = full.mesh.actor
    rows = (
        ("actor", actor, actor, actor_model),
        ("critic", cfg.mesh.critic, full.mesh.critic, critic_model),
        ("reference", cfg.mesh.reference, full.mesh.reference, actor_model),
        ("rollout", cfg.mesh.rollout, full.mesh.rollout, actor_model),
    )
    return [
        _Role(name=name, mesh=mesh or actor, model=model, given=given is not None)
        for name, given, mesh, model in rows
    ]


def _all_mesh_problems(cfg: RunConfig, world_size: int | None) -> Iterator[Problem]:
    roles = _roles(cfg)
    said: set[tuple[str, str]] = set()
    for role in roles:
        for problem in _mesh_problems(cfg, role):
            # Not a plain skip of absent roles: a critic deeper or shallower than the actor can break
            # pipeline rules on the actor's mesh that the actor itself keeps.
            field = problem.path.rpartition(".")[2]
            if role.given or (field, problem.rule) not in said:
                yield problem
            said.add((field, problem.rule))
    yield from _world_problems(roles, world_size)


def _problem(path: str, got: object, rule: str, hint: str = "") -> Problem:
    return Problem(path=path, got=show(got), rule=rule, hint=hint)


def _multiples(value: int, unit: int) -> str:
    """The multiples of `unit` on both sides of a value that is not one."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else f"{unit}"


def _nearest(value: int, legal: Iterable[int]) -> str:
    """The legal values on both sides."""
    ordered = sorted(legal)
    below = [n for n in ordered if n < value][-1:]
    above = [n for n in ordered if n > value][:1]
    return " or ".join(str(n) for n in below + above)


def _divisors(value: int) -> list[int]:
    return [n for n in range(1, value + 1) if value % n == 0]


def _plain_problems(cfg: RunConfig) -> Iterator[Problem]:
    """Rules that need neither a mesh nor a model."""
    if not cfg.run_dir.strip():
        yield _problem("run_dir", cfg.run_dir, "must name a directory", "e.g. runs/first")
    if "" in cfg.rollout.stop:
        yield _problem("rollout.stop", list(cfg.rollout.stop), "must not hold an empty text", "remove it")
    if cfg.eval.every and not cfg.eval.num_prompts:
        hint = "eval.num_prompts=64, or eval.every=0"
        yield _problem("eval.every", cfg.eval.every, "needs eval.num_prompts > 0", hint)
    yield from _digest_problems(cfg)
    yield from _elastic_problems(cfg)
    for field, mapping in (
        ("task", cfg.task),
        *((f"stages[{i}].algorithm", stage.algorithm) for i, stage in enumerate(cfg.stages)),
    ):
        if not isinstance(mapping.get("name"), str):
            yield _problem(f"{field}.name", mapping.get("name"), "must name the plug-in")


def _digest_problems(cfg: RunConfig) -> Iterator[Problem]:
    if cfg.digest.on_mismatch == "evict" and not cfg.elastic.enabled:
        rule = "needs elastic.enabled: another run cannot go on without a rank"
        yield _problem("digest.on_mismatch", "evict", rule, "stop, or elastic.enabled=true")


def _graph_problems(cfg: RunConfig) -> Iterator[Problem]:
    if not cfg.rollout.cuda_graphs:
        return
    path, hint = "rollout.cuda_graphs", "rollout.cuda_graphs=false"
    tp = next(role.mesh.tp for role in _roles(cfg) if role.name == "rollout")
    if cfg.hardware.vendor != "cuda":
        yield _problem(path, True, f"needs hardware.vendor cuda, got {cfg.hardware.vendor}", hint)
    elif cfg.hardware.transport == "host" and tp > 1:
        yield _problem(
            path,
            True,
            f"cannot record transfers through the host of mesh.rollout.tp {tp}",
            f"{hint}, or tp 1",
        )


def _elastic_problems(cfg: RunConfig) -> Iterator[Problem]:
    elastic, span = cfg.elastic, world_size_of(cfg)
    if 0 < elastic.straggler_ratio < 1:
        rule = "must be 0, or 1 at the least: ranks that are as fast as the others are no stragglers"
        yield _problem("elastic.straggler_ratio", elastic.straggler_ratio, rule, "0 or 1.5")
    if not elastic.enabled:
        return
    fewest_s = 3 * elastic.heartbeat_interval_s
    if elastic.heartbeat_timeout_s < fewest_s:
        rule = f"must be at least three heartbeat_interval_s, {fewest_s:g}: one late beat is no failure"
        path, hint = "elastic.heartbeat_timeout_s", f"{fewest_s:g} or more"
        yield _problem(path, elastic.heartbeat_timeout_s, rule, hint)
    if not (cfg.checkpoint.snapshot_every or (cfg.checkpoint.every and cfg.checkpoint.keep)):
        rule = "needs snapshots or checkpoints: without them every loss starts the run over"
        yield _problem("elastic.enabled", True, rule, "checkpoint.snapshot_every=1")
    if elastic.min_ranks > span:
        rule = f"must be at most the {span} ranks that the meshes span"
        yield _problem("elastic.min_ranks", elastic.min_ranks, rule, f"{span}")


def _cache_problems(rollout: RolloutConfig) -> Iterator[Problem]:
    """Pages fit the key tiles of every op table, and one whole sequence fits the cache."""
    page = rollout.page_size
    if page & (page - 1):
        below = 1 << page.bit_length() - 1
        rule = "must be a power of two, so that it divides the kernels' key tiles or holds whole ones"
        yield _problem("rollout.page_size", page, rule, f"{below} or {2 * below}")
        return
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    least = -(-longest // page) * page
    if 0 < rollout.kv_cache_tokens < least:
        rule = f"must hold max_prompt_tokens + max_response_tokens = {longest} tokens in pages of {page}"
        yield _problem("rollout.kv_cache_tokens", rollout.kv_cache_tokens, rule, f"{least} or more, or 0")


def _model_problems(cfg: RunConfig) -> Iterator[Problem]:
    models = (("actor", cfg.model.actor), ("critic", cfg.model.critic))
    for name, model in models:
        if model is None:
            continue
        path = f"model.{name}"
        if model.num_heads % model.num_kv_heads:
            rule = f"must divide num_heads {model.num_heads}"
            hint = _nearest(model.num_kv_heads, _divisors(model.num_heads))
            yield _problem(f"{path}.num_kv_heads", model.num_kv_heads, rule, hint)
        if model.head_dim % 2:
            rule = "must be even (rotary embedding turns pairs)"
            yield _problem(f"{path}.head_dim", model.head_dim, rule, _multiples(model.head_dim, 2))
        if cfg.invariance.mode != "off":
            yield from _leaf_problems(path, model, cfg.invariance.model_leaves)


def _leaf_problems(path: str, model: ModelConfig, leaves: int) -> Iterator[Problem]:
    for field, value in (("num_kv_heads", model.num_kv_heads), ("ffn_size", model.ffn_size)):
        if value % leaves:
            fitting = _nearest(leaves, _divisors(math.gcd(model.num_kv_heads, model.ffn_size)))
            hint = f"{_multiples(value, leaves)}, or invariance.model_leaves={fitting}"
            rule = f"must be a multiple of invariance.model_leaves {leaves}"
            yield _problem(f"{path}.{field}", value, rule, hint)


def _mesh_problems(cfg: RunConfig, role: _Role) -> Iterator[Problem]:
    yield from _tp_problems(cfg, role)
    mesh, slots = role.mesh, cfg.invariance.data_slots
    if role.name == "rollout":
        for field, value in (("pp", mesh.pp), ("vpp", mesh.vpp)):
            if value != 1:
                hint = "1; use the ranks as dp"
                yield _problem(f"{role.path}.{field}", value, "must be 1: decoding is not pipelined", hint)
        batch = min(stage.batch_size for stage in cfg.stages)
        if mesh.dp > batch:
            rule = f"must be at most the smallest stages[].batch_size {batch}"
            yield _problem(f"{role.path}.dp", mesh.dp, rule, f"{batch}")
        return
    if mesh.dp > slots:
        rule = f"must be at most invariance.data_slots {slots} (a dp rank owns whole slots)"
        common = math.gcd(*(stage.minibatch_size or stage.batch_size for stage in cfg.stages))
        more = [n for n in _divisors(common) if n >= mesh.dp][:1]
        hint = f"{slots}" + "".join(f", or invariance.data_slots={n}" for n in more)
        yield _problem(f"{role.path}.dp", mesh.dp, rule, hint)
    yield from _pipeline_problems(role)


def _tp_problems(cfg: RunConfig, role: _Role) -> Iterator[Problem]:
    tp, model, leaves = role.mesh.tp, role.model, cfg.invariance.model_leaves
    common = math.gcd(model.num_kv_heads, model.ffn_size)
    if cfg.invariance.mode == "off":
        if common % tp:
            rule = f"must divide num_kv_heads {model.num_kv_heads} and ffn_size {model.ffn_size}"
            yield _problem(f"{role.path}.tp", tp, rule, _nearest(tp, _divisors(common)))
    elif leaves % tp:
        rule = f"must divide invariance.model_leaves {leaves}"
        more = [n for n in (math.lcm(leaves, tp), tp) if common % n == 0][:1]
        hint = _nearest(tp, _divisors(leaves)) + "".join(f", or invariance.model_leaves={n}" for n in more)
        yield _problem(f"{role.path}.tp", tp, rule, hint)


def _pipeline_problems(role: _Role) -> Iterator[Problem]:
    mesh, layers = role.mesh, role.model.num_layers
    chunks = mesh.pp * mesh.vpp
    if mesh.vpp > 1 and mesh.pp == 1:
        yield _problem(f"{role.path}.vpp", mesh.vpp, "must be 1 where pp is 1", "1, or pp of 2 or more")
    if chunks > layers:
        field = "vpp" if mesh.vpp > 1 and mesh.pp <= layers else "pp"
        rule = f"pp x vpp = {chunks} must be at most num_layers {layers} (a chunk has a layer)"
        hint = f"{layers // mesh.pp}" if field == "vpp" else f"{layers}" + " with vpp 1" * (mesh.vpp > 1)
        yield _problem(f"{role.path}.{field}", getattr(mesh, field), rule, hint)
    split = mesh.pipeline_split
    if split and (len(split) != chunks or sum(split) != layers):
        rule = f"must be pp x vpp = {chunks} counts that sum to num_layers {layers}"
        hint = f"{show(list(even_split(layers, chunks)))}, or [] for that" if chunks <= layers else ""
        yield _problem(f"{role.path}.pipeline_split", list(split), rule, hint)


def even_split(layers: int, chunks: int) -> tuple[int, ...]:
    """Layers of each pipeline chunk, as even as it goes; the first chunks take the remainder."""
    return tuple(layers // chunks + (i < layers % chunks) for i in range(chunks))


def _stage_problems(cfg: RunConfig, index: int) -> Iterator[Problem]:
    stage, path = cfg.stages[index], f"stages[{index}]"
    names = [other.name for other in cfg.stages[:index]]
    if not stage.name or stage.name in names:
        hint = f"{stage.algorithm.get('name', 'train')}-{index}"
        yield _problem(f"{path}.name", stage.name, "must be a text of its own for each stage", hint)
    for field, optim in (("optim", stage.optim), ("critic_optim", stage.critic_optim)):
        if optim.min_lr > optim.lr:
            rule = f"must be at most lr {optim.lr:g}"
            yield _problem(f"{path}.{field}.min_lr", optim.min_lr, rule, f"{optim.lr:g} or less")
    if stage.critic_warmup_steps > stage.num_steps:
        rule = f"must be at most num_steps {stage.num_steps}"
        yield _problem(f"{path}.critic_warmup_steps", stage.critic_warmup_steps, rule, f"{stage.num_steps}")
    yield from _batch_problems(path, stage, cfg.invariance.data_slots)


def _batch_problems(path: str, stage: StageConfig, slots: int) -> Iterator[Problem]:
    """Batch and minibatch are whole slots and whole groups, and minibatches fill the batch.

    Slots of one size keep a batch legal or illegal whatever dp is, so that no later change of layout can be
    refused because of it.
    """
    unit = math.lcm(slots, stage.group_size)
    parts = _unit_parts(stage.group_size, slots)
    batch, minibatch = stage.batch_size, stage.minibatch_size
    if batch % unit:
        rule = f"must be a multiple of {_failing(batch, parts)}"
        yield _problem(f"{path}.batch_size", batch, rule, _multiples(batch, unit))
    if not minibatch or minibatch == batch:
        return
    legal = [n for n in _divisors(batch) if n % unit == 0] if batch % unit == 0 else []
    near = _nearest(minibatch, legal) if legal else _multiples(minibatch, unit)
    if minibatch % unit:
        rule = f"must be a multiple of {_failing(minibatch, parts)}"
        yield _problem(f"{path}.minibatch_size", minibatch, rule, near)
    elif batch % minibatch:
        rule = f"must divide batch_size {batch}"
        yield _problem(f"{path}.minibatch_size", minibatch, rule, near)


def _unit_parts(group: int, slots: int) -> tuple[tuple[str, int], ...]:
    return (("group_size", group), ("invariance.data_slots", slots))


def _failing(value: int, parts: Sequence[tuple[str, int]]) -> str:
    return " and ".join(f"{name} {unit}" for name, unit in parts if value % unit)


def _world_problems(roles: Sequence[_Role], world_size: int | None) -> Iterator[Problem]:
    world = world_size if world_size is not None else max(role.end for role in roles)
    for role in roles:
        if role.end > world and role.given:
            shape = (
                f"tp {role.mesh.tp} x pp {role.mesh.pp} x dp {role.mesh.dp} from rank {role.mesh.first_rank}"
            )
            rule = f"needs ranks {role.mesh.first_rank}..{role.end - 1}; the world has {world}"
            yield Problem(
                path=role.path, got=shape, rule=rule, hint=f"start {role.end} ranks or a smaller mesh"
            )
    used = {rank for role in roles for rank in range(role.mesh.first_rank, role.end)}
    idle = [rank for rank in range(world) if rank not in used]
    if idle:
        need = max(role.end for role in roles)
        hint = f"start {need} ranks, or a larger dp" if need < world else "move first_rank down"
        shown = ", ".join(str(rank) for rank in idle[:8]) + (", ..." if len(idle) > 8 else "")
        rule = f"every rank of the world of {world} must be on some role's mesh"
        yield Problem(path="mesh", got=f"no role on rank {shown}", rule=rule, hint=hint)
