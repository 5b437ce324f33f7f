import functools
import itertools
import math

import pytest
import torch
from accuracy import DEVICE, DTYPES, LAYOUTS, check_against_reference, random_tensor
from clamped import GPT_OSS, keep_off_limit
from hypothesis import given, settings
from hypothesis import strategies as st

from swiglu_kernels import backend_for, reference, swiglu_mlp
from swiglu_kernels.ops.glu.choice import INPUT_GRADS, SAVES, WEIGHT_GRADS
from swiglu_kernels.ops.glu.portable_backward import input_grad_launch
from swiglu_kernels.ops.mlp import operation as mlp

pytestmark = pytest.mark.skipif(backend_for(DEVICE) == "torch", reason="no kernel can run here: no Triton")

NAMES = "x w_gate w_up w_down bias_gate bias_up bias_down"
GATES = [{}, GPT_OSS, {"gate_multiplier": 0.7}, {"activation": "gelu_tanh"}]
CHUNKED = [
    {"weight_grad": weight_grad, "save": "input", "chunk_tokens": chunk}
    for weight_grad, chunk in [("triton", 10), ("torch", 16), ("none", 7), ("auto", 1000)]
]
WHOLE = [
    dict(zip(("weight_grad", "save", "input_grad"), values, strict=True))
    for values in itertools.product(WEIGHT_GRADS, SAVES, INPUT_GRADS)
]
VARIANTS = WHOLE + CHUNKED
ESSENTIAL = [
    {},
    {"weight_grad": "torch", "input_grad": "torch"},
    {"save": "input"},
    {"save": "input", "weight_grad": "torch", "input_grad": "torch"},
    {"weight_grad": "none"},
    *CHUNKED,
]


def variant_name(options: dict) -> str:
    return "-".join(map(str, options.values())) or "default"


def problem(
    tokens: int, hidden: int, intermediate: int, hidden_out: int, dtype: torch.dtype = torch.float32,
    layouts: tuple[str, ...] = ("contiguous",) * 4,
) -> list[torch.Tensor]:  # fmt: skip
    """Draw x, three weights and three biases, everything around 1 on the way."""
    scale, scale_down = max(hidden, 1) ** -0.5, max(intermediate, 1) ** -0.5
    return [
        random_tensor(tokens, hidden, dtype=dtype, layout=layouts[0]),
        random_tensor(intermediate, hidden, dtype=dtype, layout=layouts[1], scale=scale, seed=1),
        random_tensor(intermediate, hidden, dtype=dtype, layout=layouts[2], scale=scale, seed=2),
        random_tensor(hidden_out, intermediate, dtype=dtype, layout=layouts[3], scale=scale_down, seed=3),
        random_tensor(intermediate, dtype=dtype, seed=4),
        random_tensor(intermediate, dtype=dtype, seed=5),
        random_tensor(hidden_out, dtype=dtype, seed=6),
    ]


def leaves(*shape: int) -> list[torch.Tensor]:
    return [tensor.requires_grad_() for tensor in problem(*shape)]


def check(inputs: list[torch.Tensor], options: dict, gate: dict | None = None) -> None:
    keep_off_limit(gate or {}, inputs[0], inputs[1:3], inputs[4:6])
    check_against_reference(
        NAMES,
        functools.partial(swiglu_mlp, **options, **(gate or {})),
        functools.partial(reference.swiglu_mlp, **(gate or {})),
        inputs,
        wanted=[0] if options.get("weight_grad") == "none" else None,
    )


@settings(derandomize=True, deadline=None, max_examples=20)
@given(
    tokens=st.sampled_from([0, 1, 17, 65]),
    hidden=st.sampled_from([0, 1, 33, 64]),
    intermediate=st.sampled_from([0, 1, 31, 70]),
    hidden_out=st.sampled_from([0, 1, 33, 70]),
    dtype=st.sampled_from(DTYPES),
    layouts=st.tuples(*[st.sampled_from(LAYOUTS)] * 4),
    options=st.sampled_from(VARIANTS),
    biased=st.booleans(),
)
def test_output_and_gradients(tokens, hidden, intermediate, hidden_out, dtype, layouts, options, biased):
    inputs = problem(tokens, hidden, intermediate, hidden_out, dtype, layouts)
    check(inputs if biased else inputs[:4], options)


