"""The plug-ins as the trainer uses them: bits under every split, dropped rows, options, needs."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from unirl_scale.rl.algorithms import build
from unirl_scale.rl.grpo import GrpoOptions
from unirl_scale.rl.interface import ActorCritic, Algorithm, LossBatch, Scored, Targets
from unirl_scale.rl.ppo import PpoOptions
from unirl_scale.rl.reduce import tree_sum
from unirl_scale.rl.sft import SftOptions

NAN = math.nan
ROWS, WIDTH = 8, 13  # 13 is no multiple of a vector: its tail is scalar code

EVERYTHING: dict[str, Any] = {
    "entropy_coef": 0.01,
    "kl_in_reward_coef": 0.05,
    "kl_loss_coef": 0.1,
    "tis_cap": 2.0,
    "tis_level": "sequence",
}
CASES: dict[str, Algorithm] = {
    "ppo": build("ppo", PpoOptions()),
    "ppo with everything": build("ppo", PpoOptions(**EVERYTHING)),
    "ppo without clips": build("ppo", PpoOptions(dual_clip=0.0, value_clip=0.0, whiten_advantages=False)),
    "grpo": build("grpo", GrpoOptions()),
    "grpo with everything": build("grpo", GrpoOptions(**EVERYTHING)),
    "dapo": build(
        "grpo",
        GrpoOptions(
            clip_high=0.28, aggregation="token-mean", filter_groups=True, overlong_length=13, overlong_cache=4
        ),
    ),
    "dr_grpo": build("grpo", GrpoOptions(estimator="dr_grpo", aggregation_length=WIDTH)),
    "rloo": build("grpo", GrpoOptions(estimator="rloo", kl_in_reward_coef=0.05)),
    "reinforce++": build("grpo", GrpoOptions(estimator="reinforce++", gamma=0.99, kl_in_reward_coef=0.05)),
    "reinforce++-baseline": build("grpo", GrpoOptions(estimator="reinforce++-baseline")),
    "sft": build("sft", SftOptions()),
}
every_algorithm = pytest.mark.parametrize("algorithm", CASES.values(), ids=CASES.keys())


@dataclasses.dataclass(frozen=True)
class Step:
    """One training step's inputs: the scored batch and what the models say at update time."""

    scored: Scored
    rollout_logprobs: Tensor
    logprobs: Tensor
    entropy: Tensor
    values: Tensor


def make_step(seed: int = 0, rows: int = ROWS, width: int = WIDTH) -> Step:
    """Uneven lengths, gaps, wide spread, an empty row, NaN in every masked slot."""
    g = torch.Generator().manual_seed(seed)

    def normal(scale: float = 1.0) -> Tensor:
        return torch.where(mask, torch.randn(rows, width, generator=g) * scale, NAN)

    lengths = torch.randint(1, width + 1, (rows, 1), generator=g)
    mask = (torch.arange(width) < lengths) & (torch.rand(rows, width, generator=g) > 0.15)
    mask[2] = False
    mask[3] = True
    old = -normal().abs() * 3.0
    scored = Scored(
        mask=mask,
        old_logprobs=old,
        values=normal(10.0),
        ref_logprobs=old + normal(0.3),
        rewards=torch.randint(0, 3, (rows,), generator=g).double() * 0.7,
        valid_rows=torch.ones(rows, dtype=torch.bool),
        group_ids=torch.arange(rows) // 4,
        truncated=torch.zeros(rows, dtype=torch.bool),
        kl_coef=0.05,
    )
    return Step(
        scored=scored,
        rollout_logprobs=old + normal(0.2),
        logprobs=old + normal(0.5),
        entropy=normal().abs(),
        values=normal(10.0),
    )


def loss_batch(step: Step, targets: Targets) -> LossBatch:
    return LossBatch(
        mask=targets.mask,
        old_logprobs=step.scored.old_logprobs,
        advantages=targets.advantages,
        returns=targets.returns,
        old_values=step.scored.values,
        ref_logprobs=step.scored.ref_logprobs,
        rollout_logprobs=step.rollout_logprobs,
    )


