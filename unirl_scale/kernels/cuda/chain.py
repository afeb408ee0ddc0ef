"""Kernels of a few microseconds, one after another: the next one starts while the last one drains.

On Hopper a kernel launched with `launch_pdl` may be set up before the one it follows has ended; `follow` then
waits until that one's results are all written, and lets the next kernel be set up in turn. Nothing is read or
written before `follow`, so that the order of reads and writes is that of the launches.
"""

from __future__ import annotations

import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def follow():
    """First statement of a kernel that is launched with launch_pdl."""
    gdc_wait()
    gdc_launch_dependents()
