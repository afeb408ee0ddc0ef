"""Out of memory, in the user's words: the phase, the largest tensors, and which fields to lower.

What is alive is asked of the garbage collector, so that nothing has to be registered while memory lasts.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from unirl_scale.core.config import MeshConfig, RunConfig
from unirl_scale.core.errors import DeviceMemoryError
from unirl_scale.core.progress import Progress
from unirl_scale.parallel.kv_cache import KvCache
from unirl_scale.train.roles import Role

_SHOWN = 5
_ASKED = re.compile(r"ried to allocate (\d[\d.]* \w+)")
_HOST = "DefaultCPUAllocator"  # how torch says it of host memory


@dataclass(frozen=True, slots=True)
class _Held:
    """A storage and what it is for."""

    n_bytes: int
    name: str


@contextmanager
def explained(cfg: RunConfig, progress: Progress, device: torch.device) -> Iterator[None]:
    """Around training.

    Raises:
        DeviceMemoryError: an allocation failed; from torch's error.
    """
    try:
        yield
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not isinstance(error, torch.OutOfMemoryError) and _HOST not in str(error):
            raise
        raise DeviceMemoryError(_message(error, cfg, progress, device)) from error


def _message(error: RuntimeError, cfg: RunConfig, progress: Progress, device: torch.device) -> str:
    held = _held(device)
    largest = sorted(held, key=lambda h: -h.n_bytes)[:_SHOWN]
    asked = _ASKED.search(str(error))
    lines = [
        f"out of memory on {device} in {progress.describe()}: tried to allocate "
        f"{asked[1] if asked else 'more than is left'}",
        f"  tensors hold {_gib(sum(h.n_bytes for h in held))}; the largest:",
        *(f"  {_gib(h.n_bytes):>10}  {h.name}" for h in largest),
        f"hint: {'; or '.join(_ways_out(cfg, progress.phase))}",
    ]
    return "\n".join(lines)


def _held(device: torch.device) -> list[_Held]:
    """One entry a storage on the device."""
    names: dict[int, str] = {}
    alive = gc.get_objects()
    for thing in alive:
        if type(thing) in (Role, KvCache):  # isinstance would ask proxies, and some of them complain
            for name, tensor in _named(thing):
                names[tensor.untyped_storage().data_ptr()] = name
    storages: dict[int, _Held] = {}
    for thing in alive:
        if (
            issubclass(type(thing), Tensor)
            and thing.device.type == device.type
            and thing.layout == torch.strided
        ):
            storage = thing.untyped_storage()
            shape = f"{str(thing.dtype).removeprefix('torch.')} {list(thing.shape)}"
            name = names.get(storage.data_ptr(), "activation or temporary")
            storages.setdefault(storage.data_ptr(), _Held(storage.nbytes(), f"{name}, {shape}"))
    return list(storages.values())


def _named(thing: Role | KvCache) -> Iterator[tuple[str, Tensor]]:
    if isinstance(thing, KvCache):
        for layer in thing.layers[:1]:  # all layers are one storage
            yield "key-value cache of the rollout", layer.k
        return
    engine = thing.engine
    if engine is None:
        return
    for chunk in engine.chunks:
        yield f"{thing.name} weights", chunk.flat
        yield f"{thing.name} replicated weights", chunk.flat_replicated
    for optimizer in engine.optimizers:
        for name, tensor in optimizer.shard.tensors().items():
            yield f"{thing.name} optimizer state {name}", tensor


def _ways_out(cfg: RunConfig, phase: str) -> list[str]:
    """Fields with a value that takes less, the cheapest first."""
    if phase == "rollout":
        running = cfg.rollout.batch_size or max(stage.batch_size for stage in cfg.stages)
        return [
            f"rollout.batch_size={max(1, running // 2)}",
            f"rollout.prefill_tokens={max(1, cfg.rollout.prefill_tokens // 2)}",
            "a larger mesh.rollout.tp or dp",
        ]
    ways = []
    for role, mesh in (("actor", cfg.mesh.actor), ("critic", cfg.mesh.critic)):
        ways += (
            _of_mesh(f"mesh.{role}", mesh) if mesh is not None and phase in ("accumulate", "score") else []
        )
    return [*ways, "larger mesh.actor.tp, pp or dp (the optimizer state is cut over dp)"]


def _of_mesh(path: str, mesh: MeshConfig) -> list[str]:
    ways = []
    if mesh.micro_batch_size > 1:
        ways.append(f"{path}.micro_batch_size={mesh.micro_batch_size // 2}")
    if mesh.recompute == "none":
        ways.append(f"{path}.recompute=block")
    return ways


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.2f} GiB"