def run(algorithm: Algorithm, step: Step, splits: list[Tensor]) -> dict[str, Tensor]:
    """Losses and gradients w.r.t. what the models said, micro-batch by micro-batch, put together again."""
    targets = algorithm.advantages(step.scored)
    batch, weights = loss_batch(step, targets), algorithm.weights(targets.mask)
    out = {name: torch.full_like(step.logprobs, NAN) for name in ("actor", "d_logprobs", "d_entropy")}
    if isinstance(algorithm, ActorCritic):
        out |= {name: torch.full_like(step.logprobs, NAN) for name in ("critic", "d_values")}
    for rows in splits:
        logprobs, entropy = (x[rows].clone().requires_grad_() for x in (step.logprobs, step.entropy))
        loss, _ = algorithm.actor_loss(logprobs, entropy, batch.rows(rows))
        grads = torch.autograd.grad(loss, [logprobs, entropy], weights.actor[rows], allow_unused=True)
        out["actor"][rows] = loss.detach()
        out["d_logprobs"][rows] = grads[0]
        out["d_entropy"][rows] = torch.zeros_like(loss) if grads[1] is None else grads[1]
        if isinstance(algorithm, ActorCritic):
            assert weights.critic is not None
            values = step.values[rows].clone().requires_grad_()
            loss, _ = algorithm.critic_loss(values, batch.rows(rows))
            (out["d_values"][rows],) = torch.autograd.grad(loss, [values], weights.critic[rows])
            out["critic"][rows] = loss.detach()
    return out


def total(algorithm: Algorithm, step: Step) -> float:
    """The scalar loss: the tree over tokens, samples with tokens added one after the other."""
    targets = algorithm.advantages(step.scored)
    loss, _ = algorithm.actor_loss(step.logprobs, step.entropy, loss_batch(step, targets))
    weights = algorithm.weights(targets.mask).actor
    out = torch.zeros(())
    for row in tree_sum(loss * weights, 1)[targets.mask.any(dim=1)]:
        out = out + row
    return out.item()


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(
        torch.equal(a[k], b[k]) and torch.equal(a[k].signbit(), b[k].signbit()) for k in a.keys() | b.keys()
    )


WHOLE = [torch.arange(ROWS)]


@every_algorithm
def test_any_split_gives_the_same_bits(algorithm: Algorithm) -> None:
    step = make_step()
    whole = run(algorithm, step, WHOLE)
    for sizes in ([1] * 8, [3, 3, 2], [5, 3], [1, 7], [2, 2, 2, 2]):
        assert same_bits(run(algorithm, step, list(torch.arange(ROWS).split(sizes))), whole)
    shuffled = torch.tensor([6, 1, 4, 7, 0, 2, 5, 3])
    assert same_bits(run(algorithm, step, list(shuffled.split(3))), whole)
    assert all(x.isfinite().all() for x in whole.values())


def test_one_ulp_in_one_token_is_seen_in_that_token_alone() -> None:
    """Control: the comparison above sees the smallest change there is."""
    step, algorithm = make_step(), CASES["sft"]
    moved = step.logprobs.clone()
    moved[3, 5] = torch.nextafter(moved[3, 5], torch.tensor(math.inf))
    before = run(algorithm, step, WHOLE)
    after = run(algorithm, dataclasses.replace(step, logprobs=moved), WHOLE)
    assert not same_bits(before, after)
    differs = before["actor"] != after["actor"]
    assert differs.sum() == 1 and differs[3, 5]


def test_weights_counted_per_micro_batch_would_be_seen() -> None:
    """Control: the usual mistake, a normaliser that knows only its own micro-batch."""
    mask = make_step().scored.mask
    whole = CASES["ppo"].weights(mask).actor
    per_micro_batch = torch.cat([CASES["ppo"].weights(part).actor for part in mask.split(3)])
    assert not torch.equal(per_micro_batch, whole)


