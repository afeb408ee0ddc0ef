"""What the kernels need to know of the GPU they run on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from unirl_scale.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Attributes:
    name: as the driver calls it.
    programs: multiprocessors; persistent kernels start one program on each.
    l2_bytes: size of the last-level cache.
    hopper: compute capability 9.0, whose copy engine and warpgroup products hopper_*.py use.
    """

    name: str = "any"
    programs: int = 1
    l2_bytes: int = 0
    hopper: bool = False

    @classmethod
    def current(cls) -> Device:
        """The current CUDA device.

        Raises:
            ConfigError: it has no bf16 tensor cores.
        """
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        capability = (properties.major, properties.minor)
        if capability < (8, 0):
            raise ConfigError(
                f"hardware.vendor: got cuda on {properties.name} of compute capability "
                f"{properties.major}.{properties.minor}; the kernels need bf16 tensor cores, 8.0 or newer\n"
                "hint: hardware.vendor: cpu"
            )
        return cls(
            name=properties.name,
            programs=properties.multi_processor_count,
            l2_bytes=properties.L2_cache_size,
            hopper=capability == (9, 0),
        )
