"""Which kernels products of quantised operands take: by hand, PyTorch's or portable Triton."""

from typing import Literal, NamedTuple

import torch

from swiglu_kernels.ops.fp8 import hopper_fp8
from swiglu_kernels.ops.fp8.portable_codes import Quantised
from swiglu_kernels.ops.gate.formula import PLAIN, Formula
from swiglu_kernels.runtime import internals
from swiglu_kernels.runtime.backend import INTERPRETING, capability_of, multiprocessors

MULTIPLE = 16
"""What divides columns and depth of what `_scaled_mm` multiplies; from so many rows on it is taken."""
TORCH_FROM = 512
"""Tokens from which two products by PyTorch and a pass are taken for the portable launch, by blocks."""
PAYS_FROM: dict[tuple[str, bool], tuple[tuple[int, int, int], ...]] = {
    ("rowwise", False): ((2**25, 2048, 128), (2**23, 1536, 256), (2**22, 1024, 512), (0, 1152, 512)),
    ("rowwise", True): ((2**25, 6144, 1280), (2**24, 1024, 2048), (2**23, 1152, 2048), (0, 1536, 2048)),
    ("blockwise", False): (
        (2**25, 4096, 128), (2**23, 1536, 512), (2**23, 1024, 768), (2**22, 1280, 768), (0, 1536, 1408),
        (0, 1024, 3072),
    ),
    ("blockwise", True): (
        (2**25, 6144, 1280), (2**24, 1536, 2048), (2**23, 1920, 3072), (2**23, 1536, 4096), (2**24, 1024, 4096),
        (2**22, 1280, 5120),
    ),
}  # fmt: skip
"""By recipe, and whether a step is trained or a forward has weights quantised before: of layers with so many elements
in w_gate or more, and whose smaller side has so many, the fewest tokens from which fp8 was found to take less time than
bf16 (results/nvidia-h200/fp8-grid.csv and nvidia-h100/fp8-kernels.txt), from the fewest tokens on."""
EXPERTS_PAY_TO, WIDE_EXPERT = 128, 512
"""Rows for each expert up to which every forward was found to take less time, weights quantised before; and the
intermediate size from which, as with several experts for a token, any number of rows does."""
Operands = tuple[Quantised, Quantised, Quantised]
"""x, w_gate and w_up."""


class Way(NamedTuple):
    """How gate, up and z are made."""

    schedule: Literal["hopper", "torch", "portable"]
    """"torch": two products by PyTorch and a pass."""
    why: str | None
    """Why not the hand-scheduled kernel, or None."""


def pays_from(recipe: str, trains: bool, hidden: int, intermediate: int) -> int | None:
    """Return the fewest tokens from which a layer in fp8 takes less time than in bf16; None: none is known."""
    elements, side = hidden * intermediate, min(hidden, intermediate)
    found = PAYS_FROM[recipe, trains]
    return next((tokens for size, width, tokens in found if elements >= size and side >= width), None)


def where_it_pays(recipe: str, trains: bool, hidden: int, intermediate: int) -> str:
    """Say it in words."""
    least = pays_from(recipe, trains, hidden, intermediate)
    return "at no number of tokens that was measured" if least is None else f"from {least} tokens on"


def experts_pay(rows: float, slots: int, intermediate: int) -> bool:
    """Tell whether a forward of experts by rows takes less time than in bf16.

    Args:
        rows: for each expert.
        slots: experts for each token.
        intermediate: of an expert.
    """
    return rows <= EXPERTS_PAY_TO or slots > 1 or intermediate >= WIDE_EXPERT


def way_of_glu(
    given: Operands | torch.Tensor, intermediate: int, blocks: bool, dtype: torch.dtype, has_bias: bool,
    formula: Formula,
) -> Way:  # fmt: skip
    """Choose for quantised operands, or for x that is not quantised yet and others that lie as kernels like.

    x is [tokens, hidden]; results have a dtype of 16 bits.
    """
    if isinstance(given, torch.Tensor):
        x, aside = given, hopper_fp8.why_off(given.device, intermediate, has_bias, formula)
        unfit = why_not_sizes(x.device, (*x.shape, intermediate), dtype, has_bias)
    else:
        x = given[0].codes
        aside = "kernels are interpreted" if INTERPRETING else hopper_fp8.why_not(*given, has_bias, formula)
        unfit = why_not_by_torch(given[0], given[1], dtype, has_bias)
    by_torch = blocks and len(x) >= TORCH_FROM and not unfit
    return Way("hopper" if aside is None else "torch" if by_torch else "portable", aside)


def why_not_by_torch(a: Quantised, b: Quantised, dtype: torch.dtype, has_bias: bool) -> str | None:
    """Say why a b^T, of [R, D] and [C, D], is not PyTorch's product of a dtype, or return None where it is."""
    return why_not_sizes(a.codes.device, (*a.codes.shape, len(b.codes)), dtype, has_bias)


def why_not_sizes(device: torch.device, sizes: tuple[int, int, int], dtype: torch.dtype, has_bias: bool) -> str | None:
    """`why_not_by_torch` of any operands of these rows, depth and columns."""
    if INTERPRETING or capability_of(device) != (9, 0):
        return "PyTorch's product was measured on compute capability 9.0 alone"
    if internals.scaled_mm is None:
        return "this PyTorch has no torch._scaled_mm"
    if dtype != torch.bfloat16 or has_bias:
        return "PyTorch's product is for bfloat16 without a bias"
    rows, *others = sizes
    if rows < MULTIPLE or 0 in others or any(size % MULTIPLE for size in others):
        return f"PyTorch is asked for {MULTIPLE} rows or more, and multiplies multiples of {MULTIPLE}"
    return None


def product_by_hand(a: Quantised, b: Quantised, dtype: torch.dtype, has_bias: bool) -> bool:
    """Whether a b^T by rows is the forward's kernel by hand, whose gate and up are the halves of its columns."""
    (rows, _), columns = a.codes.shape, len(b.codes)
    if has_bias or INTERPRETING or a.scales.dim() == 2:
        return False
    if hopper_fp8.why_not(a, b, b, False, PLAIN) is not None:
        return False
    by_torch = why_not_by_torch(a, b, dtype, False) is None
    return not by_torch or hopper_fp8.product_pays(rows, columns, multiprocessors(a.codes.device))
