"""The suite's definition and quantiser, and those of swiglu_kernels, which know nothing of each other."""

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from swiglu_bench.cases import definition, fp8
from swiglu_bench.cases.cases import BIASES, WEIGHTS, Case, Dtype, Experts, Extras, Mode, Precision, Scope, Shape
from swiglu_bench.cases.problem import Problem
from swiglu_kernels import reference

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
VARIANTS = (Extras(), Extras(limit=1.0), Extras(limit=7.0, alpha=1.702), Extras(alpha=1.702))
SIZES = ((33, 40, 72), (1, 7, 5), (130, 129, 257), (0, 8, 8))
"""Tokens, hidden and intermediate."""
every_problem = pytest.mark.parametrize(
    ("dtype", "variant", "sizes"), [*itertools.product(DTYPES, (extras.variant for extras in VARIANTS), SIZES)], ids=str
)


def same(one: Tensor, other: Tensor) -> None:
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    assert one.equal(other) or one.view(torch.uint8).equal(other.view(torch.uint8))


def normal(dtype: torch.dtype, *sizes: Sequence[int]) -> list[Tensor]:
    return [torch.randn(size, dtype=torch.float64).to(dtype) for size in sizes]


def results(function: Callable[..., Tensor], given: Sequence[Tensor], **options: object) -> list[Tensor]:
    """The output and every gradient."""
    leaves = [value.clone().requires_grad_(value.is_floating_point()) for value in given]
    output = function(*leaves, **options)
    upstream = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    return [output.detach(), *torch.autograd.grad(output, wanted, upstream)]


