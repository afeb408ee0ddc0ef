"""The plan as a YAML or JSON file that a person can review and `read_plan` reads back unchanged."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import yaml

from unirl_scale.comm.plan import Plan, RolePlan
from unirl_scale.comm.plan_table import plan_table
from unirl_scale.comm.topology import hostlist
from unirl_scale.comm.topology.documents import read_yaml
from unirl_scale.comm.topology.model import IntArray
from unirl_scale.comm.topology.source import Source, load
from unirl_scale.core.errors import PlanError

KEY = "unirl_scale_plan"


def plan_dict(plan: Plan) -> dict[str, Any]:
    """Plain dicts, lists and numbers. Ranks are written as runs of equal nodes, not one by one."""
    return {
        KEY: 1,
        "world_size": plan.world_size,
        "transport": plan.transport,
        "data_slots": plan.data_slots,
        "model_leaves": plan.model_leaves,
        "communicators": plan.communicators,
        "order": plan.order,
        "excluded": list(plan.excluded),
        "notes": list(plan.notes),
        "nodes": _node_runs(plan),
        "placement": _rank_runs(plan),
        "roles": [_plain(role) for role in plan.roles],
    }


def write_plan(plan: Plan, *, form: typing.Literal["yaml", "json"] = "yaml") -> str:
    """The file's text; the YAML starts with the plan's table as comments."""
    body = plan_dict(plan)
    if form == "json":
        return json.dumps(body, indent=1) + "\n"
    head = "".join(f"# {line}".rstrip() + "\n" for line in plan_table(plan).splitlines())
    text: str = yaml.safe_dump(body, sort_keys=False, width=110, default_flow_style=None)
    return head + text


def read_plan(path_or_text: str) -> Plan:
    """Read a plan file of either form.

    Raises:
        PlanError: not a plan, of another version, or with a missing, unknown or ill-typed field.
    """
    source = load(path_or_text)
    body = read_yaml(source).value
    if not isinstance(body, dict) or body.get(KEY) != 1:
        got = body.get(KEY) if isinstance(body, dict) else type(body).__name__
        raise source.error(1, f"{KEY} {got!r}", "1", "give a file that `unirl-scale plan --out` wrote")
    try:
        return _plan(body)
    except (KeyError, TypeError, ValueError, IndexError) as err:
        got = f"{type(err).__name__}: {err}"
        raise source.error(1, got, "the fields of a plan", "write the plan again") from err
    except PlanError as err:
        raise source.error(_line(source, str(err)), str(err), "a plan", "write the plan again") from err


def _line(source: Source, message: str) -> int:
    return source.line_of(message.split(":")[0].rpartition(".")[2] + ":")


def _plan(body: Mapping[str, Any]) -> Plan:
    nodes: list[str] = []
    leaf: list[int] = []
    for run in body["nodes"]:
        names = hostlist.expand(run["names"]) if run["names"] else [""]
        nodes += names
        leaf += [int(run["leaf"])] * len(names)
    index = {name: i for i, name in enumerate(nodes)}
    node: list[int] = []
    device: list[int] = []
    for run in body["placement"]:
        for name in hostlist.expand(run["nodes"]) if run["nodes"] else [""]:
            node += [index[name]] * len(run["devices"])
            device += [int(d) for d in run["devices"]]
    if len(node) != body["world_size"]:
        raise ValueError(f"placement of {len(node)} ranks for a world of {body['world_size']}")
    return Plan(
        nodes=tuple(nodes),
        node=np.array(node, np.int32),
        device=np.array(device, np.int32),
        leaf=np.array(leaf, np.int32),
        order=str(body["order"]),
        roles=tuple(_typed(RolePlan, role, "roles") for role in body["roles"]),
        communicators=int(body["communicators"]),
        transport=body["transport"],
        data_slots=int(body["data_slots"]),
        model_leaves=int(body["model_leaves"]),
        excluded=tuple(body["excluded"]),
        notes=tuple(body["notes"]),
    )


def _node_runs(plan: Plan) -> list[dict[str, Any]]:
    cuts = _cuts(plan.leaf)
    return [{"names": hostlist.fold(plan.nodes[a:b]), "leaf": int(plan.leaf[a])} for a, b in cuts]


def _cuts(ids: IntArray) -> list[tuple[int, int]]:
    edges = [0, *(np.flatnonzero(np.diff(ids)) + 1).tolist(), len(ids)]
    return list(pairwise(edges))


def _rank_runs(plan: Plan) -> list[dict[str, Any]]:
    """Consecutive ranks of one node are a visit; consecutive visits with equal devices are a run."""
    out: list[dict[str, Any]] = []
    first = 0
    for a, b in _cuts(plan.node):
        name, devices = plan.nodes[plan.node[a]], plan.device[a:b].tolist()
        if out and out[-1]["devices"] == devices:
            out[-1]["nodes"].append(name)
        else:
            out.append({"first_rank": first, "nodes": [name], "devices": devices})
        first = b
    return [{**run, "nodes": hostlist.fold(run["nodes"])} for run in out]


def _plain(value: Any) -> Any:
    """Dataclasses as dicts, tuples as lists, numbers as they are; fields with no value are left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
        return {name: _plain(item) for name, item in pairs if item is not None and item != ()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


def _typed(kind: Any, value: Any, path: str) -> Any:
    """Build `kind` from plain data.

    Raises:
        PlanError: an unknown field or a value of another type.
    """
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        if not isinstance(value, dict) or set(value) - set(hints):
            extra = sorted(set(value) - set(hints)) if isinstance(value, dict) else value
            raise PlanError(f"{path}: got {extra!r}; must be fields of {getattr(kind, '__name__', kind)}")
        given = {name: _typed(hints[name], item, f"{path}.{name}") for name, item in value.items()}
        for field in dataclasses.fields(kind):
            if field.name not in given:
                given[field.name] = _absent(hints[field.name], field, path)
        make: Any = kind
        return make(**given)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        if not isinstance(value, list):
            raise PlanError(f"{path}: got {value!r}; must be a list")
        return tuple(_typed(args[0], item, f"{path}[{i}]") for i, item in enumerate(value))
    if origin in (typing.Union, types.UnionType):
        return None if value is None else _typed(next(a for a in args if a is not type(None)), value, path)
    if origin is typing.Literal:
        if value not in args:
            raise PlanError(f"{path}: got {value!r}; must be one of {', '.join(map(str, args))}")
        return value
    number = isinstance(value, int | float) and not isinstance(value, bool)
    fits = {float: number, int: number and float(value).is_integer(), str: isinstance(value, str)}
    if not fits.get(kind, isinstance(value, kind)):
        raise PlanError(f"{path}: got {value!r}; must be {kind.__name__}")
    return value


def _absent(kind: Any, field: dataclasses.Field[Any], path: str) -> Any:
    """A field the file leaves out: its default, None where that is allowed, () for a tuple."""
    if field.default is not dataclasses.MISSING:
        return field.default
    if type(None) in typing.get_args(kind):
        return None
    if typing.get_origin(kind) is tuple:
        return ()
    raise PlanError(f"{path}.{field.name}: got nothing; must be given")
