"""Chains: each call's inputs follow from all results of the one before, and the judge follows what was reported."""

from collections.abc import Callable, Sequence

import pytest
import torch
from specimens import declared, small_case
from torch import Tensor

from swiglu_bench.cases.cases import Case, Dtype, Mode, Scope, Shape
from swiglu_bench.cases.implementation import Implementation, Step
from swiglu_bench.cases.problem import Problem
from swiglu_bench.check.built import OWN, Built
from swiglu_bench.check.chain import GROUPS, Chain, Marks
from swiglu_bench.check.inputs import Draw, make_problem, new_draw, new_seed
from swiglu_bench.check.judge import Judge
from swiglu_bench.check.quantised import judge_of
from swiglu_bench.contenders import fp8, pytorch
from swiglu_bench.tasks.selftest.specimen import by_turns, right_forward, transposed

CPU = torch.device("cpu")
CALLS = 12
SHAPE = Shape("chained", 64, 96, "made up", (33,))


class Chained:
    """A judge, and chains of an implementation at a case."""

    def __init__(self, case: Case, implementation: Implementation) -> None:
        problem = make_problem(case, CPU)
        self.mode, self.draw = case.mode, new_draw()
        self.judge, self.built = Judge(problem), Built(implementation, problem)
        self.judge.truth(new_draw(), case.mode is not Mode.FORWARD)
        self.names = case.mode.results(self.built.gradients)
        self.built.as_they_lie, self.layout = True, self.built.layout
        self.sums = self.judge._places(self.names)
        if self.layout:
            found = self.layout.as_they_lie(self.sums)
            self.sums = {name: found[name] for name in self.layout.own(self.names)}

    def run(self, key: int) -> Marks:
        return Chain(self.built, self.mode, self.draw, CALLS, self.sums, lambda: None).run(key)

    def verdict(self, key: int, marks: Marks) -> str:
        wrong = self.judge.follow(self.mode, self.draw, key, marks, self.names, self.layout)
        return wrong(self.layout.canonical(self.sums) if self.layout else self.sums)


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("dtype", list(Dtype))
@pytest.mark.parametrize("scope", list(Scope))
def test_a_right_chain_is_right_however_it_rounds(scope: Scope, dtype: Dtype, mode: Mode) -> None:
    for implementation in (pytorch.eager, pytorch.eager_packed, by_turns, transposed):
        case = small_case(scope=scope, dtype=dtype, mode=mode)
        if not implementation.refuses(case):
            chained, key = Chained(case, implementation), new_seed()
            assert chained.verdict(key, chained.run(key)) == ""


@pytest.mark.parametrize("implementation", [by_turns, transposed])
def test_gradients_as_they_lie_are_held_against_eagers(implementation: Implementation) -> None:
    chained = Chained(small_case(mode=Mode.STEP, tokens=33, shape=SHAPE), implementation)
    marks = chained.run(1)
    own = next(name for name in chained.sums if name.startswith(OWN))
    chained.sums[own][5] *= 1.01
    assert "relative difference" in chained.verdict(1, marks)
    chained.built.parameters[own.removeprefix(OWN)].register_hook(lambda value: value.flip(1))
    assert "did not return" in chained.verdict(1, chained.run(1))


def test_the_next_inputs_follow_from_the_key_and_from_every_result() -> None:
    chained = Chained(small_case(mode=Mode.STEP, tokens=33, shape=SHAPE), pytorch.eager)
    first, other = chained.run(1), chained.run(2)
    assert all(mine != yours for mine, yours in zip(first, other, strict=True))
    assert len({tuple(marks) for marks in first}) == CALLS
    assert {len(marks) for marks in first} == {GROUPS * len(chained.names)}
    assert "did not return" in chained.verdict(2, first), "the key decides"
    chained.run(1)
    for result in range(GROUPS * len(chained.names)):
        marks = [list(marks) for marks in first]
        marks[3][result] ^= -(2**31)
        assert "call 4 did not return" in chained.verdict(1, marks), "what followed from another sign"


