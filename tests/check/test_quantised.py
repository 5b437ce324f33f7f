"""What quantises is judged by its recipe: codes, scales and results; right ones pass and each specimen is caught."""

import dataclasses

import pytest
import torch

from swiglu_bench.cases.cases import Case, Dtype, Mode, Precision, Scope, Shape
from swiglu_bench.cases.fp8 import defined
from swiglu_bench.cases.implementation import Implementation, Step
from swiglu_bench.cases.problem import Problem
from swiglu_bench.contenders import fp8, pytorch
from swiglu_bench.rows.record import TensorCheck
from swiglu_bench.tasks.contract.subject import Subject
from swiglu_bench.tasks.selftest.run import EXPERTS, SPECIMENS
from swiglu_bench.tasks.selftest.specimen import Specimen

CPU = torch.device("cpu")
RECIPES = [one for one in Precision if one]


def case_of(scope: Scope, precision: Precision, mode: Mode = Mode.STEP, tokens: int = 40) -> Case:
    tensorwise = precision is Precision.FP8_TENSORWISE  # PyTorch multiplies by loops there, on a CPU
    sizes = (144, 208) if tensorwise else (272, 400)
    return Case(Shape("made up", *sizes, "", ()), tokens, Dtype.BFLOAT16, scope, mode, precision=precision)


def checks_of(one: Implementation, case: Case) -> dict[str, TensorCheck]:
    admitting, contender = Subject(one, case.scope, CPU, case.dtype).admitting(case)
    return {check.tensor: check for check in admitting.admit(contender).checks}


def failed(checks: dict[str, TensorCheck]) -> list[str]:
    return [f"{name}: {check.reason}" for name, check in checks.items() if not check.ok]


@pytest.mark.parametrize("scope", [Scope.GLU, Scope.MLP])
@pytest.mark.parametrize("precision", RECIPES)
@pytest.mark.parametrize("one", [fp8.reference, fp8.scaled_mm], ids=lambda one: one.name)
def test_the_right_ones_pass_with_their_loss_beside_eager_s(
    one: Implementation, precision: Precision, scope: Scope
) -> None:
    case = case_of(scope, precision)
    if precision not in one.precisions:
        assert one.refuses(case)
        return
    checks = checks_of(one, case)
    assert failed(checks) == []
    codes = {name.removeprefix("codes of ") for name in checks if name.startswith("codes of ")}
    gate_up = {"w_gate", "d_up", "d_gate.T"} if one is fp8.reference else {"w_gate_up", "d_gate_up", "d_gate_up.T"}
    assert codes >= {"x", "x.T"} | gate_up | ({"h", "upstream.T", "w_down"} if scope is Scope.MLP else set())
    output = checks["output"]
    assert output.loss
    assert output.eager_loss
    assert output.error < 0.01 < output.loss < 0.2
    assert output.eager_loss < 0.01


def test_products_of_weight_gradients_may_stay_in_16_bits() -> None:
    def build(problem: Problem) -> Step:
        return fp8.by_products(problem, quantised_dw=False)

    case = case_of(Scope.MLP, Precision.FP8_ROWWISE)
    checks = checks_of(dataclasses.replace(fp8.scaled_mm, build=build, quantises_dw=False), case)
    assert failed(checks) == []
    assert "codes of x" in checks
    assert "codes of x.T" not in checks


@pytest.mark.parametrize("joint", [False, True])
def test_what_hands_over_nothing_is_judged_by_results_alone(joint: bool) -> None:
    case = case_of(Scope.MLP, Precision.FP8_BLOCKWISE)
    silent = dataclasses.replace(
        fp8.reference, name="silent", build=lambda problem: Step(defined(problem, joint).forward),
        weight_layout="packed" if joint else "separate",
    )  # fmt: skip
    checks = checks_of(silent, case)
    assert failed(checks) == []
    assert not [name for name in checks if name.startswith("codes of ")]


def test_what_quantises_nothing_is_judged_as_ever_in_a_case_of_a_precision() -> None:
    checks = checks_of(pytorch.eager, case_of(Scope.GLU, Precision.FP8_ROWWISE))
    assert failed(checks) == []
    assert {check.loss for check in checks.values()} == {None}


def test_eager_is_no_contender_that_quantises() -> None:
    eager = dataclasses.replace(pytorch.eager, precisions=frozenset(Precision))
    assert failed(checks_of(eager, case_of(Scope.GLU, Precision.FP8_TENSORWISE, Mode.FORWARD)))


@pytest.mark.parametrize(
    "one", [specimen for specimen in SPECIMENS.values() if specimen.precision], ids=lambda one: one.name
)
def test_wrong_quantisation_is_caught(one: Specimen) -> None:
    case = case_of(one.scope, one.precision, one.mode)
    shape = dataclasses.replace(case.shape, hidden=512, intermediate=384)
    if one.scope is Scope.EXPERTS:
        shape = dataclasses.replace(shape, experts=EXPERTS)
    case = dataclasses.replace(case, shape=shape)
    checks = checks_of(one.implementation, case)
    assert {check.check for check in checks.values() if not check.ok} & set(one.caught_by)
