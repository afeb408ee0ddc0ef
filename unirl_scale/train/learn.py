"""One optimizer step of one role: accumulate, reduce, digest, clip, update; the report is the same on every
rank."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from unirl_scale.core.config import OptimConfig
from unirl_scale.kernels.reference import tree_sum
from unirl_scale.parallel.engine import MicroResults, StepResult
from unirl_scale.parallel.engine import TokenLoss as EngineLoss
from unirl_scale.parallel.optimizer import AdamStep
from unirl_scale.parallel.samples import Sample
from unirl_scale.parallel.traffic import StepTraffic
from unirl_scale.train.exchange import replicate, share
from unirl_scale.train.roles import Role
from unirl_scale.train.sent import Meter, is_ordered, planned_step, require_sent


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnReport:
    """What an optimizer step saw and did.

    Attributes:
        loss: of the minibatch: canonical tree over samples of trees over tokens.
        sums: diagnostics summed over tokens and samples.
        sent: bytes that the role's first rank sent to others.
        digests: SHA-256 by tensor, when asked.
    """

    loss: float
    sums: dict[str, float]
    result: StepResult
    lr: float
    sent: StepTraffic
    digests: dict[str, str] = field(default_factory=dict)


def learning_rate(cfg: OptimConfig, step: int, total: int) -> float:
    """Linear warm-up from 0, then constant, linear or cosine decay to min_lr at `total`; `step` counts from
    0."""
    if step < cfg.warmup_steps:
        return cfg.lr * (step + 1) / cfg.warmup_steps
    span = max(total - cfg.warmup_steps, 1)
    progress = min((step - cfg.warmup_steps) / span, 1.0)
    if cfg.schedule == "linear":
        return cfg.min_lr + (cfg.lr - cfg.min_lr) * (1.0 - progress)
    if cfg.schedule == "cosine":
        return cfg.min_lr + (cfg.lr - cfg.min_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))
    return cfg.lr


def learn(
    role: Role,
    samples: Sequence[Sample],
    loss: EngineLoss,
    optim: OptimConfig,
    lr: float,
    *,
    digest: bool,
    before_reduce: Callable[[], None] = lambda: None,
) -> LearnReport:
    """Collective over the world; ranks outside the role's mesh only receive the report. At least one sample
    has a response.

    Args:
        before_reduce: called on every rank once its gradients are there, before a collective over the world
            and before any weight or moment changes.

    Raises:
        PlanError: the step sent other bytes than it was planned to.
    """
    engine, progress = role.engine, role.world.progress
    meter = Meter(engine) if engine is not None else None
    progress.enter("accumulate")
    results = MicroResults()
    if engine is not None and meter is not None:
        with meter.counting():
            results = engine.accumulate(samples, loss)
    progress.enter("reduce")
    before_reduce()
    total, sums = _totals(role, samples, loss, results)
    outcome: tuple[StepResult, dict[str, str], StepTraffic] | None = None
    if engine is not None and meter is not None:
        with meter.counting():
            sumsq = engine.reduce()
        digests = {f"grad/{k}": v for k, v in engine.gradient_digests().items()} if digest else {}

        def adam(count: int) -> AdamStep:
            return AdamStep(
                lr=lr,
                beta1=optim.betas[0],
                beta2=optim.betas[1],
                eps=optim.eps,
                weight_decay=optim.weight_decay,
                count=count,
            )

        progress.enter("update")
        with meter.counting():
            result = engine.step(adam, optim.clip_grad, sumsq)
        if result.applied and is_ordered(engine):
            planned = planned_step(engine, samples, role.planned)
            require_sent(role.name, role.world.ranks[role.world.index], planned, meter.sent)
        if digest:
            digests["grad_norm"] = hash_float(result.grad_norm)
            for kind, by_name in engine.state_digests().items():
                digests |= {f"{kind}/{name}": value for name, value in by_name.items()}
        outcome = (result, digests, meter.sent)
    result, digests, sent = share(role.world, role.mesh, outcome)
    if digest:
        digests = {"loss": hash_tensor(total), **digests}
    return LearnReport(loss=float(total), sums=sums, result=result, lr=lr, sent=sent, digests=digests)


def _totals(
    role: Role, samples: Sequence[Sample], loss: EngineLoss, results: MicroResults
) -> tuple[Tensor, dict[str, float]]:
    """The minibatch's loss and diagnostics from the per-sample sums of the last pipeline stage."""
    live = [i for i, s in enumerate(samples) if s.response]
    names = _diagnostic_names(loss, live[0], role.num_scores)
    columns = {
        number: torch.stack([results.loss[number], *(results.diagnostics[n][number] for n in names)])
        for number in results.loss
    }
    lengths = [len(names) + 1 if s.response else 0 for s in samples]
    rows = replicate(role.world, columns, lengths, role.owners(len(samples)))
    sums = tree_sum(torch.stack([rows[i] for i in live]))
    return sums[0], {name: float(sums[i + 1]) for i, name in enumerate(names)}


def _diagnostic_names(loss: EngineLoss, sample: int, scores: int) -> list[str]:
    """What the loss reports, asked with one dummy token, since only the last stage ever calls it."""
    return sorted(loss([sample], tuple(torch.zeros(1, 1) for _ in range(scores)))[1])


def hash_tensor(t: Tensor) -> str:
    return hashlib.sha256(
        t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    ).hexdigest()


def hash_float(value: float) -> str:
    return hash_tensor(torch.tensor([value], dtype=torch.float64))
