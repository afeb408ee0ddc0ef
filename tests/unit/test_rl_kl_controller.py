"""Fixed and adaptive KL coefficient."""

from __future__ import annotations

import dataclasses
import math

import pytest

from unirl_scale.core.errors import UniRLError
from unirl_scale.rl.kl_controller import KlController

ADAPTIVE = KlController(coef=0.2, target=6.0, horizon=1000)


def test_fixed_never_moves() -> None:
    fixed = KlController(coef=0.2)
    assert fixed.updated(100.0, 64) is fixed and fixed.updated(math.nan, 64) is fixed


def test_adaptive_step_is_proportional_inside_the_clip() -> None:
    assert ADAPTIVE.updated(6.6, 100).coef == pytest.approx(0.2 * 1.01)
    assert ADAPTIVE.updated(5.4, 100).coef == pytest.approx(0.2 * 0.99)
    assert ADAPTIVE.updated(6.0, 100).coef == 0.2


def test_adaptive_step_is_clipped_at_a_fifth() -> None:
    assert ADAPTIVE.updated(600.0, 100).coef == pytest.approx(0.2 * 1.02)
    assert ADAPTIVE.updated(0.0, 100).coef == pytest.approx(0.2 * 0.98)


def test_no_samples_no_step() -> None:
    assert ADAPTIVE.updated(math.nan, 0) is ADAPTIVE


def test_a_non_finite_kl_is_refused() -> None:
    with pytest.raises(UniRLError, match="observed KL: got nan"):
        ADAPTIVE.updated(math.nan, 8)


def test_saved_state_continues_with_the_same_bits() -> None:
    kls = [3.0, 9.0, 6.1, 0.2, 40.0, 5.9]
    whole = ADAPTIVE
    for kl in kls:
        whole = whole.updated(kl, 48)
    half = ADAPTIVE
    for kl in kls[:3]:
        half = half.updated(kl, 48)
    resumed = KlController(**dataclasses.asdict(half))
    for kl in kls[3:]:
        resumed = resumed.updated(kl, 48)
    assert resumed == whole and whole.coef != ADAPTIVE.coef
    with pytest.raises(dataclasses.FrozenInstanceError):
        whole.coef = 1.0  # type: ignore[misc]