@every_algorithm
def test_more_padding_changes_no_bit(algorithm: Algorithm) -> None:
    step = make_step()
    extra = 6

    def pad(x: Tensor) -> Tensor:
        filler = (
            torch.full((ROWS, extra), NAN)
            if x.is_floating_point()
            else torch.zeros(ROWS, extra, dtype=x.dtype)
        )
        return torch.cat([x, filler], dim=1)

    def padded(value: Any) -> Any:
        return {
            f.name: pad(x) if isinstance(x := getattr(value, f.name), Tensor) and x.dim() == 2 else x
            for f in dataclasses.fields(value)
        }

    wider = Step(**padded(step) | {"scored": Scored(**padded(step.scored))})
    got, expected = run(algorithm, wider, WHOLE), run(algorithm, step, WHOLE)
    assert same_bits({k: x[:, :WIDTH] for k, x in got.items()}, expected)
    assert all(torch.equal(x[:, WIDTH:], torch.zeros(ROWS, extra)) for x in got.values())


@every_algorithm
def test_masked_slots_are_plus_zero_whatever_they_hold(algorithm: Algorithm) -> None:
    step = make_step()
    masked = ~algorithm.advantages(step.scored).mask
    for x in run(algorithm, step, WHOLE).values():
        assert (x[masked] == 0.0).all() and not x[masked].signbit().any()


def without_row(step: Step, row: int) -> Step:
    keep = torch.tensor([i for i in range(ROWS) if i != row])

    def cut(value: Any) -> dict[str, Any]:
        return {
            f.name: x[keep] if isinstance(x := getattr(value, f.name), Tensor) else x
            for f in dataclasses.fields(value)
        }

    return Step(**cut(step) | {"scored": Scored(**cut(step.scored))})


@every_algorithm
def test_an_empty_response_is_as_if_it_were_not_there(algorithm: Algorithm) -> None:
    step = make_step()
    shorter = without_row(step, 2)
    keep = [i for i in range(ROWS) if i != 2]
    got = {k: x[keep] for k, x in run(algorithm, step, WHOLE).items()}
    assert same_bits(got, run(algorithm, shorter, [torch.arange(ROWS - 1)]))
    assert total(algorithm, step) == total(algorithm, shorter)
    assert total(algorithm, step) != total(algorithm, without_row(step, 3))
    masks = algorithm.advantages(step.scored).mask, algorithm.advantages(shorter.scored).mask
    a, b = algorithm.weights(masks[0]), algorithm.weights(masks[1])
    assert torch.equal(a.actor[keep], b.actor) and (a.num_rows, a.num_tokens) == (b.num_rows, b.num_tokens)


@pytest.mark.parametrize("name", [name for name in CASES if name != "sft"])
def test_an_invalid_reward_is_as_if_the_row_were_not_there(name: str) -> None:
    algorithm, step, row = CASES[name], make_step(), 5
    valid = torch.arange(ROWS) != row
    step = dataclasses.replace(step, scored=dataclasses.replace(step.scored, valid_rows=valid))
    step.scored.rewards[row] = NAN
    targets = algorithm.advantages(step.scored)
    assert not targets.mask[row].any() and torch.equal(targets.advantages[row], torch.zeros(WIDTH))
    assert torch.equal(algorithm.weights(targets.mask).actor[row], torch.zeros(WIDTH))
    assert targets.metrics["invalid_rewards"] == 1.0
    keep = [i for i in range(ROWS) if i != row]
    got = run(algorithm, step, WHOLE)
    shorter = run(algorithm, without_row(step, row), [torch.arange(ROWS - 1)])
    assert same_bits({k: x[keep] for k, x in got.items()}, shorter)


