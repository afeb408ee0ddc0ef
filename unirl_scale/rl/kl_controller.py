"""The coefficient of the KL penalty in the reward, fixed or adaptive."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from unirl_scale.core.errors import UniRLError


@dataclass(frozen=True, slots=True, kw_only=True)
class KlController:
    """A frozen value: `updated` returns the next one, and its three fields are its whole state.

    Attributes:
        coef: the current coefficient.
        target: wanted KL in nats a token; 0 keeps the coefficient fixed.
        horizon: samples over which an error of one is corrected by a factor of about e.
    """

    coef: float
    target: float = 0.0
    horizon: int = 10_000

    def updated(self, observed_kl: float, num_samples: int) -> KlController:
        """One proportional step: coef * (1 + clip(kl / target - 1, +-0.2) * n / horizon).

        Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences", section 2.2.

        Args:
            observed_kl: mean KL of the batch against the reference, nats a token.
            num_samples: samples behind it; 0 changes nothing.

        Raises:
            UniRLError: the observed KL is not finite; it would stay in the coefficient for good.
        """
        if self.target == 0.0 or num_samples == 0:
            return self
        if not math.isfinite(observed_kl):
            raise UniRLError(
                f"observed KL: got {observed_kl}, must be finite\n"
                "hint: the log-probs of actor or reference overflowed; lower optim.lr or optim.clip_grad"
            )
        error = min(max(observed_kl / self.target - 1.0, -0.2), 0.2)
        return replace(self, coef=self.coef * (1.0 + error * num_samples / self.horizon))
