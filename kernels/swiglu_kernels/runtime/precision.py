"""How products of float32 operands are computed, as torch's own setting says, and how results are rounded."""

import torch

from swiglu_kernels.runtime import backend
from swiglu_kernels.runtime.backend import tl, triton

# A kernel may read a global only if it is a constexpr.
INTERPRETING = tl.constexpr(backend.INTERPRETING) if backend.TRITON_AVAILABLE else False


def float32_dot_precision() -> str:
    """Return "tf32" where torch.backends.cuda.matmul allows TensorFloat-32, else "ieee"."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


@triton.jit
def round_to(value, dtype: tl.constexpr):
    """Round an fp32 tile to dtype, to nearest even."""
    if INTERPRETING and dtype == tl.bfloat16:
        # The interpreter truncates to bfloat16 instead of rounding: round the bit pattern first, NaN excepted.
        bits = value.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        value = tl.where(value == value, bits.to(tl.float32, bitcast=True), value)
    return value.to(dtype)
