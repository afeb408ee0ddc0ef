"""Cutting layers into pipeline chunks by exact dynamic programming."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from unirl_scale.core.errors import PlanError


def cut_pipeline(
    layer_us: Sequence[float], chunks: int, *, first_us: float = 0.0, last_us: float = 0.0
) -> tuple[int, ...]:
    """Layers of each chunk so that the slowest chunk is as fast as it can be.

    Among the cuts that reach the optimum, the most even one is taken (least sum of squared times), and of
    equals the one with fewer layers in the early chunks, whose stages keep most micro-batches in flight.

    Args:
        layer_us: time of each layer, measured or modelled, in order.
        chunks: consecutive pieces, each with at least one layer.
        first_us, last_us: time of the embedding before the first layer and of the head after the last.

    Returns:
        One count a chunk, summing to the number of layers.

    Raises:
        PlanError: more chunks than layers, or a negative time.
    """
    n = len(layer_us)
    if not 1 <= chunks <= n:
        raise PlanError(
            f"pipeline: got {chunks} chunks for {n} layers; must be 1 to {n}; hint: lower pp or vpp"
        )
    if min(*layer_us, first_us, last_us) < 0:
        raise PlanError("pipeline: got a negative time; must be measured times; hint: measure again")
    sums = [0.0]
    for time in layer_us:
        sums.append(sums[-1] + time)

    def cost(start: int, stop: int) -> float:
        extra = (first_us if start == 0 else 0.0) + (last_us if stop == n else 0.0)
        return sums[stop] - sums[start] + extra

    goal = _tables(n, chunks, cost, float("inf"))[0][chunks][0][0]
    _, cut_at = _tables(n, chunks, cost, goal * (1 + 1e-12))
    counts, start = [], 0
    for k in range(chunks, 0, -1):
        stop = cut_at[k][start]
        counts.append(stop - start)
        start = stop
    return tuple(counts)


Value = tuple[float, float]


def _tables(
    n: int, chunks: int, cost: Callable[[int, int], float], limit: float
) -> tuple[list[list[Value]], list[list[int]]]:
    """best[k][i]: (largest chunk, sum of squares) of layers i.. in k chunks, no chunk above `limit`.

    Without a limit the largest chunk decides; with one, the sum of squares.
    """
    nothing = (float("inf"), float("inf"))
    best: list[list[Value]] = [[nothing] * (n + 1) for _ in range(chunks + 1)]
    cut_at = [[0] * (n + 1) for _ in range(chunks + 1)]
    best[0][n] = (0.0, 0.0)
    bounded = limit < float("inf")
    for k in range(1, chunks + 1):
        for i in range(n - k, -1, -1):
            for j in range(i + 1, n - k + 2):
                here, (largest, squares) = cost(i, j), best[k - 1][j]
                if here > limit:
                    continue
                value = (max(here, largest), squares + here * here)
                key = value[::-1] if bounded else value
                known = best[k][i][::-1] if bounded else best[k][i]
                if key < known:
                    best[k][i], cut_at[k][i] = value, j
    return best, cut_at


def slowest_chunk_us(
    counts: Sequence[int], layer_us: Sequence[float], *, first_us: float = 0.0, last_us: float = 0.0
) -> float:
    """Time of the slowest chunk of a cut."""
    start, worst = 0, 0.0
    for i, count in enumerate(counts):
        time = sum(layer_us[start : start + count])
        time += (first_us if i == 0 else 0.0) + (last_us if i == len(counts) - 1 else 0.0)
        worst, start = max(worst, time), start + count
    return worst
