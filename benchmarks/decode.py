"""Rollout on one GPU: milliseconds a step against the memory floor; log-probs against training's bits.

    python -m benchmarks.decode --json out.json
    python -m benchmarks.decode --vendor cpu --model tiny --batches 1,4 --contexts 32 --steps 8 --samples 16

A step's time is end to end, host included: two calls of `Decoder.generate` on the same prompts differ by
`--steps` tokens, and their difference in time is divided by that, graphs on and off taking turns. The floor
is reading every weight (the embedding aside) and every cached key and value once. The check samples groups of
four a prompt and holds every recorded log-prob against the training forward with `==`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.step import MODELS
from unirl_scale.comm.groups import Group, GroupFactory
from unirl_scale.core.config import HardwareConfig, InvarianceConfig, MeshConfig, ModelConfig, RolloutConfig
from unirl_scale.core.mesh import Mesh
from unirl_scale.core.philox import sampling_uniforms
from unirl_scale.kernels.check import same_bits
from unirl_scale.kernels.select import op_table, probe_shapes
from unirl_scale.parallel.build import RoleGroups, build_context
from unirl_scale.parallel.decode import Decoder, Response
from unirl_scale.parallel.engine import NativeEngine
from unirl_scale.parallel.samples import Sample
from unirl_scale.parallel.sampling import SamplingOptions

BYTES_PER_S = {"NVIDIA H200": 4.3e12}  # a device-to-device copy, bytes read and written
FIRST_TOKENS = 8  # of the shorter call: starts, first page copies and captures are in both
Tokens = tuple[int, ...]


def build(model: ModelConfig, vendor: str, leaves: int, max_tokens: int) -> NativeEngine:
    """A frozen actor of random weights; its only chunk decodes too."""
    device, dtype = torch.device(vendor), torch.bfloat16
    mesh = MeshConfig(micro_batch_size=8)
    hardware = HardwareConfig(vendor=vendor)  # type: ignore[arg-type]
    groups = GroupFactory(Group.single(device=device), timedelta(minutes=1))
    ops = op_table(hardware, "layout", [probe_shapes(model, leaves)], dtype, device)
    context = build_context(
        RoleGroups(groups, [Mesh.from_config(mesh)]),
        mesh,
        InvarianceConfig(model_leaves=leaves, data_slots=1),
        ops,
        dtype,
        device,
    )
    assert context is not None
    engine = NativeEngine(model, mesh, context, "lm", max_tokens=max_tokens, trainable=False)
    engine.chunks[0].flat.normal_(std=model.init_std)
    engine.chunks[0].flat_replicated.fill_(1.0)
    return engine


def random_prompts(vocab_size: int, count: int, length: int) -> list[Tokens]:
    rng = random.Random(length)
    return [tuple(rng.randrange(vocab_size) for _ in range(length)) for _ in range(count)]


def generate(decoder: Decoder, prompts: Sequence[Tokens], new: int) -> list[Response]:
    uniforms = sampling_uniforms(1, 0, list(range(len(prompts))), new)
    return decoder.generate(prompts, uniforms, SamplingOptions(), [], new)


def seconds(decoder: Decoder, prompts: Sequence[Tokens], new: int) -> float:
    """Ends with the last token on the host, so nothing is left to wait for."""
    started = time.perf_counter()
    generate(decoder, prompts, new)
    return time.perf_counter() - started


def step_bytes(engine: NativeEngine, batch: int, context: float) -> float:
    """Weights and cached keys and values that one step must read."""
    chunk, model = engine.chunks[0], engine.model
    embedding = 0 if model.tie_embeddings else chunk.weights["embed"].numel()
    weights = (chunk.flat.numel() - embedding) * chunk.flat.element_size()
    row = 2 * model.num_layers * model.num_kv_heads * model.head_dim * chunk.flat.element_size()
    return weights + batch * context * row


def measure(
    engine: NativeEngine, batch: int, context: int, steps: int, rounds: int, rollout: RolloutConfig
) -> list[dict[str, Any]]:
    """One row with and, on a GPU, one without graphs."""
    cuda = engine.ctx.device.type == "cuda"
    modes = (True, False) if cuda else (False,)
    decoders = {on: Decoder(engine.chunks[0], replace(rollout, cuda_graphs=on)) for on in modes}
    prompts = random_prompts(engine.model.vocab_size, batch, context)
    times: dict[bool, list[float]] = {on: [] for on in modes}
    for turn in range(rounds + 1):
        for on, decoder in decoders.items():
            # The longer call first: it sizes the cache that the graphs of both hold.
            longer = seconds(decoder, prompts, FIRST_TOKENS + steps)
            shorter = seconds(decoder, prompts, FIRST_TOKENS)
            if turn:  # the first turn compiles and captures
                times[on].append((longer - shorter) / steps)
    peak = BYTES_PER_S.get(torch.cuda.get_device_name()) if cuda else None
    floor = step_bytes(engine, batch, context + FIRST_TOKENS + steps / 2) / peak if peak else None
    rows = []
    for on, values in times.items():
        s = statistics.median(values)
        rows.append(
            {
                "batch": batch,
                "context": context,
                "graphs": "on" if on else "off",
                "ms": s * 1e3,
                "tokens_per_s": batch / s,
                "floor_ms": floor * 1e3 if floor else None,
                "of_floor": floor / s if floor else None,
            }
        )
    return rows


def check(
    engine: NativeEngine, samples: int, length: int, new: int, rollout: RolloutConfig
) -> dict[str, Any]:
    """Tokens whose recorded log-prob has the training forward's bits, with graphs where there are any."""
    distinct = random_prompts(engine.model.vocab_size, -(-samples // 4), length)
    prompts = [p for p in distinct for _ in range(4)][:samples]
    decoder = Decoder(engine.chunks[0], rollout)
    responses = generate(decoder, prompts, new)
    scores = engine.score([Sample(p, r.tokens) for p, r in zip(prompts, responses)]).scores
    equal = total = 0
    for number, response in enumerate(responses):
        scored = scores[number][0].cpu()
        total += len(response.tokens)
        if same_bits(response.logprobs, scored):
            equal += len(response.tokens)
        else:
            equal += int(np.sum(response.logprobs.numpy().view(np.int32) == scored.numpy().view(np.int32)))
    counts = decoder.counts
    return {
        "tokens": total,
        "equal": equal,
        "steps": counts.steps,
        "prefilled_tokens": counts.prefilled_tokens,
        "preempted": counts.preempted,
    }


def profile(engine: NativeEngine, batch: int, context: int, rollout: RolloutConfig) -> str:
    """Device time by kernel over a short call with graphs, after one that captures."""
    decoder = Decoder(engine.chunks[0], rollout)
    prompts = random_prompts(engine.model.vocab_size, batch, context)
    generate(decoder, prompts, 64)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        generate(decoder, prompts, 64)
    table: str = profiler.key_averages().table(sort_by="self_device_time_total", row_limit=30)
    return table


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    print(f"{'batch':>6} {'context':>8} {'graphs':>7} {'ms':>9} {'tok/s':>9} {'floor ms':>9} {'of floor':>9}")
    for r in rows:
        floor = f"{r['floor_ms']:9.3f} {r['of_floor']:9.2f}" if r["floor_ms"] else f"{'-':>9} {'-':>9}"
        print(
            f"{r['batch']:6} {r['context']:8} {r['graphs']:>7} {r['ms']:9.3f} "
            f"{r['tokens_per_s']:9.0f} {floor}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vendor", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--model", default="1.1b", choices=tuple(MODELS))
    parser.add_argument("--leaves", type=int, default=1)
    parser.add_argument("--batches", default="1,16,64")
    parser.add_argument("--contexts", default="1024,4096")
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=512, help="of the check; 256 new tokens each on a GPU")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--profile", action="store_true", help="print device time by kernel, largest batch")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    batches = [int(n) for n in args.batches.split(",")]
    contexts = [int(n) for n in args.contexts.split(",")]
    rollout = RolloutConfig(
        max_prompt_tokens=max(contexts),
        max_response_tokens=FIRST_TOKENS + max(args.steps, 64),
        page_size=args.page_size,
    )
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    with torch.no_grad():
        engine = build(MODELS[args.model], args.vendor, args.leaves, longest)
        checked = check(
            engine, args.samples, min(contexts) // 4, args.steps, replace(rollout, batch_size=max(batches))
        )
        print(
            f"log-probs equal to the training forward's: {checked['equal']} of {checked['tokens']}; {checked}"
        )
        rows = []
        for context in contexts:
            for batch in batches:
                rows += measure(engine, batch, context, args.steps, args.rounds, rollout)
        name = torch.cuda.get_device_name() if args.vendor == "cuda" else "cpu"
        print(f"{name}, torch {torch.__version__}, {args.model}, W={args.leaves}, {engine.ctx.ops.name}")
        print_rows(rows)
        if args.profile:
            print(profile(engine, max(batches), contexts[0], rollout))
    if args.json:
        result = {
            "device": name,
            "torch": torch.__version__,
            "model": args.model,
            "check": checked,
            "rows": rows,
        }
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n")
    if checked["equal"] != checked["tokens"]:
        raise SystemExit("rollout and training differ")


if __name__ == "__main__":
    main()
