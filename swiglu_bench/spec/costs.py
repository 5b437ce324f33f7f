"""What a case costs by arithmetic alone: operations, fewest bytes, matrix products, memory. No torch in here.

Legend for products: C[m, n] = A[m, k] B[k, n], 2 m n k operations. T tokens, H hidden, I intermediate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from swiglu_bench.spec.cases import ACTIVATIONS, WEIGHTS, Case, Mode, Scope

Product = tuple[int, int, int]
"""(m, n, k) of one matrix product."""
Amount = TypeVar("Amount", int, list[Product])

TRUTH_CHUNK = 2048
"""Tokens that the fp64 reference computes at a time."""


@dataclass(frozen=True)
class Footprint:
    """Memory of one forward and backward by arithmetic, counted in whole tensors of the case's dtype.

    `saved` counts [T, I] tensors held between forward and backward beyond inputs, weights and output. `phases` lists
    the candidates for the peak above inputs and weights (the output included), each as the numbers of [T, I], [T, H]
    and [I, H] tensors alive at once; the peak is the largest of them.
    """

    saved: int
    phases: tuple[tuple[int, int, int], ...]


def products(case: Case, gradients: tuple[str, ...]) -> list[Product]:
    """The bare matrix products of a case, from which its matmul limit is computed; gate and up are one packed product.

    `gradients` says which gradients the backward must yield; the products for others are left out.
    """
    tokens, hidden, intermediate = case.tokens, case.shape.hidden, case.shape.intermediate
    if case.scope is Scope.ACTIVATION:
        return []
    forward = [(tokens, 2 * intermediate, hidden)]
    backward: list[Product] = []
    if "x" in gradients:
        backward.append((tokens, hidden, 2 * intermediate))
    if "w_gate" in gradients:
        backward.append((2 * intermediate, hidden, tokens))
    if case.scope is Scope.MLP:
        forward.append((tokens, hidden, intermediate))
        if gradients:
            backward.append((tokens, intermediate, hidden))
        if "w_down" in gradients:
            backward.append((hidden, intermediate, tokens))
    return _in_mode(case.mode, forward, backward)


def _in_mode(mode: Mode, forward: Amount, backward: Amount) -> Amount:
    return {Mode.FORWARD: forward, Mode.BACKWARD: backward, Mode.STEP: forward + backward}[mode]


def flops(case: Case, gradients: tuple[str, ...]) -> int:
    """Floating-point operations of the case's products, plus the gate's: 5 an element forward, 12 backward."""
    gate = case.tokens * case.shape.intermediate * _in_mode(case.mode, 5, 12)
    return sum(2 * m * n * k for m, n, k in products(case, gradients)) + gate


def min_bytes(case: Case, gradients: tuple[str, ...]) -> int:
    """Fewest bytes to move through device memory: each input read once, each output written once.

    Backward reads the upstream gradient, activations and weights; what is saved for it is a choice and not counted.
    """
    size = tensor_elements(case)
    forward = sum(size[name] for name in (*ACTIVATIONS[case.scope], *WEIGHTS[case.scope], "output"))
    backward = forward + sum(size[name] for name in gradients)
    return _in_mode(case.mode, forward, backward) * case.dtype.bytes


def longest_sum(case: Case) -> int:
    """Number of terms in the longest sum behind an output or gradient of the case; fp32 rounding grows with it."""
    if case.scope is Scope.ACTIVATION:
        return 1
    sums = [case.shape.hidden, 2 * case.shape.intermediate]
    return max(sums if case.mode is Mode.FORWARD else [*sums, case.tokens])


def tensor_elements(case: Case) -> dict[str, int]:
    """Elements of every named tensor of a case, `output` included."""
    tokens, hidden, intermediate = case.tokens, case.shape.hidden, case.shape.intermediate
    return {
        "x": tokens * hidden,
        **dict.fromkeys(("gate", "up"), tokens * intermediate),
        **dict.fromkeys(("w_gate", "w_up", "w_down"), hidden * intermediate),
        "output": tokens * (hidden if case.scope is Scope.MLP else intermediate),
    }


def predicted_memory(case: Case, footprint: Footprint) -> tuple[int, int]:
    """(saved, peak) bytes of one forward and backward that follow from a footprint."""
    tokens, hidden, intermediate = case.tokens, case.shape.hidden, case.shape.intermediate
    unit = (tokens * intermediate, tokens * hidden, intermediate * hidden)
    peak = max(sum(count * size for count, size in zip(phase, unit, strict=True)) for phase in footprint.phases)
    return footprint.saved * unit[0] * case.dtype.bytes, peak * case.dtype.bytes


def judge_bytes(case: Case) -> int:
    """Device memory that judging a case takes: its tensors, eager's results on them, and the fp64 truths at hand."""
    size, given = tensor_elements(case), _given(case)
    results = size["output"] + (given if case.mode is not Mode.FORWARD else 0)
    chunk = 8 * min(case.tokens, TRUTH_CHUNK) * case.shape.intermediate
    return (given + size["output"] + 3 * results + _work(case)) * case.dtype.bytes + (3 * results + given + chunk) * 8


def contender_bytes(case: Case) -> int:
    """Device memory that a contender's process takes: tensors, work, and its results twice, once for the judge."""
    size, given = tensor_elements(case), _given(case)
    results = size["output"] + (given if case.mode is not Mode.FORWARD else 0)
    return (given + size["output"] + 2 * results + _work(case)) * case.dtype.bytes


def _given(case: Case) -> int:
    """Elements of the activations and weights."""
    size = tensor_elements(case)
    return sum(size[name] for name in ACTIVATIONS[case.scope] + WEIGHTS[case.scope])


def _work(case: Case) -> int:
    """Elements that eager's forward and backward hold at most beside inputs and results."""
    return 6 * case.tokens * case.shape.intermediate
