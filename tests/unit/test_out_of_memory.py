"""An allocation that fails is told with its phase, what holds the memory, and what to lower."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.dist.engine_ranks import GQA
from tests.rollouts import roles_of
from unirl_scale.core.config import MeshConfig, MeshesConfig, RolloutConfig, RunConfig, StageConfig
from unirl_scale.core.errors import DeviceMemoryError
from unirl_scale.core.progress import Progress
from unirl_scale.kernels.reference import ReferenceOps
from unirl_scale.train.out_of_memory import explained

CPU = torch.device("cpu")
MESH = MeshConfig(micro_batch_size=8)
CFG = RunConfig(mesh=MeshesConfig(actor=MESH), rollout=RolloutConfig(), stages=(StageConfig(batch_size=64),))


def message(cfg: RunConfig, phase: str) -> str:
    progress = Progress()
    progress.enter(phase, 7)
    with pytest.raises(DeviceMemoryError) as caught, explained(cfg, progress, CPU):
        torch.empty(1 << 60, dtype=torch.uint8)
    assert isinstance(caught.value.__cause__, RuntimeError)
    return str(caught.value)


def test_the_largest_tensors_are_named_and_the_fields_of_the_phase_are_lowered() -> None:
    roles = roles_of(replace(GQA, vocab_size=300_000), ReferenceOps("whole"), "cpu", leaves=2)
    text = message(CFG, "accumulate")
    asked = "tried to allocate 1152921504606846976 bytes\n"
    assert text.startswith(f"out of memory on cpu in step 7, accumulate: {asked}")
    assert "actor weights, float32 [" in text
    assert "actor optimizer state exp_avg_sq, float32 [" in text
    assert "mesh.actor.micro_batch_size=4; or mesh.actor.recompute=block" in text
    del roles
    assert "mesh.actor.micro_batch_size" not in message(CFG, "update")


def test_a_rollout_is_told_to_decode_fewer_sequences() -> None:
    assert "hint: rollout.batch_size=32; or rollout.prefill_tokens=4096; or" in message(CFG, "rollout")
    some = replace(CFG, rollout=RolloutConfig(batch_size=10))
    assert "rollout.batch_size=5;" in message(some, "rollout")


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match=r"^another$") as caught, explained(CFG, Progress(), CPU):
        raise RuntimeError("another")
    assert not isinstance(caught.value, DeviceMemoryError)
