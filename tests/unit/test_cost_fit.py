"""Fits of nccl-tests and hccl_test logs."""

from __future__ import annotations

import pytest

from unirl_scale.comm.cost_fit import fit, mean_error, read_curve
from unirl_scale.core.errors import PlanError


def nccl_log(base_us: float, gb_per_s: float, ranks: int = 4, wrong: str = "0") -> str:
    """A log whose times are exactly base + size / rate, printed with nccl-tests' digits."""
    lines = ["# nThread 1 nGpus 4 minBytes 1024 maxBytes 1073741824 step: 4(factor)", "#", "# Using devices"]
    lines += [
        f"#  Rank {r:2d} Group  0 Pid   77 on   node1 device {r:2d} [0x0{r}] NVIDIA X" for r in range(ranks)
    ]
    lines.append("#       size         count      type   redop    root     time   algbw   busbw #wrong")
    for power in range(10, 31, 2):
        size = 1 << power
        time = base_us + size / gb_per_s / 1e3
        algbw = size / time / 1e3
        busbw = algbw * 2 * (ranks - 1) / ranks
        lines.append(
            f"{size:12d} {size // 4:12d} float sum -1 {time:.2f} {algbw:.2f} {busbw:.2f} {wrong} "
            f"{time:.2f} {algbw:.2f} {busbw:.2f} {wrong}"
        )
    return "\n".join([*lines, "# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 1.0", ""])


HCCL_LOG = """\
data_size(Bytes): | aveg_time(us): | alg_bandwidth(GB/s): | check_result:
8192              | 50.40          | 0.16254              | success
8192              | 50.60          | 0.16190              | success
1048576           | 92.00          | 11.398               | success
134217728         | 5418.70        | 24.770               | success
"""


def test_fit_recovers_latency_and_bandwidth() -> None:
    curve = read_curve(nccl_log(30.0, 120.0), collective="all_reduce")
    assert curve.ranks == 4
    found = fit(curve)
    assert found.base_us == pytest.approx(30.0, rel=0.01)
    assert found.gb_per_s == pytest.approx(120.0, rel=0.01)
    assert found.mean_error < 0.001
    link = found.link("NV", "all_reduce", 4)
    assert link.beta_gb_per_s == pytest.approx(180.0, rel=0.01)
    assert link.alpha_us == pytest.approx(5.0, rel=0.01)
    assert "11 points" in link.source


def test_the_residual_says_when_the_model_does_not_hold() -> None:
    log = nccl_log(30.0, 120.0)
    bent = "\n".join(
        line.replace(line.split()[5], str(3 * float(line.split()[5])))
        if line.startswith("    16777216")
        else line
        for line in log.splitlines()
    )
    assert fit(read_curve(bent, collective="all_reduce")).max_error > 0.3


def test_the_slowest_rank_of_hccl_test_counts() -> None:
    curve = read_curve(HCCL_LOG, collective="all_reduce", ranks=8)
    assert curve.size_bytes == (8192, 1048576, 134217728)
    assert curve.time_us[0] == 50.6
    assert mean_error(fit(curve).time_us, [curve]) < 0.02


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello\nworld\n", "no result rows"),
        (nccl_log(30.0, 120.0, wrong="17"), "failed their check"),
        (HCCL_LOG.replace("success\n1048576", "failed\n1048576"), "failed their check"),
        ("# Collective test starting: all_gather_perf\n" + nccl_log(30.0, 120.0), "a log of all_gather"),
    ],
)
def test_logs_that_prove_nothing_are_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        read_curve(text, collective="all_reduce")


def test_too_few_points_are_refused() -> None:
    curve = read_curve(HCCL_LOG, collective="all_reduce", ranks=8)
    with pytest.raises(PlanError, match="got 1 points"):
        fit(curve, low=10**8)
