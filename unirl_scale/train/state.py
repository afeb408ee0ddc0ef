"""TrainState: all that a resume needs besides weights and optimizer state, which live in the roles."""

from __future__ import annotations

from dataclasses import dataclass, replace

from unirl_scale.rl.kl_controller import KlController


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """Counters of a run; the same on every rank.

    Attributes:
        step: training steps done, over all stages.
        stage, stage_step: the current stage and the steps done in it.
        prompts_seen: the data cursor; the order of data is a function of (seed, cursor).
        samples_seen: the next global sample id.
        optimizer_steps: actor and critic updates tried, which number the digests.
        actor_updates, critic_updates: updates applied, which count Adam's steps.
        skipped_steps: updates skipped because of a non-finite gradient or a batch with nothing valid.
        kl: controller of the KL penalty in the reward.
    """

    step: int = 0
    stage: int = 0
    stage_step: int = 0
    prompts_seen: int = 0
    samples_seen: int = 0
    optimizer_steps: int = 0
    actor_updates: int = 0
    critic_updates: int = 0
    skipped_steps: int = 0
    kl: KlController = KlController(coef=0.0)  # noqa: RUF009 - frozen

    def next_stage(self, kl: KlController) -> TrainState:
        return replace(self, stage=self.stage + 1, stage_step=0, kl=kl)

    def updated(self, role: str) -> TrainState:
        """One more update of the actor or the critic was applied."""
        if role == "critic":
            return replace(self, critic_updates=self.critic_updates + 1)
        return replace(self, actor_updates=self.actor_updates + 1)
