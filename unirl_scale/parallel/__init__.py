"""Tensor, pipeline and data parallel layers, models and the sharded optimizer."""
