"""`invariance.mode: off`, the peer that the price is measured against, computes the same numbers up to
rounding.

Its bits depend on the layout, which is what the last test shows. Not covered here: its speed.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.dist.engine_ranks import GQA, MHA, Case, run_numbers
from tests.dist.run_ranks import RankPool
from unirl_scale.core.config import MeshConfig

LAYOUTS = {
    "one": MeshConfig(micro_batch_size=4),
    "tp2-sp-dp2": MeshConfig(tp=2, dp=2, sequence_parallel=True, micro_batch_size=4),
    "tp2-pp2": MeshConfig(tp=2, pp=2, micro_batch_size=2),
    "pp2-vpp2-dp3": MeshConfig(pp=2, vpp=2, dp=3, recompute="block", micro_batch_size=4),
}
CASES = {
    "lm": Case(model=replace(MHA, num_layers=4), leaves=2, slots=3),
    "tied": Case(model=replace(GQA, num_layers=4), leaves=2, slots=3),
    "critic": Case(model=replace(MHA, num_layers=4), leaves=2, slots=3, head="value"),
}


def numbers(run_ranks: RankPool, case: Case) -> list[float]:
    by_rank = run_ranks(run_numbers, case.world_size, case, timeout_s=300.0)
    assert all(found == by_rank[0] for found in by_rank)
    return [number for step in by_rank[0] for number in step]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_off_is_layout_up_to_rounding(run_ranks: RankPool, case, layout) -> None:
    expected = numbers(run_ranks, case)
    got = numbers(run_ranks, replace(case, mode="off", mesh=layout))
    assert got == pytest.approx(expected, rel=1e-4)


def test_off_has_other_bits_on_other_layouts(run_ranks: RankPool) -> None:
    case = replace(CASES["lm"], mode="off")
    assert numbers(run_ranks, case) != numbers(run_ranks, replace(case, mesh=LAYOUTS["pp2-vpp2-dp3"]))
