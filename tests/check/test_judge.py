"""The judge: what must pass it, and what must fail it."""

import functools
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from judged import judge_here
from specimens import small_case
from torch import Tensor

from swiglu_bench.cases.cases import ACTIVATIONS, DENSE, PLAIN, Dtype, Extras, Mode, Scope, Shape, tensors
from swiglu_bench.cases.problem import Problem
from swiglu_bench.check import judge as judge_module
from swiglu_bench.check.built import Produced
from swiglu_bench.check.inputs import Desk, Draw, leaf, make_problem, torch_dtype
from swiglu_bench.check.judge import KEPT, REFERENCE, Judge, compute_truth, in_fp64
from swiglu_bench.rows.record import TensorCheck

MIDDLE = Shape("middle", 96, 160, "made up", (33,))
ONE, OTHER = Draw(1), Draw(11)
every_setting = pytest.mark.parametrize(
    ("scope", "dtype"), [(scope, dtype) for scope in DENSE for dtype in Dtype], ids=lambda value: value.value
)


def in_high_precision(problem: Problem, draw: Draw, *, drop: int = 0, swap: bool = False) -> Produced:
    """What a good fused kernel gives: everything in fp32, each result rounded once to the case's dtype.

    `drop` leaves out the last columns of the products' inner dimension, `swap` takes gate for up.
    """
    scope, dtype, desk = problem.case.scope, torch_dtype(problem.case), Desk(problem)
    given = dict(zip(ACTIVATIONS[scope], desk.activations(draw), strict=True)) | problem.weights
    leaves = {name: value.detach().float().requires_grad_() for name, value in given.items()}
    if scope is Scope.ACTIVATION:
        gate, up = leaves["gate"], leaves["up"]
    else:
        inner = slice(0, leaves["x"].shape[1] - drop)
        gate, up = (F.linear(leaves["x"][:, inner], leaves[name][:, inner]) for name in ("w_gate", "w_up"))
    if swap:
        gate, up = up, gate
    output = F.silu(gate) * up
    if scope is Scope.MLP:
        output = F.linear(output, leaves["w_down"])
    output.backward(desk.upstream(draw).float())
    found = {"output": output.detach()} | {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return {name: value.to(dtype) for name, value in found.items()}


@functools.cache
def setting(scope: Scope, dtype: Dtype, tokens: int = 33, shape: Shape = MIDDLE) -> tuple[Problem, Judge]:
    problem = make_problem(small_case(scope=scope, dtype=dtype, tokens=tokens, shape=shape), "cpu", seed=0)
    return problem, Judge(problem)


def failed(checks: tuple[TensorCheck, ...]) -> set[str]:
    return {check.tensor for check in checks if not check.ok}


# What must pass


@every_setting
@pytest.mark.parametrize("tokens", [1, 130])
def test_a_result_kept_in_fp32_until_the_store_passes(scope: Scope, dtype: Dtype, tokens: int) -> None:
    problem, judge = setting(scope, dtype, tokens)
    for draw in (ONE, OTHER):
        checks = judge_here(judge, in_high_precision(problem, draw), draw)
        assert {check.tensor for check in checks} == {"output", *tensors(scope)}
        assert not failed(checks), [(check.tensor, check.reason) for check in checks]


# What must fail


def changed(change: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    """The result with a part of it changed in place."""

    def copy(value: Tensor) -> Tensor:
        value = value.clone()
        change(value)
        return value

    return copy


def flip_the_largest(value: Tensor) -> None:
    value.view(-1)[value.abs().argmax()] *= -1


FAULTS: dict[str, Callable[[Tensor], Tensor | None]] = {
    "zeros": torch.zeros_like,
    "shifted row": lambda value: value.roll(1, 0),
    "last row unwritten": changed(lambda value: value[-1].zero_()),
    "last row of a ragged tile mixed up": changed(lambda value: value[-1].add_(value[-2])),
    "row 0 for all": lambda value: value[:1].expand_as(value).clone(),
    "one wrong element": changed(flip_the_largest),
    "one element off by the rms": changed(lambda v: v[-1, -1].add_(v.float().norm().item() / math.sqrt(v.numel()))),
    "one NaN": changed(lambda value: value[0, 0].fill_(math.nan)),
    "3% too large": lambda value: value * 1.03,
    "fp8 on the way": lambda value: value.to(torch.float8_e4m3fn).to(value.dtype),
    "wrong dtype": torch.Tensor.double,
    "wrong shape": lambda value: value[:-1],
    "missing": lambda value: None,
}


@every_setting
def test_a_fault_fails_in_the_tensor_that_has_it_and_nowhere_else(scope: Scope, dtype: Dtype) -> None:
    problem, judge = setting(scope, dtype)
    produced = in_high_precision(problem, ONE)
    for fault, spoil in FAULTS.items():
        for name, value in produced.items():
            checks = judge_here(judge, produced | {name: spoil(value)}, ONE)
            assert failed(checks) == {name}, f"{fault} in {name}"
            assert all(check.reason and check.check for check in checks if not check.ok)


@every_setting
def test_wrong_work_fails_everywhere(scope: Scope, dtype: Dtype) -> None:
    problem, judge = setting(scope, dtype)
    everything = {"output", *tensors(scope)}
    assert failed(judge_here(judge, in_high_precision(problem, ONE, swap=True), ONE)) >= {"output", *ACTIVATIONS[scope]}
    assert failed(judge_here(judge, in_high_precision(problem, OTHER), ONE)) == everything, "a stale result"
    for drop in (16, 1) if scope is not Scope.ACTIVATION else ():
        assert failed(judge_here(judge, in_high_precision(problem, ONE, drop=drop), ONE)) == everything
    produced = in_high_precision(problem, ONE)
    first, second = ("gate", "up") if scope is Scope.ACTIVATION else ("w_gate", "w_up")
    exchanged = produced | {first: produced[second], second: produced[first]}
    assert failed(judge_here(judge, exchanged, ONE)) == {first, second}


def test_one_bad_row_of_thousands_fails() -> None:
    """Where the norm of many rows hides the one, the largest element shows it."""
    problem, judge = setting(Scope.ACTIVATION, Dtype.BFLOAT16, 20_000, Shape("narrow", 8, 64, "made up", (1,)))
    produced = in_high_precision(problem, ONE)
    for name in ("last row unwritten", "last row of a ragged tile mixed up", "one wrong element"):
        assert failed(judge_here(judge, produced | {"output": FAULTS[name](produced["output"])}, ONE)) == {"output"}


@functools.cache
def unrounded(scope: Scope, dtype: Dtype) -> Judge:
    """One whose results are not rounded, so that no rounding blurs the size of an error."""
    judge = Judge(setting(scope, dtype)[0])
    judge.truth(ONE, True)
    judge.dtype = torch.float64
    return judge


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(DENSE), st.sampled_from(list(Dtype)),
    st.floats(0.02, 50.0).filter(lambda factor: abs(factor - 1) > 0.02), st.integers(0, 3),
)  # fmt: skip
def test_an_injected_error_of_known_size_flips_the_verdict_where_the_budget_is(
    scope: Scope, dtype: Dtype, factor: float, which: int
) -> None:
    """The truth with an error of `factor` times the budget, the same for every element, or of one element alone."""
    judge = unrounded(scope, dtype)
    values = judge.truth(ONE, True).values
    name = list(values)[which % len(values)]

    def verdict(value: Tensor) -> TensorCheck:
        produced = dict(values) | {name: value}
        return next(check for check in judge_here(judge, produced, ONE) if check.tensor == name)

    truth, clean = values[name], verdict(values[name])
    rms = (truth.norm() / math.sqrt(truth.numel())).item()
    assert clean.ok
    signs = torch.randint(0, 2, truth.shape, generator=torch.Generator().manual_seed(1)) * 2.0 - 1
    spread = verdict(truth + signs * rms * clean.allowed * factor)
    assert spread.ok is (factor < 1)
    assert spread.check == ("" if factor < 1 else "relative error")
    spoilt = truth.clone()
    spoilt[0, 0] += rms * clean.max_allowed * factor
    single = verdict(spoilt)
    within = clean.max_allowed * factor / math.sqrt(truth.numel()) <= clean.allowed
    assert single.ok is (factor < 1 and within)
    if within and factor > 1:
        assert single.check == "largest element"


# The judge itself


# Comparing with eager: one call, or the sums of many


def test_what_compares_sums_keeps_no_truth() -> None:
    """It lasts for longer than the truth that its budgets are from, which may be most of a GPU's memory."""
    judge = Judge(make_problem(small_case(), "cpu"))
    first = weakref.ref(judge.truth(Draw(0), True).expected["w_gate"].truth)
    comparing = judge.compare(Mode.STEP, [Draw(9)])
    for seed in range(1, KEPT + 1):
        judge.truth(Draw(seed), True)
    assert comparing
    assert first() is None


def compared(dtype: Dtype, calls: int, call: Callable[[Problem, Draw], Produced], mode: Mode = Mode.STEP) -> str:
    """What is wrong with the sum of the results of some calls."""
    problem, judge = setting(Scope.GLU, dtype)
    judge.truth(ONE, True)
    draws = [Draw(10 * number + 100) for number in range(calls)]
    names = {"output"} if mode is Mode.FORWARD else {"output", *tensors(Scope.GLU)}
    sums = {name: torch.zeros_like(value) for name, value in in_high_precision(problem, ONE).items() if name in names}
    for draw in draws:
        produced = call(problem, draw)
        for name, place in sums.items():
            place.add_(produced[name])
    return judge.compare(mode, draws)(sums)


@pytest.mark.parametrize("dtype", list(Dtype))
@pytest.mark.parametrize(("calls", "mode"), [(1, Mode.FORWARD), (1, Mode.STEP), (64, Mode.STEP)])
def test_sums_of_right_results_pass(dtype: Dtype, calls: int, mode: Mode) -> None:
    assert compared(dtype, calls, in_high_precision, mode) == ""


@pytest.mark.parametrize("fault", ["zeros", "row 0 for all", "one NaN"])
@pytest.mark.parametrize(
    ("dtype", "calls", "every"),
    [(Dtype.FLOAT32, 1, 1), (Dtype.FLOAT16, 16, 4), (Dtype.BFLOAT16, 16, 4), (Dtype.FLOAT32, 64, 64)],
)
def test_a_sum_in_which_some_results_are_wrong_is_found(dtype: Dtype, calls: int, every: int, fault: str) -> None:
    def call(problem: Problem, draw: Draw) -> Produced:
        produced = in_high_precision(problem, draw)
        wrong = draw.seed // 10 % every == 10 % every
        return produced | {"w_up": FAULTS[fault](produced["w_up"])} if wrong else produced

    assert compared(dtype, calls, call).startswith("w_up: ")


def test_what_lies_in_shared_memory_is_read_once() -> None:
    """Whoever wrote it could change it between two looks."""
    read: list[str] = []

    class Watched(Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            read.append(function.__name__)
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))

    problem, judge = setting(Scope.GLU, Dtype.FLOAT32)
    output = in_high_precision(problem, ONE)["output"]
    assert judge.compare(Mode.FORWARD, [ONE])({"output": output.as_subclass(Watched)}) == ""
    assert [name for name in read if name not in ("numel", "__get__")] == ["sub"]


