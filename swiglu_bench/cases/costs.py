"""What a case costs by arithmetic alone: operations, fewest bytes, matrix products, memory. No torch in here.

Legend for products: C[m, n] = A[m, k] B[k, n], 2 m n k operations. T tokens, H hidden, I intermediate. Experts multiply
T * top_k rows, each by its expert's weights: the operations are those of dense products with as many rows. Those of
experts on other ranks are not counted.
"""

from dataclasses import dataclass
from typing import TypeVar

from swiglu_bench.cases.cases import ACTIVATIONS, BIASES, INDEX, WEIGHTS, Case, Mode, Scope

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
    of_rows, of_weights = products_by_kind(case, gradients)
    return of_rows + of_weights


def products_by_kind(case: Case, gradients: tuple[str, ...]) -> tuple[list[Product], list[Product]]:
    """The same in two lists: products of rows with weights, and those that sum over rows to a weight's gradient."""
    rows, hidden, intermediate = case.rows, case.shape.hidden, case.shape.intermediate
    if case.scope is Scope.ACTIVATION:
        return [], []
    forward, backward, of_weights = [(rows, 2 * intermediate, hidden)], list[Product](), list[Product]()
    if "x" in gradients:
        backward.append((rows, hidden, 2 * intermediate))
    if "w_gate" in gradients:
        of_weights.append((2 * intermediate, hidden, rows))
    if case.scope is not Scope.GLU:
        forward.append((rows, hidden, intermediate))
        if gradients:
            backward.append((rows, intermediate, hidden))
        if "w_down" in gradients:
            of_weights.append((hidden, intermediate, rows))
    return _in_mode(case.mode, forward, backward), _in_mode(case.mode, [], of_weights)


def _in_mode(mode: Mode, forward: Amount, backward: Amount) -> Amount:
    return {Mode.FORWARD: forward, Mode.BACKWARD: backward, Mode.STEP: forward + backward}[mode]


def flops(case: Case, gradients: tuple[str, ...]) -> int:
    """Floating-point operations of all micro-batches: products, and the gate's 5 an element forward, 12 backward."""
    gate = case.rows * case.shape.intermediate * _in_mode(case.mode, 5, 12)
    return case.accumulate * (sum(2 * m * n * k for m, n, k in products(case, gradients)) + gate)