def compare(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        same(one, other)


def our_block(x: Tensor, *values: Tensor, **variant: float) -> Tensor:
    scope = Scope.GLU if len(values) in (2, 4) else Scope.MLP
    return definition.block(x, dict(zip(WEIGHTS[scope] + BIASES[scope], values, strict=False)), **variant)


@every_problem
def test_a_block_is_that_of_the_kernels_reference_bit_by_bit(
    dtype: torch.dtype, variant: dict[str, float | None], sizes: tuple[int, int, int]
) -> None:
    tokens, hidden, intermediate = sizes
    pair = normal(dtype, (tokens, intermediate), (tokens, intermediate))
    compare(results(definition.gate_mul, pair, **variant), results(reference.gate_mul, pair, **variant))
    compare(results(definition.silu_mul, pair), results(reference.silu_mul, pair))
    x, *weights = normal(dtype, (tokens, hidden), *2 * [(intermediate, hidden)], (hidden, intermediate))
    biases = normal(dtype, (intermediate,), (intermediate,), (hidden,))
    for own in ([], biases):
        for count, theirs in ((2, reference.swiglu_glu), (3, reference.swiglu_mlp)):
            given = [x, *weights[:count], *own[:count]]
            compare(results(our_block, given, **variant), results(theirs, given, **variant))


def our_experts(
    x: Tensor, index: Tensor, weights: Tensor, w_gate_up: Tensor, w_down: Tensor, *biases: Tensor, **variant: float
) -> Tensor:
    """The suite's, called as the kernels' reference is: products in libraries depend on where an operand lies."""
    values = [*w_gate_up.chunk(2, 1), w_down, *(part for both in biases[:1] for part in both.chunk(2, 1)), *biases[1:]]
    own = dict(zip(WEIGHTS[Scope.MLP] + BIASES[Scope.MLP], values, strict=False))
    return definition.experts(x, index, weights, own, **variant)


def their_experts(
    x: Tensor, index: Tensor, weights: Tensor, w_gate_up: Tensor, w_down: Tensor, *biases: Tensor, **variant: float
) -> Tensor:
    named = dict(zip(("b_gate_up", "b_down"), biases, strict=False))
    return reference.swiglu_experts(x, w_gate_up, w_down, index, weights, **named, **variant)


@every_problem
def test_experts_are_those_of_the_kernels_reference(
    dtype: torch.dtype, variant: dict[str, float | None], sizes: tuple[int, int, int]
) -> None:
    """Bit by bit, unless there are biases, which the suite adds to rounded products."""
    tokens, hidden, intermediate = sizes
    x, weights, *own = normal(
        dtype, (tokens, hidden), (tokens, 2), (5, 2 * intermediate, hidden), (5, hidden, intermediate)
    )
    given = [x, torch.rand(tokens, 5).argsort(1)[:, :2], weights, *own]
    compare(results(our_experts, given, **variant), results(their_experts, given, **variant))
    if dtype is torch.float64:
        given += normal(dtype, (5, 2 * intermediate), (5, hidden))
        pairs = zip(results(our_experts, given, **variant), results(their_experts, given, **variant), strict=True)
        assert all((one - other).norm() <= 1e-14 * other.norm() for one, other in pairs)


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("recipe", reference.RECIPES)
@pytest.mark.parametrize("size", [(256, 128), (130, 300), (1, 1), (7, 129), (129, 7)])
def test_codes_and_scales_are_those_of_the_kernels_reference_bit_by_bit(
    dtype: torch.dtype, recipe: str, size: tuple[int, int]
) -> None:
    (value,) = normal(torch.float32, size)
    value[:, : size[1] // 2] *= 2.0**-12
    value[size[0] // 2 :, :: size[1] // 2 + 1] = torch.tensor([0.0, torch.inf, torch.nan])[size[0] % 3]
    value, precision = value.to(dtype), Precision(f"fp8-{recipe}")
    for name in ("x", "x.T", "w_gate", "w_gate.T"):
        along, weight = name.endswith(".T"), name.startswith("w_")
        codes, scales = fp8.quantise(value, precision, name)
        right = reference.quantise(value.T if along else value, recipe, weight)
        means = fp8.dequantise(codes, scales), reference.dequantise(*right)
        right_codes, right_scales = right[0], right[1][:, None] if right[1].dim() == 1 else right[1]
        if along:
            codes, scales, means = codes.T, scales.T, (means[0].T, means[1])
        same(codes.contiguous().view(torch.uint8), right_codes.view(torch.uint8))
        same(scales.contiguous(), right_scales.contiguous())
        same(means[0].contiguous(), means[1])


def our_quantised(precision: Precision, scope: Scope, gradients: tuple[bool, bool]) -> Callable[..., Tensor]:
    shape = Shape("odd", 140, 290, "made up", (131,), Experts(5, 2) if scope is Scope.EXPERTS else None)
    case = Case(shape, 131, Dtype.FLOAT32, scope, Mode.STEP, precision=precision)

    def call(*given: Tensor) -> Tensor:
        count = len(given) - len(WEIGHTS[scope])
        weights = dict(zip(WEIGHTS[scope], given[count:], strict=True))
        problem = Problem(case, torch.device("cpu"), weights)
        return fp8.defined(problem, False, *gradients).forward(*given[:count])

    return call


def equal_outputs_and_close_gradients(ours: list[Tensor], theirs: list[Tensor]) -> None:
    """The suite differentiates the gate by hand."""
    same(ours[0], theirs[0])
    assert all((one - other).norm() <= 1e-10 * other.norm() for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("recipe", reference.RECIPES)
@pytest.mark.parametrize("scope", [Scope.GLU, Scope.MLP])
@pytest.mark.parametrize("gradients", [(True, True), (True, False), (False, True), (False, False)], ids=str)
def test_a_quantised_block_is_that_of_the_kernels_reference(
    recipe: str, scope: Scope, gradients: tuple[bool, bool]
) -> None:
    given = normal(torch.float64, (131, 140), (290, 140), (290, 140), (140, 290))[: 1 + len(WEIGHTS[scope])]
    dx, dw = gradients
    equal_outputs_and_close_gradients(
        results(our_quantised(Precision(f"fp8-{recipe}"), scope, gradients), given),
        results(reference.swiglu_mlp_fp8, given, recipe=recipe, fp8_weight_grad=dw, fp8_input_grad=dx),
    )


def test_quantised_experts_are_those_of_the_kernels_reference() -> None:
    x, weights, *own = normal(torch.float64, (131, 140), (131, 2), (5, 290, 140), (5, 290, 140), (5, 140, 290))
    given = [x, torch.rand(131, 5).argsort(1)[:, :2], weights, *own]

    def theirs(x: Tensor, index: Tensor, weights: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
        w_gate_up = torch.cat([w_gate, w_up], 1)
        return reference.swiglu_experts(x, w_gate_up, w_down, index, weights, precision="fp8-rowwise")

    ours = our_quantised(Precision.FP8_ROWWISE, Scope.EXPERTS, (False, False))
    equal_outputs_and_close_gradients(results(ours, given), results(theirs, given))
