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

A mixture of experts is the same block for each expert, with its weights and its tokens' rows. A block's upstream
gradient is the output's times the routing weight. Products that sum over an expert's tokens, those that make gradients
of its weights, have operands in the case's dtype.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from swiglu_bench.cases.cases import Case, Precision, Scope
from swiglu_bench.cases.definition import by_expert
from swiglu_bench.cases.implementation import Step
from swiglu_bench.cases.problem import Problem

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
SMALLEST = 2.0**-100
"""Stands for a largest magnitude that is smaller, 0 too: neither its scale nor the inverse leaves fp32."""
BLOCK = 128

Quantised = tuple[Tensor, Tensor]
"""Codes [..., rows, columns], and scales with as many rows and columns as there are groups along each."""
Quantiser = Callable[[Tensor, Precision, str], Quantised]
Operand = Callable[[str, Tensor], Tensor]
"""An operand's name and unquantised values -> the values that its product multiplies."""


def quantise(value: Tensor, precision: Precision, name: str) -> Quantised:
    """Codes and fp32 scales of an operand [..., rows, columns] by its name; the last blocks may be smaller ones."""
    rows, columns = value.shape[-2:]
    groups = _groups(value, precision, name)
    amax = groups.abs().amax((-3, -1)).clamp(min=SMALLEST)
    inverse = torch.full_like(amax, LARGEST) / amax  # LARGEST / amax is a reciprocal and a product, of other bits
    codes = (groups * inverse[..., :, None, :, None]).clamp(-LARGEST, LARGEST).to(E4M3)
    return codes.flatten(-4, -3).flatten(-2)[..., :rows, :columns], amax * (1 / LARGEST)


def largest(value: Tensor, precision: Precision, name: str) -> Tensor:
    """The largest magnitude in each group, in fp32."""
    return _groups(value, precision, name).abs().amax((-3, -1))