@pytest.mark.parametrize("options", ESSENTIAL, ids=variant_name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_variant_in_every_dtype(options, dtype):
    inputs = problem(37, 70, 45, 33, dtype, ("contiguous", "transposed", "half", "transposed"))
    check(inputs[: 7 if "save" in options else 4], options)


@pytest.mark.parametrize("gate", GATES[1:], ids=str)
@pytest.mark.parametrize("save", ["preact", "input"])
def test_every_gate(gate, save):
    check(problem(17, 33, 31, 33, torch.float16), {"save": save}, gate)


@pytest.mark.parametrize("save", ["preact", "input"])
def test_where_nothing_needs_a_mask(save):
    check(problem(256, 128, 128, 128, torch.bfloat16)[:4], {"save": save})


@pytest.mark.gpu
@pytest.mark.parametrize("options", [*ESSENTIAL, {"save": "input", "chunk_tokens": 256}], ids=variant_name)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 4096, 1408, 4096), (1000, 2880, 2880, 2880), (777, 509, 1031, 509)])
def test_every_variant_at_model_sizes(shape, options, dtype):
    check(problem(*shape, dtype)[:4], options)


@pytest.mark.gpu
@pytest.mark.parametrize("gate", GATES[1:], ids=str)
@pytest.mark.parametrize("save", ["preact", "input"])
def test_every_gate_at_model_sizes(gate, save):
    check(problem(1000, 2880, 2880, 2880, torch.bfloat16), {"save": save}, gate)


def largest_allocations(monkeypatch, **options) -> tuple[int, int]:
    """Return the most elements of a [*, intermediate] tensor that the forward and the backward allocate at once."""
    tokens, hidden, intermediate, hidden_out = 40, 9, 48, 6
    inputs = leaves(tokens, hidden, intermediate, hidden_out)
    sizes = []
    new = mlp.new

    def spy(like, *shape):
        if not {hidden, hidden_out} & set(shape):
            sizes.append(math.prod(shape))
        return new(like, *shape)

    monkeypatch.setattr(mlp, "new", spy)
    monkeypatch.setattr(mlp, "TILE", 8)
    out = swiglu_mlp(*inputs, **options)
    forward, sizes[:] = max(sizes), []
    torch.autograd.grad(out.sum(), inputs)
    return forward, max(sizes)


def test_chunks_bound_what_is_allocated(monkeypatch):
    assert largest_allocations(monkeypatch, save="input") == (40 * 48, 40 * 48)
    assert largest_allocations(monkeypatch, save="input", chunk_tokens=16) == (16 * 48, 40 * 24)


@pytest.mark.parametrize(
    ("chunk", "weight_grad"), [(1, "triton"), (3, "torch"), (5, "triton"), (8, "torch"), (9, "auto")]
)
def test_gradients_do_not_depend_on_the_slices(monkeypatch, chunk, weight_grad):
    monkeypatch.setattr(mlp, "TILE", 8)
    inputs = leaves(8, 9, 40, 6)
    whole = torch.autograd.grad(swiglu_mlp(*inputs, save="input").sum(), inputs)
    out = swiglu_mlp(*inputs, save="input", weight_grad=weight_grad, chunk_tokens=chunk)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), inputs), whole, rtol=1e-5, atol=1e-5)


def test_dx_is_summed_over_slices_in_fp32():
    # Slices that add 1 each: a bfloat16 sum stops growing at 256.
    d_gate, weight = (torch.full((1, 1), value, device=DEVICE).bfloat16() for value in (1.0, 0.5))
    dx = torch.full((1, 1), 250.0, device=DEVICE)
    for _ in range(10):
        input_grad_launch(None, d_gate, d_gate, weight, weight, dx, accumulate=True).run()
    assert dx.item() == 260
