import functools

import pytest
import torch
import torch.nn.functional as F
from accuracy import DEVICE, DTYPES, LAYOUTS, assert_as_accurate_as_eager, check_against_reference, random_tensor
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import opcheck

from swiglu_kernels import backend_for, reference, swiglu_DWf_DW_dfg_kernel, swiglu_fg_kernel, unsloth_silu_mul
from swiglu_kernels.ops.gate.unsloth import BLOCK_SIZE, backward_launch, forward_launch

pytestmark = pytest.mark.skipif(backend_for(DEVICE) == "torch", reason="no kernel can run here: no Triton")


def pair(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return random_tensor(*shape, dtype=dtype), random_tensor(*shape, dtype=dtype, seed=1)


@settings(derandomize=True, deadline=None, max_examples=30)
@given(
    shape=st.lists(st.sampled_from([0, 1, 2, 3, 7]), max_size=2),
    columns=st.sampled_from([0, 1, 2, 5, 64, 129, 700, 1025]),
    dtype=st.sampled_from(DTYPES),
    gate_layout=st.sampled_from(LAYOUTS),
    up_layout=st.sampled_from(LAYOUTS),
    overwrite=st.booleans(),
)
def test_output_and_gradients(shape, columns, dtype, gate_layout, up_layout, overwrite):
    gate = random_tensor(*shape, columns, dtype=dtype, layout=gate_layout, scale=2.0)
    up = random_tensor(*shape, columns, dtype=dtype, layout=up_layout, seed=1)

    def function(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        # clone: with overwrite the backward may destroy what it is given
        clone = functools.partial(torch.clone, memory_format=torch.preserve_format)
        return unsloth_silu_mul(clone(gate), clone(up), overwrite=overwrite)

    check_against_reference("gate up", function, reference.silu_mul, [gate, up])


@pytest.mark.parametrize("dtype", DTYPES)
def test_documented_rounding_of_the_forward(dtype):
    e, g = pair(2, 3, 129, dtype=dtype)
    f = F.silu(e.float()).to(dtype)
    torch.testing.assert_close(swiglu_fg_kernel(e, g), f * g, rtol=2 * torch.finfo(dtype).eps, atol=1e-7)


@pytest.mark.parametrize(("dtype", "layout"), zip([*DTYPES, torch.float32], LAYOUTS, strict=True))
def test_in_place_backward_overwrites_in_the_documented_order(dtype, layout):
    names = ("DW", "e", "g")
    buffers = [random_tensor(5, 33, dtype=dtype, layout=layout, seed=seed) for seed in range(3)]
    answers = {}
    for call_dtype in (dtype, torch.float64):
        dw, e, g = (buffer.to(call_dtype, copy=True).requires_grad_() for buffer in buffers)
        h = reference.silu_mul(e, g)
        de, df = torch.autograd.grad(h, (e, g), dw)
        answers[call_dtype] = (h.detach(), df, de)
    pointers = [buffer.data_ptr() for buffer in buffers]
    outputs = swiglu_DWf_DW_dfg_kernel(*buffers)
    assert [output.data_ptr() for output in outputs] == pointers
    for name, buffer, output, eager, truth in zip(
        names, buffers, outputs, answers[dtype], answers[torch.float64], strict=True
    ):
        assert output is buffer
        assert_as_accurate_as_eager(name, output, eager, truth)


def test_overwrite_puts_the_gradients_into_the_saved_buffers_and_keeps_the_upstream_gradient():
    leaves = [tensor.requires_grad_() for tensor in pair(4, 9)]
    gate, up = (leaf * 1 for leaf in leaves)
    other, upstream = torch.zeros(4, 9, device=DEVICE, requires_grad=True), random_tensor(4, 9, dtype=torch.float32)
    before = upstream.clone()
    out = unsloth_silu_mul(gate, up, overwrite=True) + other
    d_other, d_gate, d_up = torch.autograd.grad(out, (other, *leaves), upstream)
    assert all(map(torch.equal, (upstream, d_other, up, gate), (before, before, d_gate, d_up)))


def test_overwrite_refuses_a_second_backward():
    gate, up = (tensor.requires_grad_() for tensor in pair(4, 9))
    h = unsloth_silu_mul(gate * 1, up * 1, overwrite=True)
    h.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"the first backward overwrote gate and up.*retain_graph=True"):
        h.sum().backward()


def test_overwrite_makes_other_users_of_the_buffers_fail_loudly():
    gate, up = (tensor.requires_grad_() for tensor in pair(4, 9))
    intermediate = gate * 1
    square = intermediate**2  # saved before, hence differentiated after
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (unsloth_silu_mul(intermediate, up * 1, overwrite=True) + square).sum().backward()


def test_one_buffer_twice_is_refused():
    x = random_tensor(4, 9, dtype=torch.float32).requires_grad_()
    y = x * 1
    with pytest.raises(ValueError, match="expected three separate buffers"):
        unsloth_silu_mul(y, y, overwrite=True).sum().backward()
    d_x = torch.autograd.grad(unsloth_silu_mul(x, x).sum(), x)[0]
    torch.testing.assert_close(d_x, torch.autograd.grad(reference.silu_mul(x, x).sum(), x)[0])


def test_operator_registration():
    gate, up = (tensor.requires_grad_() for tensor in pair(4, 9))
    dw, e, g = (random_tensor(4, 9, dtype=torch.float32, seed=seed) for seed in range(3))
    opcheck(torch.ops.swiglu_kernels.unsloth_silu_mul.default, (gate, up, False))
    opcheck(torch.ops.swiglu_kernels.unsloth_backward.default, (dw, e, g))
    opcheck(torch.ops.swiglu_kernels.unsloth_backward_.default, (dw, e, g))


@pytest.mark.parametrize(
    ("elements", "long"),
    [(1, False), (2**31 - 4 * BLOCK_SIZE, False), (2**31 - 4 * BLOCK_SIZE + 1, True), (2**31, True)],
)
def test_width_of_offsets_at_the_boundary(elements, long):
    like = torch.empty(elements, dtype=torch.bfloat16, device="meta")
    assert forward_launch(like, like, like).arguments["LONG_INDEXING"] is long
    assert backward_launch(like, like, like).arguments["LONG_INDEXING"] is long
