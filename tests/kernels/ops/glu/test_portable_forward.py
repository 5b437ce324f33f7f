"""The forward of few tokens, where several programs share a sum over the hidden dimension."""

import itertools

import pytest
import torch
from accuracy import DEVICE
from blocks import check, problem
from clamped import GPT_OSS

from swiglu_kernels import backend_for, reference, swiglu_glu
from swiglu_kernels.ops.glu.portable_forward import forward_launch

pytestmark = pytest.mark.skipif(backend_for(DEVICE) == "torch", reason="no kernel can run here: no Triton")

SHAPES = [(1, 2048, 64), (16, 2064, 80), (17, 2048, 48), (70, 2304, 32), (128, 2048, 64)]
"""Tokens, hidden, intermediate."""


def launch_of(inputs: list[torch.Tensor]) -> list[int]:
    """How many programs share a sum, and how many add the parts up."""
    x, w_gate, w_up = inputs
    launch = forward_launch(x, w_gate, w_up, x.new_empty(x.shape[0], w_gate.shape[0]), None)
    return [launch.grid[1], *([] if launch.then is None else launch.then.grid)]


@pytest.mark.parametrize(
    ("shape", "dtype"), zip(SHAPES, itertools.cycle([torch.float16, torch.bfloat16]), strict=False), ids=str
)
def test_parts_of_a_sum(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    inputs = problem(*shape, dtype=dtype)
    parts, *join = launch_of(inputs)
    assert parts > 1
    assert len(join) == 2
    check("swiglu_glu", inputs, {})


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[3]])
def test_with_biases_and_another_gate(shape: tuple[int, int, int]) -> None:
    check("swiglu_glu", problem(*shape, dtype=torch.bfloat16, biased=True), {}, GPT_OSS)


def test_no_part_depends_on_what_the_scratch_held(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w_gate, w_up = problem(5, 2048, 48, dtype=torch.float16)
    expected = swiglu_glu(x, w_gate, w_up)
    make = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *given, **options: make(*given, **options).fill_(torch.nan))
    assert torch.equal(swiglu_glu(x, w_gate, w_up), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 7, 16, 17, 40, 64, 65, 100, 128])
@pytest.mark.parametrize(
    ("hidden", "intermediate"), [(2048, 768), (7168, 2048), (2880, 2880), (4096, 11008), (3584, 18944)]
)
def test_every_choice_for_few_tokens_on_a_gpu(tokens: int, hidden: int, intermediate: int, dtype: torch.dtype) -> None:
    inputs = problem(tokens, hidden, intermediate, dtype=dtype)
    for _ in range(2):  # described, then remembered
        check("swiglu_glu", inputs, {})
        with torch.no_grad():
            z = swiglu_glu(*inputs)
        exact = reference.swiglu_glu(*(tensor.double() for tensor in inputs))
        assert (z - exact).norm() < 4e-3 * exact.norm()
