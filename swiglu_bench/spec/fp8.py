"""fp8 by definition: the quantiser of each recipe, and SwiGLU on quantised operands. Plain PyTorch, never optimised.

Codes are float8_e4m3fn. For each group of values that has a scale of its own, in fp32, amax at least 2^-100:

    inverse = 448 / amax,  code = round to nearest even of clamp(value * inverse, -448, 448),  scale = amax * (1 / 448)

and a code stands for code * scale. It is torchao's and DeepGEMM's arithmetic: a division for a group, none for a value.
Groups lie along the sum of the product that the operand is for:

    tensorwise  one group: the whole matrix (`torch._scaled_mm`; torchao's float8 recipe "tensorwise")
    rowwise     a row of either operand: of x a token's, of a weight an output feature's (torchao's "rowwise")
    blockwise   of activations and gradients 128 in a row, of weights 128 x 128 (DeepSeek-V3, arXiv:2412.19437, 3.3)

A product along another dimension has groups of its own: its operand's name ends in ".T". x and w_gate are quantised
along hidden for the forward, x.T along tokens for dW_gate, w_gate.T along intermediate for dX.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from swiglu_bench.spec.cases import Case, Precision, Scope
from swiglu_bench.spec.implementation import Step
from swiglu_bench.spec.problem import Problem

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
SMALLEST = 2.0**-100
"""Stands for a largest magnitude that is smaller, 0 too: neither its scale nor the inverse leaves fp32."""
BLOCK = 128

Quantised = tuple[Tensor, Tensor]
"""Codes [rows, columns], and scales with as many rows and columns as there are groups along each."""
Quantiser = Callable[[Tensor, Precision, str], Quantised]
Operand = Callable[[str, Tensor], Tensor]
"""An operand's name and unquantised values -> the values that its product multiplies."""


def quantise(value: Tensor, precision: Precision, name: str) -> Quantised:
    """Codes and fp32 scales of an operand [rows, columns] by its name; the last blocks may be smaller ones."""
    rows, columns = value.shape
    groups = _groups(value, precision, name)
    amax = groups.abs().amax((1, 3)).clamp(min=SMALLEST)
    inverse = torch.full_like(amax, LARGEST) / amax  # LARGEST / amax is a reciprocal and a product, of other bits
    codes = (groups * inverse[:, None, :, None]).clamp(-LARGEST, LARGEST).to(E4M3)
    return codes.flatten(0, 1).flatten(1)[:rows, :columns], amax * (1 / LARGEST)


def largest(value: Tensor, precision: Precision, name: str) -> Tensor:
    """The largest magnitude in each group, in fp32."""
    return _groups(value, precision, name).abs().amax((1, 3))


