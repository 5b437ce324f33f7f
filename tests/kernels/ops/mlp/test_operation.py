import functools
import math

import pytest
import torch
from accuracy import DEVICE, DTYPES, LAYOUTS
from blocks import GATES, WITH_AUTO, leaves, problem, variant_name
from blocks import check as check_operation
from hypothesis import given, settings
from hypothesis import strategies as st

from swiglu_kernels import backend_for, swiglu_mlp
from swiglu_kernels.ops.glu.portable_backward import input_grad_launch
from swiglu_kernels.ops.mlp import operation as mlp

pytestmark = pytest.mark.skipif(backend_for(DEVICE) == "torch", reason="no kernel can run here: no Triton")

CHUNKED = [
    {"weight_grad": weight_grad, "save": "input", "chunk_tokens": chunk}
    for weight_grad, chunk in [("triton", 10), ("torch", 16), ("none", 7), ("auto", 1000)]
]
ESSENTIAL = [
    {},
    {"weight_grad": "torch", "input_grad": "torch"},
    {"save": "input"},
    {"save": "input", "weight_grad": "torch", "input_grad": "torch"},
    {"weight_grad": "none"},
    *CHUNKED,
]


check = functools.partial(check_operation, "swiglu_mlp")


@settings(derandomize=True, deadline=None, max_examples=20)
@given(
    tokens=st.sampled_from([0, 1, 17, 65]),
    hidden=st.sampled_from([0, 1, 33, 64]),
    intermediate=st.sampled_from([0, 1, 31, 70]),
    hidden_out=st.sampled_from([0, 1, 33, 70]),
    dtype=st.sampled_from(DTYPES),
    layouts=st.tuples(*[st.sampled_from(LAYOUTS)] * 4),
    options=st.sampled_from(WITH_AUTO + CHUNKED),
    biased=st.booleans(),
)
def test_output_and_gradients(tokens, hidden, intermediate, hidden_out, dtype, layouts, options, biased):
    inputs = problem(tokens, hidden, intermediate, hidden_out, dtype, layouts, biased)
    check(inputs, options)


@pytest.mark.parametrize("options", ESSENTIAL, ids=variant_name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_variant_in_every_dtype(options, dtype):
    layouts = ("contiguous", "transposed", "half", "transposed")
    check(problem(37, 70, 45, 33, dtype, layouts, biased="save" in options), options)


@pytest.mark.parametrize("gate", [gate for gate in GATES.values() if gate], ids=str)
@pytest.mark.parametrize("save", ["preact", "input"])
def test_every_gate(gate, save):
    check(problem(17, 33, 31, 33, torch.float16, biased=True), {"save": save}, gate)


@pytest.mark.parametrize("save", ["preact", "input"])
def test_where_nothing_needs_a_mask(save):
    check(problem(256, 128, 128, 128, torch.bfloat16), {"save": save})


@pytest.mark.gpu
@pytest.mark.parametrize("options", [*ESSENTIAL, {"save": "input", "chunk_tokens": 256}], ids=variant_name)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 4096, 1408, 4096), (1000, 2880, 2880, 2880), (777, 509, 1031, 509)])
def test_every_variant_at_model_sizes(shape, options, dtype):
    check(problem(*shape, dtype), options)


@pytest.mark.gpu
@pytest.mark.parametrize("gate", [gate for gate in GATES.values() if gate], ids=str)
@pytest.mark.parametrize("save", ["preact", "input"])
def test_every_gate_at_model_sizes(gate, save):
    check(problem(1000, 2880, 2880, 2880, torch.bfloat16, biased=True), {"save": save}, gate)


def largest_allocations(monkeypatch, **options) -> tuple[int, int]:
    """Return the most elements of a [*, intermediate] tensor that the forward and the backward allocate at once."""
    tokens, hidden, intermediate, hidden_out = 40, 9, 48, 6
    inputs = leaves(tokens, hidden, intermediate, hidden_out, biased=True)
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
    inputs = leaves(8, 9, 40, 6, biased=True)
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
