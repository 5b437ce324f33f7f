"""What `swiglu_experts` does in fp8 beside what it does in 16 bits: its forward, by rows.

    1. x by rows, each token once; w_gate_up and w_down by rows of each expert, unless they came quantised
    2. h, in 16 bits, and where a backward follows gate and up: one launch of both products and the gate
    3. h by rows, a launch of its own: its rows are wider than a program's tile
    4. y = h w_down^T

The backward's products take operands in 16 bits: x, the weights, and gate and up as the forward made them. The gradient
of a routing weight is the upstream gradient times y.
"""

from types import ModuleType
from typing import Any

import torch

from swiglu_kernels.ops.experts import hopper_fp8_experts, portable_experts
from swiglu_kernels.ops.experts.routing import Routing
from swiglu_kernels.ops.fp8 import operation as fp8
from swiglu_kernels.ops.fp8.kept_codes import find
from swiglu_kernels.ops.fp8.portable_codes import Quantised, quantise_rows
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
        raise ValueError(
            f"{quantised[0]}: expected both weights quantised, and precision='fp8-rowwise', or both as they are"
        )
    for name, pair in pairs.items():
        codes, scales = pair if len(pair) == 2 else (None, None)
        if not (
            isinstance(codes, torch.Tensor)
            and isinstance(scales, torch.Tensor)
            and (codes.dtype, scales.dtype, codes.dim()) == (torch.float8_e4m3fn, torch.float32, 3)
            and codes.is_contiguous()
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


def products(
    x: torch.Tensor, weights: tuple[torch.Tensor, torch.Tensor], scales: Pair, biases: Pair, routing: Routing,
    formula: Formula, interleaved: bool, keep: bool, backend: str, keep_codes: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Return y [P, H] and, with `keep`, pre [P, 2I].

    weights, scales, biases: of gate and up, and of down; weights with scales are codes. `keep_codes`: those of weights
    without scales may be kept.
    """
    (w_gate_up, w_down), (s_gate_up, s_down), (b_gate_up, b_down) = weights, scales, biases
    kernels = KERNELS[backend]
    codes = quantise_rows(x, "rowwise", False)
    fp8.hand(codes, "x")
    of_weights = _of_weights("w_gate_up", w_gate_up, s_gate_up, keep_codes)
    h, pre = kernels.gate_up_of_codes(codes, of_weights, routing, b_gate_up, formula, interleaved, x.dtype, keep)
    del codes, of_weights
    codes = quantise_rows(h, "rowwise", False, routing.starts)
    fp8.hand(codes, "h", routing.row)
    del h
    of_weights = _of_weights("w_down", w_down, s_down, keep_codes)
    y: torch.Tensor = kernels.down_of_codes(codes, of_weights, routing, b_down, x.dtype)
    return y, pre


def _of_weights(name: str, weight: torch.Tensor, scales: torch.Tensor | None, keep: bool) -> Quantised:
    def make() -> Quantised:
        return quantise_rows(weight, "rowwise", True) if scales is None else Quantised(weight, scales)

    quantised = find(weight, "rowwise", make) if keep else make()
    fp8.hand(quantised, name)
    return quantised