@every_algorithm
def test_nothing_valid_is_a_loss_of_exactly_zero(algorithm: Algorithm) -> None:
    step = make_step()
    nothing = dataclasses.replace(step.scored, mask=torch.zeros(ROWS, WIDTH, dtype=torch.bool))
    step = dataclasses.replace(step, scored=nothing)
    targets = algorithm.advantages(step.scored)
    weights = algorithm.weights(targets.mask)
    assert (weights.num_rows, weights.num_tokens) == (0, 0) and total(algorithm, step) == 0.0
    assert all(torch.equal(x, torch.zeros(ROWS, WIDTH)) for x in run(algorithm, step, WHOLE).values())
    assert all(math.isfinite(x) for x in targets.metrics.values())


def test_critic_losses_split_any_way_are_the_global_mean() -> None:
    """Token losses [[1, 2, 3], [4]]: 2.5, gradients bit-equal. A mean of means says 3, a sum of means 6."""
    ppo = build("ppo", PpoOptions(value_clip=0.0))
    assert isinstance(ppo, ActorCritic)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    target = torch.tensor([[1.0, 2.0, 3.0], [4.0, NAN, NAN]])
    values = (target * 2.0).sqrt()
    zeros = torch.zeros(2, 3)
    batch = LossBatch(mask=mask, old_logprobs=zeros, advantages=zeros, returns=zeros, old_values=zeros)
    weights = ppo.weights(mask).critic
    assert weights is not None
    grads, sums, means = {}, {}, {}
    for split in ([[0, 1]], [[0], [1]], [[1], [0]]):
        grad, parts = torch.zeros(2, 3), []
        for rows in map(torch.tensor, split):
            v = values[rows].clone().requires_grad_()
            loss, _ = ppo.critic_loss(v, batch.rows(rows))
            (grad[rows],) = torch.autograd.grad(loss, [v], weights[rows])
            parts.append((loss.detach(), weights[rows], mask[rows]))
        grads[str(split)] = grad
        sums[str(split)] = sum((x * w).sum().item() for x, w, _ in parts)
        means[str(split)] = [x[m].mean().item() for x, _, m in parts]
    assert list(sums.values()) == pytest.approx([2.5] * 3)
    assert all(torch.equal(a, b) for a, b in itertools.pairwise(grads.values()))
    wrong = means["[[0], [1]]"]
    assert sum(wrong) == pytest.approx(6.0) and sum(wrong) / 2 == pytest.approx(3.0)


def test_nan_in_a_masked_slot_never_reaches_the_loss() -> None:
    algorithm = CASES["ppo"]
    mask = torch.tensor([[True, False]])
    batch = LossBatch(mask=mask, old_logprobs=torch.tensor([[0.0, NAN]]), advantages=torch.ones(1, 2))
    logprobs = torch.zeros(1, 2).requires_grad_()
    loss, diagnostics = algorithm.actor_loss(logprobs, torch.full((1, 2), NAN), batch)
    assert loss.tolist() == [[-1.0, 0.0]]
    loss.sum().backward()
    assert logprobs.grad is not None and logprobs.grad.tolist() == [[-1.0, 0.0]]
    assert all(not x.requires_grad for x in diagnostics.values())
    assert {name: x[0, 1].item() for name, x in diagnostics.items()} == dict.fromkeys(diagnostics, 0.0)
    assert torch.tensor([[0.0, NAN]]).mul(mask).isnan().any()  # control: multiplying keeps the NaN


def test_grpo_without_std_on_a_nan_reward_golden() -> None:
    ones = torch.ones(4, 2, dtype=torch.bool)
    scored = Scored(
        mask=ones,
        old_logprobs=torch.zeros(4, 2),
        rewards=torch.tensor([1.0, NAN, 0.0, 1.0], dtype=torch.float64),
        valid_rows=torch.tensor([True, False, True, True]),
        group_ids=torch.zeros(4, dtype=torch.int64),
        truncated=torch.zeros(4, dtype=torch.bool),
    )
    targets = CASES["dr_grpo"].advantages(scored)
    assert targets.advantages[:, 0].tolist() == pytest.approx([1 / 3, 0.0, -2 / 3, 1 / 3])
    assert targets.returns is None


