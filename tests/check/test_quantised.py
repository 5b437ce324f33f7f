"""What quantises is judged by its recipe: codes, scales and results; right ones pass and each specimen is caught."""

import dataclasses
from typing import Any

import judged
import pytest
import torch
from torch import Tensor

from swiglu_bench.cases.cases import Case, Dtype, Mode, Precision, Scope, Shape
from swiglu_bench.cases.fp8 import dequantise
from swiglu_bench.cases.implementation import Implementation, Step
from swiglu_bench.cases.problem import Problem
from swiglu_bench.check.built import Built
from swiglu_bench.check.inputs import Draw, make_problem
from swiglu_bench.check.quantised import judge_of
from swiglu_bench.contenders import experts, fp8, pytorch
from swiglu_bench.rows.record import TensorCheck
from swiglu_bench.tasks.selftest.run import EXPERTS, SPECIMENS
from swiglu_bench.tasks.selftest.run import case_of as case_of_specimen


def case_of(scope: Scope, precision: Precision, mode: Mode = Mode.STEP, tokens: int = 40) -> Case:
    tensorwise = precision is Precision.FP8_TENSORWISE  # PyTorch multiplies by loops there, on a CPU
    sizes = (80, 112) if tensorwise else (144, 272)
    return Case(Shape("made up", *sizes, "", ()), tokens, Dtype.BFLOAT16, scope, mode, precision=precision)


def checks_of(entry: Implementation, case: Case) -> dict[str, TensorCheck]:
    return {check.tensor: check for check in judged.checks_of(entry, case)}


def codes_in(checks: dict[str, TensorCheck]) -> set[str]:
    return {name.removeprefix("codes of ") for name in checks if name.startswith("codes of ")}


def assert_loss_beside_eager_s(output: TensorCheck) -> None:
    assert output.loss
    assert output.eager_loss
    assert output.error < 0.01 < output.loss < 0.2
    assert output.eager_loss < 0.01


def failed(checks: dict[str, TensorCheck]) -> list[str]:
    return [f"{name}: {check.reason}" for name, check in checks.items() if not check.ok]


RIGHT = [(entry, precision) for entry in (fp8.reference, fp8.scaled_mm) for precision in sorted(entry.precisions)]


@pytest.mark.parametrize(("entry", "precision"), RIGHT, ids=lambda value: getattr(value, "name", value))
def test_the_right_ones_pass_with_their_loss_beside_eager_s(entry: Implementation, precision: Precision) -> None:
    checks = checks_of(entry, case_of(Scope.MLP, precision))
    assert failed(checks) == []
    gate_up = {"w_gate", "d_up", "d_gate.T"} if entry is fp8.reference else {"w_gate_up", "d_gate_up", "d_gate_up.T"}
    assert codes_in(checks) >= {"x", "x.T", "h", "upstream.T", "w_down"} | gate_up
    assert_loss_beside_eager_s(checks["output"])


def test_products_of_weight_gradients_may_stay_in_16_bits() -> None:
    def build(problem: Problem) -> Step:
        return fp8.by_products(problem, quantised_dw=False)

    case = case_of(Scope.MLP, Precision.FP8_ROWWISE)
    checks = checks_of(dataclasses.replace(fp8.scaled_mm, build=build, quantises_dw=False), case)
    assert failed(checks) == []
    assert "codes of x" in checks
    assert "codes of x.T" not in checks


def test_what_quantises_nothing_is_judged_as_ever_in_a_case_of_a_precision() -> None:
    checks = checks_of(pytorch.eager, case_of(Scope.GLU, Precision.FP8_ROWWISE))
    assert failed(checks) == []
    assert {check.loss for check in checks.values()} == {None}


@pytest.mark.parametrize("name", [name for name, specimen in SPECIMENS.items() if specimen.precision])
def test_wrong_quantisation_is_caught(name: str) -> None:
    specimen = SPECIMENS[name]
    case = case_of_specimen(specimen, "cpu")
    case = dataclasses.replace(case, tokens=40, shape=dataclasses.replace(case.shape, hidden=256, intermediate=128))
    checks = checks_of(specimen.implementation, case)
    assert {check.check for check in checks.values() if not check.ok} & set(specimen.caught_by)


# Mixtures of experts, block by block


