"""The layout lottery on one GPU: ranks share it and exchange bytes through the host.

Kernels, shapes and reductions are those of several GPUs; the transport is not, and it adds nothing up.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.cuda

# Wide enough for the tuned kernels: hidden 512, heads of 64, W = 4 leaves; prompts of uneven length.
CONFIG = """
seed: 3
precision: bf16
hardware: {vendor: cuda, transport: host}
invariance: {model_leaves: 4, data_slots: 4}
model:
  actor: {hidden_size: 512, num_layers: 4, num_heads: 8, num_kv_heads: 4, head_dim: 64, ffn_size: 1536,
          qk_norm: true, qkv_bias: true, tie_embeddings: true, init_std: 0.05}
rollout: {max_prompt_tokens: 24, max_response_tokens: 24, temperature: 0.9}
task: {name: jsonl, path: sums.jsonl, heldout_size: 8, verifier: exact_match}
stages:
  - name: sft
    num_steps: 1
    batch_size: 16
    algorithm: {name: sft}
    optim: {lr: 0.0003, clip_grad: 0.3}
  - name: ppo
    num_steps: 1
    batch_size: 16
    minibatch_size: 8
    algorithm: {name: ppo, kl_in_reward_coef: 0.05, kl_loss_coef: 0.01, entropy_coef: 0.01}
    optim: {lr: 0.00003, clip_grad: 0.3}
    critic_optim: {lr: 0.0005}
digest: {every: 1}
"""
LAYOUTS = {
    "tp4": ["mesh.actor.tp=4", "mesh.actor.sequence_parallel=true"],
    "tp2-pp2": ["mesh.actor.tp=2", "mesh.actor.pp=2", "mesh.actor.micro_batch_size=2", "mesh.rollout.dp=4"],
    "dp3": ["mesh.actor.dp=3", "mesh.actor.recompute=block"],
}


def run(folder: Path, name: str, *overrides: str) -> Path:
    run_dir = folder / name
    command = [sys.executable, "-m", "unirl_scale", "train", str(folder / "run.yaml"), f"run_dir={run_dir}"]
    done = subprocess.run([*command, *overrides], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return run_dir


def digests(run_dir: Path) -> list[str]:
    return (run_dir / "digests.jsonl").read_text().splitlines()


def test_layouts_give_the_digests_of_one_rank(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    rows = [{"prompt": f"{a}+{b * b}=", "answer": str(a + b * b)} for a in range(12) for b in range(12)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.yaml").write_text(CONFIG.replace("sums.jsonl", str(tmp_path / "sums.jsonl")))
    alone = digests(run(tmp_path, "alone"))
    for name, overrides in LAYOUTS.items():
        assert digests(run(tmp_path, name, *overrides)) == alone, name
    other = digests(run(tmp_path, "other", "stages.0.optim.lr=0.00030001"))
    assert other != alone
