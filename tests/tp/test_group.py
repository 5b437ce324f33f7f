"""What a group decides by, with a group of one, and with others' words put into its ear."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from swiglu_bench.check.inputs import make_problem
from swiglu_bench.check.judge import REFERENCE
from swiglu_bench.check.truth import compute_truth
from swiglu_bench.measure.clock import CudaClock, Sample
from swiglu_bench.measure.rounds import Contender, Rule, run_rounds
from swiglu_bench.spec.cases import Case, Dtype, Mode, Scope, Shape
from swiglu_bench.tp import case, contenders, truth
from swiglu_bench.tp.group import AlignedCudaClock, Group, GroupClock, RankFailed

CASE = Case(Shape("made-up", 12, 24, "for tests", ()), 6, Dtype.FLOAT32, Scope.MLP, Mode.STEP)


class Fake(Group):
    """This rank of a group whose others answer as `others` makes of this one's answer."""

    def __init__(self, rank: int = 0, size: int = 2, others: Any = lambda value: value) -> None:
        super().__init__(rank, size, torch.device("cpu"), None, None)  # type: ignore[arg-type]
        object.__setattr__(self, "others", others)

    def gather(self, value: Any) -> list[Any]:
        return [value if rank == self.rank else self.others(value) for rank in range(self.size)]  # type: ignore[attr-defined]

    def largest(self, *values: float) -> list[float]:
        return [max(pair) for pair in zip(values, self.others(list(values)), strict=True)]  # type: ignore[attr-defined]


class Clock:
    cache = "cpu"

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure = failure

    def sample(self, call: Any, lead_us: float) -> Sample:
        if self.failure:
            raise self.failure
        return Sample(1.0, 10.0, True, call())

    def synchronize(self) -> None: ...


def test_a_sample_is_the_slowest_rank_s_and_filled_where_all_were():
    slower = Fake(others=lambda told: [3.0, 5.0, 1.0, 0.0, 77.0])
    clock = GroupClock(slower, Clock())
    sample = clock.sample(lambda: "mine", 100.0)
    assert (sample.ms, sample.host_us, sample.queue_filled, sample.result) == (3.0, 10.0, False, "mine")
    assert clock.now() == 77.0


def test_a_failure_of_another_rank_is_everybody_s():
    def others(told: Any) -> Any:
        return [0.0, 0.0, 0.0, 1.0, 1.0] if isinstance(told, list) else "ValueError: there"

    with pytest.raises(RankFailed, match="rank 1: ValueError: there"):
        GroupClock(Fake(others=others), Clock()).sample(lambda: None, 1.0)
    with pytest.raises(RankFailed, match="rank 0: KeyError: 'here'") as failed:
        GroupClock(Fake(others=lambda told: told if isinstance(told, list) else ""), Clock(KeyError("here"))).sample(
            lambda: None, 1.0
        )
    assert isinstance(failed.value.__cause__, KeyError)


def test_work_together_ends_the_same_everywhere():
    assert Fake().together(lambda: 3) == 3
    with pytest.raises(RankFailed, match=r"^rank 1: no$"):
        Fake(others=lambda told: "no").together(lambda: 3)
    with pytest.raises(RankFailed, match=r"^ZeroDivisionError: division by zero$"):
        Fake().together(lambda: 1 / 0)


def test_rounds_end_by_the_group_s_time():
    seconds = itertools.count()
    clock = GroupClock(Fake(others=lambda told: [*told[:4], float(next(seconds))]), Clock())
    rule = Rule(warmup_rounds=0, min_rounds=3, max_rounds=99, min_s=100, budget_s=10)
    found = run_rounds([Contender("one", lambda number: lambda: None)], clock, rule, now=clock.now)
    assert found.stopped_by == "budget"
    assert len(found.timings["one"].samples) < 99


