"""One training step of a stage: sample or read, judge, score, learn. The algorithm's page."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from unirl_scale.core.config import RunConfig, StageConfig
from unirl_scale.core.trajectory import Trajectory
from unirl_scale.parallel.samples import Sample
from unirl_scale.rl.interface import Algorithm, LossBatch, Scored
from unirl_scale.rl.rewards import screen_rewards
from unirl_scale.train.data import PromptSource
from unirl_scale.train.learn import LearnReport, hash_tensor, learn, learning_rate
from unirl_scale.train.minibatch import Minibatch, minibatches, pad
from unirl_scale.train.roles import Role, Roles
from unirl_scale.train.rollout import Draw, sample
from unirl_scale.train.sent import axis_bytes
from unirl_scale.train.state import TrainState


@dataclass(slots=True)
class StepLog:
    """What one step leaves behind: metrics, and digests by optimizer step."""

    metrics: dict[str, float] = field(default_factory=dict)
    digests: dict[int, dict[str, str]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.metrics[f"time/{phase}_s"] = time.perf_counter() - start


class StageRunner:
    """Runs steps of one stage.

    Args:
        cfg: resolved configuration.
        stage, algorithm: the stage and its built algorithm.
        data: prompts of the training split.
        before_reduce: see `learn`.
        compare: called with the number of steps completed, after `before_reduce`, where a digest is due.
    """

    def __init__(
        self,
        cfg: RunConfig,
        stage: StageConfig,
        algorithm: Algorithm,
        roles: Roles,
        data: PromptSource,
        before_reduce: Callable[[], None] = lambda: None,
        compare: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.cfg, self.stage, self.algorithm, self.roles, self.data = cfg, stage, algorithm, roles, data
        self.before_reduce, self.compare = before_reduce, compare

    def step(self, state: TrainState) -> tuple[TrainState, StepLog]:
        """Collective over the world; the new state and the log are the same on every rank."""
        log, progress = StepLog(), self.roles.world.progress
        progress.enter("rollout", state.step + 1)
        with log.timed("rollout"):
            trajectory = self._sampled(state) if self.algorithm.needs.rollout else self._taught(state)
        progress.enter("score")
        with log.timed("score"):
            scored, values = self._score(trajectory, state, log)
        targets = self.algorithm.advantages(scored)
        log.metrics |= targets.metrics
        batch = LossBatch(
            mask=targets.mask,
            old_logprobs=scored.old_logprobs,
            advantages=targets.advantages,
            returns=targets.returns,
            old_values=values,
            ref_logprobs=scored.ref_logprobs,
        )
        with log.timed("train"):
            state = self._learn(trajectory, batch, state, log)
        tokens = int(scored.mask.sum()) + sum(len(p) for p in trajectory.prompts)
        seconds = sum(v for k, v in log.metrics.items() if k.startswith("time/"))
        log.metrics |= {"tokens": float(tokens), "tokens_per_s": tokens / seconds}
        kl = state.kl.updated(log.metrics.get("kl_ref", 0.0), trajectory.size)
        return self._advanced(state, trajectory, kl=kl), log

    def _advanced(self, state: TrainState, trajectory: Trajectory, **changes: object) -> TrainState:
        return replace(
            state,
            step=state.step + 1,
            stage_step=state.stage_step + 1,
            prompts_seen=state.prompts_seen + trajectory.size // self.stage.group_size,
            samples_seen=state.samples_seen + trajectory.size,
            **changes,  # type: ignore[arg-type]
        )

    # ---- data -------------------------------------------------------------------------------------
    def _sampled(self, state: TrainState) -> Trajectory:
        """Responses sampled from the actor, judged by the task."""
        group = self.stage.group_size
        prompts = self.data.next(state.prompts_seen, self.stage.batch_size // group)
        prompts = [p for p in prompts for _ in range(group)]
        ids = range(state.samples_seen, state.samples_seen + len(prompts))
        self.roles.refresh_rollout()
        draw = Draw(prompts=[p.tokens for p in prompts], sample_ids=ids, seed=self.cfg.seed, step=state.step)
        judged = sample(
            self.roles,
            draw,
            self.cfg.rollout,
            self.data.stops,
            lambda number, tokens: self.data.judge(prompts[number], tokens),
        )
        return Trajectory(
            sample_ids=tuple(ids),
            group_ids=tuple(i // group for i in ids),
            prompts=tuple(p.tokens for p in prompts),
            responses=tuple(j.tokens for j in judged),
            truncated=tuple(j.truncated for j in judged),
            rollout_logprobs=tuple(j.logprobs for j in judged),
            rewards=tuple(j.reward for j in judged),
        )

    def _taught(self, state: TrainState) -> Trajectory:
        """The task's own targets as responses."""
        prompts = self.data.next(state.prompts_seen, self.stage.batch_size)
        ids = range(state.samples_seen, state.samples_seen + len(prompts))
        return Trajectory(
            sample_ids=tuple(ids),
            group_ids=tuple(ids),
            prompts=tuple(p.tokens for p in prompts),
            responses=tuple(self.data.target(p) for p in prompts),
            truncated=(False,) * len(prompts),
            rewards=(0.0,) * len(prompts),
        )

    # ---- scores -----------------------------------------------------------------------------------
    def _score(self, trajectory: Trajectory, state: TrainState, log: StepLog) -> tuple[Scored, Tensor | None]:
        """Log-probs of the actor before its first update, values, reference log-probs."""
        samples = [Sample(p, r) for p, r in zip(trajectory.prompts, trajectory.responses)]
        width = trajectory.width
        screened = screen_rewards(trajectory.rewards, trajectory.sample_ids, self.cfg.reward.on_invalid)
        if screened.invalid_ids:
            log.warnings.append(f"dropped samples with invalid rewards: {list(screened.invalid_ids[:8])}")
        mask = torch.from_numpy(trajectory.mask())
        old = torch.zeros(trajectory.size, width)
        if self.algorithm.needs.rollout:
            old = pad(self.roles.actor.score(samples), width)
            log.metrics["rollout/logprob_max_abs_diff"] = self._rollout_difference(trajectory, old, mask)
        critic = self.roles.critic if self.algorithm.needs.critic else None
        values = pad(critic.score(samples), width) if critic else None
        reference = self.roles.reference
        scored = Scored(
            mask=mask,
            old_logprobs=old,
            values=values,
            ref_logprobs=pad(reference.score(samples), width) if reference else None,
            rewards=screened.rewards,
            valid_rows=screened.valid_rows,
            group_ids=torch.tensor(trajectory.group_ids),
            truncated=torch.tensor(trajectory.truncated),
            kl_coef=state.kl.coef,
        )
        return scored, values

    def _rollout_difference(self, trajectory: Trajectory, old: Tensor, mask: Tensor) -> float:
        """Largest |log-prob at sampling - log-prob of the training forward| over the response tokens."""
        sampled = pad([torch.from_numpy(x) for x in trajectory.rollout_logprobs], trajectory.width)
        return float(torch.where(mask, (sampled - old).abs(), torch.zeros_like(old)).max())

    # ---- updates ----------------------------------------------------------------------------------
    def _learn(self, trajectory: Trajectory, batch: LossBatch, state: TrainState, log: StepLog) -> TrainState:
        reports: dict[str, list[tuple[LearnReport, int]]] = {}
        for minibatch in minibatches(
            trajectory, batch, self.algorithm, self.stage, self.cfg.seed, state.step
        ):
            number = state.optimizer_steps + 1
            if minibatch.weights.num_tokens == 0:
                log.warnings.append(f"optimizer step {number}: no sample trains; skipped")
                state = replace(state, skipped_steps=state.skipped_steps + 1)
                continue
            every = self.cfg.digest.every
            digest = every > 0 and number % every == 0
            if digest:
                log.digests[number] = _batch_digests(batch)
            for role in self.roles.trained(self.stage, state.stage_step):
                report = self._update(role, minibatch, state, digest)
                reports.setdefault(role.name, []).append((report, minibatch.weights.num_tokens))
                log.digests.setdefault(number, {}).update(
                    {f"{role.name}/{k}": v for k, v in report.digests.items()}
                )
                if report.result.applied:
                    state = state.updated(role.name)
                else:
                    state = replace(state, skipped_steps=state.skipped_steps + 1)
                    names = ", ".join(report.result.nonfinite[:4])
                    log.warnings.append(
                        f"optimizer step {number}: {role.name} gradient not finite in {names}; skipped"
                    )
            state = replace(state, optimizer_steps=number)
        log.digests = {n: d for n, d in log.digests.items() if d}
        log.metrics |= _summary(reports)
        log.metrics["skipped_steps"] = float(state.skipped_steps)
        return state

    def _update(self, role: Role, minibatch: Minibatch, state: TrainState, digest: bool) -> LearnReport:
        critic = role.name == "critic"
        optim = self.stage.critic_optim if critic else self.stage.optim
        lr = learning_rate(optim, state.stage_step, self.stage.num_steps)
        loss = minibatch.critic_loss(self.algorithm) if critic else minibatch.actor_loss(self.algorithm)

        def before_reduce() -> None:
            self.before_reduce()
            if digest:  # of what these gradients were computed from
                self.compare(state.step)

        return learn(role, minibatch.samples, loss, optim, lr, digest=digest, before_reduce=before_reduce)