def dequantise(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """The values that codes stand for."""
    for dim, size in enumerate(codes.shape):
        if scales.shape[dim] not in (1, size):
            scales = scales.repeat_interleave(BLOCK, dim).narrow(dim, 0, size)
    return codes.to(dtype) * scales.to(dtype)


def _groups(value: Tensor, precision: Precision, name: str) -> Tensor:
    """fp32 [..., groups down, rows of a group, groups across, columns of a group], zeros where the last ones end."""
    rows, columns = value.shape[-2:]
    high, wide = _group(precision, name, rows, columns)
    padded = torch.nn.functional.pad(value.float(), (0, -columns % wide, 0, -rows % high))
    return padded.unflatten(-2, (-(-rows // high), high)).unflatten(-1, (-(-columns // wide), wide))


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


def operand_sizes(case: Case) -> dict[str, tuple[int, ...]]:
    """Sizes of all operands that a case's products may have, by name.

    There are w_gate, w_up, d_gate and d_up, each with its product, or w_gate_up and d_gate_up, with one for both. Of
    experts, weights are [experts, ...], and all other operands but x have a row for each token and slot, in this order.
    """
    hidden, intermediate, experts = case.shape.hidden, case.shape.intermediate, case.shape.experts
    weights = dict.fromkeys(("w_gate", "w_up"), (intermediate, hidden)) | {"w_gate_up": (2 * intermediate, hidden)}
    rows = {"x": (case.tokens, hidden)}
    gradients = {f"d_{name}": (case.pairs, intermediate) for name in ("gate", "up")}
    gradients["d_gate_up"] = case.pairs, 2 * intermediate
    if case.scope is not Scope.GLU:
        weights["w_down"] = hidden, intermediate
        rows["h"], gradients["upstream"] = (case.pairs, intermediate), (case.pairs, hidden)
    each = (experts.count,) if experts else ()
    found: dict[str, tuple[int, ...]] = rows | {name: each + size for name, size in weights.items()}
    if case.mode == "forward":
        return found
    turned = [name for name in (found | gradients) if name in weights or not experts]
    found |= gradients
    return found | {f"{name}.T": found[name] for name in turned}


def scale_size(precision: Precision, name: str, size: tuple[int, ...]) -> tuple[int, ...]:
    """The size of an operand's scales."""
    *each, rows, columns = size
    high, wide = _group(precision, name, rows, columns)
    return (*each, -(-rows // high), -(-columns // wide))


def required(case: Case, joint: bool) -> tuple[str, ...]:
    """The operands that every contender of a precision quantises: those of the forward's products."""
    weights = ("w_gate_up",) if joint else ("w_gate", "w_up")
    return ("x", *weights) if case.scope is Scope.GLU else ("x", *weights, "h", "w_down")


def swiglu(
    x: Tensor, weights: Mapping[str, Tensor], upstream: Tensor | None, operand: Operand, joint: bool
) -> dict[str, Tensor]:
    """The output and, given the upstream gradient, every gradient, in x's dtype, with operands as `operand` has them.

    `joint`: gate and up are one product, quantised as one matrix. Sums are in the dtype that `operand` returns.
    """

    def product(a: str, b: str, first: Tensor, second: Tensor) -> Tensor:
        """first @ second^T"""
        left, right = operand(a, first), operand(b, second)
        if a.endswith(".T"):
            left, right = left.T, right.T
        elif b.endswith(".T"):
            right = right.T
        return (left @ right.T).to(x.dtype)

    first = {name: weights[f"w_{name}"] for name in ("gate", "up")}
    if joint:
        first = {"gate_up": torch.cat([*first.values()])}
    made = [product("x", f"w_{name}", x, weight) for name, weight in first.items()]
    gate, up = made[0].chunk(2, 1) if joint else made
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
    d_first = [torch.cat([d_gate, d_up], 1)] if joint else [d_gate, d_up]
    each = list(zip(first.items(), d_first, strict=True))
    dx = [product(f"d_{name}", f"w_{name}.T", gradient, weight) for (name, weight), gradient in each]
    dw = [product(f"d_{name}.T", "x.T", gradient, x) for (name, _), gradient in each]
    w_gate, w_up = dw[0].chunk(2) if joint else dw
    return answer | {"x": dx[0] if joint else dx[0] + dx[1], "w_gate": w_gate, "w_up": w_up}


class Rows(NamedTuple):
    """What an expert's block is made of."""

    expert: int
    token: Tensor
    """[rows] the token of each row of the block."""
    slot: Tensor
    """[rows] which of the token's experts it is."""
    top_k: int

    def of(self, name: str, whole: Quantised) -> Quantised:
        """The block's codes and scales of an operand of the mixture, which `operand_sizes` describes."""
        codes, scales = whole
        at = self._at(name)
        return codes.view(torch.uint8)[at].view(E4M3), scales[at]

    def enter(self, name: str, own: Quantised, into: dict[str, Quantised], experts: int, tokens: int) -> None:
        """Put the block's codes and scales of an operand where they belong among the mixture's."""
        weight = name.startswith("w_")
        size = (experts,) if weight else (tokens if name == "x" else tokens * self.top_k,)
        if name not in into:
            codes, scales = (part.new_zeros(size + (part.shape if weight else part.shape[1:])) for part in own)
            into[name] = codes, scales
        for whole, part in zip(into[name], own, strict=True):
            bits = (whole.view(torch.uint8), part.view(torch.uint8)) if part.dtype == E4M3 else (whole, part)
            bits[0][self._at(name)] = bits[1]

    def _at(self, name: str) -> int | Tensor:
        if name.startswith("w_"):
            return self.expert
        return self.token if name == "x" else self.token * self.top_k + self.slot


OperandOf = Callable[[Rows | None], Operand]
"""What an expert's block has as its operands; None: of a dense block, which is all there is."""


def compute(
    activations: Sequence[Tensor], weights: Mapping[str, Tensor], upstream: Tensor | None, operand_of: OperandOf,
    joint: bool,
) -> dict[str, Tensor]:  # fmt: skip
    """`swiglu` of a dense block's x, or of experts' x, top_k_index and top_k_weights."""
    x, *routing = activations
    if not routing:
        return swiglu(x, weights, upstream, operand_of(None), joint)
    index, routing_weights = routing
    answer = {"output": torch.zeros_like(x)}
    if upstream is not None:
        answer |= {"x": torch.zeros_like(x), "top_k_weights": torch.zeros_like(routing_weights)}
        answer |= {name: torch.zeros_like(value, dtype=x.dtype) for name, value in weights.items()}
    for number, (token, slot) in enumerate(by_expert(index, len(weights["w_gate"]))):
        own = {name: value[number].to(x.dtype) for name, value in weights.items()}
        weight = routing_weights[token, slot, None]
        d_rows = None if upstream is None else upstream[token]
        d_block = None if d_rows is None else (d_rows * weight).to(x.dtype)
        found = swiglu(x[token], own, d_block, operand_of(Rows(number, token, slot, index.shape[1])), joint)
        rows = found.pop("output")
        answer["output"].index_add_(0, token, (rows * weight).to(x.dtype))
        if d_rows is None:
            continue
        answer["x"].index_add_(0, token, found.pop("x"))
        answer["top_k_weights"][token, slot] = (d_rows * rows).sum(1).to(routing_weights.dtype)
        for name, value in found.items():
            answer[name][number] = value
    return answer


NAMES = ("w_gate", "w_up", "w_down")


class _Definition(torch.autograd.Function):
    """`compute` of activations [..., size] as autograd calls it; the backward computes everything again."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., dict[str, Tensor]], count: int, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.run, ctx.count = run, count
        x = tensors[0]
        return run(_flat(tensors[:count]), tensors[count:], None)["output"].unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        activations, weights = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        found = ctx.run(_flat(activations), weights, upstream.flatten(0, -2))
        first: list[Tensor | None] = [found.pop("x").view_as(activations[0])]
        if len(activations) > 1:
            first += [None, found.pop("top_k_weights").view_as(activations[2])]
        return None, None, *first, *(found[name] for name in NAMES[: len(weights)])


def _flat(activations: Sequence[Tensor]) -> list[Tensor]:
    return [value.flatten(0, -2) for value in activations]


def is_quantised(name: str, quantised_dx: bool, quantised_dw: bool) -> bool:
    """Whether an operand is quantised where those of products for gradients of activations, and of weights, are."""
    turned, weight = name.endswith(".T"), name.startswith("w_")
    if turned and not weight:  # of a product that makes the gradient of a weight
        return quantised_dw
    return quantised_dx if turned or name.startswith(("d_", "upstream")) else True


def defined(
    problem: Problem, joint: bool = False, quantised_dx: bool = True, quantised_dw: bool = True,
    quantiser: Quantiser = quantise,
) -> Step:  # fmt: skip
    """x -> output by the definition, with its gradients; in a problem of fp64 all but the quantisation is exact.

    Without `quantised_dx` or `quantised_dw`, operands of products that make gradients of activations or of weights are
    not quantised. Those of experts' weights never are.
    """
    weights = tuple(problem.weights.values())
    wide, precision = torch.promote_types(weights[0].dtype, torch.float32), problem.case.precision
    quantised_dw = quantised_dw and problem.case.scope is not Scope.EXPERTS
    watched: dict[str, Quantised] | None = None

    def run(activations: Sequence[Tensor], given: Sequence[Tensor], upstream: Tensor | None) -> dict[str, Tensor]:
        def operand_of(rows: Rows | None) -> Operand:
            def operand(name: str, value: Tensor) -> Tensor:
                if not is_quantised(name, quantised_dx, quantised_dw):
                    return value.to(wide)
                codes, scales = quantiser(value, precision, name)
                if watched is not None and rows is None:
                    watched[name] = codes, scales
                elif watched is not None and rows is not None:
                    rows.enter(name, (codes, scales), watched, len(given[0]), len(activations[0]))
                return dequantise(codes, scales, wide)

            return operand

        return compute(activations, dict(zip(NAMES, given, strict=False)), upstream, operand_of, joint)

    def hand_over(into: dict[str, Quantised] | None) -> None:
        nonlocal watched
        watched = into

    return Step(lambda *inputs: _Definition.apply(run, len(inputs), *inputs, *weights), hand_over=hand_over)