# The truth


def drawn(problem: Problem) -> tuple[list[Tensor], Tensor]:
    desk = Desk(problem)
    return desk.activations(Draw(1)), desk.upstream(Draw(1))


def by_autograd(problem: Problem, activations: list[Tensor], upstream: Tensor) -> dict[str, Tensor]:
    """The same answer by another way: PyTorch's own derivatives of the definition, in fp64."""
    given = [leaf(value.double() if value.is_floating_point() else value.clone()) for value in activations]
    exact = in_fp64(problem).with_leaves(requires_grad=True)
    output = REFERENCE.build(exact).forward(*given)
    output.backward(upstream.double())
    leaves = dict(zip(ACTIVATIONS[problem.case.scope], given, strict=True)) | exact.parameters
    return {"output": output.detach()} | {name: value.grad for name, value in leaves.items() if value.grad is not None}


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("extras", [PLAIN, Extras(bias=True, limit=0.7), Extras(limit=0.7, alpha=1.702)], ids=str)
def test_the_truth_agrees_with_autograd(scope: Scope, extras: Extras) -> None:
    problem = make_problem(small_case(scope=scope, dtype=Dtype.BFLOAT16, tokens=33), "cpu", extras)
    answer, expected = compute_truth(problem, *drawn(problem)), by_autograd(problem, *drawn(problem))
    assert set(answer) == set(expected) == {"output", *tensors(scope), *problem.biases}
    for name, value in answer.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("scope", list(Scope))
def test_chunks_change_nothing_and_no_tokens_are_an_empty_answer(scope: Scope, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem(small_case(scope=scope, tokens=7), "cpu")
    activations, upstream = drawn(problem)
    whole = compute_truth(problem, activations, upstream)
    monkeypatch.setattr(judge_module, "TRUTH_CHUNK", 3)
    for name, value in compute_truth(problem, activations, upstream).items():
        torch.testing.assert_close(value, whole[name], rtol=1e-13, atol=1e-13)
    assert list(compute_truth(problem, activations, None)) == ["output"]
    empty = make_problem(small_case(scope=scope, tokens=0), "cpu")
    assert compute_truth(empty, *drawn(empty))["output"].shape[0] == 0
