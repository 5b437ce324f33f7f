from typing import Any

import pytest
from specimens import a_record

from swiglu_bench.rows.record import Record
from swiglu_bench.show.writers.cautions import cautions

CALM = {"stopped_by": "precision", "throttle": "", "other_processes": 0, "gpu_note": ""}


def said(*rows: Record) -> list[str]:
    return [text for text, _ in cautions(rows)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stopped_by": "budget"}, ["budget", "7 tokens"]),
        ({"throttle": "software-power-cap", "throttled_share": 0.83}, ["software-power-cap", "83%", "7 tokens"]),
        ({"other_processes": 2}, ["process", "7 tokens"]),
        ({"gpu_note": "NVML does not answer: Driver Not Loaded."}, ["NVML does not answer: Driver Not Loaded."]),
        ({"remarks": "Not checked by the wall clock."}, ["mine", "7 tokens", "Not checked by the wall clock."]),
    ],
)
def test_what_spoils_the_figures_is_said_once_and_where(changes: dict[str, Any], words: list[str]) -> None:
    spoilt = a_record(**CALM | changes)
    (sentence,) = said(a_record(**CALM, tokens=1024), spoilt, spoilt)
    assert all(word in sentence for word in words)
    assert said(a_record(**CALM)) == []


def test_where_cases_of_several_gpus_ran_is_said() -> None:
    rows = [a_record(tokens=index + 1, host="h", gpu_index=index, gpu_uuid=f"GPU-{index}") for index in range(10)]
    assert said(*rows)[0].startswith("The cases ran on 10 GPUs (h 0, h 1, h 2, h 3, h 4, h 5, h 6, h 7 and 2 more): ")
    assert said(rows[0], rows[0]) == []