def _batch_digests(batch: LossBatch) -> dict[str, str]:
    """What every optimizer step of the training step starts from."""
    tensors = {
        "old_logprobs": batch.old_logprobs,
        "advantages": batch.advantages,
        "returns": batch.returns,
        "values": batch.old_values,
        "ref_logprobs": batch.ref_logprobs,
    }
    return {f"batch/{name}": hash_tensor(t) for name, t in tensors.items() if t is not None}


def _summary(reports: Mapping[str, list[tuple[LearnReport, int]]]) -> dict[str, float]:
    """Means over the step's updates: losses and norms an update, diagnostics a token. Bytes that a role's
    first rank sends are summed over updates and roles."""
    out: dict[str, float] = {}
    for role, entries in reports.items():
        tokens = sum(n for _, n in entries)
        out[f"{role}/loss"] = sum(r.loss for r, _ in entries) / len(entries)
        out[f"{role}/grad_norm"] = sum(r.result.grad_norm for r, _ in entries) / len(entries)
        out[f"{role}/lr"] = entries[-1][0].lr
        for name in entries[0][0].sums:
            out[f"{role}/{name}"] = sum(r.sums[name] for r, _ in entries) / tokens
        for report, _ in entries:
            for axis, n_bytes in axis_bytes(report.sent).items():
                name = f"comm/{axis}_sent_bytes"
                out[name] = out.get(name, 0.0) + n_bytes
    return out
