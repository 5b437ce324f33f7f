from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from specimens import declared, small_case
from torch import Tensor

from swiglu_bench.cases.cases import PLAIN, Case, Dtype, Extras, Precision, Scope
from swiglu_bench.cases.definition import by_expert
from swiglu_bench.cases.implementation import Implementation, Step
from swiglu_bench.cases.problem import Problem
from swiglu_bench.check import usage
from swiglu_bench.check.built import Built
from swiglu_bench.check.inputs import make_problem
from swiglu_bench.check.usage import Arrangement, Question, Seeds, UseJudge
from swiglu_bench.check.usage import small_case as small
from swiglu_bench.contenders import pytorch
from swiglu_bench.rows.record import TensorCheck
from swiglu_bench.tasks.contract.inputs import Subject
from swiglu_bench.tasks.selftest.run import SPECIMENS
from swiglu_bench.tasks.selftest.specimen import glu, right_backward, right_forward

CPU = torch.device("cpu")
OF_WEIGHTS = "d input 2"
"""The gradient of a mixture's routing weights."""


def faults(entry: Implementation, scope: Scope = Scope.GLU, dtype: Dtype = Dtype.FLOAT32) -> tuple[TensorCheck, ...]:
    """What an implementation does wrong as a model uses it, by the code of a sweep in this process."""
    admitting, contender = Subject(entry, scope, CPU, dtype).admitting()
    return admitting.use(contender)


@pytest.mark.parametrize("dtype", list(Dtype))
@pytest.mark.parametrize(
    ("entry", "scope"),
    [*((pytorch.eager, scope) for scope in Scope), (pytorch.eager_packed, Scope.MLP)],
    ids=lambda value: getattr(value, "name", value),
)
def test_what_is_right_passes_at_every_scope_and_dtype(entry: Implementation, scope: Scope, dtype: Dtype) -> None:
    assert faults(entry, scope, dtype) == ()


