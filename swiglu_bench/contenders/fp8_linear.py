"""Linear layers whose products take fp8 operands, quantised by the definition; imported by builds only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from swiglu_bench.cases.cases import Precision
from swiglu_bench.cases.fp8 import BLOCK, Quantised, Rows, quantise

Multiply = Callable[[Quantised, Quantised, bool], Tensor]
"""(a [m, k], b [n, k], whether b is a weight) -> a b^T in bf16; a's groups, and b's, are along k."""


@dataclass
class ScaledLinear:
    """What its operands are called, how they are multiplied, and where their codes go while somebody looks."""

    x: str
    weight: str
    upstream: str
    precision: Precision
    multiply: Multiply
    quantised_dw: bool = True
    """Whether the weight's gradient has fp8 operands, too; else it is a bf16 product."""
    watched: dict[str, Quantised] | None = None

    def quantise(self, value: Tensor, name: str) -> Quantised:
        """Codes and scales, which are handed over."""
        found = quantise(value, self.precision, name)
        if self.watched is not None:
            self.watched[name] = found
        return found

    def infer(self, x: Tensor, weight: Quantised) -> Tensor:
        """x [..., k] times a weight that is quantised already."""
        if self.watched is not None:
            self.watched[self.weight] = weight
        rows = x.reshape(-1, x.shape[-1])
        return self.multiply(self.quantise(rows, self.x), weight, True).unflatten(0, x.shape[:-1])

    def train(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [..., k] times weight [n, k], quantised in the call, with gradients."""
        product: Tensor = _Product.apply(self, x.reshape(-1, x.shape[-1]), weight)
        return product.unflatten(0, x.shape[:-1])


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: ScaledLinear, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return layer.multiply(layer.quantise(x, layer.x), layer.quantise(weight, layer.weight), True)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), layer = ctx.saved_tensors, ctx.layer
        dx = dw = None
        if ctx.needs_input_grad[1]:
            rows = layer.quantise(upstream, layer.upstream)
            dx = layer.multiply(rows, _transposed(layer.quantise(weight, f"{layer.weight}.T")), True)
        if ctx.needs_input_grad[2] and layer.quantised_dw:
            columns = (layer.quantise(upstream, f"{layer.upstream}.T"), layer.quantise(x, f"{layer.x}.T"))
            dw = layer.multiply(*map(_transposed, columns), False)
        elif ctx.needs_input_grad[2]:
            dw = upstream.T @ x
        return None, dx, dw


def _transposed(quantised: Quantised) -> Quantised:
    codes, scales = quantised
    return codes.mT.contiguous(), scales.mT.contiguous()


@dataclass
class GroupedLinear:
    """The linear layers of experts, for rows that are sorted by expert; the gradients of weights are bf16 products."""

    x: str
    weight: str
    upstream: str
    precision: Precision
    top_k: int
    watched: dict[str, Quantised] | None = None

    def quantise(self, value: Tensor, name: str, order: Tensor | None = None) -> Quantised:
        """Codes and scales, handed over too: of rows by (token, slot) pairs, of which `order` is each row's."""
        found = quantise(value, self.precision, name)
        if self.watched is not None and order is None:
            self.watched[name] = found
        elif self.watched is not None and order is not None:
            rows = Rows(0, order // self.top_k, order % self.top_k, self.top_k)
            rows.enter(name, found, self.watched, 0, len(order) // self.top_k)
        return found

    def infer(self, rows: Tensor, weight: Quantised, ends: Tensor, order: Tensor) -> Tensor:
        """Rows [pairs, k], those of an expert up to its end, times weights [experts, n, k] that are quantised."""
        if self.watched is not None:
            self.watched[self.weight] = weight
        return scaled_grouped_mm(self.quantise(rows, self.x, order), weight, ends)

    def train(self, rows: Tensor, weight: Tensor, ends: Tensor, order: Tensor) -> Tensor:
        """The same with weights that are quantised in the call, and gradients."""
        product: Tensor = _GroupedProduct.apply(self, rows, weight, ends, order)
        return product


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: GroupedLinear, rows: Tensor, weight: Tensor, ends: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight, ends, order)
        ctx.layer = layer
        return scaled_grouped_mm(layer.quantise(rows, layer.x, order), layer.quantise(weight, layer.weight), ends)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        (rows, weight, ends, order), layer = ctx.saved_tensors, ctx.layer
        d_rows = d_weight = None
        if ctx.needs_input_grad[1]:
            turned = _transposed(layer.quantise(weight, f"{layer.weight}.T"))
            d_rows = scaled_grouped_mm(layer.quantise(upstream, layer.upstream, order), turned, ends)
        if ctx.needs_input_grad[2]:
            d_weight = torch._grouped_mm(upstream.contiguous().T, rows, offs=ends)
        return None, d_rows, d_weight, None, None


def scaled_grouped_mm(rows: Quantised, weights: Quantised, ends: Tensor) -> Tensor:
    """torch._scaled_grouped_mm with full accumulation: [pairs, k] and [experts, n, k] -> [pairs, n] in bf16.

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

    def multiply(a: Quantised, b: Quantised, weight: bool) -> Tensor:
        (codes_a, scales_a), (codes_b, scales_b) = a, b
        # Scales are padded to rows of SCALES; else the codes are, too.
        scales_alone = hasattr(functional, "scaled_mm") and not torch.compiler.is_compiling()
        step = 16  # tokens, of a weight's gradient
        if precision is Precision.FP8_BLOCKWISE:
            step = SCALES * BLOCK if weight and not scales_alone else BLOCK
        short = -codes_a.shape[1] % step
        if short:
            codes_a, codes_b = (_padded(codes, short) for codes in (codes_a, codes_b))
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


def _padded(codes: Tensor, columns: int) -> Tensor:
    """With zeros behind each row; as bytes, for which every device can do that."""
    return torch.nn.functional.pad(codes.view(torch.uint8), (0, columns)).view(codes.dtype)


def deep_gemm(a: Quantised, b: Quantised, weight: bool) -> Tensor:
    """DeepGEMM's product of blocks of 128 and of 128 x 128, by the name that the installed version has."""
    import deep_gemm as package

    assert weight
    multiply = getattr(package, "fp8_gemm_nt", None) or package.gemm_fp8_fp8_bf16_nt
    (codes_a, scales_a), (codes_b, scales_b) = a, b
    out = torch.empty(len(codes_a), len(codes_b), dtype=torch.bfloat16, device=codes_a.device)
    multiply((codes_a.contiguous(), scales_a), (codes_b.contiguous(), scales_b), out)
    return out


def in_both_ways(
    train: Callable[..., Tensor], infer: Callable[..., Tensor], compiled: bool
) -> tuple[Callable[..., Tensor], ...]:
    """The forward with gradients and without, both under torch.compile if asked."""
    ways = train, infer
    return tuple(torch.compile(way, fullgraph=True, dynamic=False) for way in ways) if compiled else ways


class QuantisedWeight:
    """A weight's codes, quantised anew when the weight changes."""

    def __init__(self, weight: Tensor, quantiser: Callable[[Tensor], Quantised]) -> None:
        self._weight, self._quantiser = weight, quantiser
        self._version = -1
        self._quantised: Quantised | None = None

    def __call__(self) -> Quantised:
        """Codes and scales of the weight as it is now."""
        if self._quantised is None or self._version != self._weight._version:
            self._quantised = self._quantiser(self._weight.detach())
            self._version = self._weight._version
        return self._quantised