def test_the_gpu_s_clock_meets_behind_the_spin(monkeypatch: pytest.MonkeyPatch):
    order: list[str] = []

    class Event:
        def __init__(self, **_: Any) -> None: ...
        def record(self) -> None:
            order.append("event")

        def query(self) -> bool:
            return False

        def synchronize(self) -> None: ...
        def elapsed_time(self, other: Any) -> float:
            return 2.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: order.append("spin"))
    monkeypatch.setattr(dist, "all_reduce", lambda token: order.append("meet"))
    clock = AlignedCudaClock.__new__(AlignedCudaClock)
    clock._token, clock._cycles_per_us, clock.cache, clock._other_data = torch.zeros(1), 1.0, "hot", None
    assert clock.sample(lambda: order.append("call"), 10.0).ms == 2.0
    assert order == ["spin", "meet", "event", "call", "event"]
    alone = CudaClock.__new__(CudaClock)
    alone._cycles_per_us, alone._other_data = 1.0, None
    order.clear()
    alone.sample(lambda: order.append("call"), 10.0)
    assert order == ["spin", "event", "call", "event"]


@pytest.fixture
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: tensor.fill_(1) if tensor.numel() == 24 else tensor)


@pytest.mark.usefixtures("_alone")
def test_the_ranks_fp64_parts_make_up_the_whole():
    problem = make_problem(CASE, "cpu", unannounced=1)
    whole = compute_truth(problem, 0)
    parts = [truth.shared_truth(Fake(rank), problem, 0) for rank in range(2)]
    for name in ("output", "x"):
        torch.testing.assert_close(sum(part[name] for part in parts), whole[name])
    torch.testing.assert_close(torch.cat([part["w_up"] for part in parts]), whole["w_up"])
    torch.testing.assert_close(torch.cat([part["w_down"] for part in parts], 1), whole["w_down"])
    mine = truth.own_part(Fake(1), problem, dict(whole))
    for name in ("w_gate", "w_up", "w_down"):
        torch.testing.assert_close(mine[name], parts[1][name])


@pytest.mark.usefixtures("_alone")
def test_a_sum_that_is_not_the_answer_is_no_yardstick():
    problem = make_problem(CASE, "cpu", unannounced=1)
    part = contenders.part_of(Fake(), problem, by_sequence=False)
    rows = truth.rows_of(1, 2, problem)  # another rank's weights: what a wrong cut would compute with
    wrong = {"w_gate": problem.weights["w_gate"][rows], "w_up": problem.weights["w_up"][rows]}
    part.weights.update(wrong)
    with pytest.raises(truth.NoReference, match="The sum of the ranks' parts is wrong in output"):
        truth.make_judges(Fake(), problem, part, 0)


def test_ranks_that_draw_other_tensors_are_noticed():
    problem = make_problem(CASE, "cpu", unannounced=1)
    truth.check_same(Fake(), problem)
    with pytest.raises(truth.NoReference, match="not of one kind"):
        truth.check_same(Fake(others=lambda prints: prints[::-1]), problem)


def test_a_rank_s_part_of_a_problem():
    problem = make_problem(CASE, "cpu", unannounced=1)
    part = contenders.part_of(Fake(1, 3), problem, by_sequence=True)
    assert part.case.shape.intermediate == 8
    torch.testing.assert_close(part.weights["w_down"], problem.weights["w_down"][:, 8:16])
    torch.testing.assert_close(part.activations[1][0], problem.activations[1][0][2:4])
    assert part.upstream[0].shape == (2, 12)


def test_why_there_is_no_asynchronous_compile():
    assert "without sequence parallelism there are none" in str(contenders.why_no_async("cuda", False))
    assert "needs GPUs" in str(contenders.why_no_async("cpu", True))
    assert contenders.why_no_async("cuda", True) is None
    with pytest.raises(contenders.NothingFused, match="found no collective to pipeline"):
        contenders.check_fused(lambda: torch.ones(2) + 1)


def test_the_rank_that_fails_is_named():
    from swiglu_bench.rows.record import TensorCheck

    good = TensorCheck("output", True, 0.1, 0.1, 1.0, 0.1, 0.1, 1.0)
    bad = TensorCheck("output", False, 2.0, 0.1, 1.0, 0.1, 0.1, 1.0, reason="too far")
    assert case._worst([(good,), (bad,)])[0].reason == "on rank 1 too far"
    assert case._worst([(good,), (good,)])[0].ok


def test_weights_are_not_copied_for_the_plain_module():
    problem = make_problem(CASE, "cpu", unannounced=1).with_leaves(requires_grad=False)
    mlp = contenders._PlainMLP(problem)
    assert mlp.get_parameter("up_proj.weight").data_ptr() == problem.weights["w_up"].data_ptr()
    x = problem.activations[0][0]
    torch.testing.assert_close(mlp(x), REFERENCE.build(problem).forward(x))
