"""`unirl-scale plan`: from an operator's files to a plan and the files that hand it on."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from unirl_scale.comm.environment_files import addresses_of, host_file, rank_file, rank_table
from unirl_scale.comm.plan import Plan
from unirl_scale.comm.plan_draw import draw_plan
from unirl_scale.comm.plan_file import write_plan
from unirl_scale.comm.plan_request import PlanRequest, describe_search, plan, search
from unirl_scale.comm.plan_table import plan_table
from unirl_scale.comm.plan_traffic import Axis
from unirl_scale.comm.topology import Topology
from unirl_scale.core.check import require_legal, world_size_of
from unirl_scale.core.config import MeshConfig, MeshesConfig, RunConfig
from unirl_scale.core.errors import PlanError
from unirl_scale.core.load import load_config
from unirl_scale.core.typed import to_plain
from unirl_scale.core.yaml_text import read_yaml
from unirl_scale.launch.collectives import planned_environment
from unirl_scale.launch.console import Console

HostsForm = Literal["openmpi", "mpich", "slurm", "rankfile"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCommand:
    """What the command line asked for; "" = do not write.

    Attributes:
        config, overrides: as for `train`.
        request: topology files and assumptions. Where its ranks are not those that the meshes span, the best
            layout for them is searched.
        search: print that many layouts and plan the first.
        out: the plan, YAML or JSON by its ending.
        draw, draw_axis: SVG or PNG of the machine, coloured by the axis.
        hosts, hosts_form: host file for a launcher.
        rank_table: HCCL rank table.
        exports: shell file that exports the collective library's variables.
        product: Ascend product; "" = as the topology shows.
        quiet: print neither table nor proofs.
    """

    config: str
    overrides: tuple[str, ...]
    request: PlanRequest
    search: int = 0
    out: str = ""
    draw: str = ""
    draw_axis: Axis = "pp"
    hosts: str = ""
    hosts_form: HostsForm = "openmpi"
    rank_table: str = ""
    exports: str = ""
    product: str = ""
    quiet: bool = False


def plan_command(command: PlanCommand, environ: Mapping[str, str], console: Console) -> int:
    """Plan, print, write; the exit status.

    Raises:
        ConfigError: the configuration is wrong.
        PlanError: a file cannot be read, the meshes do not fit, or the environment is refused.
    """
    _check_endings(command)
    cfg, auto = _asked(command)
    require_legal(cfg, source=command.config)
    cfg = _searched(cfg, command, console, auto=auto)
    made, topology, shown = plan(cfg, command.request)
    if command.out or not command.quiet:
        # Counting what the layers send needs them, and so torch, which takes seconds to load.
        from unirl_scale.train.planned import with_sent_bytes

        made = with_sent_bytes(made, cfg)
    if not command.quiet:
        console.text(plan_table(made))
        for sentence in shown:
            console.line(f"verified: {sentence}")
    for path, content in _files(cfg, command, made, topology, environ).items():
        Path(path).write_bytes(content if isinstance(content, bytes) else content.encode())
        console.line(f"wrote {path}")
    return 0


def _check_endings(command: PlanCommand) -> None:
    for option, path, endings in (
        ("--out", command.out, (".yaml", ".yml", ".json")),
        ("--draw", command.draw, (".svg", ".png")),
    ):
        if path and Path(path).suffix not in endings:
            hint = f"{option} {Path(path).with_suffix(endings[0])}"
            raise PlanError(f"{option}: got {path}; must end in {' or '.join(endings)}; hint: {hint}")


def _asked(command: PlanCommand) -> tuple[RunConfig, bool]:
    """The configuration, and whether it leaves the layout to the planner: `mesh: auto`.

    Raises:
        ConfigError: it is wrong.
    """
    auto = "mesh=auto" in command.overrides
    if not auto:
        with contextlib.suppress(OSError, UnicodeDecodeError):  # which load_config reports
            tree, _ = read_yaml(Path(command.config).read_text(encoding="utf-8"), command.config)
            auto = isinstance(tree, dict) and tree.get("mesh") == "auto"
    if not auto:
        return load_config(command.config, command.overrides), False
    kept = [text for text in command.overrides if text != "mesh=auto"]
    return load_config(command.config, ["mesh={}", *kept]), True


def _searched(cfg: RunConfig, command: PlanCommand, console: Console, *, auto: bool) -> RunConfig:
    """The configuration on the best layout, where one was asked for or the ranks are not the meshes'."""
    ranks, world = command.request.ranks, world_size_of(cfg)
    if not auto and not command.search and ranks in (None, world):
        return cfg
    request = command.request if auto or ranks else replace(command.request, ranks=world)
    found = search(cfg, request, best=max(1, command.search))
    if not command.quiet:
        console.text(describe_search(found))
        console.line(f"the first: {' '.join(_overrides(found[0].mesh))}")
        console.line()
    return replace(cfg, mesh=MeshesConfig(actor=found[0].mesh))


def _overrides(mesh: MeshConfig) -> list[str]:
    """`key=value` settings that give the actor this mesh."""
    plain, default = to_plain(mesh), to_plain(MeshConfig())
    changed = [name for name in plain if plain[name] != default[name] and name != "pipeline_split"]
    layers = ",".join(map(str, mesh.pipeline_split))
    split = [f"mesh.actor.pipeline_split=[{layers}]"] if mesh.pipeline_split else []
    return [*(f"mesh.actor.{name}={str(plain[name]).lower()}" for name in changed), *split]


def _files(
    cfg: RunConfig, command: PlanCommand, made: Plan, topology: Topology, environ: Mapping[str, str]
) -> dict[str, str | bytes]:
    """Path -> content of everything to write; all are made before the first is written."""
    files: dict[str, str | bytes] = {}
    if command.out:
        files[command.out] = write_plan(made, form="json" if command.out.endswith(".json") else "yaml")
    if command.draw:
        drawing = draw_plan(made, axis=command.draw_axis)
        files[command.draw] = drawing.png() if command.draw.endswith(".png") else drawing.svg()
    if command.hosts:
        form = command.hosts_form
        files[command.hosts] = rank_file(made) if form == "rankfile" else host_file(made, form)
    if command.rank_table:
        address = addresses_of(topology) if len(made.nodes) > 1 else None
        files[command.rank_table] = rank_table(made, address)
    if command.exports:
        chosen = planned_environment(cfg, made, topology, environ, command.product)
        files[command.exports] = "".join(f"{line}\n" for line in chosen.lines())
    return files
