"""The forward of few tokens, where several programs share a sum over the hidden dimension."""

import functools
import itertools

import pytest
import torch
from accuracy import DEVICE, check_against_reference, random_tensor
from clamped import GPT_OSS, keep_off_limit

from swiglu_kernels import backend_for, reference, swiglu_glu, swiglu_mlp
from swiglu_kernels.ops.glu.portable_forward import forward_launch

pytestmark = pytest.mark.skipif(backend_for(DEVICE) == "torch", reason="no kernel can run here: no Triton")

SHAPES = [(1, 2048, 64), (16, 2064, 80), (17, 2048, 48), (70, 2304, 32), (128, 2048, 64)]
"""Tokens, hidden, intermediate."""


def problem(tokens: int, hidden: int, intermediate: int, dtype: torch.dtype) -> list[torch.Tensor]:
    scale = hidden**-0.5
    return [
        random_tensor(tokens, hidden, dtype=dtype),
        random_tensor(intermediate, hidden, dtype=dtype, scale=scale, seed=1),
        random_tensor(intermediate, hidden, dtype=dtype, scale=scale, seed=2),
        random_tensor(intermediate, dtype=dtype, seed=3),
        random_tensor(intermediate, dtype=dtype, seed=4),
    ]


def launch_of(inputs: list[torch.Tensor]) -> list[int]:
    """How many programs share a sum, and how many add the parts up."""
    x, w_gate, w_up, *_ = inputs
    launch = forward_launch(x, w_gate, w_up, x.new_empty(x.shape[0], w_gate.shape[0]), None)
    return [launch.grid[1], *([] if launch.then is None else launch.then.grid)]


@pytest.mark.parametrize(
    ("shape", "dtype"), zip(SHAPES, itertools.cycle([torch.float16, torch.bfloat16]), strict=False), ids=str
)
def test_parts_of_a_sum(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    inputs = problem(*shape, dtype)
    parts, *join = launch_of(inputs)
    assert parts > 1
    assert len(join) == 2
    check_against_reference("x w_gate w_up", swiglu_glu, reference.swiglu_glu, inputs[:3])


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[3]])
def test_with_biases_and_another_gate(shape: tuple[int, int, int]) -> None:
    inputs = problem(*shape, torch.bfloat16)
    keep_off_limit(GPT_OSS, inputs[0], inputs[1:3], inputs[3:])
    check_against_reference(
        "x w_gate w_up bias_gate bias_up",
        functools.partial(swiglu_glu, **GPT_OSS),
        functools.partial(reference.swiglu_glu, **GPT_OSS),
        inputs,
    )


def test_no_part_depends_on_what_the_scratch_held(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w_gate, w_up, *_ = problem(5, 2048, 48, torch.float16)
    expected = swiglu_glu(x, w_gate, w_up)
    make = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *given, **options: make(*given, **options).fill_(torch.nan))
    assert torch.equal(swiglu_glu(x, w_gate, w_up), expected)


def test_the_whole_block_and_what_it_recomputes() -> None:
    inputs = problem(5, 2048, 48, torch.float16)[:3]
    inputs.append(random_tensor(2048, 48, dtype=torch.float16, scale=48**-0.5, seed=5))
    for save in ("preact", "input"):
        check_against_reference(
            "x w_gate w_up w_down", functools.partial(swiglu_mlp, save=save), reference.swiglu_mlp, inputs
        )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 7, 16, 17, 40, 64, 65, 100, 128])
@pytest.mark.parametrize(
    ("hidden", "intermediate"), [(2048, 768), (7168, 2048), (2880, 2880), (4096, 11008), (3584, 18944)]
)
def test_every_choice_for_few_tokens_on_a_gpu(tokens: int, hidden: int, intermediate: int, dtype: torch.dtype) -> None:
    inputs = problem(tokens, hidden, intermediate, dtype)
    for _ in range(2):  # described, then remembered
        check_against_reference("x w_gate w_up", swiglu_glu, reference.swiglu_glu, inputs[:3])
        with torch.no_grad():
            z = swiglu_glu(*inputs[:3])
        exact = reference.swiglu_glu(*(tensor.double() for tensor in inputs[:3]))
        assert (z - exact).norm() < 4e-3 * exact.norm()
