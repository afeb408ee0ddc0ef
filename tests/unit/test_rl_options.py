"""Options of the plug-ins: what they need, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from unirl_scale.core.errors import ConfigError
from unirl_scale.rl.algorithms import ALGORITHMS, build
from unirl_scale.rl.grpo import GrpoOptions
from unirl_scale.rl.interface import ActorCritic
from unirl_scale.rl.ppo import PpoOptions
from unirl_scale.rl.sft import SftOptions

PPO, GRPO, SFT = build("ppo", PpoOptions()), build("grpo", GrpoOptions()), build("sft", SftOptions())


@pytest.mark.parametrize("option", [{"kl_in_reward_coef": 0.1}, {"kl_loss_coef": 0.1}, {"kl_metric": True}])
def test_the_reference_is_needed_only_where_a_kl_is_asked_for(option: dict[str, Any]) -> None:
    assert not any(algorithm.needs.reference for algorithm in (PPO, GRPO, SFT))
    assert build("ppo", PpoOptions(**option)).needs.reference
    assert build("grpo", GrpoOptions(**option)).needs.reference


def test_critic_rollout_and_group_needs() -> None:
    assert PPO.needs.critic and isinstance(PPO, ActorCritic)
    assert not GRPO.needs.critic and not isinstance(GRPO, ActorCritic)
    assert GRPO.needs.rollout and not SFT.needs.rollout
    reinforce = build("grpo", GrpoOptions(estimator="reinforce++"))
    assert (GRPO.needs.min_group_size, reinforce.needs.min_group_size) == (2, 1)


@pytest.mark.parametrize(
    "name, options, expected",
    [
        ("ppo", {"gamma": 1.5}, r"algorithm.gamma: got 1.5, must lie in \[0, 1\]\nhint: gamma: 1"),
        ("ppo", {"lam": -0.1}, r"algorithm.lam: got -0.1"),
        ("ppo", {"value_clip": math.nan}, r"algorithm.value_clip: got nan"),
        ("ppo", {"clip_low": 1.0}, r"algorithm.clip_low: got 1.0, must be below 1"),
        ("ppo", {"entropy_coef": math.nan}, r"algorithm.entropy_coef: got nan"),
        ("ppo", {"dual_clip": 0.5}, r"algorithm.dual_clip: got 0.5, must be above 1"),
        ("ppo", {"kl_target": 0.1}, r"algorithm.kl_target: got 0.1 with kl_in_reward_coef 0"),
        ("ppo", {"aggregation": "seq-mean-token-sum-norm"}, r"algorithm.aggregation_length: got 0"),
        ("grpo", {"estimator": "dr_grpo"}, r"algorithm.aggregation_length: got 0, estimator dr_grpo"),
        ("grpo", {"overlong_length": 10, "overlong_cache": 20}, r"algorithm.overlong_cache: got 20"),
        ("sft", {"aggregation": "seq-mean-token-sum-norm"}, r"algorithm.aggregation_length: got 0"),
    ],
)
def test_a_bad_option_is_named_with_its_rule(name: str, options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        build(name, ALGORITHMS[name].options_type(**options))


def test_all_bad_options_are_listed_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        build("ppo", PpoOptions(gamma=2.0, lam=2.0, clip_high=-1.0))
    assert [word in str(caught.value) for word in ("gamma", "lam", "clip_high")] == [True] * 3


def test_an_unknown_algorithm_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="got 'gpro', no such algorithm\nhint: grpo"):
        build("gpro", None)
