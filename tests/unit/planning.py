"""Configurations that the planner's tests share."""

from __future__ import annotations

from dataclasses import replace

from unirl_scale.core.config import (
    HardwareConfig,
    InvarianceConfig,
    MeshConfig,
    MeshesConfig,
    ModelConfig,
    ModelsConfig,
    RolloutConfig,
    RunConfig,
    StageConfig,
)

MODEL = ModelConfig(
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    ffn_size=14336,
    vocab_size=128256,
)


def run_config(mesh: MeshConfig, *, slots: int = 64, batch: int = 128, leaves: int = 8) -> RunConfig:
    """An 8B actor on one mesh for every role."""
    return RunConfig(
        precision="bf16",
        hardware=HardwareConfig(vendor="cuda"),
        invariance=InvarianceConfig(model_leaves=leaves, data_slots=slots),
        model=ModelsConfig(actor=MODEL),
        mesh=MeshesConfig(actor=mesh, rollout=replace(mesh, vpp=1, pipeline_split=())),
        rollout=RolloutConfig(max_prompt_tokens=1024, max_response_tokens=3072),
        stages=(StageConfig(batch_size=batch),),
    )
