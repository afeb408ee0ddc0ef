"""Mesh: who is where. Axes, coordinates and groups as plain ints; no process group, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from unirl_scale.core.config import MeshConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """A rank's place on a mesh."""

    tp: int
    dp: int
    pp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """A tp x dp x pp block of consecutive ranks, tp fastest (kept inside a node), then dp, then pp."""

    tp: int = 1
    dp: int = 1
    pp: int = 1
    first_rank: int = 0

    @classmethod
    def from_config(cls, cfg: MeshConfig) -> Mesh:
        return cls(tp=cfg.tp, dp=cfg.dp, pp=cfg.pp, first_rank=cfg.first_rank)

    @property
    def size(self) -> int:
        return self.tp * self.dp * self.pp

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(self.first_rank, self.first_rank + self.size))

    def rank_at(self, *, tp: int, dp: int, pp: int) -> int:
        return self.first_rank + tp + self.tp * (dp + self.dp * pp)

    def coordinates(self, rank: int) -> Coordinates | None:
        """The rank's place, or None when it is not on this mesh."""
        local = rank - self.first_rank
        if not 0 <= local < self.size:
            return None
        return Coordinates(tp=local % self.tp, dp=local // self.tp % self.dp, pp=local // (self.tp * self.dp))

    def tp_groups(self) -> list[tuple[int, ...]]:
        """Rank lists that differ in tp only."""
        return [
            tuple(self.rank_at(tp=t, dp=d, pp=p) for t in range(self.tp))
            for p in range(self.pp)
            for d in range(self.dp)
        ]

    def dp_groups(self) -> list[tuple[int, ...]]:
        """Rank lists that differ in dp only."""
        return [
            tuple(self.rank_at(tp=t, dp=d, pp=p) for d in range(self.dp))
            for p in range(self.pp)
            for t in range(self.tp)
        ]

    def pp_groups(self) -> list[tuple[int, ...]]:
        """Rank lists that differ in pp only."""
        return [
            tuple(self.rank_at(tp=t, dp=d, pp=p) for p in range(self.pp))
            for d in range(self.dp)
            for t in range(self.tp)
        ]
