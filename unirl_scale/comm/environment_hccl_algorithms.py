"""HCCL_ALGO: its syntax, and which algorithms each product has for each operator.

From the CANN 8.5 tables of algorithms between servers and between super pods. What they do not list is
refused: HCCL itself would fall back to another algorithm without a word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from unirl_scale.comm.environment_rules import problem
from unirl_scale.core.problems import Problem

Product = Literal["910", "A2", "A3", "950"]
"""Atlas training series (910), A2 (910B), A3 (910C), Ascend 950."""

DEFAULT_EXPANSION: dict[Product, str] = {"910": "", "A2": "HOST", "A3": "AI_CPU", "950": "CCU_SCHED"}
"""HCCL_OP_EXPANSION_MODE when it is unset."""

_REDUCTIONS = ("allreduce", "reducescatter", "reduce")
_ALL = ("allgather", "reducescatter", "allreduce", "broadcast", "reduce", "scatter", "alltoall")
_BASIC = ("allgather", "reducescatter", "allreduce")
_WITH_BROADCAST = (*_BASIC, "broadcast")
_LEVEL1: dict[Product, dict[str, tuple[str, ...]]] = {
    "910": {
        "ring": (*_BASIC, "reduce"),
        "H-D_R": (*_WITH_BROADCAST, "reduce"),
        "NHR": _WITH_BROADCAST,
        "NHR_V1": _WITH_BROADCAST,
        "NB": (*_WITH_BROADCAST, "scatter"),
    },
    "A2": {
        "ring": (*_BASIC, "reduce", "scatter"),
        "H-D_R": (*_WITH_BROADCAST, "reduce"),
        "NHR": (*_WITH_BROADCAST, "scatter"),
        "NHR_V1": _WITH_BROADCAST,
        "NB": (*_WITH_BROADCAST, "scatter"),
        "pipeline": (*_BASIC, "alltoall"),
        "pairwise": ("alltoall",),
    },
    "A3": {
        "ring": (*_BASIC, "reduce", "scatter"),
        "NHR": (*_WITH_BROADCAST, "scatter"),
        "NB": (*_WITH_BROADCAST, "scatter"),
        "AHC": _BASIC,
    },
    "950": {"NHR": (*_WITH_BROADCAST, "reduce", "scatter")},
}
_LEVEL2: dict[Product, dict[str, tuple[str, ...]]] = {
    "910": {},
    "A2": {},
    "A3": {
        "ring": (*_BASIC, "reduce", "scatter"),
        "H-D_R": ("allreduce", "broadcast", "reduce"),
        "NHR": (*_WITH_BROADCAST, "scatter"),
        "NB": (*_WITH_BROADCAST, "scatter"),
        "pipeline": ("allgather", "reducescatter"),
    },
    "950": {"NHR": (*_WITH_BROADCAST, "reduce", "scatter")},
}


def algorithm_problems(text: str, env: Mapping[str, str], product: Product) -> list[Problem]:
    """Everything wrong with HCCL_ALGO: syntax, levels, and algorithms the product lacks for an operator."""
    found: list[Problem] = []
    parts = [p.strip() for p in text.split("/")]
    named = ["=" in p for p in parts]
    if any(named) and not all(named):
        return [
            problem("HCCL_ALGO", text, "must be one setting for all operators, or one for each named", "")
        ]
    if len(parts) > 1 and not any(named):
        return [
            problem("HCCL_ALGO", text, "must name its operators when it has several parts", "allreduce=...")
        ]
    seen: set[str] = set()
    for part in parts:
        operator, _, levels = part.rpartition("=")
        if operator and operator not in _ALL:
            found.append(problem("HCCL_ALGO", operator, f"must name operators of {', '.join(_ALL)}"))
            continue
        if operator in seen:
            found.append(problem("HCCL_ALGO", operator, "must name each operator once"))
        seen.add(operator)
        found += _level_problems(levels, operator, env, product)
    return found


def _level_problems(levels: str, operator: str, env: Mapping[str, str], product: Product) -> list[Problem]:
    chosen: dict[str, str] = {}
    for item in levels.split(";"):
        level, colon, algorithm = item.strip().partition(":")
        if not colon or level not in ("level0", "level1", "level2"):
            rule = "must read level0:NA;level1:<algorithm>, with level2 between super pods"
            return [problem("HCCL_ALGO", item, rule, "level0:NA;level1:NHR")]
        if level in chosen:
            return [problem("HCCL_ALGO", item, f"must set {level} once")]
        chosen[level] = algorithm
    found = []
    if chosen.get("level0", "NA") != "NA":
        found.append(
            problem("HCCL_ALGO", f"level0:{chosen['level0']}", "must leave level0 at NA", "level0:NA")
        )
    for level, table in (("level1", _LEVEL1[product]), ("level2", _LEVEL2[product])):
        if level in chosen:
            found += _table_problems(level, chosen[level], operator, table, product)
    mode = env.get("HCCL_OP_EXPANSION_MODE", DEFAULT_EXPANSION[product])
    if "level2" in chosen and mode != "AI_CPU" and _LEVEL2[product]:
        rule = f"must have no level2 with HCCL_OP_EXPANSION_MODE={mode}"
        found.append(problem("HCCL_ALGO", f"level2:{chosen['level2']}", rule, "AI_CPU"))
    if chosen.get("level1") == "AHC" and chosen.get("level2", "AHC") != "AHC":
        rule = "must have no level2 beside level1:AHC, which decides both"
        found.append(problem("HCCL_ALGO", f"level2:{chosen['level2']}", rule, "drop level2"))
    strict = env.get("HCCL_DETERMINISTIC", "false").lower() != "false"
    if product == "A2" and chosen.get("level1") == "pipeline" and strict and operator in ("", *_REDUCTIONS):
        rule = "must not be pipeline with HCCL_DETERMINISTIC, which A2 then ignores"
        found.append(problem("HCCL_ALGO", "level1:pipeline", rule, "level1:NHR"))
    return found


def _table_problems(
    level: str, algorithm: str, operator: str, table: Mapping[str, Sequence[str]], product: Product
) -> list[Problem]:
    text = f"{level}:{algorithm}"
    if not table:
        return [problem("HCCL_ALGO", text, f"must have no {level} on {product}", f"drop {level}")]
    if algorithm not in table:
        near = [a for a in table if a.lower() == algorithm.lower()]
        hint = f"did you mean {near[0]}?" if near else ""
        return [problem("HCCL_ALGO", text, f"must be one of {', '.join(table)} on {product}", hint)]
    if operator and operator not in table[algorithm]:
        fits = ", ".join(a for a, ops in table.items() if operator in ops) or "none"
        rule = f"must do {operator} on {product}"
        return [
            problem("HCCL_ALGO", f"{operator}={text}", rule, f"{fits} do" if fits != "none" else "drop it")
        ]
    return []
