"""A step that sends other bytes than planned is refused by axis; both directions of a pipeline count."""

from __future__ import annotations

from dataclasses import replace

import pytest

from unirl_scale.core.errors import PlanError
from unirl_scale.parallel.traffic import StepTraffic
from unirl_scale.train.sent import axis_bytes, require_sent

PLANNED = StepTraffic(tp=10, dp=20, pp_up=3, pp_down=4)


def test_equal_bytes_pass() -> None:
    require_sent("actor", 1, PLANNED, PLANNED)
    assert axis_bytes(PLANNED) == {"tp": 10, "dp": 20, "pp": 7}


@pytest.mark.parametrize(
    ("group", "axis", "expected"),
    [("tp", "tp", 10), ("dp", "dp", 20), ("pp_up", "pp", 7), ("pp_down", "pp", 7)],
)
def test_one_byte_more_names_the_axis(group: str, axis: str, expected: int) -> None:
    sent = replace(PLANNED, **{group: getattr(PLANNED, group) + 1})
    with pytest.raises(PlanError) as caught:
        require_sent("critic", 3, PLANNED, sent)
    message = f"comm.{axis}: got {expected + 1} bytes sent by rank 3 in an optimizer step of critic"
    assert str(caught.value).startswith(f"{message}; planned were {expected}; must be the same; hint: ")
