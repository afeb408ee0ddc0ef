"""How long a phase of a role takes: compute, pipeline bubble and communication, nothing overlapped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from unirl_scale.comm.plan import Assumptions, CallPlan
from unirl_scale.comm.plan_model import (
    MicroBatches,
    ModelSize,
    chunk_layers,
    samples_per_step,
    sequence_tokens,
    stage_params,
)
from unirl_scale.comm.plan_pipeline import cut_pipeline, slowest_chunk_us
from unirl_scale.core.config import MeshConfig, RunConfig

_OPTIMIZER_BYTES = 28.0  # reads gradient, master, two moments; writes master and moments: 7 x fp32


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Microseconds; None where a figure is unknown."""

    compute_us: float | None
    bubble_us: float | None
    comm_us: float | None
    mfu: float | None = None


def communication_us(plans: Sequence[CallPlan]) -> float | None:
    """All calls of a step, one after the other."""
    times = [p.step_us for p in plans]
    return None if None in times else sum(t or 0.0 for t in times)


def layer_times_us(
    cfg: RunConfig, size: ModelSize, mesh: MeshConfig, told: Assumptions, samples: float
) -> tuple[tuple[float, ...], float] | None:
    """Forward and backward of each layer, and of the output layer, for a micro-batch of `samples`; measured
    layer times where there are any, else from the peak. None = the peak is unknown."""
    layers = size.config.num_layers
    tokens = samples * sequence_tokens(cfg)
    peak = told.accelerator.peak_flop_per_s
    scale = 0.0 if peak is None else 3e6 * tokens / mesh.tp / (peak * told.accelerator.efficiency)
    one = scale * size.forward_flop(sequence_tokens(cfg), 1, head=False)
    head = scale * 2.0 * size.head_matmul_params
    if len(told.layer_us) == layers:
        share = 2.0 * size.head_matmul_params / size.forward_flop(sequence_tokens(cfg), 1, head=False)
        return told.layer_us, share * sum(told.layer_us) / layers
    return None if peak is None else ((one,) * layers, head)


def _micro_batch_us(
    cfg: RunConfig, size: ModelSize, mesh: MeshConfig, told: Assumptions, passes: float, samples: float
) -> float | None:
    """Compute of the slowest stage for a micro-batch of `samples`, `passes` forward passes worth of it."""
    times = layer_times_us(cfg, size, mesh, told, samples)
    if times is None:
        return None
    layer_us, head_us = times
    stages = [0.0] * mesh.pp
    start = 0
    for chunk, count in enumerate(chunk_layers(size.config, mesh)):
        stages[chunk % mesh.pp] += sum(layer_us[start : start + count])
        start += count
    stages[-1] += head_us
    return max(stages) * passes / 3


@lru_cache(maxsize=256)
def _cut(layers: tuple[float, ...], chunks: int, head: float) -> tuple[int, ...]:
    return cut_pipeline(layers, chunks, last_us=head)


def best_split(
    cfg: RunConfig, size: ModelSize, mesh: MeshConfig, told: Assumptions
) -> tuple[tuple[int, ...], float] | None:
    """The optimal pipeline_split, and the slowest chunk of the present one over that of the optimum."""
    times = layer_times_us(cfg, size, mesh, told, mesh.micro_batch_size)
    if times is None or mesh.pp * mesh.vpp == 1:
        return None
    layer_us, head_us = times
    unit = max(layer_us)  # one cut serves every mesh whose times differ by a factor
    relative = tuple(round(t / unit, 9) for t in layer_us)
    counts = _cut(relative, mesh.pp * mesh.vpp, round(head_us / unit, 9))
    now = slowest_chunk_us(chunk_layers(size.config, mesh), layer_us, last_us=head_us)
    return counts, now / slowest_chunk_us(counts, layer_us, last_us=head_us)


def train_time(
    cfg: RunConfig,
    size: ModelSize,
    mesh: MeshConfig,
    plans: Sequence[CallPlan],
    told: Assumptions,
    micros: MicroBatches,
) -> Times:
    """One optimizer step: the micro-batches through 1F1B, gradients, optimizer, weights.

    The bubble of 1F1B is (pp - 1) micro-batches, of the interleaved schedule (pp - 1) / vpp (Narayanan et al.
    2021); tensor-parallel traffic lengthens each micro-batch and so the bubble.
    """
    passes = 3 + (mesh.recompute == "block")
    micro = _micro_batch_us(cfg, size, mesh, told, passes, micros.mean)
    comm = communication_us(plans)
    if micro is None:
        return Times(compute_us=None, bubble_us=None, comm_us=comm)
    inner = communication_us([p for p in plans if p.call.axis == "tp"])
    longer = micro + (inner or 0.0) / micros.count
    bubble = (mesh.pp - 1) / mesh.vpp * longer
    compute = micro * micros.count
    bandwidth = told.accelerator.memory_gb_per_s
    if bandwidth:
        params = max(stage_params(size, mesh, s) for s in range(mesh.pp))
        compute += _OPTIMIZER_BYTES * params / mesh.dp / (bandwidth * 1e3)
    mfu = None
    peak = told.accelerator.peak_flop_per_s
    if comm is not None and peak:
        tokens = samples_per_step(cfg) * sequence_tokens(cfg)
        seconds = (compute + bubble + comm) / 1e6
        ranks = mesh.tp * mesh.pp * mesh.dp
        mfu = size.train_flop(sequence_tokens(cfg)) * tokens / (seconds * ranks * peak)
    return Times(compute_us=compute, bubble_us=bubble, comm_us=comm, mfu=mfu)


def score_time(
    cfg: RunConfig,
    size: ModelSize,
    mesh: MeshConfig,
    plans: Sequence[CallPlan],
    told: Assumptions,
    micros: MicroBatches,
) -> Times:
    """Forward over the samples of one optimizer step."""
    micro = _micro_batch_us(cfg, size, mesh, told, 1, micros.mean)
    comm = communication_us(plans)
    if micro is None:
        return Times(compute_us=None, bubble_us=None, comm_us=comm)
    return Times(compute_us=micro * micros.count, bubble_us=(mesh.pp - 1) / mesh.vpp * micro, comm_us=comm)


def decode_time(
    cfg: RunConfig,
    size: ModelSize,
    mesh: MeshConfig,
    plans: Sequence[CallPlan],
    told: Assumptions,
    sequences: int,
) -> Times:
    """Decoding a batch: every token reads all weights and half of the final KV cache, at `efficiency` of the
    memory's bandwidth. A pipelined decode passes the stages one after the other."""
    bandwidth = told.accelerator.memory_gb_per_s
    step = communication_us(plans)
    steps = cfg.rollout.max_response_tokens
    comm = None if step is None else step * steps
    if not bandwidth:
        return Times(compute_us=None, bubble_us=None, comm_us=comm)
    itemsize = 4 if cfg.precision == "fp32" else 2
    weights = sum(stage_params(size, mesh, s) for s in range(mesh.pp)) * itemsize
    heads = size.config.num_kv_heads * size.config.head_dim / mesh.tp
    cache = 2.0 * size.config.num_layers * heads * itemsize * sequences
    read = weights + cache * (cfg.rollout.max_prompt_tokens + steps / 2)
    floor = read / (bandwidth * 1e3 * told.accelerator.efficiency)
    return Times(compute_us=floor * steps, bubble_us=0.0, comm_us=comm)
