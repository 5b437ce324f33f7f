"""What tests of hand-scheduled kernels for Hopper share."""

from collections.abc import Callable

import pytest
import torch
from accuracy import assert_as_accurate_as_eager

from swiglu_kernels import reference
from swiglu_kernels.hopper import admission
from swiglu_kernels.ops.glu import hopper_forward
from swiglu_kernels.runtime.launch import Launch
from swiglu_kernels.tiles.rules import Tile

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


needs_hopper = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")]


def check_against_fp64(
    describe: Callable[..., Launch], shape: tuple[int, int, int], store: bool, dtype: torch.dtype, *tile: Tile
) -> None:
    """Run a forward of (tokens, hidden, intermediate) and compare z, and gate and up if stored, with fp64."""
    tokens, hidden, intermediate = shape
    x = torch.randn(tokens, hidden, device="cuda").to(dtype)
    weights = [(torch.randn(intermediate, hidden, device="cuda") * hidden**-0.5).to(dtype) for _ in range(2)]
    z, gate, up = (x.new_full((tokens, intermediate), float("nan")) for _ in range(3))
    with admission.by_hand_aside(None):  # these tests are what a version of Triton has to pass
        assert hopper_forward.why_not(x, *weights, torch.cuda.get_device_capability()) is None
    describe(x, *weights, z, (gate, up) if store else None, *tile).run()
    exact = [x.double() @ weight.double().T for weight in weights]
    eager = [x @ weight.T for weight in weights]
    assert_as_accurate_as_eager("z", z, reference.silu_mul(*eager), reference.silu_mul(*exact), terms=hidden)
    if store:
        for results in zip((gate, up), eager, exact, strict=True):
            assert_as_accurate_as_eager("gate or up", *results, terms=hidden)


def drawn_experts(
    index: torch.Tensor, count: int, hidden: int, intermediate: int, transposed: bool,
    sizes: float | torch.Tensor = 1.0,
) -> list[torch.Tensor]:  # fmt: skip
    """Draw x, both weights (of `sizes` by expert), routing weights and both biases of a mixture, in bfloat16."""
    tokens, slots = index.shape
    drawn = [
        (torch.randn(shape, device="cuda") * scale).bfloat16()
        for shape, scale in (
            ((tokens, hidden), 1), ((count, 2 * intermediate, hidden), hidden**-0.5 * sizes),
            ((count, hidden, intermediate), intermediate**-0.5 * sizes), ((tokens, slots), 1),
            ((count, 2 * intermediate), 1), ((count, hidden), 1),
        )
    ]  # fmt: skip
    if transposed:
        drawn[1:3] = (weight.mT.contiguous().mT for weight in drawn[1:3])
    return drawn