def made_as_one(chained: Chained, key: int, rounds: int) -> Marks:
    """What a contender reports that guesses all inputs, makes all calls as one, and guesses again by the results."""
    guess: Marks = [[0] * GROUPS * len(chained.names)] * CALLS
    for _ in range(rounds):
        chain = Chain(chained.built, chained.mode, chained.draw, CALLS, chained.sums, lambda: None, told=guess)
        guess = chain.run(key)
    return guess


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
def test_calls_made_as_one_come_no_further_than_one_call_in_each_round(dtype: Dtype) -> None:
    """Where inputs depend smoothly on results, a few rounds of guesses would do for any number of calls."""
    chained = Chained(small_case(mode=Mode.FORWARD, tokens=33, shape=SHAPE, dtype=dtype), pytorch.eager)
    for rounds in (1, 3, CALLS - 2):
        assert chained.verdict(5, made_as_one(chained, 5, rounds)), rounds
    assert chained.verdict(5, made_as_one(chained, 5, CALLS)) == ""


def altered(change: Callable[[Tensor], Tensor]) -> Implementation:
    def build(problem: Problem) -> Step:
        return Step(lambda x: change(right_forward(x, *problem.weights.values())))

    return declared(build)


@pytest.mark.parametrize(
    "change", [torch.zeros_like, lambda out: out * 1.02, lambda out: torch.cat([out[:-1], out[-1:] * 0])]
)
def test_a_wrong_result_is_found(change: Callable[[Tensor], Tensor]) -> None:
    chained = Chained(small_case(mode=Mode.FORWARD, tokens=33, shape=SHAPE), altered(change))
    assert chained.verdict(7, chained.run(7))


@pytest.mark.parametrize("marks", [[], [[0]], [[0] * GROUPS] * 3 + [[0]]])
def test_reports_of_another_form_are_wrong(marks: Sequence[Sequence[int]]) -> None:
    chained = Chained(small_case(mode=Mode.FORWARD), pytorch.eager)
    assert chained.verdict(7, [list(each) for each in marks]) == "the number of marks is wrong"


def test_forwards_of_backwards_are_made_before() -> None:
    made: list[str] = []

    def build(problem: Problem) -> Step:
        def forward(x: Tensor) -> Tensor:
            made.append("forward")
            output = right_forward(x, *problem.weights.values())
            output.register_hook(lambda _: made.append("backward"))
            return output

        return Step(forward)

    chained = Chained(small_case(mode=Mode.BACKWARD), declared(build))
    chain = Chain(chained.built, Mode.BACKWARD, Draw(3), CALLS, chained.sums, lambda: None)
    assert made == ["forward"] * CALLS
    chain.run(4)
    assert made[CALLS:] == ["backward"] * CALLS


def test_codes_that_differ_by_rounding_are_no_fault() -> None:
    shape = Shape("quantised", 256, 384, "made up", (64,))
    precision = max(fp8.scaled_mm.precisions, key=str)
    case = Case(shape, 64, Dtype.BFLOAT16, Scope.GLU, Mode.STEP, precision=precision)
    problem = make_problem(case, CPU)
    judge, built = judge_of(*fp8.scaled_mm.way_of(case))(problem), Built(fp8.scaled_mm, problem)
    judge.truth(new_draw(), True)
    names = case.mode.results(built.gradients)
    sums, draw = judge._places(names), new_draw()
    marks = Chain(built, case.mode, draw, CALLS, sums, lambda: None).run(8)
    assert judge.follow(case.mode, draw, 8, marks, names)(sums) == ""


@pytest.mark.gpu
def test_a_recorded_chain_is_the_queued_one_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    case = small_case(mode=Mode.STEP, tokens=33, shape=SHAPE, dtype=Dtype.BFLOAT16)
    problem = make_problem(case, device)
    built, judge = Built(pytorch.eager, problem), Judge(problem)
    judge.truth(new_draw(), True)
    names = case.mode.results(built.gradients)
    draw = new_draw()
    for recorded in (False, True):
        sums = judge._places(names)
        chain = Chain(built, case.mode, draw, CALLS, sums, lambda: None)
        if recorded:
            chain.record(device)
        for key, fewest in ((3, CALLS), (4, CALLS + 1)):
            monkeypatch.setattr("swiglu_bench.check.judge.RECORDED_CALLS", fewest)
            assert judge.follow(case.mode, draw, key, chain.run(key), names)(sums) == "", (recorded, key)
