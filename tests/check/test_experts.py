"""Mixtures of experts: how they are routed, the truth, and contenders that are right or wrong."""

import dataclasses

import pytest
import torch
from judged import admitting
from judged import checks_of as checks_of_results

from swiglu_bench.cases.cases import PLAIN, Case, Dtype, Experts, Extras, Mode, RoutingKind, Scope, Shape, tensors
from swiglu_bench.cases.implementation import Implementation, Step
from swiglu_bench.cases.problem import Problem
from swiglu_bench.check.inputs import make_problem
from swiglu_bench.contenders import experts, pytorch
from swiglu_bench.rows.record import AuditVerdict
from swiglu_bench.tasks.contract.inputs import PASSED, Subject
from swiglu_bench.tasks.contract.matrix import checks_of
from swiglu_bench.tasks.selftest.run import EXPERTS, SHAPES, SPECIMENS
from swiglu_bench.tasks.selftest.specimen import Specimen

CPU = torch.device("cpu")
GPT_OSS = Extras(bias=True, limit=7.0, alpha=1.702, interleaved=True)


def mixture(
    routing: RoutingKind = RoutingKind.UNIFORM, extras: Extras = PLAIN, count: int = 6, top_k: int = 2
) -> Shape:
    return Shape("mixture", 24, 40, "made up", (1,), Experts(count, top_k, routing), extras)


def case_of(shape: Shape, tokens: int = 33, dtype: Dtype = Dtype.FLOAT32) -> Case:
    return Case(shape, tokens, dtype, Scope.EXPERTS, Mode.STEP)


@pytest.mark.parametrize("entry", [pytorch.eager, experts.grouped, experts.batched], ids=lambda entry: entry.name)
@pytest.mark.parametrize("shape", [mixture(RoutingKind.SINGLE), mixture(extras=GPT_OSS)], ids=str)
@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
def test_the_ways_of_pytorch_are_right(entry: Implementation, shape: Shape, dtype: Dtype) -> None:
    case = case_of(shape, tokens=17, dtype=dtype)
    problem = make_problem(case, CPU)
    if entry is experts.batched and dtype is Dtype.BFLOAT16:
        case = dataclasses.replace(case, mode=Mode.FORWARD)  # its weight gradients are summed in bf16
    checks = checks_of_results(entry, case)
    if case.mode is Mode.STEP:
        assert {check.tensor for check in checks} == {"output", *problem.biases, *tensors(Scope.EXPERTS)}
    assert [(check.tensor, check.reason) for check in checks if not check.ok] == []


def test_a_limit_that_is_ignored_is_caught_as_a_model_uses_it() -> None:
    def unlimited(problem: Problem) -> Step:
        extras = dataclasses.replace(problem.extras, limit=1e4)
        return experts.grouped.build(dataclasses.replace(problem, extras=extras))

    for entry, caught in ((experts.grouped, False), (dataclasses.replace(experts.grouped, build=unlimited), True)):
        admits, contender = admitting(entry, case_of(mixture(extras=GPT_OSS)))
        assert bool(admits.use(contender)) is caught


@pytest.mark.parametrize(
    "name", ["idle experts", "crowded expert", "every expert", "non-contiguous", "bias", "clamp", "model use"]
)
def test_the_contract_of_the_grouped_product(name: str) -> None:
    (check,) = checks_of(Scope.EXPERTS, [name])
    assert check.ask(Subject(experts.grouped, Scope.EXPERTS, CPU, Dtype.BFLOAT16)) == PASSED


ROUTED = [specimen for specimen in SPECIMENS.values() if specimen.scope is Scope.EXPERTS and not specimen.precision]
ROUTED = [specimen for specimen in ROUTED if specimen.task != "verify" and not specimen.needs]


@pytest.mark.parametrize("specimen", ROUTED, ids=lambda specimen: specimen.name)
def test_wrong_routings_are_caught(specimen: Specimen) -> None:
    subject = Subject(specimen.implementation, Scope.EXPERTS, CPU, specimen.dtype)
    if specimen.task == "audit":
        (check,) = checks_of(Scope.EXPERTS, specimen.caught_by)
        assert check.ask(subject).verdict is AuditVerdict.FAIL
        return
    shape = dataclasses.replace(SHAPES["cpu"], experts=EXPERTS)
    case = dataclasses.replace(case_of(shape, specimen.tokens or 33), mode=specimen.mode)
    assert {check.check for check in checks_of_results(specimen.implementation, case)} & set(specimen.caught_by)
