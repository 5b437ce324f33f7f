"""Mixtures of experts: how they are routed, the truth, and contenders that are right or wrong."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from swiglu_bench.cases.cases import PLAIN, Case, Dtype, Experts, Extras, Mode, Routing, Scope, Shape, tensors
from swiglu_bench.cases.implementation import Implementation, Step
from swiglu_bench.cases.problem import Problem
from swiglu_bench.check.inputs import Desk, Draw, draw_experts, load_of, make_problem
from swiglu_bench.check.judge import compute_truth
from swiglu_bench.contenders import experts, pytorch
from swiglu_bench.rows.record import AuditVerdict
from swiglu_bench.tasks.contract.matrix import checks_of
from swiglu_bench.tasks.contract.subject import PASSED, Subject
from swiglu_bench.tasks.selftest.run import EXPERTS, SHAPES, SPECIMENS
from swiglu_bench.tasks.selftest.specimen import Specimen

CPU = torch.device("cpu")
GPT_OSS = Extras(bias=True, limit=7.0, alpha=1.702, interleaved=True)


def mixture(routing: Routing = Routing.UNIFORM, extras: Extras = PLAIN, count: int = 6, top_k: int = 2) -> Shape:
    return Shape("mixture", 24, 40, "made up", (1,), Experts(count, top_k, routing), extras)


def case_of(shape: Shape, tokens: int = 33, dtype: Dtype = Dtype.FLOAT32) -> Case:
    return Case(shape, tokens, dtype, Scope.EXPERTS, Mode.STEP)


# Routing


@pytest.mark.parametrize("routing", Routing)
@pytest.mark.parametrize(("tokens", "count", "top_k"), [(0, 4, 2), (1, 4, 4), (50, 6, 4), (400, 16, 3)])
def test_a_token_has_different_experts_and_every_draw_is_another(
    routing: Routing, tokens: int, count: int, top_k: int
) -> None:
    index, again, other = (torch.full((tokens, top_k), -1) for _ in range(3))
    for place, seed in ((index, 1), (again, 1), (other, 2)):
        draw_experts(Experts(count, top_k, routing), place, torch.Generator().manual_seed(seed))
    assert torch.equal(index, again)
    assert tokens < 50 or not torch.equal(index, other)
    assert all(set(row) <= set(range(count)) and len(set(row)) == top_k for row in index.tolist())


def test_loads_are_what_the_routing_says() -> None:
    def load(routing: Routing) -> tuple[int, int, int]:
        index = torch.empty(4000, 2, dtype=torch.int64)
        draw_experts(Experts(16, 2, routing), index, torch.Generator().manual_seed(0))
        found = load_of(Experts(16, 2, routing), index)
        assert found.least <= found.median <= found.most
        return found.least, found.most, found.idle

    assert load(Routing.BALANCED) == (500, 500, 0)
    assert load(Routing.SINGLE) == (0, 4000, 14)
    least, most, idle = load(Routing.UNIFORM)
    assert 400 < least < 500 < most < 600
    skewed_least, skewed_most, _ = load(Routing.ZIPF)
    assert skewed_most > 6 * skewed_least
    assert idle == 0


def test_padding_is_told_for_tiles_of_128_rows() -> None:
    index = torch.tensor([0] * 100 + [1] * 156).view(-1, 1)
    found = load_of(Experts(4, 1), index)
    assert (found.least, found.median, found.most, found.idle) == (0, 50.0, 156, 2)
    assert found.padding == 1 - 256 / 384
    assert load_of(Experts(4, 1), index[:0]).padding == 0.0


# Truth


def by_autograd(problem: Problem, activations: list[Tensor], upstream: Tensor) -> dict[str, Tensor]:
    """The same by another way: every expert computes every token, and PyTorch differentiates."""
    x, index, weights = activations
    leaves = {"x": x, "top_k_weights": weights} | problem.parameters
    leaves = {name: value.detach().double().requires_grad_() for name, value in leaves.items()}
    extras = problem.extras
    gate, up = (
        torch.einsum("th,eih->tei", leaves["x"], leaves[f"w_{name}"]) + leaves.get(f"bias_{name}", torch.zeros(()))
        for name in ("gate", "up")
    )
    if extras.limit:
        gate, up = gate.clamp(max=extras.limit), up.clamp(-extras.limit, extras.limit) + 1
    hidden = gate * torch.sigmoid(extras.alpha * gate) * up
    found = torch.einsum("tei,ehi->teh", hidden, leaves["w_down"]) + leaves.get("bias_down", torch.zeros(()))
    chosen = F.one_hot(index, len(leaves["w_down"])).double()
    output = torch.einsum("teh,tke,tk->th", found, chosen, leaves["top_k_weights"])
    output.backward(upstream.double())
    return {"output": output.detach()} | {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


@pytest.mark.parametrize(("extras", "routing"), [(PLAIN, Routing.SINGLE), (GPT_OSS, Routing.UNIFORM)], ids=str)
def test_the_truth_agrees_with_autograd(extras: Extras, routing: Routing) -> None:
    extras = dataclasses.replace(extras, limit=extras.limit and 0.7)  # one that is reached
    problem = make_problem(case_of(mixture(routing, extras), dtype=Dtype.BFLOAT16), CPU)
    desk = Desk(problem)
    activations, upstream = desk.activations(Draw(1)), desk.upstream(Draw(1))
    answer, expected = compute_truth(problem, activations, upstream), by_autograd(problem, activations, upstream)
    assert set(answer) == set(expected) == {"output", *tensors(Scope.EXPERTS), *problem.biases}
    assert bool(problem.biases) == extras.bias
    for name, value in answer.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-11, atol=1e-12)


# Contenders


@pytest.mark.parametrize("entry", [pytorch.eager, experts.grouped, experts.batched], ids=lambda entry: entry.name)
@pytest.mark.parametrize("shape", [mixture(Routing.SINGLE), mixture(extras=GPT_OSS)], ids=str)
@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
def test_the_ways_of_pytorch_are_right(entry: Implementation, shape: Shape, dtype: Dtype) -> None:
    case = case_of(shape, tokens=17, dtype=dtype)
    problem = make_problem(case, CPU)
    if entry is experts.batched and dtype is Dtype.BFLOAT16:
        case = dataclasses.replace(case, mode=Mode.FORWARD)  # its weight gradients are summed in bf16
    admitting, contender = Subject(entry, Scope.EXPERTS, CPU, dtype).admitting(case)
    checks = admitting.admit(contender).checks
    if case.mode is Mode.STEP:
        assert {check.tensor for check in checks} == {"output", *problem.biases, *tensors(Scope.EXPERTS)}
    assert [(check.tensor, check.reason) for check in checks if not check.ok] == []


def test_what_a_shape_has_must_be_offered() -> None:
    biased, plain = (case_of(mixture(extras=extras), dtype=Dtype.BFLOAT16) for extras in (GPT_OSS, PLAIN))
    assert experts.liger_experts.refuses(biased) == "It does not support what mixture needs: bias, limit."
    assert experts.liger_experts.refuses(plain) is None
    assert experts.batched.refuses(case_of(mixture(), tokens=17)) == "It supports at most 16 tokens."


def test_a_limit_that_is_ignored_is_caught_as_a_model_uses_it() -> None:
    def unlimited(problem: Problem) -> Step:
        extras = dataclasses.replace(problem.extras, limit=1e4)
        return experts.grouped.build(dataclasses.replace(problem, extras=extras))

    for entry, caught in ((experts.grouped, False), (dataclasses.replace(experts.grouped, build=unlimited), True)):
        admitting, contender = Subject(entry, Scope.EXPERTS, CPU, Dtype.FLOAT32).admitting(
            case_of(mixture(extras=GPT_OSS))
        )
        assert bool(admitting.use(contender)) is caught


@pytest.mark.parametrize(
    "name", ["idle experts", "crowded expert", "every expert", "non-contiguous", "bias", "clamp", "model use"]
)
def test_the_contract_of_the_grouped_product(name: str) -> None:
    (check,) = checks_of(Scope.EXPERTS, [name])
    assert check.ask(Subject(experts.grouped, Scope.EXPERTS, CPU, Dtype.BFLOAT16)) == PASSED


ROUTED = [specimen for specimen in SPECIMENS.values() if specimen.scope is Scope.EXPERTS and not specimen.precision]


@pytest.mark.parametrize("specimen", ROUTED, ids=lambda specimen: specimen.name)
def test_wrong_routings_are_caught(specimen: Specimen) -> None:
    subject = Subject(specimen.implementation, Scope.EXPERTS, CPU, specimen.dtype)
    if specimen.task == "audit":
        (check,) = checks_of(Scope.EXPERTS, specimen.caught_by)
        assert check.ask(subject).verdict is AuditVerdict.FAIL
        return
    shape = dataclasses.replace(SHAPES["cpu"], experts=EXPERTS)
    case = dataclasses.replace(case_of(shape, specimen.tokens or 33), mode=specimen.mode)
    admitting, contender = subject.admitting(case)
    assert {check.check for check in admitting.admit(contender).checks} & set(specimen.caught_by)
