"""What is accepted as a report of a contender's process."""

from typing import Any

import pytest

from swiglu_bench.worker.worker import MOST_REASON, Malformed, SampleReport

RIGHT = {"ms": 1.0, "host_us": 2.0, "queue_us": 2.0, "queue_filled": True, "delivered": ["output"], "faults": {}}


def test_a_report_is_its_fields() -> None:
    assert SampleReport.checked(RIGHT).model_dump() == RIGHT


@pytest.mark.parametrize(
    "change",
    [
        {"ms": "1"}, {"ms": -1.0}, {"ms": float("nan")}, {"ms": None}, {"more": 1}, {"delivered": "output"},
        {"delivered": ["x" * (MOST_REASON + 1)]}, {"queue_filled": 1}, {"faults": {"output": "wrong"}},
    ],
)  # fmt: skip
def test_anything_else_is_malformed(change: dict[str, Any]) -> None:
    with pytest.raises(Malformed) as refused:
        SampleReport.checked(RIGHT | change)
    assert "\n" not in str(refused.value)


def test_what_is_no_object_is_malformed() -> None:
    for data in (None, 3, "text", [], {}):
        with pytest.raises(Malformed):
            SampleReport.checked(data)
