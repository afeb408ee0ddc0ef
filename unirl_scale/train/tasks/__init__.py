"""What the model is asked, and how its answers are judged."""

from unirl_scale.train.tasks.tasks import TASKS, build

__all__ = ["TASKS", "build"]
