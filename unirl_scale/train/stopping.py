"""StopRequest: the scheduler asks this process to end. Imports no torch.

A scheduler sends SIGTERM or SIGUSR1 and kills after a grace. Where snapshots are taken, the ranks drop what
they do at once and make the newest one durable: that takes a save, however long a step is. Where none are
taken, they end together at the next step boundary, with a checkpoint of that step.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable

from unirl_scale.core.errors import StopRequested
from unirl_scale.core.progress import Progress


class StopRequest:
    """Whether, when and by which signal this process was asked to end. Signal handlers only note it here.

    Args:
        grace_s: from the signal until the process is killed.
        at_once: leave the step in progress; otherwise its end is awaited.

    Attributes:
        signum, name: the signal, 0 and "" while there was none.
        save: makes the newest snapshot durable within the seconds it is given; says whether it did.
        on_request: called once, from a thread of its own, when the process is asked to leave at once: ends
            the collectives that the training thread may wait in.
    """

    def __init__(self, grace_s: float, *, at_once: bool) -> None:
        self.grace_s, self.at_once, self.signum, self.name = grace_s, at_once, 0, ""
        self.save: Callable[[float], bool] | None = None
        self.on_request: Callable[[str], None] = lambda reason: None
        self._since_s = 0.0

    def note(self, signum: int) -> None:
        """The signal has come; waits for nothing."""
        if self.signum:
            return
        self._since_s, self.name, self.signum = time.monotonic(), signal.Signals(signum).name, signum
        if self.at_once:
            reason = f"stopped by {self.name}"
            threading.Thread(target=self.on_request, args=(reason,), daemon=True).start()

    @property
    def left_s(self) -> float:
        """Seconds of grace that are left."""
        return self._since_s + self.grace_s - time.monotonic()

    def observe(self, progress: Progress) -> None:
        """Observer of the training thread.

        Raises:
            StopRequested: the process is to leave at once.
        """
        if self.signum and self.at_once:
            raise StopRequested(f"asked to stop by {self.name}")

    def save_newest(self) -> bool:
        """Make the newest snapshot durable; a tenth of what is left of the grace stays for the end itself."""
        return self.save is not None and self.left_s > 0 and self.save(0.9 * self.left_s)
