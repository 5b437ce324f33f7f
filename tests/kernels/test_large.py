"""64 x 8192 x 14336 bf16, 7.5e9 elements in one tensor: every operation, on slices around 2^31 and at the end."""

import gc
from collections.abc import Iterator

import pytest
import torch
from accuracy import assert_as_accurate_as_eager

from swiglu_kernels import reference, silu_mul, swiglu_glu, unsloth_silu_mul

ROWS, COLUMNS, HIDDEN = 64 * 8192, 14336, 64
BOUNDARY = 2**31 // COLUMNS
PARTS = [
    slice(0, 8),
    slice(BOUNDARY - 4, BOUNDARY + 4),
    slice(2 * BOUNDARY - 4, 2 * BOUNDARY + 8),
    slice(ROWS - 8, ROWS),
]

pytestmark = [pytest.mark.gpu, pytest.mark.alone]


@pytest.fixture(autouse=True)
def room() -> Iterator[None]:
    """Ask for the memory of six such tensors, and give all of it back."""
    needed = 6.5 * 2 * ROWS * COLUMNS
    if torch.cuda.get_device_properties(0).total_memory < needed:
        pytest.skip(f"needs a GPU with {needed / 2**30:.0f} GiB")
    yield
    gc.collect()
    torch.cuda.empty_cache()


def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_().mul_(scale)


def check(name: str, got: torch.Tensor, eager: torch.Tensor, truth: torch.Tensor) -> None:
    assert_as_accurate_as_eager(name, got.detach(), eager.detach(), truth.detach(), terms=2 * COLUMNS)


@pytest.mark.parametrize("overwrites", [False, True], ids=["silu_mul", "unsloth"])
def test_elementwise(overwrites: bool) -> None:
    gate, up = draw(64, 8192, COLUMNS), draw(64, 8192, COLUMNS)
    before = [[value.view(ROWS, COLUMNS)[part].clone() for value in (gate, up)] for part in PARTS]
    leaves = gate.requires_grad_(), up.requires_grad_()
    h = unsloth_silu_mul(*leaves, overwrite=True) if overwrites else silu_mul(*leaves)
    upstream = draw(64, 8192, COLUMNS)
    d_gate, d_up = torch.autograd.grad(h, leaves, upstream)
    for part, inputs in zip(PARTS, before, strict=True):
        dh = upstream.view(ROWS, COLUMNS)[part]
        eager_leaves = [value.requires_grad_() for value in inputs]
        truth_leaves = [value.detach().double().requires_grad_() for value in inputs]
        eager, truth = reference.silu_mul(*eager_leaves), reference.silu_mul(*truth_leaves)
        d_eager = torch.autograd.grad(eager, eager_leaves, dh)
        d_truth = torch.autograd.grad(truth, truth_leaves, dh.double())
        check("h", h.view(ROWS, COLUMNS)[part], eager, truth)
        for name, got, one_eager, one_truth in zip(("d_gate", "d_up"), (d_gate, d_up), d_eager, d_truth, strict=True):
            check(name, got.view(ROWS, COLUMNS)[part], one_eager, one_truth)


def test_glu() -> None:
    x = draw(64, 8192, HIDDEN).requires_grad_()
    weights = [draw(COLUMNS, HIDDEN, scale=HIDDEN**-0.5).requires_grad_() for _ in range(2)]
    z = swiglu_glu(x, *weights, weight_grad="torch", save="input", input_grad="two_step")
    upstream = draw(64, 8192, COLUMNS)
    d_x, *d_weights = torch.autograd.grad(z, [x, *weights], upstream)
    for part in PARTS:
        eager_x = x.detach().view(ROWS, HIDDEN)[part].requires_grad_()
        truth_x = eager_x.detach().double().requires_grad_()
        eager = reference.swiglu_glu(eager_x, *(weight.detach() for weight in weights))
        truth = reference.swiglu_glu(truth_x, *(weight.detach().double() for weight in weights))
        dz = upstream.view(ROWS, COLUMNS)[part]
        check("z", z.view(ROWS, COLUMNS)[part], eager, truth)
        d_eager, d_truth = (
            torch.autograd.grad(eager, eager_x, dz)[0],
            torch.autograd.grad(truth, truth_x, dz.double())[0],
        )
        check("d_x", d_x.view(ROWS, HIDDEN)[part], d_eager, d_truth)
    assert all(bool(torch.isfinite(gradient).all()) for gradient in d_weights)
