"""Loss, pre-clip gradients, grad-norm, weights and both Adam moments have the same bits on every layout.

Each test runs five optimizer steps of PPO's actor or critic loss on a layout of 1..6 gloo ranks and holds
every digest of every step, as every rank saw it, against one rank that runs one sample at a time. Advantages
span ten decades with -0.0 and a subnormal among them, lengths are uneven, one response is empty, the clip is
always active and the KL is not zero. 13 samples never divide into slots evenly.

Not covered here: NCCL and HCCL, more than 6 ranks, and meshes that share ranks with another role (tests/e2e).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.dist.engine_ranks import GQA, MHA, Case, Digests, run_case
from tests.dist.run_ranks import RankPool
from unirl_scale.core.config import MeshConfig
from unirl_scale.core.digest_compare import Comparison, compare_digests

TIMEOUT_S = 300.0  # six ranks on two busy cores
Run = Callable[[Case], list[Digests]]

# One layer is enough where the axis under test is not the depth; few leaves where it is not tensor
# parallelism.
DATA = Case(model=replace(MHA, num_layers=1), leaves=2, slots=12)
TENSOR = Case(model=replace(MHA, num_layers=2), leaves=12, slots=3)
DEPTH = Case(model=replace(MHA, num_layers=5), leaves=2, slots=3)
QWEN = Case(model=GQA, leaves=6, slots=4)  # grouped heads, QKV bias, qk-norm, tied embeddings, 5 layers
CRITIC = replace(TENSOR, head="value", leaves=6)
BF16 = replace(TENSOR, precision="bf16", leaves=6)
# Leaves wide enough that the self-check takes whole-matrix GEMM where the processor's BLAS allows it.
WIDE = Case(
    model=replace(
        MHA,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        ffn_size=128,
        vocab_size=96,
    ),
    gemm="auto",
    leaves=2,
    slots=4,
)


def mesh(**axes: object) -> MeshConfig:
    """A bucket a layer, so that gradients travel behind the backward and weights behind the forward."""
    return MeshConfig(**{"micro_batch_size": 4, "bucket_elements": 1, **axes})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def run(run_ranks: RankPool) -> Run:
    """Digests of a case by rank."""
    return lambda case: run_ranks(run_case, case.world_size, case, timeout_s=TIMEOUT_S)


@pytest.fixture(scope="module")
def reference(run: Run) -> Callable[[Case], Digests]:
    """Digests of one rank that runs one sample at a time; computed once a case."""
    known: dict[Case, Digests] = {}

    def of(case: Case) -> Digests:
        single = replace(case, mesh=MeshConfig(), fault="")
        if single not in known:
            known[single] = run(single)[0]
        return known[single]

    return of


def comparison(a: Digests, b: Digests) -> Comparison:
    return compare_digests(dict(enumerate(a, start=1)), dict(enumerate(b, start=1)))


def assert_equal(run: Run, reference: Callable[[Case], Digests], case: Case) -> None:
    expected = reference(case)
    assert len(expected) == case.steps
    for step in expected:
        assert set(step) == case.tensors
    for rank, digests in enumerate(run(case)):
        result = comparison(expected, digests)
        assert result.equal, f"rank {rank}: {result.first_difference}"
        assert (result.steps, result.tensors) == (case.steps, case.steps * len(case.tensors))


# ---- one axis at a time -----------------------------------------------------------------------------
@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 4, 13])
def test_micro_batch_and_recompute_change_no_bit(run, reference, micro_batch_size, recompute) -> None:
    layout = MeshConfig(micro_batch_size=micro_batch_size, recompute=recompute)
    assert_equal(run, reference, replace(TENSOR, slots=1, mesh=layout))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    ("dp", "slots"), [(2, 12), (3, 12), (4, 12), (5, 12), (6, 12), (2, 5), (3, 5), (4, 7), (3, 2)]
)
def test_data_parallel_even_where_slots_do_not_divide(run, reference, dp, slots, overlap) -> None:
    assert_equal(run, reference, replace(DATA, slots=slots, mesh=mesh(dp=dp, overlap=overlap)))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("bucket_elements", [1, 2000, 1 << 18])
@pytest.mark.parametrize(
    "layout",
    [
        mesh(dp=3, micro_batch_size=1),
        mesh(dp=4, recompute="block"),
        mesh(pp=2, vpp=2, dp=2, micro_batch_size=1),
        mesh(tp=2, dp=3, sequence_parallel=True),
        mesh(pp=3, dp=2, micro_batch_size=2),
    ],
    ids=["dp3", "dp4-recompute", "pp2-vpp2-dp2", "tp2-dp3-sp", "pp3-dp2"],
)
def test_overlap_and_bucket_size_change_no_bit(run, reference, layout, bucket_elements, overlap) -> None:
    layout = replace(layout, overlap=overlap, bucket_elements=bucket_elements)
    assert_equal(run, reference, replace(QWEN, mesh=layout, steps=3))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tp", [2, 3, 4, 6])
def test_tensor_parallel_with_and_without_sequence_parallel(run, reference, tp, sequence_parallel) -> None:
    assert_equal(run, reference, replace(TENSOR, mesh=mesh(tp=tp, sequence_parallel=sequence_parallel)))


@pytest.mark.parametrize(
    "layout",
    [
        mesh(pp=2),  # 3, 2 layers
        mesh(pp=3, micro_batch_size=1),  # 2, 2, 1
        mesh(pp=4, micro_batch_size=2),  # 2, 1, 1, 1
        mesh(pp=4, pipeline_split=(1, 1, 1, 2)),
        mesh(pp=2, vpp=2, micro_batch_size=1),  # interleaved
        mesh(pp=2, vpp=2, pipeline_split=(2, 1, 1, 1), recompute="block"),
    ],
    ids=["even-ish", "uneven", "one-layer", "split", "interleaved", "interleaved-split"],
)
def test_pipeline_parallel_uneven_and_interleaved(run, reference, layout) -> None:
    assert_equal(run, reference, replace(DEPTH, mesh=layout))


# ---- the models -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "layout",
    [
        mesh(tp=3, sequence_parallel=True),
        mesh(pp=4),  # the tied embedding lives on two ranks
        mesh(pp=2, vpp=2, dp=2, micro_batch_size=1),
        mesh(tp=2, pp=2, sequence_parallel=True, recompute="block"),
    ],
    ids=["tp3-sp", "pp4", "pp2-vpp2-dp2", "tp2-pp2-sp"],
)
def test_grouped_heads_bias_qk_norm_and_tied_embeddings(run, reference, layout) -> None:
    assert_equal(run, reference, replace(QWEN, mesh=layout))


@pytest.mark.parametrize("case", [CRITIC, replace(WIDE, head="value")], ids=["blocked", "auto"])
@pytest.mark.parametrize(
    "layout",
    [mesh(), mesh(tp=2, sequence_parallel=True), mesh(pp=2, dp=3)],
    ids=["micro", "tp2-sp", "pp2-dp3"],
)
def test_value_head(run, reference, layout, case) -> None:
    assert_equal(run, reference, replace(case, mesh=layout))


@pytest.mark.parametrize(
    "layout", [mesh(), mesh(tp=2, sequence_parallel=True), mesh(dp=3)], ids=["micro", "tp2-sp", "dp3"]
)
def test_the_gemm_path_that_the_self_check_picks(run, reference, layout) -> None:
    assert_equal(run, reference, replace(WIDE, mesh=layout))


@pytest.mark.parametrize("leaf_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "layout", [mesh(tp=3, sequence_parallel=True), mesh(tp=2, dp=2)], ids=["tp3-sp", "tp2-dp2"]
)
def test_bf16_and_rounded_leaves(run, reference, layout, leaf_dtype) -> None:
    assert_equal(run, reference, replace(BF16, mesh=layout, leaf_dtype=leaf_dtype))


# ---- everything at once -----------------------------------------------------------------------------
def random_case(seed: int) -> Case:
    """A model, a precision and a mixed layout of 2..6 ranks."""
    rng = random.Random(seed)
    case = rng.choice([QWEN, replace(QWEN, head="value"), replace(DEPTH, leaves=6)])
    case = replace(case, precision=rng.choice(["fp32", "bf16"]), slots=rng.choice([1, 3, 4, 6]))
    case = replace(case, leaf_dtype=rng.choice(["fp32", "bf16"]) if case.precision == "bf16" else "fp32")
    shapes = [
        (tp, pp, dp)
        for tp in (1, 2, 3, 6)
        for pp in (1, 2, 3, 4, 5)
        for dp in range(1, case.slots + 1)
        if 2 <= tp * pp * dp <= 6
    ]
    tp, pp, dp = rng.choice(shapes)
    vpp = rng.choice([v for v in (1, 2) if v * pp <= case.model.num_layers]) if pp > 1 else 1
    cuts = [0, *sorted(rng.sample(range(1, case.model.num_layers), pp * vpp - 1)), case.model.num_layers]
    layout = MeshConfig(
        tp=tp,
        pp=pp,
        dp=dp,
        vpp=vpp,
        sequence_parallel=rng.random() < 0.5,
        micro_batch_size=rng.choice([1, 2, 3, 4]) if tp * pp == 1 else 4,
        recompute=rng.choice(["none", "block"]),
        overlap=seed % 3 != 0,
        bucket_elements=(1, 2000)[seed % 2],
        pipeline_split=tuple(b - a for a, b in itertools.pairwise(cuts)),
    )
    return replace(case, mesh=layout)


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(s, marks=pytest.mark.slow) for s in range(6, 60))]
)
def test_random_mixed_layouts(run, reference, seed) -> None:
    assert_equal(run, reference, random_case(seed))


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("case", [TENSOR, CRITIC, BF16, QWEN], ids=["lm", "critic", "bf16", "qwen"])
def test_every_tensor_parallel_layout(
    run, reference, case, tp, sequence_parallel, micro_batch_size, recompute
) -> None:
    if case.leaves % tp:
        pytest.skip(f"tp {tp} does not divide {case.leaves} leaves")
    layout = mesh(
        tp=tp, sequence_parallel=sequence_parallel, micro_batch_size=micro_batch_size, recompute=recompute
    )
    assert_equal(run, reference, replace(case, mesh=layout))


# ---- negative controls ------------------------------------------------------------------------------
# What a wrong forward shows in first: the loss is one fp32 number and may round the difference away.
FORWARD = ((1, "loss"), (1, "grad/embed"))


def differs(run: Run, reference: Callable[[Case], Digests], case: Case) -> Comparison:
    return comparison(reference(case), run(case)[0])


def test_digests_move_with_every_step(reference) -> None:
    steps = reference(TENSOR)
    for before, after in itertools.pairwise(steps):
        assert [name for name in sorted(TENSOR.tensors) if before[name] == after[name]] == []


def test_a_flipped_bit_of_one_forward_product_shows_at_the_first_step(run, reference) -> None:
    result = differs(run, reference, replace(TENSOR, fault="flipped_forward_bit"))
    assert result.differing[0] in FORWARD, result.first_difference


def test_a_flipped_bit_of_one_gradient_leaf_on_one_rank_names_that_parameter(run, reference) -> None:
    case = replace(DATA, slots=3, mesh=mesh(dp=3), fault="flipped_gradient_bit")
    result = differs(run, reference, case)
    first = [name for step, name in result.differing if step == 1]
    changed = "layers.0.ffn_down"
    assert first[0] == f"grad/{changed}", result.first_difference
    assert {name for name in first if name.startswith(("grad/", "loss"))} == {f"grad/{changed}"}


@pytest.mark.parametrize("tp", [1, 3])
def test_two_swapped_leaves_show_at_the_first_step(run, reference, tp) -> None:
    result = differs(run, reference, replace(TENSOR, mesh=mesh(tp=tp), fault="swapped_leaves"))
    assert result.differing[0] in FORWARD, result.first_difference


def test_two_swapped_siblings_cannot_be_seen(run, reference) -> None:
    """a + b = b + a, which is why two leaves, or two ranks, prove nothing."""
    assert differs(run, reference, replace(TENSOR, mesh=mesh(), fault="swapped_siblings")).equal


def test_a_dropped_data_slot_shows_in_every_gradient(run, reference) -> None:
    result = differs(run, reference, replace(DATA, slots=4, mesh=mesh(dp=4), fault="dropped_slot"))
    gradients = {name for name in DATA.tensors if name.startswith("grad/")}
    assert {name for step, name in result.differing if step == 1} >= gradients
    assert result.differing[0] == (1, "grad/embed"), result.first_difference


def test_buckets_reduced_a_micro_batch_too_early_show_in_their_gradients_alone(run, reference) -> None:
    case = replace(DATA, slots=3, mesh=mesh(dp=3, micro_batch_size=1))
    assert differs(run, reference, case).equal
    result = differs(run, reference, replace(case, fault="early_bucket"))
    replicated = ("attn_norm", "ffn_norm", "final_norm")  # not in a bucket: reduced at the end
    leafed = {n for n in DATA.tensors if n.startswith("grad/") and not n.endswith(replicated)}
    shown = {name for step, name in result.differing if step == 1 and name.startswith("grad/")}
    assert {"grad/embed", "grad/lm_head", "grad/layers.0.qkv"} <= shown <= leafed


def test_two_samples_swapped_between_slots_show_in_the_gradients(run, reference) -> None:
    result = differs(run, reference, replace(DATA, slots=4, mesh=mesh(), fault="swapped_samples"))
    assert result.differing[0] == (1, "grad/embed"), result.first_difference


@pytest.mark.parametrize("ranks", [3, 4, 6])
def test_one_vendor_sum_over_data_shows(run, reference, ranks) -> None:
    case = replace(DATA, slots=ranks, mesh=mesh(dp=ranks), fault="vendor_sum_over_data")
    result = differs(run, reference, case)
    assert result.differing[0] == (1, "grad/embed"), result.first_difference


@pytest.mark.parametrize("ranks", [3, 4, 6])
def test_one_vendor_sum_over_model_leaves_shows(run, reference, ranks) -> None:
    case = replace(TENSOR, leaves=ranks, mesh=mesh(tp=ranks), fault="vendor_sum_over_leaves")
    result = differs(run, reference, case)
    assert result.differing[0] in FORWARD, result.first_difference


def test_a_vendor_sum_of_two_cannot_be_seen(run, reference) -> None:
    case = replace(DATA, slots=2, mesh=mesh(dp=2), fault="vendor_sum_over_data")
    assert differs(run, reference, case).equal
