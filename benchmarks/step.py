"""One GPU: a training step of ours in `layout` and in `off` mode against Hugging Face transformers, A B C A B
C.

    python -m benchmarks.step --models 1.1b,2b --rounds 5 --json out.json

The same work for all: bf16 forward and backward of 4 x 4096 random tokens with a loss on every next token,
gradient clipping, AdamW with fp32 state (the peer: fused AdamW on bf16 weights, SDPA attention, its own
cross-entropy). MFU counts 6 x parameters per token plus half of full attention (causal), over the device's
dense bf16 peak.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.price import Layout, _adam, build
from unirl_scale.comm.groups import Group, GroupFactory
from unirl_scale.core.config import HardwareConfig, MeshConfig, ModelConfig
from unirl_scale.parallel.engine import NativeEngine
from unirl_scale.parallel.samples import Sample

PEAK_FLOP_PER_S = {"NVIDIA H200": 989.5e12, "NVIDIA H100": 989.5e12, "NVIDIA A100": 312e12}
MODELS = {
    "1.1b": ModelConfig(
        hidden_size=2048,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        ffn_size=8192,
        vocab_size=32000,
    ),
    "2b": ModelConfig(
        hidden_size=4096,
        num_layers=8,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        ffn_size=14336,
        vocab_size=32000,
    ),
    "tiny": ModelConfig(
        hidden_size=256, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64, ffn_size=512, vocab_size=1000
    ),
}
Step = Callable[[], None]
_TIMEOUT = timedelta(minutes=1)


def ours(model: ModelConfig, mode: str, ids: Tensor, leaves: int, micro: int) -> tuple[Step, NativeEngine]:
    """A step of our engine on one GPU; `leaves` > 1 measures several leaves on one rank."""
    group = GroupFactory(Group.single(device=ids.device), _TIMEOUT)
    mesh = MeshConfig(micro_batch_size=micro)
    layout = Layout(mesh=mesh, leaves=leaves if mode == "layout" else 1, slots=1)
    engine = build(
        group, model, layout, mode, HardwareConfig(vendor="cuda"), torch.bfloat16, max_tokens=ids.shape[1]
    )
    return engine_step(engine, ids), engine


def engine_step(engine: NativeEngine, ids: Tensor) -> Step:
    """Forward, backward, clip and AdamW on rows of tokens [B, S] with a loss on every next token."""
    samples = [Sample((int(row[0]),), tuple(row[1:].tolist())) for row in ids]
    scale = 1.0 / (ids.shape[0] * (ids.shape[1] - 1))

    def loss(numbers: Sequence[int], scores: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        return scores[0] * -scale, {}

    def step() -> None:
        with torch.no_grad():
            engine.accumulate(samples, loss)
            engine.step(_adam, 1.0, engine.reduce())

    return step


def peer_model(model: ModelConfig, ids: Tensor) -> Any:
    """transformers' Llama in bf16 on the device of `ids`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=model.hidden_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        intermediate_size=model.ffn_size,
        vocab_size=model.vocab_size,
        max_position_embeddings=ids.shape[1],
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).to(device=ids.device, dtype=torch.bfloat16)


def peer_step(net: Any, ids: Tensor) -> Step:
    """The same step with a model of transformers, wrapped or not."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        net(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def flop_per_token(model: ModelConfig, length: int) -> float:
    """6 a parameter of a matrix product, and causal attention counted half."""
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    layer = model.hidden_size * (heads + model.num_heads * model.head_dim + 3 * model.ffn_size)
    parameters = model.num_layers * layer + model.hidden_size * model.vocab_size
    attention = model.num_layers * 12 * model.num_heads * model.head_dim * length / 2
    return 6.0 * parameters + attention


def timed(step: Step) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def measure(
    name: str, rounds: int, batch: int, length: int, leaves: Sequence[int], micro: int
) -> list[dict[str, Any]]:
    """Rows of one model: medians of interleaved steps, and the peak memory of each contender alone."""
    model = MODELS[name]
    ids = torch.randint(0, model.vocab_size, (batch, length), device="cuda")
    makers: dict[str, Callable[[], Step]] = {"transformers": lambda: peer_step(peer_model(model, ids), ids)}
    makers["off"] = lambda: ours(model, "off", ids, 1, micro)[0]
    for w in leaves:
        makers[f"layout W={w}"] = lambda w=w: ours(model, "layout", ids, w, micro)[0]  # type: ignore[misc]
    steps, peaks = {}, {}
    for key, make in makers.items():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        steps[key] = make()
        for _ in range(2):
            steps[key]()
        torch.cuda.synchronize()
        peaks[key] = (torch.cuda.max_memory_allocated() - before) / 2**30
    times: dict[str, list[float]] = {key: [] for key in steps}
    for _ in range(rounds):
        for key, step in steps.items():
            times[key].append(timed(step))
    tokens, peak = batch * length, PEAK_FLOP_PER_S.get(torch.cuda.get_device_name())
    rows = []
    for key, values in times.items():
        seconds = statistics.median(values)
        mfu = flop_per_token(model, length) * tokens / seconds / peak if peak else None
        rows.append(
            {
                "model": name,
                "contender": key,
                "ms": seconds * 1e3,
                "tokens_per_s": tokens / seconds,
                "mfu": mfu,
                "peak_gib": peaks[key],
                "vs_peer": statistics.median(times["transformers"]) / seconds,
                "vs_off": seconds / statistics.median(times["off"]),
            }
        )
    del steps
    gc.collect()
    torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="1.1b,2b")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--leaves", default="1,8")
    parser.add_argument("--micro", type=int, default=4)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    leaves = [int(w) for w in args.leaves.split(",")]
    for name in args.models.split(","):
        rows += measure(name, args.rounds, args.batch, args.length, leaves, args.micro)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(
        f"{'model':6} {'contender':14} {'ms':>8} {'tok/s':>9} {'MFU':>6} {'GiB':>7} {'x peer':>7} "
        f"{'/ off':>6}"
    )
    for r in rows:
        mfu = f"{r['mfu']:.1%}" if r["mfu"] is not None else "-"
        print(
            f"{r['model']:6} {r['contender']:14} {r['ms']:8.1f} {r['tokens_per_s']:9.0f} {mfu:>6} "
            f"{r['peak_gib']:7.2f} {r['vs_peer']:7.2f} {r['vs_off']:6.3f}"
        )
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