def mixture(mode: Mode = Mode.STEP, tokens: int = 40) -> Case:
    shape = Shape("made up", 128, 96, "", (), EXPERTS)
    return Case(shape, tokens, Dtype.BFLOAT16, Scope.EXPERTS, mode, precision=Precision.FP8_ROWWISE)


def grouped_products(
    codes: Tensor, weights: Tensor, scales: Tensor, weight_scales: Tensor, *, offs: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """What torch._scaled_grouped_mm computes on Hopper, with the checks of its meta function."""
    like = [value.to("meta") for value in (codes, weights, scales, weight_scales, offs)]
    torch.ops.aten._scaled_grouped_mm(*like[:4], offs=like[4], out_dtype=out_dtype)
    first = dequantise(codes, scales[:, None], torch.float32)
    second = dequantise(weights, weight_scales[:, None], torch.float32)
    sizes = offs.diff(prepend=offs.new_zeros(1)).tolist()
    return torch.cat([rows @ weight for rows, weight in zip(first.split(sizes), second, strict=True)]).to(out_dtype)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> Implementation:
    monkeypatch.setattr(torch, "_scaled_grouped_mm", grouped_products)
    return dataclasses.replace(fp8.scaled_grouped, gpus=())


def test_the_definition_of_experts_passes_with_its_loss_beside_eager_s() -> None:
    checks = checks_of(fp8.reference, mixture())
    assert failed(checks) == []
    backward = {"d_gate", "d_up", "w_gate.T", "w_up.T", "upstream", "w_down.T"}
    assert codes_in(checks) == {"x", "w_gate", "w_up", "h", "w_down"} | backward
    assert_loss_beside_eager_s(checks["output"])


@pytest.mark.parametrize("tokens", [3, 40], ids=["idle experts", ""])
def test_grouped_products_of_torch_pass_by_their_codes_and_by_their_results(
    on_hopper: Implementation, tokens: int
) -> None:
    checks = checks_of(on_hopper, mixture(tokens=tokens))
    assert failed(checks) == []
    backward = {"d_gate_up", "w_gate_up.T", "upstream", "w_down.T"}
    assert codes_in(checks) == {"x", "w_gate_up", "h", "w_down"} | backward

    def silent(problem: object) -> Step:
        return dataclasses.replace(on_hopper.build(problem), hand_over=None)  # type: ignore[arg-type]

    checks = checks_of(dataclasses.replace(on_hopper, build=silent), mixture(Mode.FORWARD, tokens))
    assert failed(checks) == []
    assert codes_in(checks) == set()


def test_codes_multiplied_by_other_scales_than_those_handed_over_are_caught(
    on_hopper: Implementation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def product(codes: Tensor, weights: Tensor, scales: Tensor, of_weights: Tensor, **options: Any) -> Tensor:
        return grouped_products(codes, weights, scales, of_weights[:1].expand_as(of_weights), **options)

    monkeypatch.setattr(torch, "_scaled_grouped_mm", product)
    assert not checks_of(on_hopper, mixture(Mode.FORWARD))["output"].ok


def test_what_multiplies_in_bf16_is_no_contender_that_quantises() -> None:
    for entry, case in (
        (experts.grouped, mixture(Mode.FORWARD)),
        (pytorch.eager, case_of(Scope.GLU, Precision.FP8_TENSORWISE, Mode.FORWARD)),
    ):
        assert failed(checks_of(dataclasses.replace(entry, precisions=frozenset(Precision)), case))


@pytest.mark.parametrize("precision", [Precision.FP8_ROWWISE, Precision.FP8_BLOCKWISE])
@pytest.mark.parametrize("scope", [Scope.GLU, Scope.MLP])
def test_micro_batches_are_held_against_the_definition_s(scope: Scope, precision: Precision) -> None:
    case = dataclasses.replace(case_of(scope, precision), accumulate=4)
    problem = make_problem(case, "cpu")
    judge = judge_of(False, True, True)(problem)
    checks = checks_of(fp8.reference, case)
    assert failed(checks) == []
    for draw in (Draw(1), Draw(2)):
        produced = Built(fp8.reference, problem).call(Mode.STEP, draw)()
        assert all(check.ok for check in judge.judge(produced, draw))
        assert judge.compare(Mode.STEP, [draw])(produced) == ""
