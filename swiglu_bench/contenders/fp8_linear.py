"""Linear layers whose products take fp8 operands, quantised by the definition; imported by builds only."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from swiglu_bench.cases.cases import Precision
from swiglu_bench.cases.fp8 import BLOCK, Quantised, Rows, quantise

Multiply = Callable[[Quantised, Quantised, bool, Tensor | None], Tensor]
"""(a [m, k], b [n, k], whether b is a weight, None) -> a b^T in bf16; a's groups, and b's, are along k. Of experts
(a, b [experts, n, k], True, where each expert's rows of a end)."""


@dataclass
class ScaledLinear:
    """What its operands are called, how they are multiplied, and where their codes go while somebody looks.

    Of experts, rows are sorted by expert: `ends` says where those of each end, `order` which pair of a token and one of
    its `top_k` experts each is.
    """

    x: str
    weight: str
    upstream: str
    precision: Precision
    multiply: Multiply
    quantised_dw: bool = True
    """Whether the weight's gradient has fp8 operands, too; else it is a bf16 product, as it is of experts."""
    top_k: int = 0
    watched: dict[str, Quantised] | None = None

    def quantise(self, value: Tensor, name: str, order: Tensor | None = None) -> Quantised:
        """Codes and scales, which are handed over."""
        found = quantise(value, self.precision, name)
        if self.watched is not None and order is None:
            self.watched[name] = found
        elif self.watched is not None and order is not None:
            rows = Rows(0, order // self.top_k, order % self.top_k, self.top_k)
            rows.enter(name, found, self.watched, 0, len(order) // self.top_k)
        return found

    def infer(self, x: Tensor, weight: Quantised, ends: Tensor | None = None, order: Tensor | None = None) -> Tensor:
        """x [rows, k] times a weight that is quantised already."""
        if self.watched is not None:
            self.watched[self.weight] = weight
        return self.multiply(self.quantise(x, self.x, order), weight, True, ends)

    def train(self, x: Tensor, weight: Tensor, ends: Tensor | None = None, order: Tensor | None = None) -> Tensor:
        """x [rows, k] times weight [n, k] or [experts, n, k], quantised in the call, with gradients."""
        return _Product.apply(self, x, weight, ends, order)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, layer: ScaledLinear, x: Tensor, weight: Tensor, ends: Tensor | None, order: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight, ends, order)
        ctx.layer = layer
        return layer.multiply(layer.quantise(x, layer.x, order), layer.quantise(weight, layer.weight), True, ends)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight, ends, order), layer = ctx.saved_tensors, ctx.layer
        dx = dw = None
        if ctx.needs_input_grad[1]:
            rows = layer.quantise(upstream, layer.upstream, order)
            dx = layer.multiply(rows, _transposed(layer.quantise(weight, f"{layer.weight}.T")), True, ends)
        if ctx.needs_input_grad[2] and layer.quantised_dw:
            columns = (layer.quantise(upstream, f"{layer.upstream}.T"), layer.quantise(x, f"{layer.x}.T"))
            dw = layer.multiply(*map(_transposed, columns), False, None)
        elif ctx.needs_input_grad[2] and ends is None:
            dw = upstream.T @ x
        elif ctx.needs_input_grad[2]:
            dw = torch._grouped_mm(upstream.contiguous().T, x, offs=ends)
        return None, dx, dw, None, None


def _transposed(quantised: Quantised) -> Quantised:
    codes, scales = quantised
    return codes.mT.contiguous(), scales.mT.contiguous()


def scaled_grouped_mm(rows: Quantised, weights: Quantised, weight: bool, ends: Tensor | None) -> Tensor:
    """torch._scaled_grouped_mm with full accumulation.

    Groups of any size: rows step by k bytes, a multiple of 16, so that every group begins where TMA can read it.
    """
    (codes, scales), (of_weights, weight_scales) = rows, weights
    return torch._scaled_grouped_mm(
        codes, of_weights.mT, scales.flatten(), weight_scales.flatten(1), offs=ends, out_dtype=torch.bfloat16
    )


SCALES = 4
"""cuBLAS reads the scales of 128 x 128 in rows of a multiple of this, which torch._scaled_mm does not check."""


def scaled_mm(precision: Precision) -> Multiply:
    """torch._scaled_mm with full accumulation; by blocks torch.nn.functional.scaled_mm where there is one.

    Not in what is compiled: Dynamo of torch 2.11 cannot trace it.
    """
    functional = torch.nn.functional

    def multiply(a: Quantised, b: Quantised, weight: bool, ends: Tensor | None) -> Tensor:
        (codes_a, scales_a), (codes_b, scales_b) = a, b
        # Scales are padded to rows of SCALES; else the codes are, too.
        scales_alone = hasattr(functional, "scaled_mm") and not torch.compiler.is_compiling()
        step = 16  # tokens, of a weight's gradient
        if precision is Precision.FP8_BLOCKWISE:
            step = SCALES * BLOCK if weight and not scales_alone else BLOCK
        short = -codes_a.shape[1] % step
        if short:  # zeros behind each row; as bytes, for which every device can do that
            codes_a, codes_b = (
                functional.pad(codes.view(torch.uint8), (0, short)).view(codes.dtype) for codes in (codes_a, codes_b)
            )
        codes_a, codes_b = codes_a.contiguous(), codes_b.contiguous().T
        if precision is Precision.FP8_TENSORWISE:
            scales_a, scales_b = scales_a.reshape(()), scales_b.reshape(())
        elif precision is Precision.FP8_ROWWISE:
            scales_a, scales_b = scales_a.flatten()[:, None], scales_b.flatten()[None]
        else:
            blocks = (0, codes_a.shape[1] // BLOCK - scales_a.shape[1])
            scales_a, scales_b = (functional.pad(scales, blocks) for scales in (scales_a, scales_b))
            scales_a = scales_a.T.contiguous().T
            if weight and scales_alone:
                scales_b = functional.pad(scales_b, (0, -scales_b.shape[1] % SCALES)).T
                kinds = functional.ScalingType
                return functional.scaled_mm(
                    codes_a, codes_b, scales_a, kinds.BlockWise1x128, scales_b, kinds.BlockWise128x128
                )
            scales_b = scales_b.T if weight else scales_b.T.contiguous()
        return torch._scaled_mm(codes_a, codes_b, scale_a=scales_a, scale_b=scales_b, out_dtype=torch.bfloat16)

    return multiply


def deep_gemm(a: Quantised, b: Quantised, weight: bool, ends: Tensor | None) -> Tensor:
    """DeepGEMM's product of blocks of 128 and of 128 x 128, by the name that the installed version has."""
    import deep_gemm as package

    assert weight
    multiply = getattr(package, "fp8_gemm_nt", None) or package.gemm_fp8_fp8_bf16_nt
    (codes_a, scales_a), (codes_b, scales_b) = a, b
    out = torch.empty(len(codes_a), len(codes_b), dtype=torch.bfloat16, device=codes_a.device)
    multiply((codes_a.contiguous(), scales_a), (codes_b.contiguous(), scales_b), out)
    return out


def operands(weights: Sequence[Tensor], codes_of: Callable[[int, Tensor], Quantised]) -> Callable[[], Sequence[Any]]:
    """What calls multiply by: the weights in training, else their codes, quantised anew when a weight changes."""
    kept: dict[int, tuple[int, Quantised]] = {}

    def given() -> Sequence[Any]:
        if torch.is_grad_enabled():
            return weights
        for number, weight in enumerate(weights):
            if number not in kept or kept[number][0] != weight._version:
                kept[number] = weight._version, codes_of(number, weight.detach())
        return [kept[number][1] for number in range(len(weights))]

    return given
