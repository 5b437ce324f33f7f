"""Experts that quantise are judged by their recipe, block by block; right ones pass and each wrong one is caught."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from swiglu_bench.cases.cases import Case, Dtype, Experts, Mode, Precision, Scope, Shape
from swiglu_bench.cases.fp8 import dequantise
from swiglu_bench.cases.implementation import Implementation, Step
from swiglu_bench.contenders import experts, fp8, fp8_experts
from swiglu_bench.rows.record import TensorCheck
from swiglu_bench.tasks.contract.subject import Subject
from swiglu_bench.tasks.selftest.run import EXPERTS

CPU = torch.device("cpu")


def case_of(mode: Mode = Mode.STEP, tokens: int = 40, experts: Experts = EXPERTS) -> Case:
    shape = Shape("made up", 128, 96, "", (), experts)
    return Case(shape, tokens, Dtype.BFLOAT16, Scope.EXPERTS, mode, precision=Precision.FP8_ROWWISE)


def checks_of(one: Implementation, case: Case) -> dict[str, TensorCheck]:
    admitting, contender = Subject(one, case.scope, CPU, case.dtype).admitting(case)
    return {check.tensor: check for check in admitting.admit(contender).checks}


def failed(checks: dict[str, TensorCheck]) -> list[str]:
    return [f"{name}: {check.reason}" for name, check in checks.items() if not check.ok]


def grouped_products(
    codes: Tensor, weights: Tensor, scales: Tensor, weight_scales: Tensor, *, offs: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """What torch._scaled_grouped_mm computes on Hopper, with the checks of its meta function."""
    like = [one.to("meta") for one in (codes, weights, scales, weight_scales, offs)]
    torch.ops.aten._scaled_grouped_mm(*like[:4], offs=like[4], out_dtype=out_dtype)
    first = dequantise(codes, scales[:, None], torch.float32)
    second = dequantise(weights, weight_scales[:, None], torch.float32)
    sizes = offs.diff(prepend=offs.new_zeros(1)).tolist()
    return torch.cat([rows @ one for rows, one in zip(first.split(sizes), second, strict=True)]).to(out_dtype)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> Implementation:
    monkeypatch.setattr(torch, "_scaled_grouped_mm", grouped_products)
    return dataclasses.replace(fp8_experts.scaled_grouped, gpus=())


@pytest.mark.parametrize("mode", [Mode.FORWARD, Mode.STEP])
def test_the_definition_passes_with_its_loss_beside_eager_s(mode: Mode) -> None:
    checks = checks_of(fp8.reference, case_of(mode))
    assert failed(checks) == []
    codes = {name.removeprefix("codes of ") for name in checks if name.startswith("codes of ")}
    backward = {"d_gate", "d_up", "w_gate.T", "w_up.T", "upstream", "w_down.T"} if mode is Mode.STEP else set()
    assert codes == {"x", "w_gate", "w_up", "h", "w_down"} | backward
    output = checks["output"]
    assert output.loss
    assert output.eager_loss
    assert output.error < 0.01 < output.loss < 0.2
    assert output.eager_loss < 0.01


@pytest.mark.parametrize("mode", [Mode.FORWARD, Mode.STEP])
@pytest.mark.parametrize("few", [False, True], ids=["", "idle experts"])
def test_grouped_products_of_torch_pass_by_their_codes_and_by_their_results(
    on_hopper: Implementation, mode: Mode, few: bool
) -> None:
    case = case_of(mode, tokens=3 if few else 40)
    checks = checks_of(on_hopper, case)
    assert failed(checks) == []
    codes = {name.removeprefix("codes of ") for name in checks if name.startswith("codes of ")}
    backward = {"d_gate_up", "w_gate_up.T", "upstream", "w_down.T"} if mode is Mode.STEP else set()
    assert codes == {"x", "w_gate_up", "h", "w_down"} | backward

    def silent(problem: object) -> Step:
        return dataclasses.replace(on_hopper.build(problem), hand_over=None)  # type: ignore[arg-type]

    checks = checks_of(dataclasses.replace(on_hopper, build=silent), case)
    assert failed(checks) == []
    assert not [name for name in checks if name.startswith("codes of ")]


def _wrong(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
    def product(codes: Tensor, weights: Tensor, scales: Tensor, weight_scales: Tensor, **options: object) -> Tensor:
        return grouped_products(codes, weights, *change(scales, weight_scales), **options)  # type: ignore[arg-type]

    return product


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda scales, of_weights: (scales, of_weights[:1].expand_as(of_weights)), id="first expert's"),
        pytest.param(lambda scales, of_weights: (scales, of_weights.roll(1, 0)), id="next expert's"),
        pytest.param(lambda scales, of_weights: (scales.roll(1), of_weights), id="next row's"),
        pytest.param(lambda scales, of_weights: (scales.mean().expand_as(scales), of_weights), id="one for all rows"),
    ],
)
def test_codes_multiplied_by_other_scales_than_those_handed_over_are_caught(
    on_hopper: Implementation, monkeypatch: pytest.MonkeyPatch, change: Callable[..., tuple[Tensor, Tensor]]
) -> None:
    monkeypatch.setattr(torch, "_scaled_grouped_mm", _wrong(change))
    checks = checks_of(on_hopper, case_of(Mode.FORWARD))
    assert not checks["output"].ok


def test_bf16_experts_are_no_contender_that_quantises() -> None:
    claims = dataclasses.replace(experts.grouped, precisions=frozenset({Precision.FP8_ROWWISE}))
    assert failed(checks_of(claims, case_of(Mode.FORWARD)))
