"""The loop, roles, rollout, checkpoint, elastic restart, metrics."""
