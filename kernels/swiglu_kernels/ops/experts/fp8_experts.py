"""What `swiglu_experts` does in fp8 beside what it does in 16 bits: its forward, by rows.

    1. x by rows, each token once; w_gate_up and w_down by rows of each expert, unless they came quantised
    2. h, in 16 bits, and where a backward follows gate and up: one launch of both products and the gate
    3. h by rows, a launch of its own: its rows are wider than a program's tile
    4. y = h w_down^T

The backward's products take operands in 16 bits: x, the weights, and gate and up as the forward made them. The gradient
of a routing weight is the upstream gradient times y.
"""

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch

from swiglu_kernels.ops.experts import hopper_fp8_experts, portable_experts
from swiglu_kernels.ops.experts.routing import Routing
from swiglu_kernels.ops.fp8 import operation as fp8
from swiglu_kernels.ops.fp8.kept_codes import find
from swiglu_kernels.ops.fp8.portable_codes import Quantised, lies_as_codes, quantise_rows
from swiglu_kernels.ops.gate.formula import Formula
from swiglu_kernels.runtime.checks import check_option, check_tensor

PRECISIONS = ("bf16", "fp8-rowwise")
"""Of the operands of the forward's products; with "bf16" they stay as they are."""
KERNELS: dict[str, ModuleType] = {"portable": portable_experts, "hopper": hopper_fp8_experts}
"""By what `backend` calls them: of both products, with the same functions."""


def unpack(precision: str, w_gate_up: Any, w_down: Any) -> tuple[Any, Any, torch.Tensor | None, torch.Tensor | None]:
    """Return both weights, or their codes, and the scales of these.

    Raises:
        TypeError: one is a tuple, but not what `quantise` returns of experts.
        ValueError: precision is unknown, only one is quantised, or both are with "bf16".
    """
    check_option("precision", precision, PRECISIONS)
    pairs = {"w_gate_up": w_gate_up, "w_down": w_down}
    quantised = [name for name, weight in pairs.items() if isinstance(weight, tuple)]
    if not quantised:
        return w_gate_up, w_down, None, None
    if len(quantised) == 1 or precision == "bf16":
        expected = "both weights quantised, and precision='fp8-rowwise', or both as they are"
        raise ValueError(f"{quantised[0]}: expected {expected}")
    for name, pair in pairs.items():
        codes, scales = pair if len(pair) == 2 else (None, None)
        if not (
            isinstance(codes, torch.Tensor)
            and isinstance(scales, torch.Tensor)
            and (codes.dtype, scales.dtype, codes.dim()) == (torch.float8_e4m3fn, torch.float32, 3)
            and lies_as_codes(codes)
            and scales.is_contiguous()
            and scales.shape == codes.shape[:2]
        ):
            raise TypeError(f"{name}: expected what `quantise` returns of [experts, rows, depth], codes and scales")
    return w_gate_up[0], w_down[0], w_gate_up[1], w_down[1]


def like_codes(x: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tensors of x's dtype without data that lie as the codes of both weights do, to choose kernels by."""
    first, second = (torch.empty(weight.shape, dtype=x.dtype, device="meta") for weight in (w_gate_up, w_down))
    return first, second


def check(x: Any, w_gate_up: torch.Tensor) -> None:
    """Raise unless x can be multiplied in fp8: by its dtype, its device, and sizes that are multiples of 16."""
    sizes = (("hidden", w_gate_up.shape[2]), ("intermediate", w_gate_up.shape[1] // 2))
    fp8.check("x", check_tensor("x", x), sizes)


Pair = tuple[torch.Tensor | None, torch.Tensor | None]


def weights_of(weights: tuple[torch.Tensor, torch.Tensor], scales: Pair, keep: bool) -> Callable[[int], Quantised]:
    """Return what yields the codes of gate and up (0) and of down (1); weights with scales are codes.

    `keep`: those of weights without scales may be kept from call to call.
    """

    def quantised(at: int) -> Quantised:
        weight, scale = weights[at], scales[at]
        make = partial(quantise_rows, weight, "rowwise", True)
        codes = Quantised(weight, scale) if scale is not None else find(weight, "rowwise", make) if keep else make()
        fp8.hand(codes, ("w_gate_up", "w_down")[at])
        return codes

    return quantised


def products(
    x: torch.Tensor, of_weights: Callable[[int], Quantised], biases: Pair, routing: Routing, formula: Formula,
    interleaved: bool, keep: bool, backend: str,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Return y [P, H] and, with `keep`, pre [P, 2I]; `of_weights` is that of `weights_of`, biases as there."""
    kernels, (b_gate_up, b_down) = KERNELS[backend], biases
    codes = quantise_rows(x, "rowwise", False)
    fp8.hand(codes, "x")
    h, pre = kernels.gate_up_of_codes(codes, of_weights(0), routing, b_gate_up, formula, interleaved, x.dtype, keep)
    del codes
    codes = quantise_rows(h, "rowwise", False, routing.starts)
    fp8.hand(codes, "h", routing.row)
    del h
    y: torch.Tensor = kernels.down_of_codes(codes, of_weights(1), routing, b_down, x.dtype)
    return y, pre
