"""The operators of all operations with gate and up weights, as torch.library.opcheck sees them."""

import pytest
import torch
from accuracy import DEVICE, random_tensor
from torch.library import opcheck

from swiglu_kernels import backend_for
from swiglu_kernels.ops.fp8 import operation as fp8
from swiglu_kernels.ops.gate.formula import PLAIN
from swiglu_kernels.ops.glu.operation import GLU
from swiglu_kernels.ops.glu.packed import LAYOUTS
from swiglu_kernels.ops.mlp.operation import MLP

pytestmark = pytest.mark.skipif(backend_for(DEVICE) == "torch", reason="no kernel can run here: no Triton")

X, WEIGHT, BIAS, W_DOWN = (5, 16), (32, 16), (32,), (48, 32)
CASES = {
    "glu": (GLU, [X, WEIGHT, WEIGHT, None, None], ("triton", "preact", "fused"), {}),
    "glu biased": (GLU, [X, WEIGHT, WEIGHT, BIAS, BIAS], ("none", "input", "torch"), {}),
    "mlp": (MLP, [X, WEIGHT, WEIGHT, BIAS, BIAS, W_DOWN, (48,)], ("triton", "preact", "fused"), {}),
    "mlp in chunks": (MLP, [X, WEIGHT, WEIGHT, BIAS, BIAS, W_DOWN, (48,)], ("torch", "input", "torch"), {"chunk": 2}),
    "fp8": (fp8.MLP, [X, WEIGHT, WEIGHT, BIAS, BIAS, W_DOWN, (48,), *[None] * 4], ("fp8", "preact", ""),
            {"recipe": "blockwise"}),
}  # fmt: skip
CASES |= {
    layout: (GLU, [X, (16, 64) if layout == "transposed" else (64, 16), None, (64,), None],
             ("triton", "preact", "fused"), {"layout": layout})
    for layout in LAYOUTS
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_operators(name: str) -> None:
    operation, shapes, how, more = CASES[name]
    in_fp8 = operation is fp8.MLP
    if in_fp8 and fp8.why_not(DEVICE):
        pytest.skip(str(fp8.why_not(DEVICE)))
    dtype = torch.bfloat16 if in_fp8 else torch.float32
    given = [shape if shape is None else random_tensor(*shape, dtype=dtype).requires_grad_() for shape in shapes]
    options = *how, PLAIN.numbers, more.get("layout", "separate"), more.get("chunk", 0), more.get("recipe", "")
    # A step between codes, which rounding in another place takes, is no error of an operator.
    tests = {"test_utils": ("test_schema", "test_autograd_registration", "test_faketensor")} if in_fp8 else {}
    opcheck(operation.forward._overload, (*given, *options), **tests)
    if in_fp8:
        return
    plain = [tensor if tensor is None else tensor.detach() for tensor in given]
    saved = [*plain[:6], *[None] * (6 - len(plain))]
    kept = torch.ones((5, 32) if "preact" in how else (0, 0), device=DEVICE)
    d_out = torch.ones(5, 32 if saved[5] is None else 48, device=DEVICE)
    needs = [tensor is not None for tensor in plain]
    opcheck(operation.backward._overload, (d_out, *saved, kept, kept, needs, *options))
