"""A bit that changes in one rank's weights: the run stops, or goes on without that rank and keeps its bits.

Not covered here: which copies are compared (tests/dist/test_replicas.py).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fault.train_job import TrainJob, ended
from unirl_scale.core.digest_compare import compare_digests, read_digests

pytestmark = pytest.mark.slow

# A verifier is the one piece of a user's code that runs inside a rank; this one damages it as well.
JUDGES = """\
from pathlib import Path

import torch

from unirl_scale.train.replicas import ReplicaCheck

plain = ReplicaCheck.__call__


def flip_then_compare(self, step):
    if Path("armed").exists() and step == 2 and self._session.rank == 1:
        Path("armed").unlink()
        self._roles.actor.engine.chunks[0].flat.view(torch.int32)[17] ^= 1
    plain(self, step)


ReplicaCheck.__call__ = flip_then_compare


def length(response, answer, metadata):
    return 0.1 * len(response)
"""
TASK = "task={name: jsonl, path: prompts.jsonl, heldout_size: 0, verifier: 'judges:length', %s}"
TOKENS = 'tokenizer: {mode: charset, charset: "0123456789+-="}'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "judges.py").write_text(JUDGES)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(8) for b in range(8)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "armed").touch()
    return tmp_path


def test_the_run_stops_and_names_rank_node_and_tensor(folder: Path) -> None:
    job = TrainJob(folder, options=(TASK % TOKENS,))
    try:
        run = ended(job.start())
    finally:
        job.end()
    assert run.status == 1
    assert "silent data corruption, found in step 3: rank 1 (node-0): actor weights embed of" in run.err
    assert not (folder / "armed").exists()


def test_the_run_goes_on_without_the_rank_from_a_save_that_was_compared(folder: Path) -> None:
    options = (TASK % TOKENS, "elastic.enabled=true", "elastic.restart=false", "digest.on_mismatch=evict")
    job = TrainJob(folder, options=options)
    try:
        run = ended(job.start())
    finally:
        job.end()
    assert run.status == 0, run.err
    assert "lost rank 1" in run.out
    assert "snapshot of step 2, incarnation 1, in memory: it may hold silent data corruption" in run.out
    assert "continuing after step 1 of 5" in run.out
    alone = TrainJob(folder / "alone", options=(TASK % TOKENS,))
    alone.folder.mkdir()
    for name in ("judges.py", "prompts.jsonl"):
        (alone.folder / name).write_text((folder / name).read_text())
    try:
        alone.train_well("mesh.actor.dp=1")
    finally:
        alone.end()
    result = compare_digests(read_digests(alone.run_dir), read_digests(job.run_dir))
    assert result.equal, result.first_difference
