"""Packed rows of a sample depend on the sample alone; slots and micro-batches lose and reorder nothing."""

from __future__ import annotations

import random

import pytest
import torch

from unirl_scale.parallel.packing import Packed, pack
from unirl_scale.parallel.samples import Sample, plan_slots
from unirl_scale.parallel.scored import pad_scored, split_scored, unpad_scored

PROMPTS = [(5, 6, 7), (8,), (1, 2, 3, 4, 5, 6, 7)]
RESPONSES = [(9, 10), (11, 12, 13, 14), (15,)]


def packed(tp: int = 1, tp_rank: int = 0, leaves: int = 6, rows: slice = slice(None)) -> Packed:
    return pack(
        PROMPTS[rows], RESPONSES[rows], leaves=leaves, tp=tp, tp_rank=tp_rank, device=torch.device("cpu")
    )


def test_samples_lie_end_to_end_padded_to_the_leaves() -> None:
    p = packed()
    assert p.spans.lengths == (6, 6, 12)
    assert p.ids.tolist() == [
        5,
        6,
        7,
        9,
        10,
        -1,
        8,
        11,
        12,
        13,
        14,
        -1,
        1,
        2,
        3,
        4,
        5,
        6,
        7,
        15,
        -1,
        -1,
        -1,
        -1,
    ]
    assert p.positions.tolist() == [*range(6), *range(6), *range(12)]


def test_the_row_before_a_response_token_scores_it() -> None:
    p = packed()
    assert p.score_targets.tolist() == [9, 10, 11, 12, 13, 14, 15]
    assert p.score_rows.tolist() == [2, 3, 6, 7, 8, 9, 18]
    assert p.score_spans.lengths == (2, 4, 1)
    assert p.ids[p.score_rows + 1].tolist() == p.score_targets.tolist()


@pytest.mark.parametrize("tp", [1, 2, 3, 6])
def test_token_blocks_of_all_ranks_gather_back_into_packed_order(tp: int) -> None:
    ranks = [packed(tp=tp, tp_rank=rank) for rank in range(tp)]
    assert (ranks[0].own_rows is None) == (tp == 1)
    rows = [torch.arange(24) if p.own_rows is None else p.own_rows for p in ranks]
    by_rank = torch.cat([p.ids[own] for p, own in zip(ranks, rows)])
    index = ranks[0].gather_index
    assert torch.equal(by_rank if index is None else by_rank[index], ranks[0].ids)
    assert [p.own_lengths for p in ranks] == [tuple(n // tp for n in (6, 6, 12))] * tp
    assert sorted(torch.cat(rows).tolist()) == list(range(24))


def test_a_samples_rows_do_not_depend_on_its_neighbours() -> None:
    together, start = packed(), 0
    for i, length in enumerate(together.spans.lengths):
        alone = packed(rows=slice(i, i + 1))
        assert together.ids[start : start + length].tolist() == alone.ids.tolist()
        assert together.positions[start : start + length].tolist() == alone.positions.tolist()
        start += length


def test_scores_go_to_padded_rows_and_back() -> None:
    p, values = packed(), torch.arange(1.0, 8.0)
    padded = pad_scored(values, p)
    assert padded.tolist() == [[1, 2, 0, 0], [3, 4, 5, 6], [7, 0, 0, 0]]
    assert torch.equal(unpad_scored(padded, p), values)
    assert [t.tolist() for t in split_scored(values, p)] == [[1, 2], [3, 4, 5, 6], [7]]


def random_samples(count: int, seed: int) -> list[Sample]:
    rng = random.Random(seed)
    return [Sample((1,), (2,) * rng.choice((0, 1, 3))) for _ in range(count)]


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
@pytest.mark.parametrize(
    ("count", "slots", "dp"), [(13, 12, 5), (13, 12, 1), (8, 4, 4), (3, 6, 4), (16, 5, 2)]
)
def test_live_samples_run_once_in_order_inside_their_slot(count, slots, dp, micro_batch) -> None:
    samples = random_samples(count, seed=count + dp)
    plans = [plan_slots(samples, slots, dp, rank, micro_batch) for rank in range(dp)]
    assert [slot for plan in plans for slot in plan.slots] == list(range(slots))
    assert [i for plan in plans for i in plan.samples] == [i for i, s in enumerate(samples) if s.response]
    slot_of = [slot for slot in range(slots) for _ in range(count // slots + (slot < count % slots))]
    for plan in plans:
        assert all(len(micro) <= micro_batch for micro in plan.micros)
        begin = 0
        for slot, end in zip(plan.slots, plan.slot_ends):
            members = [i for micro in plan.micros[begin:end] for i in micro]
            assert {slot_of[i] for i in members} <= {slot}
            full = [len(micro) == micro_batch for micro in plan.micros[begin:end]]
            assert all(full[:-1])
            begin = end
        assert begin == len(plan.micros)


def test_a_slot_holds_the_same_samples_on_every_layout() -> None:
    samples = random_samples(13, seed=1)

    def by_slot(dp: int, micro_batch: int) -> list[list[int]]:
        out = []
        for rank in range(dp):
            plan, begin = plan_slots(samples, 7, dp, rank, micro_batch), 0
            for end in plan.slot_ends:
                out.append([i for micro in plan.micros[begin:end] for i in micro])
                begin = end
        return out

    assert by_slot(1, 1) == by_slot(3, 2) == by_slot(5, 4) == by_slot(7, 13)
