"""What a rank judges by, in a group of one."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from swiglu_bench.cases.cases import Dtype, Mode, Scope, Shape
from swiglu_bench.check.built import Built
from swiglu_bench.check.inputs import Desk, Draw, make_problem
from swiglu_bench.check.judge import REFERENCE, compute_truth
from swiglu_bench.contenders import split
from swiglu_bench.tasks.tp import SplitCase, judge
from swiglu_bench.tasks.tp.court import merged
from swiglu_bench.tasks.tp.judge import NoReference, PartOfTokens, SplitJudge, cuts, part_of
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


def rank(number: int, size: int) -> Group:
    return Group(number, size, torch.device("cpu"), None, None)  # type: ignore[arg-type]


def test_the_ranks_fp64_parts_make_up_the_whole() -> None:
    problem = make_problem(replace(CASE, ranks=2), "cpu", seed=1)
    desk = Desk(problem)
    given = desk.activations(DRAW), desk.upstream(DRAW)
    whole = compute_truth(problem, *given)
    parts = [compute_truth(part_of(rank(number, 2), problem), *given) for number in range(2)]
    for name in ("output", "x"):
        torch.testing.assert_close(sum(part[name] for part in parts), whole[name])
    for number, part in enumerate(parts):
        cut = cuts(number, 2, problem)
        for name in ("w_gate", "w_up", "w_down"):
            torch.testing.assert_close(part[name], whole[name][cut[name]])


def test_what_is_right_passes_and_what_is_wrong_does_not(alone: Group) -> None:
    problem = make_problem(CASE, "cpu", seed=1)
    found = SplitJudge(alone, problem, [DRAW])
    produced = Built(REFERENCE, problem).train(DRAW)
    assert all(check.ok for check in found.judge(produced, DRAW))
    assert all(check.ok for check in found.judge_alone(produced, DRAW, {}))
    assert not found.compare(CASE.mode, [DRAW])(produced)
    produced["w_up"] = produced["w_up"] * 1.001
    assert [check.tensor for check in found.judge(produced, DRAW) if not check.ok] == ["w_up"]
    assert "w_up" in found.compare(CASE.mode, [DRAW])(produced)


def test_a_sum_that_is_not_the_answer_is_no_yardstick(alone: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, other = make_problem(CASE, "cpu", seed=1), make_problem(CASE, "cpu", seed=2)
    with monkeypatch.context() as patch:
        patch.setattr(judge, "split", lambda known, mesh, whole, by_sequence: split.split(
            known, mesh, other, by_sequence))  # fmt: skip
        with pytest.raises(NoReference, match="output"):
            SplitJudge(alone, problem, [DRAW])


def test_a_rank_has_its_part_of_weights_and_tokens() -> None:
    problem = make_problem(replace(CASE, ranks=3), "cpu", seed=1)
    group = rank(1, 3)
    part = part_of(group, problem)
    assert part.case.shape.intermediate == 8
    torch.testing.assert_close(part.weights["w_down"], problem.weights["w_down"][:, 8:16])
    whole, mine = Desk(problem), PartOfTokens(problem, group)
    torch.testing.assert_close(mine.activations(DRAW)[0], whole.activations(DRAW)[0][2:4])
    torch.testing.assert_close(mine.upstream(DRAW), whole.upstream(DRAW)[2:4])


def test_a_time_is_the_slowest_rank_s_and_a_fault_names_its_rank() -> None:
    quick = SampleReport(ms=1, host_us=9, queue_us=9, queue_filled=True, delivered=["output", "x"], faults={})
    fault = FaultReport(check="form", reason="has another shape")
    slow = SampleReport(ms=3, host_us=5, queue_us=5, queue_filled=False, delivered=["output"], faults={"x": fault})
    both = merged([quick, slow])
    assert (both.ms, both.host_us, both.queue_filled, both.delivered) == (3, 9, False, ["output"])
    assert both.faults["x"].reason == "on rank 1 has another shape"
    calls = [CallReport(delivered=[], faults={}, conduct=conduct) for conduct in ({}, {"kept": "was changed"})]
    assert merged(calls).conduct == {"kept": "on rank 1 was changed"}