def min_bytes(
    case: Case, gradients: tuple[str, ...], idle_experts: int | None = None, weight_bytes: int | None = None
) -> int:
    """Fewest bytes to move through device memory: each input read once, each output written once, in each micro-batch.

    Backward reads the upstream gradient, activations and weights; what is saved for it is a choice and not counted.
    The weights of experts without a token are not read; `idle_experts` of them or, where that is not known, as many as
    there are more experts than rows. `weight_bytes` are those of an element of a weight, where it is not in the dtype.
    """
    size = tensor_elements(case)
    if case.shape.experts:
        count = case.shape.experts.count
        idle = max(0, count - case.rows) if idle_experts is None else idle_experts
        size |= {name: size[name] // count * (count - idle) for name in WEIGHTS[case.scope] + BIASES[case.scope]}
    weights = sum(size[name] for name in WEIGHTS[case.scope]) * (weight_bytes or case.dtype.bytes)
    others = (*ACTIVATIONS[case.scope], *(BIASES[case.scope] if case.shape.extras.bias else ()), "output")
    forward = weights + sum(size[name] for name in others) * case.dtype.bytes
    backward = forward + sum(tensor_elements(case)[name] for name in gradients) * case.dtype.bytes
    return case.accumulate * _in_mode(case.mode, forward, backward)


def longest_sum(case: Case) -> int:
    """Number of terms in the longest sum behind an output or gradient of the case; fp32 rounding grows with it."""
    if case.scope is Scope.ACTIVATION:
        return 1
    sums = [case.shape.hidden, 2 * case.shape.intermediate * (case.shape.experts.top_k if case.shape.experts else 1)]
    return max(sums if case.mode is Mode.FORWARD else [*sums, case.tokens])


def tensor_elements(case: Case) -> dict[str, int]:
    """Elements of every named tensor of a case, `output` included."""
    tokens, hidden, intermediate = case.tokens, case.shape.hidden, case.shape.intermediate
    return {
        "x": tokens * hidden,
        **dict.fromkeys(("gate", "up"), tokens * intermediate),
        **dict.fromkeys((INDEX, "top_k_weights"), case.pairs),
        **dict.fromkeys(("w_gate", "w_up", "w_down"), experts_of(case) * hidden * intermediate),
        **dict.fromkeys(("bias_gate", "bias_up"), experts_of(case) * intermediate),
        "bias_down": experts_of(case) * hidden,
        "output": tokens * (hidden if case.scope in {Scope.MLP, Scope.EXPERTS} else intermediate),
    }


def experts_of(case: Case) -> int:
    """The number of experts; 1 of a dense block."""
    return case.shape.experts.count if case.shape.experts else 1


def predicted_memory(case: Case, footprint: Footprint) -> tuple[int, int]:
    """(saved, peak) bytes of one forward and backward that follow from a footprint."""
    tokens, hidden, intermediate = case.tokens, case.shape.hidden, case.shape.intermediate
    unit = (tokens * intermediate, tokens * hidden, intermediate * hidden)
    peak = max(sum(count * size for count, size in zip(phase, unit, strict=True)) for phase in footprint.phases)
    return footprint.saved * unit[0] * case.dtype.bytes, peak * case.dtype.bytes


def judge_bytes(case: Case) -> int:
    """Device memory that judging a case takes: its tensors, eager's results on them, and the fp64 truths at hand."""
    size, given, results = _sizes(case)
    chunk = 8 * min(case.tokens, TRUTH_CHUNK) * case.shape.intermediate
    if case.precision:  # whole tensors: groups run along tokens, too; of experts a block's, and all codes, a byte each
        rows = case.tokens * (12 * case.shape.intermediate + 4 * case.shape.hidden)
        chunk = 8 * case.tokens * case.shape.intermediate + rows + 3 * given // experts_of(case)
        chunk += (given + _work(case)) // 4 if case.shape.experts else 0
    in_fp64 = 3 * results + given // experts_of(case) + chunk  # weights, one expert's at a time
    bare = 3 * given if case.shape.experts else 0  # operands and results of the bare grouped products
    return (given + size["output"] + 3 * results + _work(case) + bare) * case.dtype.bytes + in_fp64 * 8


def contender_bytes(case: Case, layers: int = 1) -> int:
    """Device memory that a contender's process takes, with its letterboxes, which are the judge's.

    Weights: the case's, those in its own layout, others for a model's use, and handed over. Results: of a call and of
    the one before, filled with NaN where they may come to lie, handed over, and their sums. Each further one of the
    `layers` in a CUDA graph has inputs, weights, those in its own layout and results.
    """
    size, given, results = _sizes(case)
    weights = sum(size[name] for name in WEIGHTS[case.scope])
    codes = given if case.precision else 0
    further = (layers - 1) * (given + weights + codes + size["output"] + results + _work(case))
    return (3 * given + weights + codes + size["output"] + 5 * results + _work(case) + further) * case.dtype.bytes


def use_bytes(case: Case) -> int:
    """Device memory that the scenarios of a model's use take, beside the case that is there in both processes.

    The contender has a second layer, the gradients of both and other weights; the judge two layers in fp32 (of fp32 in
    fp64) with their gradients, the results in it, in the dtype and handed over, and one of them in fp64 several times.
    """
    size, given, results = _sizes(case)
    weights, trained = sum(size[name] for name in WEIGHTS[case.scope]), 1 + (case.mode is not Mode.FORWARD)
    wide = 2 * case.dtype.bytes
    largest = max(size[name] for name in ("output", *(WEIGHTS[case.scope] if trained > 1 else ())))
    contender = (2 * trained + 2) * weights + 4 * given + 4 * results + 2 * _work(case)
    judge = wide * (2 * trained * weights + 4 * results + 2 * _work(case)) + 8 * 4 * largest
    return contender * case.dtype.bytes + judge + 4 * results * case.dtype.bytes


def _sizes(case: Case) -> tuple[dict[str, int], int, int]:
    """Elements of every tensor, of the activations and weights together, and of the results."""
    size = tensor_elements(case)
    given = sum(size[name] for name in ACTIVATIONS[case.scope] + WEIGHTS[case.scope])
    return size, given, size["output"] + (given if case.mode is not Mode.FORWARD else 0)


def _work(case: Case) -> int:
    """Elements that eager's forward and backward hold at most beside inputs and results."""
    return case.pairs * (6 * case.shape.intermediate + (3 * case.shape.hidden if case.shape.experts else 0))
