"""What is accepted as a report of a contender's process."""

import json
import random
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import bad_implementations as bad
import pytest
import torch
from courts import run_here
from from_files import from_file
from specimens import small_case

from swiglu_bench.cases.cases import Mode
from swiglu_bench.contenders import pytorch
from swiglu_bench.machine import machine
from swiglu_bench.measure.rounds import Rule
from swiglu_bench.rows.record import Status
from swiglu_bench.worker.child import Contender
from swiglu_bench.worker.policy import Settings, Task
from swiglu_bench.worker.worker import LONGEST_MS, LONGEST_US, MOST_REASON, LayoutReport, Malformed, SampleReport

FORWARD = small_case(mode=Mode.FORWARD)

RIGHT = {
    "ms": 1.0, "host_us": 2.0, "queue_us": 2.0, "queue_filled": True, "mhz": 1980.0, "delivered": ["output"],
    "faults": {},
}  # fmt: skip


def test_a_report_is_its_fields() -> None:
    assert asdict(SampleReport.checked(RIGHT)) == RIGHT


@pytest.mark.parametrize(
    "change",
    [
        {"ms": "1"}, {"ms": -1.0}, {"ms": float("nan")}, {"ms": None}, {"more": 1}, {"delivered": "output"},
        {"delivered": ["x" * (MOST_REASON + 1)]}, {"queue_filled": 1}, {"mhz": -1.0}, {"faults": {"output": "wrong"}},
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


def test_a_call_may_take_the_host_as_long_as_the_device() -> None:
    assert (
        SampleReport.checked(RIGHT | {"ms": LONGEST_MS, "host_us": LONGEST_US, "queue_us": 2e8}).host_us == LONGEST_US
    )


ODD = [None, True, -1, -0.0, 0, 0.0, 1e12, 1e300, 10**400, float("nan"), float("inf"), "1", "", [], [1], {}, {"a": 1}]


def malformed(seed: int) -> Any:
    """An answer in JSON: a report of which some fields are odd, missing or more; or no report at all."""
    lot = random.Random(seed)
    if lot.random() < 0.1:
        return lot.choice(ODD)
    report: dict[str, Any] = dict(RIGHT)
    for field in lot.sample(list(report), lot.randint(1, 3)):
        match lot.randint(0, 4):
            case 0:
                del report[field]
            case 1:
                report[f"{field}s"] = report[field]
            case _:
                report[field] = lot.choice(ODD)
    return json.loads(json.dumps(report))


def test_whatever_is_sent_is_a_sample_or_malformed() -> None:
    """And whoever sends what is malformed is ended: what it says next could be anything."""
    taken = 0
    for seed in range(200):
        child = MagicMock()
        child.ask.return_value = malformed(seed)
        contender = Contender("sender", pytorch.eager, child, 1.0)
        try:
            sample = contender.ask(SampleReport, "sample").sample()
        except Malformed:
            child.end.assert_called_once()
            continue
        taken += 1
        assert 0 < sample.ms <= LONGEST_MS
        assert 0 <= sample.host_us <= LONGEST_US
        assert 0 <= sample.queue_us <= LONGEST_US
    assert taken < 40, "most are malformed"


@pytest.mark.timed
def test_figures_that_cannot_be_and_answers_to_no_question_cost_one_row(tmp_path: Path) -> None:
    rule = Rule(warmup_rounds=1, min_rounds=4, max_rounds=4, min_s=0.0, budget_s=60.0)
    settings = Settings(Task.TIME, torch.device("cpu"), "c", "r", rule=rule)
    hostile = [from_file(each) for each in (bad.no_time, bad.long_time, bad.no_number, bad.says_it_twice)]
    everyone, this = [pytorch.eager, *hostile], machine.describe(settings.device)
    rows = {row.implementation: row for row in run_here([FORWARD], everyone, settings, this, logs=tmp_path)}
    assert rows.keys() == {each.name for each in everyone}
    assert rows["eager"].status in (Status.OK, Status.UNSETTLED)
    for row in (rows[each.name] for each in hostile):
        assert row.status is Status.ERROR
        assert re.search("malformed report|not asked for", row.reason), row.reason


VIEW: dict[str, Any] = {"parameter": "w", "size": [4, 3], "stride": [3, 1], "offset": 0, "order": None, "rows": [],
                        "columns": False, "flipped": False}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"parameter": "v"}, {"offset": 1}, {"stride": [2**40, 1]}, {"size": [4]}, {"size": [0, 3]}, {"stride": [0, 1]},
        {"stride": [1, 1]}, {"flipped": True},
        {"order": [0, 1, 2], "rows": [3]}, {"order": [0, 1, 2, 4], "rows": [4]}, {"order": [0, 1, 2, 2], "rows": [4]},
        {"order": [0, 1, 2, 3], "rows": [5]}, {"order": [2, 1, 3], "columns": True}, {"order": [2**45], "rows": [1]},
    ],
)  # fmt: skip
def test_a_layout_that_would_lead_the_judge_out_of_its_memory_is_malformed(change: dict[str, Any]) -> None:
    def told(view: dict[str, Any]) -> LayoutReport:
        return LayoutReport.checked({"sizes": {"w": [4, 3]}, "views": {"w_gate": view}})

    layout = told(VIEW | {"order": [3, 1, 0, 2], "rows": [4]}).layout({"w_gate": (4, 3)})
    assert LayoutReport.of(layout).layout({"w_gate": (4, 3)}).sizes == layout.sizes
    with pytest.raises(Malformed, match="malformed report"):
        told(VIEW | change).layout({"w_gate": (4, 3)})


def test_a_layout_has_no_more_elements_than_the_weights() -> None:
    with pytest.raises(Malformed, match="more or fewer elements"):
        LayoutReport.checked({"sizes": {"w": [2**40, 3]}, "views": {"w_gate": VIEW}}).layout({"w_gate": (4, 3)})


INTERPRETED = """
import numpy, torch
from triton import language as tl
from triton.runtime import interpreter
from swiglu_bench.worker.workbench import _round_bfloat16
values = torch.cat([torch.randn(4096) * 10.0 ** torch.randint(-20, 20, (4096,)),
                    torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.4e38, 1.00390625, 1.01171875])])
def same():
    bits = interpreter._convert_float(values.numpy(), tl.float32, tl.bfloat16, None)
    got = torch.from_numpy(bits.astype(numpy.uint16).view(numpy.int16)).view(torch.bfloat16)
    return torch.equal(got.nan_to_num(7), values.bfloat16().nan_to_num(7))
print(same(), end=" ")
_round_bfloat16(), _round_bfloat16()
print(same())
"""


def test_an_interpreted_kernel_rounds_to_bfloat16_as_a_gpu_does() -> None:
    pytest.importorskip("triton")
    done = subprocess.run([sys.executable, "-c", INTERPRETED], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "True"], done.stderr