def test_ppo_targets_are_the_golden_gae() -> None:
    mask = torch.tensor([[True] * 4, [True] * 3 + [False]])
    scored = Scored(
        mask=mask,
        old_logprobs=torch.zeros(2, 4),
        values=torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.5, 0.5, 0.5, NAN]]),
        rewards=torch.tensor([1.0, -1.0], dtype=torch.float64),
        valid_rows=torch.ones(2, dtype=torch.bool),
        group_ids=torch.arange(2),
        truncated=torch.tensor([True, False]),
    )
    targets = CASES["ppo"].advantages(scored)
    assert targets.advantages.dtype == torch.float32 and targets.returns is not None
    white = torch.tensor([[0.88619, 0.83076, 0.77242, 0.71100], [-1.00318, -1.06569, -1.13150, 0.0]])
    assert torch.allclose(targets.advantages, white, atol=1e-5)
    assert torch.allclose(targets.returns[0], torch.tensor([0.899675, 0.9365, 0.97, 1.0]), atol=1e-6)
    assert targets.metrics["truncated_rows"] == 1.0


def test_kl_in_reward_uses_the_controllers_coefficient() -> None:
    step = make_step()
    options = PpoOptions(kl_in_reward_coef=0.05, whiten_advantages=False, lam=1.0)
    algorithm = build("ppo", options)
    weak = algorithm.advantages(step.scored).advantages
    strong = algorithm.advantages(dataclasses.replace(step.scored, kl_coef=0.5)).advantages
    assert not torch.equal(weak, strong)
    assert algorithm.initial_kl.coef == 0.05 and algorithm.initial_kl.target == 0.0


def test_truncated_rows_can_be_kept_out() -> None:
    step = make_step()
    truncated = torch.arange(ROWS) == 3
    scored = dataclasses.replace(step.scored, truncated=truncated)
    assert build("grpo", GrpoOptions()).advantages(scored).mask[3].any()
    assert not build("grpo", GrpoOptions(drop_truncated=True)).advantages(scored).mask[3].any()


def test_dapo_judges_groups_by_the_reward_before_the_overlong_penalty() -> None:
    mask = torch.arange(10) < torch.tensor([[5], [10], [5], [10]])
    scored = Scored(
        mask=mask,
        old_logprobs=torch.zeros(4, 10),
        rewards=torch.tensor([0.0, 0.0, 1.0, 0.0], dtype=torch.float64),
        valid_rows=torch.ones(4, dtype=torch.bool),
        group_ids=torch.tensor([0, 0, 1, 1]),
        truncated=torch.zeros(4, dtype=torch.bool),
    )
    options = GrpoOptions(filter_groups=True, overlong_length=10, overlong_cache=2)
    targets = build("grpo", options).advantages(scored)
    assert targets.mask.any(dim=1).tolist() == [False, False, True, True]
    assert targets.metrics["filtered_rows"] == 2.0 and targets.metrics["overlong_rows"] == 2.0


def test_a_missing_reference_is_no_metric_and_with_a_kl_an_error() -> None:
    scored = dataclasses.replace(make_step().scored, ref_logprobs=None, kl_coef=0.0)
    assert "kl_ref" not in CASES["ppo"].advantages(scored).metrics
    with pytest.raises(ValueError, match="ref_logprobs"):
        CASES["ppo"].advantages(dataclasses.replace(scored, kl_coef=0.1))


def test_sft_loss_is_the_negative_log_probability() -> None:
    step = make_step()
    got = run(CASES["sft"], step, WHOLE)
    mask = step.scored.mask
    assert torch.equal(got["actor"][mask], -step.logprobs[mask])
    assert torch.allclose(got["d_logprobs"][mask], torch.tensor(-1.0 / int(mask.sum())))