def test_more_digits_and_sums_in_another_order_are_no_fault() -> None:
    def forward(*given: Tensor) -> Tensor:
        return right_forward(*(value.float() for value in given)).to(given[0].dtype)

    def backward(*given: Tensor) -> Any:
        return tuple(value.to(given[0].dtype) for value in right_backward(*(value.float() for value in given)))

    def term_by_term(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
        """Far below zero a gate's last digits are SiLU's first ones, and a product may add them up in any order."""
        gate = x.new_zeros(*x.shape[:-1], len(w_gate))
        for column, row in zip(x.unbind(-1), w_gate.unbind(-1), strict=True):
            gate = gate + column[..., None] * row
        return torch.nn.functional.silu(gate) * (x @ w_up.T)

    assert faults(declared(lambda problem: glu(problem, forward, backward)), dtype=Dtype.BFLOAT16) == ()
    assert faults(declared(lambda problem: glu(problem, term_by_term))) == ()


def gpt_oss() -> Case:
    """A mixture whose gates are steep, clamped and with biases, in bf16."""
    extras = Extras(bias=True, limit=7.0, alpha=1.702, interleaved=True)
    shape = replace(small_case(scope=Scope.EXPERTS).shape, extras=extras)
    return small(small_case(scope=Scope.EXPERTS, dtype=Dtype.BFLOAT16, shape=shape), "cpu")


class GateInHalf(torch.autograd.Function):
    """gpt-oss's gated product in fp32, whose backward finds gate and up rounded to bf16, as fused kernels save them."""

    @staticmethod
    def forward(ctx: Any, pair: Tensor, alpha: float, limit: float) -> Tensor:
        ctx.save_for_backward(pair.bfloat16())
        ctx.variant = alpha, limit
        return GateInHalf.of(pair, alpha, limit)

    @staticmethod
    def of(pair: Tensor, alpha: float, limit: float) -> Tensor:
        gate, up = pair.chunk(2, 1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(alpha * gate) * (up + 1)

    @staticmethod
    def backward(ctx: Any, d_hidden: Tensor) -> Any:
        pair = ctx.saved_tensors[0].float().requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(GateInHalf.of(pair, *ctx.variant), pair, d_hidden)[0], None, None


def keeps_gates_in_half(problem: Problem) -> Step:
    weights, extras = problem.parameters, problem.extras

    def forward(x: Tensor, index: Tensor, routing_weights: Tensor) -> Tensor:
        own = {name: value.float() for name, value in weights.items()}
        out = torch.zeros_like(x, dtype=torch.float32)
        for number, (token, slot) in enumerate(by_expert(index, usage.EXPERTS)):
            own_x = x[token].float()
            pair = [own_x @ own[f"w_{name}"][number].T + own[f"bias_{name}"][number] for name in ("gate", "up")]
            hidden = GateInHalf.apply(torch.cat(pair, 1), extras.alpha, extras.limit).bfloat16().float()
            rows = hidden @ own["w_down"][number].T + own["bias_down"][number]
            out = out.index_add(0, token, rows * routing_weights[token, slot, None].float())
        return out.to(x.dtype)

    return Step(forward)


@pytest.mark.parametrize("draw", [24, 28])
def test_steep_gates_far_below_zero_are_no_fault_of_who_rounds_them(draw: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few features make a token's gradient there, so that eager's error is small by chance, as in these draws."""
    entry, case = declared(keeps_gates_in_half, Scope.EXPERTS, offers=("bias", "limit")), gpt_oss()
    seeds = Seeds(1000 + draw, 2000 + draw, 3000 + draw, (4000 + draw, 5000 + draw, 6000 + draw))
    asked = Question("two_layers", case, case.shape.extras, seeds, True)
    problem = make_problem(case, CPU, seed=seeds.weights)
    expected = UseJudge(problem, asked)
    made = Arrangement(Built(entry, problem), asked).run()
    results = {name: made[name] for name in expected.truth}
    assert [check for check in expected.judge(results) if not check.ok] == []
    monkeypatch.setattr(usage, "TAIL", 0.0)
    assert [check.tensor for check in expected.judge(results) if not check.ok] == [
        "two_layers: d input 0 of the second"
    ], "by eager's error alone they would be one"


def judged(name: str, value: Tensor, truth: Tensor, eager: Tensor, precision: Precision) -> TensorCheck:
    """A result with an uneven upstream gradient, of a mixture or of a layer in fp8."""
    expected: Any = object.__new__(UseJudge)
    scope = Scope.EXPERTS if name == OF_WEIGHTS else Scope.MLP
    case = replace(small_case(scope=scope, dtype=Dtype.BFLOAT16), precision=precision)
    asked = Question("uneven_upstream", small(case, "cpu"), PLAIN, Seeds.new(), True)
    expected._asked, expected._quantised, expected._device = asked, bool(precision), CPU
    name = f"uneven_upstream: {name}"
    expected.truth, expected._eager = {name: truth}, {name: eager}
    found: TensorCheck = expected._judge(name, value)
    return found


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        (OF_WEIGHTS, Precision.UNQUANTISED),
        (OF_WEIGHTS, Precision.FP8_ROWWISE),
        ("d input 0", Precision.FP8_BLOCKWISE),
        ("d input 0", Precision.FP8_TENSORWISE),
    ],
)
def test_what_a_large_token_loses_by_chance_is_no_fault_and_a_small_one_that_is_lost_is(
    name: str, precision: Precision
) -> None:
    """A token or two are all of the norm, and eager may lose little on them: alike are tokens of one size."""
    source = torch.Generator().manual_seed(0)
    sizes = torch.linspace(20, -70, usage.TOKENS, dtype=torch.float64).exp2()[:, None]
    columns = usage.TOP_K if name == OF_WEIGHTS else 64
    truth = torch.randn(usage.TOKENS, columns, generator=source, dtype=torch.float64) * sizes
    lost = 4e-3 * torch.randn(truth.shape, generator=source, dtype=torch.float64) * truth
    eager, value = truth + lost, truth - lost
    eager[0] = truth[0] + lost[0] / 20
    assert judged(name, value, truth, eager, precision).ok
    if precision is not Precision.FP8_TENSORWISE:  # where it shares its scale with large ones
        assert not judged(name, torch.where(sizes > 1.0, value, 0.0), truth, eager, precision).ok
    assert not judged(name, 1.2 * value, truth, eager, precision).ok


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("shared-workspace", {"two_calls"}),
        ("assigned-gradients", {"two_calls", "accumulated"}),
        ("stale-weights", {"changed_weights"}),
        ("weights-by-shape", {"two_layers"}),
        ("first-batch-only", {"batches"}),
        ("ignores-strides", {"strided"}),
        ("needs-every-gradient", {"inputs_without_gradient", "frozen_weights"}),
        ("sigmoid-tail", {"two_layers"}),
        ("gate-bounded", {"wide_values"}),
        ("nan-hidden", {"nan_and_inf"}),
        ("small-gradients-flushed", {"uneven_upstream"}),
        ("large-gradients-bounded", {"uneven_upstream"}),
        ("sigmoid-deep-tail", {"two_layers"}),
        ("one-number-of-tokens", {"other_lengths"}),
        ("inference-overwrites", {"other_lengths"}),
        ("nan-gradient-hidden", {"nan_and_inf_upstream"}),
    ],
)
def test_each_kind_of_fault_shows_where_it_is_made(name: str, where: set[str]) -> None:
    found = faults(SPECIMENS[name].implementation)
    assert {check.check for check in found} == {"use"}
    assert where <= {check.tensor.partition(":")[0] for check in found}, [check.tensor for check in found]
    assert all(check.reason for check in found)


def refusing(when: Callable[[Tensor], bool]) -> Implementation:
    def forward(x: Tensor, *weights: Tensor) -> Tensor:
        if when(x):
            raise NotImplementedError("not here")
        return right_forward(x, *weights)

    return declared(lambda problem: glu(problem, forward))


def test_a_refusal_with_an_error_is_tolerated_only_where_a_model_can_do_without() -> None:
    assert faults(refusing(lambda x: x.dim() > 2 or not x.is_contiguous() or not torch.isfinite(x).all())) == ()
    (check,) = faults(refusing(lambda x: bool(x.abs().max() > 30)))
    assert check.check == "use"
    assert "wide" in check.reason
    assert "not here" in check.reason


def reference_of(name: str, extras: Extras = PLAIN, tokens: int = usage.TOKENS) -> tuple[UseJudge, dict[str, Tensor]]:
    """What judges a scenario of a dense block in bf16, and eager's results."""
    case = replace(small(small_case(scope=Scope.MLP, dtype=Dtype.BFLOAT16), "cpu"), tokens=tokens)
    asked = Question(name, case, extras, Seeds.new(), True)
    expected = UseJudge(make_problem(case, CPU, extras), asked)
    return expected, {name: value.clone() for name, value in expected._eager.items()}


def test_a_nan_that_reaches_another_token_is_told_unless_the_library_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPUs with AMX, bf16 products of some sizes carry it over the end of a row."""
    expected, results = reference_of("nan_and_inf")
    (name,) = results
    hidden = {name: results[name].nan_to_num()}
    results[name][9, 0] = torch.nan
    for spreads in (False, True):
        monkeypatch.setattr(usage, "library_spreads", lambda *given: spreads)  # noqa: B023
        assert [check.ok for check in expected.judge(results)] == [spreads]
        assert [check.check for check in expected.judge(hidden)] == ["finite"]


@pytest.mark.parametrize(("limit", "compared"), [(1.0, False), (7.0, True)])
def test_gradients_near_a_limit_are_not_compared(limit: float, compared: bool) -> None:
    """They jump there, and rounding decides for values near it; wide values always are."""
    extras = Extras(limit=limit)
    assert any(": d " in name for name in reference_of("two_calls", extras)[0].truth) is compared
    assert list(reference_of("wide_values", extras)[0].truth) == ["wide_values: output"]


@pytest.mark.parametrize("row", [0, 70, 200])
@pytest.mark.parametrize("name", sorted(usage.IN_TAIL))
def test_of_many_tokens_a_single_one_that_is_lost_is_found(name: str, row: int) -> None:
    """Of the deepest, the last, eager itself is now and then off by an eighth."""
    expected, results = reference_of("two_layers", tokens=300)
    assert all(check.ok for check in expected.judge(results))
    results[name][row] = 0.0
    assert [check.tensor for check in expected.judge(results) if not check.ok] == [name]