def dequantise(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """The values that codes stand for."""
    for dim, size in enumerate(codes.shape):
        if scales.shape[dim] not in (1, size):
            scales = scales.repeat_interleave(BLOCK, dim).narrow(dim, 0, size)
    return codes.to(dtype) * scales.to(dtype)


def _groups(value: Tensor, precision: Precision, name: str) -> Tensor:
    """fp32 [groups down, rows of a group, groups across, columns of a group], with zeros where the last ones end."""
    rows, columns = value.shape
    high, wide = _group(precision, name, rows, columns)
    padded = torch.nn.functional.pad(value.float(), (0, -columns % wide, 0, -rows % high))
    return padded.unflatten(0, (-1, high)).unflatten(2, (-1, wide))


def _group(precision: Precision, name: str, rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns of a group."""
    if precision is Precision.FP8_TENSORWISE:
        return max(rows, 1), max(columns, 1)
    blockwise = precision is Precision.FP8_BLOCKWISE
    if blockwise and name.startswith("w_"):
        return BLOCK, BLOCK
    if name.endswith(".T"):
        return BLOCK if blockwise else max(rows, 1), 1
    return 1, BLOCK if blockwise else max(columns, 1)


def operand_sizes(case: Case) -> dict[str, tuple[int, int]]:
    """Sizes of all operands that a case's products may have, by name.

    There are w_gate, w_up, d_gate and d_up, each with its product, or w_gate_up and d_gate_up, with one for both.
    """
    tokens, hidden, intermediate = case.tokens, case.shape.hidden, case.shape.intermediate
    of_hidden, of_weight, of_both = (tokens, hidden), (intermediate, hidden), (2 * intermediate, hidden)
    forward = {"x": of_hidden, "w_gate": of_weight, "w_up": of_weight, "w_gate_up": of_both}
    backward = dict.fromkeys(("d_gate", "d_up", "d_gate.T", "d_up.T"), (tokens, intermediate))
    backward |= dict.fromkeys(("d_gate_up", "d_gate_up.T"), (tokens, 2 * intermediate))
    backward |= {"x.T": of_hidden, "w_gate.T": of_weight, "w_up.T": of_weight, "w_gate_up.T": of_both}
    if case.scope is Scope.MLP:
        forward |= {"h": (tokens, intermediate), "w_down": (hidden, intermediate)}
        backward |= {"upstream": of_hidden, "w_down.T": (hidden, intermediate), "upstream.T": of_hidden}
        backward |= {"h.T": (tokens, intermediate)}
    return forward | (backward if case.mode != "forward" else {})


def scale_size(precision: Precision, name: str, size: tuple[int, int]) -> tuple[int, int]:
    """The size of an operand's scales."""
    high, wide = _group(precision, name, *size)
    return -(-size[0] // high), -(-size[1] // wide)


def required(case: Case, joint: bool) -> tuple[str, ...]:
    """The operands that every contender of a precision quantises: those of the forward's products."""
    return (
        "x",
        *(("w_gate_up",) if joint else ("w_gate", "w_up")),
        *(("h", "w_down") if case.scope is Scope.MLP else ()),
    )


def swiglu(
    x: Tensor, weights: Mapping[str, Tensor], upstream: Tensor | None, operand: Operand, joint: bool
) -> dict[str, Tensor]:
    """The output and, given the upstream gradient, every gradient, in x's dtype, with operands as `operand` has them.

    `joint`: gate and up are one product, quantised as one matrix. Sums are in the dtype that `operand` returns.
    """

    def product(a: str, b: str, first: Tensor, second: Tensor) -> Tensor:
        """first @ second^T"""
        one, other = operand(a, first), operand(b, second)
        if a.endswith(".T"):
            one, other = one.T, other.T
        elif b.endswith(".T"):
            other = other.T
        return (one @ other.T).to(x.dtype)

    if joint:
        w_gate_up = torch.cat([weights["w_gate"], weights["w_up"]])
        gate, up = product("x", "w_gate_up", x, w_gate_up).chunk(2, 1)
    else:
        gate, up = (product("x", name, x, weights[name]) for name in ("w_gate", "w_up"))
    silu = torch.nn.functional.silu(gate)
    hidden = silu * up
    mlp = "w_down" in weights
    answer = {"output": product("h", "w_down", hidden, weights["w_down"]) if mlp else hidden}
    if upstream is None:
        return answer
    d_hidden = upstream
    if mlp:
        d_hidden = product("upstream", "w_down.T", upstream, weights["w_down"])
        answer["w_down"] = product("upstream.T", "h.T", upstream, hidden)
    sigmoid = torch.sigmoid(gate)
    d_up, d_gate = d_hidden * silu, d_hidden * up * (sigmoid * (1 + gate * (1 - sigmoid)))
    if joint:
        d_gate_up = torch.cat([d_gate, d_up], 1)
        answer["x"] = product("d_gate_up", "w_gate_up.T", d_gate_up, w_gate_up)
        answer["w_gate"], answer["w_up"] = product("d_gate_up.T", "x.T", d_gate_up, x).chunk(2)
        return answer
    answer["x"] = product("d_gate", "w_gate.T", d_gate, weights["w_gate"])
    answer["x"] += product("d_up", "w_up.T", d_up, weights["w_up"])
    return answer | {"w_gate": product("d_gate.T", "x.T", d_gate, x), "w_up": product("d_up.T", "x.T", d_up, x)}


class _Definition(torch.autograd.Function):
    """`swiglu` of x [..., hidden] as autograd calls it; the backward computes everything again."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., dict[str, Tensor]], x: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        ctx.run = run
        return run(x.flatten(0, -2), weights, None)["output"].unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        found = ctx.run(x.flatten(0, -2), weights, upstream.flatten(0, -2))
        return None, found.pop("x").view_as(x), *(found[name] for name in NAMES[: len(weights)])


NAMES = ("w_gate", "w_up", "w_down")


def makes_dw(name: str) -> bool:
    """Whether it is an operand of a product that makes the gradient of a weight."""
    return name.endswith(".T") and not name.startswith("w_")


def defined(problem: Problem, joint: bool = False, quantised_dw: bool = True, quantiser: Quantiser = quantise) -> Step:
    """x -> output by the definition, with its gradients; in a problem of fp64 all but the quantisation is exact.

    Without `quantised_dw`, operands of products that make gradients of weights are not quantised.
    """
    weights = tuple(problem.weights.values())
    wide, precision = torch.promote_types(weights[0].dtype, torch.float32), problem.case.precision
    watched: dict[str, Quantised] | None = None

    def operand(name: str, value: Tensor) -> Tensor:
        if makes_dw(name) and not quantised_dw:
            return value.to(wide)
        codes, scales = quantiser(value, precision, name)
        if watched is not None:
            watched[name] = codes, scales
        return dequantise(codes, scales, wide)

    def run(x: Tensor, given: Sequence[Tensor], upstream: Tensor | None) -> dict[str, Tensor]:
        return swiglu(x, dict(zip(NAMES, given, strict=False)), upstream, operand, joint)

    def hand_over(into: dict[str, Quantised] | None) -> None:
        nonlocal watched
        watched = into

    return Step(lambda x: _Definition.apply(run, x, *weights), hand_over=hand_over)
