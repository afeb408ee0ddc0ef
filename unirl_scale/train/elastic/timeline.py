"""Where the time of a recovery goes: one line a view in RUN_DIR/elastic/events.jsonl."""

from __future__ import annotations

import json
import time
from pathlib import Path

from unirl_scale.core.progress import Progress
from unirl_scale.train.elastic.view import View

# The first time that a view's rank 0 enters the phase, the time is noted under the name.
_MARKS = {"restore": "connected_s", "rollout": "restored_s", "boundary": "first_step_s"}


class Timeline:
    """Notes when a view came to what; an observer of its rank 0.

    Times are of the host's monotonic clock, the same for all its processes: `stopped_s` when this process
    heard that the last view is over, `formed_s` of the next one, `connected_s` its groups, `restored_s` the
    state of training, `first_step_s` a step completed.

    Args:
        file: gets the line, once the first step is complete.
        stopped_s: 0 for the first view of the process.
    """

    def __init__(self, file: Path, view: View, layout: str, stopped_s: float, formed_s: float) -> None:
        self._file = file
        self._event: dict[str, object] = {
            "view": view.incarnation,
            "reason": view.reason,
            "losses": [str(loss) for loss in view.losses],
            "ranks": len(view.members),
            "layout": layout,
            "after_step": view.step,
            "stopped_s": stopped_s,
            "formed_s": formed_s,
        }
        self._left = dict(_MARKS)

    def observe(self, progress: Progress) -> None:
        """Called at each phase of the training thread."""
        name = self._left.pop(progress.phase, None)
        if name is None:
            return
        self._event[name] = time.monotonic()
        if not self._left:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(self._event) + "\n")
