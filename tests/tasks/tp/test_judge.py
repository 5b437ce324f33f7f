"""What a rank judges by, in a group of one."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from swiglu_bench.cases.cases import Case, Dtype, Mode, Scope, Shape
from swiglu_bench.check.built import Built
from swiglu_bench.check.inputs import Desk, Draw, make_problem
from swiglu_bench.check.judge import REFERENCE, compute_truth
from swiglu_bench.tasks.tp import contenders, judge
from swiglu_bench.tasks.tp.group import Group
from swiglu_bench.tasks.tp.judge import NoReference, SplitJudge

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="PyTorch without torch.distributed")
CASE = Case(Shape("made-up", 12, 24, "for tests", ()), 6, Dtype.FLOAT32, Scope.MLP, Mode.STEP)
DRAW = Draw(3)


@pytest.fixture(scope="module")
def alone() -> Iterator[Group]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Group(0, 1, torch.device("cpu"), dist.new_group(backend="gloo"), init_device_mesh("cpu", (1,)))
    dist.destroy_process_group()


def rank(number: int, size: int) -> Group:
    return Group(number, size, torch.device("cpu"), None, None)  # type: ignore[arg-type]


def test_the_ranks_fp64_parts_make_up_the_whole() -> None:
    problem = make_problem(CASE, "cpu", seed=1)
    desk = Desk(problem)
    given = desk.activations(DRAW), desk.upstream(DRAW)
    whole = compute_truth(problem, *given)
    parts = [compute_truth(contenders.part_of(rank(number, 2), problem), *given) for number in range(2)]
    for name in ("output", "x"):
        torch.testing.assert_close(sum(part[name] for part in parts), whole[name])
    for number, part in enumerate(parts):
        cut = contenders.cuts(number, 2, problem)
        for name in ("w_gate", "w_up", "w_down"):
            torch.testing.assert_close(part[name], whole[name][cut[name]])


def test_what_is_right_passes_and_what_is_wrong_does_not(alone: Group) -> None:
    problem = make_problem(CASE, "cpu", seed=1)
    found = SplitJudge(alone, problem, [DRAW])
    produced = Built(REFERENCE, problem).train(DRAW)
    assert all(one.ok for one in found.judge(produced, DRAW))
    assert all(one.ok for one in found.judge_alone(produced, DRAW, {}))
    assert not found.compare(CASE.mode, [DRAW])(produced)
    produced["w_up"] = produced["w_up"] * 1.001
    assert [one.tensor for one in found.judge(produced, DRAW) if not one.ok] == ["w_up"]
    assert "w_up" in found.compare(CASE.mode, [DRAW])(produced)


def test_a_sum_that_is_not_the_answer_is_no_yardstick(alone: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, other = make_problem(CASE, "cpu", seed=1), make_problem(CASE, "cpu", seed=2)
    with monkeypatch.context() as patch:
        patch.setattr(judge, "split", lambda known, group, whole, by_sequence: contenders.split(
            known, group, other, by_sequence))  # fmt: skip
        with pytest.raises(NoReference, match="output"):
            SplitJudge(alone, problem, [DRAW])


def test_a_rank_has_its_part_of_weights_and_tokens() -> None:
    problem = make_problem(CASE, "cpu", seed=1)
    group = rank(1, 3)
    part = contenders.part_of(group, problem)
    assert part.case.shape.intermediate == 8
    torch.testing.assert_close(part.weights["w_down"], problem.weights["w_down"][:, 8:16])
    whole, mine = Desk(problem), contenders.PartOfTokens(problem, group)
    torch.testing.assert_close(mine.activations(DRAW)[0], whole.activations(DRAW)[0][2:4])
    torch.testing.assert_close(mine.upstream(DRAW), whole.upstream(DRAW)[2:4])


def test_why_there_is_no_asynchronous_compile() -> None:
    assert "sequence parallelism" in str(contenders.why_no_async("cuda", False))
    assert "GPUs" in str(contenders.why_no_async("cpu", True))
    assert contenders.why_no_async("cuda", True) is None
    with pytest.raises(contenders.NothingFused):
        contenders.check_fused(lambda: torch.ones(2) + 1)
