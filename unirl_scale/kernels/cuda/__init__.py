"""Op table for NVIDIA GPUs, in Triton."""
