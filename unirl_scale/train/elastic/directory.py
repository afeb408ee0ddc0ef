"""Where a newcomer finds the job, and the numbering that fences off parts of it that were cut off.

    RUN_DIR/elastic/
      members.json       addresses of the newest view's control threads; any of them knows the hub
      views/000003       made by the hub that formed view 3, once, by link(2): the uids of who is in it

A number is taken once. A hub may pass over a number that another one has taken only when every process of
that view is with it, or has ended on its own host: then that view never came to be. Two parts of a job that
cannot reach each other can thus not both go on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from unirl_scale.train.elastic.processes import has_ended
from unirl_scale.train.elastic.view import View


class Directory:
    """The `elastic` folder of a run directory that every node sees."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._views = path / "views"

    def addresses(self) -> list[str]:
        """Where members of the newest view listen; empty before the first. They may be long gone."""
        try:
            found = json.loads((self.path / "members.json").read_text())
        except (OSError, ValueError):  # none yet, or torn by a file system without atomic rename
            return []
        return [str(address) for address in found]

    def publish(self, addresses: Collection[str]) -> None:
        """Let newcomers find these members."""
        self.path.mkdir(parents=True, exist_ok=True)
        partial = self.path / f"members.{os.getpid()}.part"
        partial.write_text(json.dumps(list(addresses)))
        partial.replace(self.path / "members.json")

    def newest(self) -> int:
        """The largest number taken; 0 before the first."""
        with suppress(FileNotFoundError):
            return max((int(item.name) for item in self._views.iterdir() if item.name.isdecimal()), default=0)
        return 0

    def claim(self, view: View | None, present: Collection[str]) -> int | None:
        """Take the next number for a view.

        Args:
            view: the newest that the hub knows; None for the founder of a job, which follows all there were.
            present: uids of who will be in the view to form.

        Returns:
            The number, or None when another part of the job has gone on.
        """
        self._views.mkdir(parents=True, exist_ok=True)
        partial = self._views / f"claim.{os.getpid()}.part"
        partial.write_text(json.dumps(sorted(present)))
        number = view.incarnation if view is not None else self.newest()
        try:
            while True:
                number += 1
                try:
                    (self._views / f"{number:06d}").hardlink_to(partial)
                    return number
                except FileExistsError:
                    others = self._uids(number) - set(present)
                    if view is not None and not all(map(has_ended, others)):
                        return None
        finally:
            partial.unlink()

    def _uids(self, number: int) -> set[str]:
        try:
            return set(json.loads((self._views / f"{number:06d}").read_text()))
        except (OSError, ValueError):
            return {"unreadable"}  # nobody we know: its claimant may be alive
