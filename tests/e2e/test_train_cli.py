"""The command with the real trainer: SFT then PPO on JSONL prompts, the same digests on one rank and on four.

The run has several epochs of minibatches, KL in loss and reward, a critic on a mesh of its own and a digest
of every optimizer step. Golden losses are left out: they would hold on one processor family and torch only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFIG = """\
seed: 3
invariance: {model_leaves: 4, data_slots: 4}
model:
  actor: {hidden_size: 32, num_layers: 3, num_heads: 4, head_dim: 8, ffn_size: 48, init_std: 0.1}
  critic: {hidden_size: 24, num_layers: 2, num_heads: 4, head_dim: 6, ffn_size: 32}
mesh: {actor: {micro_batch_size: 4}}
rollout: {max_prompt_tokens: 6, max_response_tokens: 5, temperature: 0.9, top_p: 0.95}
task:
  name: jsonl
  path: prompts.jsonl
  heldout_size: 8
  verifier: judges:closeness
  tokenizer: {mode: charset, charset: "0123456789+="}
eval: {num_prompts: 8}
digest: {every: 1}
stages:
  - name: sft
    num_steps: 2
    batch_size: 16
    algorithm: {name: sft}
    optim: {lr: 0.01, warmup_steps: 2}
  - name: ppo
    num_steps: 2
    batch_size: 16
    minibatch_size: 8
    epochs: 2
    group_size: 2
    algorithm: {name: ppo, kl_loss_coef: 0.05, kl_in_reward_coef: 0.05, entropy_coef: 0.01}
    optim: {lr: 0.01, clip_grad: 0.1, weight_decay: 0.1}
    critic_optim: {lr: 0.01}
"""
JUDGES = """\
import math


def closeness(response, answer, metadata):
    \"\"\"Partial credit, so that the rewards of untrained models differ.\"\"\"
    return sum(a == b for a, b in zip(response, answer)) / 2 - 0.01 * len(response)


def broken(response, answer, metadata):
    return math.nan if answer == "11" else 0.5
"""
FOUR = (
    "mesh.actor={tp: 2, dp: 2, sequence_parallel: true, micro_batch_size: 2}",
    "mesh.critic={pp: 2, dp: 2, recompute: block}",
    "mesh.reference={pp: 3, first_rank: 1}",
    "mesh.rollout={tp: 4}",
)
FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "OMPI_", "PMI", "SLURM_", "UNIRL_")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("train")
    (path / "run.yaml").write_text(CONFIG)
    (path / "judges.py").write_text(JUDGES)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(4, 10)]
    (path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def unirl(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    return subprocess.run(
        [sys.executable, "-m", "unirl_scale", *args],
        cwd=folder,
        env={**kept, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"},
        text=True,
        capture_output=True,
        timeout=400,
    )


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def single(folder: Path) -> Path:
    result = unirl(folder, "train", "run.yaml", "run_dir=one")
    assert result.returncode == 0, result.stderr
    return folder / "one"


def test_the_run_trains_both_roles_and_keeps_rollout_exact(single: Path) -> None:
    metrics = [m for m in lines(single / "metrics.jsonl") if m["step"]]
    assert [m["stage"] for m in metrics] == ["sft", "sft", "ppo", "ppo"]
    for m in metrics[2:]:
        assert m["rollout/logprob_max_abs_diff"] == 0.0
        assert m["actor/grad_norm"] > 0.1, "the clip is active"
        assert m["critic/grad_norm"] > 0
    assert metrics[3]["kl_ref"] > 0
    digests = lines(single / "digests.jsonl")
    assert [d["step"] for d in digests] == list(range(1, 2 + 2 * 4 + 1))
    kinds = {"/".join(name.split("/")[:2]) for name in digests[-1]["tensors"]}
    each = ("loss", "grad_norm", "grad", "master", "exp_avg", "exp_avg_sq")
    batch = ("old_logprobs", "advantages", "returns", "values", "ref_logprobs")
    assert kinds == {f"{role}/{kind}" for role in ("actor", "critic") for kind in each} | {
        f"batch/{name}" for name in batch
    }


def test_four_ranks_give_the_digests_of_one(folder: Path, single: Path) -> None:
    result = unirl(folder, "train", "run.yaml", "run_dir=four", *FOUR)
    assert result.returncode == 0, result.stderr
    verdict = unirl(folder, "compare", "one", "four")
    assert verdict.returncode == 0, verdict.stdout
    assert verdict.stdout.startswith("equal: 10 steps, ")
    one, four = (
        [
            {k: v for k, v in m.items() if not k.startswith(("time/", "tokens_per_s", "comm/", "ranks/"))}
            for m in lines(run / "metrics.jsonl")
        ]
        for run in (single, folder / "four")
    )
    assert one == four
    last = lines(folder / "four" / "metrics.jsonl")[-1]
    for axis in ("tp", "dp", "pp"):  # the actor's, both roles', the critic's
        assert last[f"comm/{axis}_sent_bytes"] > 0


def test_other_rewards_are_told_apart_and_bad_ones_dropped(folder: Path, single: Path) -> None:
    """Negative control: `compare` names the first step that has rewards, and the first tensor."""
    settings = ("task.verifier=judges:broken", "eval.num_prompts=0")
    result = unirl(folder, "train", "run.yaml", "run_dir=drop", *settings)
    assert result.returncode == 0, result.stderr
    verdict = unirl(folder, "compare", "one", "drop")
    assert verdict.returncode == 1
    assert verdict.stdout.startswith("different: first at step 3: batch/advantages (and ")
    ppo = [m for m in lines(folder / "drop" / "metrics.jsonl") if m["stage"] == "ppo"]
    assert sum(m["invalid_rewards"] for m in ppo) > 0
    assert "dropped samples with invalid rewards" in result.stdout + result.stderr


def test_verify_runs_the_lottery(folder: Path) -> None:
    settings = ("stages.0.num_steps=1", "stages.1.num_steps=1", "stages.1.epochs=1")
    result = unirl(
        folder,
        "verify",
        "run.yaml",
        "--layouts",
        "3",
        "--seed",
        "5",
        "--steps",
        "1",
        "--max-ranks",
        "3",
        *settings,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    table = result.stdout.splitlines()[-3:]
    assert "reference" in table[0]
    assert all(" yes" in row for row in table[1:])


def test_an_invalid_reward_stops_the_run_before_the_update(folder: Path) -> None:
    settings = ("task.verifier=judges:broken", "reward.on_invalid=error", "eval.num_prompts=0")
    result = unirl(folder, "train", "run.yaml", "run_dir=error", *settings, "mesh.actor.dp=2")
    assert result.returncode == 1
    assert "reward: got sample " in result.stderr and "reward.on_invalid: drop" in result.stderr
    assert "Traceback" not in result.stderr
    steps = [d["step"] for d in lines(folder / "error" / "digests.jsonl")]
    assert steps in ([1, 2], [1, 2, 3, 4, 5, 6]), "no digest of a step after the bad batch"
