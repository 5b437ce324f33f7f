import pytest
import torch
from accuracy import DEVICE, DTYPES, LAYOUTS, assert_as_accurate_as_eager, check_against_reference, random_tensor
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import opcheck

from swiglu_kernels import backend_for, reference, silu_mul
from swiglu_kernels.ops.gate.operation import BLOCK, forward_launch

pytestmark = pytest.mark.skipif(backend_for(DEVICE) == "torch", reason="no kernel can run here: no Triton")


@settings(derandomize=True, deadline=None, max_examples=30)
@given(
    shape=st.lists(st.sampled_from([0, 1, 2, 3, 7]), max_size=2),
    columns=st.sampled_from([0, 1, 2, 5, 64, 129, 700, 1025]),
    dtype=st.sampled_from(DTYPES),
    gate_layout=st.sampled_from(LAYOUTS),
    up_layout=st.sampled_from(LAYOUTS),
)
def test_output_and_gradients(shape, columns, dtype, gate_layout, up_layout):
    gate = random_tensor(*shape, columns, dtype=dtype, layout=gate_layout, scale=3.0)
    up = random_tensor(*shape, columns, dtype=dtype, layout=up_layout, seed=1)
    check_against_reference("gate up", silu_mul, reference.silu_mul, [gate, up])


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_values(dtype):
    largest = torch.finfo(dtype).max
    gate = torch.tensor([0.0, -0.0, largest, -largest, -90.0, -20.0, 90.0, float("nan"), 1.0, 1.0], device=DEVICE)
    up = torch.tensor([1.0, 1.0, 0.5, 2.0, 1.0, 1.0, 1.0, 1.0, float("nan"), float("inf")], device=DEVICE)
    gate, up = gate.to(dtype), up.to(dtype)
    expected = reference.silu_mul(gate.double(), up.double()).to(dtype)
    torch.testing.assert_close(silu_mul(gate, up), expected, equal_nan=True)


def test_packed_halves_are_read_without_a_copy():
    packed = random_tensor(3, 2 * 40, dtype=torch.float32)
    gate, up = packed.chunk(2, dim=-1)
    launch = forward_launch(gate, up, torch.empty(3, 40, device=DEVICE))
    assert launch.arguments["gate_ptr"].data_ptr() == packed.data_ptr()
    assert launch.arguments["up_ptr"].data_ptr() == packed.data_ptr() + 40 * 4
    assert launch.arguments["gate_row"] == 80


@pytest.mark.parametrize(
    ("elements", "wide"), [(0, False), (2**31, False), (2**31 + 1, True), (2**31 + 2 * BLOCK, True)]
)
def test_width_of_offsets_at_the_boundary(elements, wide):
    like = torch.empty(elements, dtype=torch.bfloat16, device="meta")
    assert forward_launch(like, like, like).arguments["WIDE"] is wide


def test_rows_further_apart_than_32_bits():
    # A view over 4 GiB of which two short rows are touched; memory that is never touched costs nothing.
    gate = torch.empty(2**31 + 8, dtype=torch.float16, device=DEVICE).as_strided((2, 5), (2**31, 1))
    up = random_tensor(2, 5, dtype=torch.float16)
    gate.copy_(random_tensor(2, 5, dtype=torch.float16, seed=1))
    truth = reference.silu_mul(gate.double(), up.double())
    assert_as_accurate_as_eager("h", silu_mul(gate, up), reference.silu_mul(gate, up), truth)


def test_operator_registration():
    gate, up = (random_tensor(4, 9, dtype=torch.float32, seed=seed).requires_grad_() for seed in (0, 1))
    opcheck(torch.ops.swiglu_kernels.silu_mul.default, (gate, up))
    opcheck(torch.ops.swiglu_kernels.silu_mul_backward.default, (gate.detach(), gate.detach(), up.detach()))
