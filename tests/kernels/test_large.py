"""Tensors of more than 2^31 elements: every operation, on slices around each multiple of 2^31 and at the end."""

import gc
from collections.abc import Iterator

import pytest
import torch
from accuracy import assert_as_accurate_as_eager

from swiglu_kernels import reference, silu_mul, swiglu_glu, unsloth_silu_mul
from swiglu_kernels.ops.mlp.portable_mlp import down_backward_launch

HIDDEN = 64
SIZES = [(2**17 + 5, 2**14 + 16), (64 * 8192, 14336)]
"""Rows and columns: just above 2^31 elements, and 7.5e9, as 64 x 8192 tokens of a Llama have."""

pytestmark = [pytest.mark.gpu, pytest.mark.alone]


@pytest.fixture(params=SIZES, ids=lambda size: "x".join(map(str, size)))
def size(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """Ask for the memory of six such tensors, and give all of it back."""
    rows, columns = request.param
    needed = 6.5 * 2 * rows * columns
    if torch.cuda.get_device_properties(0).total_memory < needed:
        pytest.skip(f"needs a GPU with {needed / 2**30:.0f} GiB")
    yield rows, columns
    gc.collect()
    torch.cuda.empty_cache()


def parts(rows: int, columns: int) -> list[slice]:
    boundary = 2**31 // columns
    found = [slice(0, 8), *(slice(at - 4, at + 8) for at in (boundary, 2 * boundary)), slice(rows - 8, rows)]
    return [part for part in found if part.stop <= rows]


def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_().mul_(scale)


def check(
    names: str, got: list[torch.Tensor], inputs: list[torch.Tensor], upstream: torch.Tensor, terms: int,
    operation=reference.silu_mul,
) -> None:  # fmt: skip
    """Compare an output and gradients of the first inputs with what eager and fp64 make of `inputs`."""
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        leaves = [tensor.detach().to(dtype, copy=True).requires_grad_() for tensor in inputs]
        output = operation(*leaves)
        gradients = torch.autograd.grad(output, leaves[: len(got) - 1], upstream.to(dtype))
        results.append([output.detach(), *gradients])
    for name, *values in zip(names.split(), got, *results, strict=True):
        assert_as_accurate_as_eager(name, *(value.detach() for value in values), terms=terms)


@pytest.mark.parametrize("overwrites", [False, True], ids=["silu_mul", "unsloth"])
def test_elementwise(overwrites: bool, size: tuple[int, int]) -> None:
    gate, up = draw(*size), draw(*size)
    before = [[gate[part].clone(), up[part].clone()] for part in parts(*size)]
    leaves = gate.requires_grad_(), up.requires_grad_()
    h = unsloth_silu_mul(*leaves, overwrite=True) if overwrites else silu_mul(*leaves)
    upstream = draw(*size)
    results = h, *torch.autograd.grad(h, leaves, upstream)
    for part, inputs in zip(parts(*size), before, strict=True):
        check("h d_gate d_up", [value[part] for value in results], inputs, upstream[part], terms=1)


@pytest.mark.parametrize("options", [("triton", "preact", "fused"), ("torch", "input", "two_step")], ids=str)
def test_glu(size: tuple[int, int], options: tuple[str, ...]) -> None:
    rows, columns = size
    x, *weights = draw(rows, HIDDEN), *(draw(columns, HIDDEN, scale=HIDDEN**-0.5) for _ in range(2))
    leaves = [tensor.requires_grad_() for tensor in (x, *weights)]
    z = swiglu_glu(*leaves, **dict(zip(("weight_grad", "save", "input_grad"), options, strict=True)))
    upstream = draw(rows, columns)
    d_x, d_w_gate, _ = torch.autograd.grad(z, leaves, upstream)
    for part in parts(rows, columns):
        check("z d_x", [z[part], d_x[part]], [x[part], *weights], upstream[part], 2 * columns, reference.swiglu_glu)
    for part in (slice(0, 64), slice(columns - 64, columns)):

        def of_weights(w_gate: torch.Tensor, w_up: torch.Tensor) -> torch.Tensor:
            return reference.swiglu_glu(x.detach().to(w_gate.dtype), w_gate, w_up)

        inputs, results = [weight[part] for weight in weights], [z[:, part], d_w_gate[part]]
        check("z d_w_gate", results, inputs, upstream[:, part], rows, of_weights)


def test_the_backward_of_the_down_projection(size: tuple[int, int]) -> None:
    rows, columns = size
    d_out, w_down, gate, up = draw(rows, HIDDEN), draw(HIDDEN, columns, scale=0.125), draw(*size), draw(*size)
    d_gate, d_up, h = (torch.full_like(gate, float("nan")) for _ in range(3))
    down_backward_launch(d_out, w_down, (gate, up), d_gate, d_up, h).run()
    for part in parts(*size):
        results = []
        for dtype in (torch.bfloat16, torch.float64):
            pair = [tensor[part].to(dtype, copy=True).requires_grad_() for tensor in (gate, up)]
            product = reference.silu_mul(*pair)
            gradients = torch.autograd.grad(product, pair, d_out[part].to(dtype) @ w_down.to(dtype))
            results.append([product.detach(), *gradients])
        for name, *values in zip(("h", "d_gate", "d_up"), (h[part], d_gate[part], d_up[part]), *results, strict=True):
            assert_as_accurate_as_eager(name, *values, terms=HIDDEN)
