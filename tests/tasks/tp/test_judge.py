"""What a rank judges by, in a group of one."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from swiglu_bench.cases.cases import Dtype, Mode, Scope, Shape
from swiglu_bench.check.inputs import Draw, make_problem
from swiglu_bench.contenders import split
from swiglu_bench.tasks.tp import SplitCase, judge
from swiglu_bench.tasks.tp.court import merged
from swiglu_bench.tasks.tp.judge import NoReference, SplitJudge
from swiglu_bench.worker.ranks import Group
from swiglu_bench.worker.worker import CallReport, FaultReport, SampleReport

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="PyTorch without torch.distributed")
CASE = SplitCase(Shape("made-up", 12, 24, "for tests", ()), 6, Dtype.FLOAT32, Scope.MLP, Mode.STEP)
DRAW = Draw(3)


@pytest.fixture(scope="module")
def alone() -> Iterator[Group]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Group(0, 1, torch.device("cpu"), dist.new_group(backend="gloo"), init_device_mesh("cpu", (1,)))
    dist.destroy_process_group()


def test_a_sum_that_is_not_the_answer_is_no_yardstick(alone: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, other = make_problem(CASE, "cpu", seed=1), make_problem(CASE, "cpu", seed=2)
    with monkeypatch.context() as patch:
        patch.setattr(judge, "split", lambda known, mesh, whole, by_sequence: split.split(
            known, mesh, other, by_sequence))  # fmt: skip
        with pytest.raises(NoReference, match="output"):
            SplitJudge(alone, problem, [DRAW])


def test_a_time_is_the_slowest_rank_s_and_a_fault_names_its_rank() -> None:
    quick = SampleReport(ms=1, host_us=9, queue_us=9, queue_filled=True, delivered=["output", "x"], faults={})
    fault = FaultReport(check="form", reason="has another shape")
    slow = SampleReport(ms=3, host_us=5, queue_us=5, queue_filled=False, delivered=["output"], faults={"x": fault})
    both = merged([quick, slow])
    assert (both.ms, both.host_us, both.queue_filled, both.delivered) == (3, 9, False, ["output"])
    assert both.faults["x"].reason == "on rank 1 has another shape"
    calls = [CallReport(delivered=[], faults={}, conduct=conduct) for conduct in ({}, {"kept": "was changed"})]
    assert merged(calls).conduct == {"kept": "on rank 1 was changed"}
