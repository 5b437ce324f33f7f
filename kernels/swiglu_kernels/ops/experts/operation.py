"""swiglu_experts: a mixture of experts, each a SwiGLU block; out[token] is the weighted sum of its k experts' results.

Forward: the routing (`routing.py`), two grouped products, the first with the gate in its epilogue, and the sum over
each token's rows. In elements of x's dtype, for P rows (T k pairs and the padding), hidden H and intermediate I:

                       alive from forward to backward    peak forward            peak backward
    recompute=False    2 P I (gate and up)               3 P I, then P I + P H   3 P I + P H, then 3 P I beside the
                                                                                 gradient of w_gate_up, P I beside both
      retain_graph                                                               2 P I more
    recompute=True     nothing                           P I + P H               as without it

and 4 bytes for each pair and row. In fp8 kernels by hand sort the codes of x: P H / 2 more in the forward.

With precision="fp8-rowwise" the forward is that of `fp8_experts.py`, and y is kept as well (P H more), for the
gradients of the routing weights.

Backward: one product, d_out w_down, never stored, whose epilogue makes the gradients of gate and up (over the saved
ones where nobody else wants them), the weighted h and the routing weights' gradients; then d_x as a grouped product and
a sum over each token's rows, and the gradients of both weights. All sums are fp32 in a fixed order.

Where an `Exchange` is under way with other ranks (`parallel.py`), products with rows of tokens begin with the tiles
whose rows are here, the others' results are made before the own ones, and their dX before the weights' gradients.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from swiglu_kernels.ops.experts import choice, definition, fp8_experts, hopper_experts, portable_experts, portable_pairs
from swiglu_kernels.ops.experts.choice import PAIRS
from swiglu_kernels.ops.experts.portable_experts import row_dots, row_sums, slot_grads
from swiglu_kernels.ops.experts.routing import Routing, combine, new_routing, route, split
from swiglu_kernels.ops.fp8 import operation as fp8
from swiglu_kernels.ops.fp8.kept_codes import SUFFIX, KeptCodes
from swiglu_kernels.ops.gate.formula import Limit, check_formula, formula_of
from swiglu_kernels.ops.glu.block import needs_backward, new
from swiglu_kernels.runtime import autocast
from swiglu_kernels.runtime.backend import backend_for
from swiglu_kernels.runtime.checks import check_experts, check_option
from swiglu_kernels.runtime.main_grad import HALF, MARK, main_grad_of, stand_in
from swiglu_kernels.runtime.operator import call_and_keep, operator, register, save
from swiglu_kernels.runtime.shortcuts import door, plan
from swiglu_kernels.runtime.shortcuts.door import as_matrix, like_leading, of_matrix
from swiglu_kernels.runtime.shortcuts.series import Series

KERNELS: dict[str, ModuleType] = {"portable": portable_experts, "hopper": hopper_experts}
"""By what `backend` calls them; `routing.py` says what functions they have."""

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""Of the six floating-point tensors."""
Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""out, pre, y and five tensors of the routing."""


class Exchange(Protocol):
    """Brings other ranks' rows of x, or of d_out, and takes the results for them, while products run."""

    first: int
    """Tokens that are here from the beginning, the first ones."""

    def wait(self) -> None:
        """Let what is launched from now on wait for what is under way."""

    def results(self, columns: int) -> Tensor:
        """Return where all tokens' results are to be written, [tokens, columns]."""

    def send(self, results: Tensor, values: Tensor | None = None) -> None:
        """Let results of all tokens but the first travel, and values beside them, [tokens, k]."""


class _UnderWay(threading.local):
    exchange: Exchange | None = None


_under_way = _UnderWay()
"""What the call of this thread may use, which the operators' schemas have no place for."""


@contextlib.contextmanager
def under_way(exchange: Exchange | None) -> Iterator[None]:
    """Let the one call of `swiglu_experts` meanwhile, and its backward, use an exchange; None: there is none."""
    before, _under_way.exchange = _under_way.exchange, exchange
    try:
        yield
    except BaseException:
        if exchange is not None:  # before memory is freed that it writes
            exchange.wait()
        raise
    finally:
        _under_way.exchange = before


# Positions in a list of needs or gradients.
X, W_GATE_UP, W_DOWN, WEIGHTS, B_GATE_UP, B_DOWN = range(6)


def _outputs(
    x: Tensor, w_gate_up: Tensor, w_down: Tensor, index: Tensor, tile_rows: int, keep: bool, keep_y: bool
) -> Outputs:
    """Allocate out, pre and y (both empty unless they are kept) and the routing."""
    routing = new_routing(index, w_gate_up.shape[0], tile_rows)
    rows = routing.pair.shape[0]
    pre = new(x, rows, w_gate_up.shape[1]) if keep else new(x, 0, 0)
    y = new(x, rows, w_down.shape[1]) if keep_y else new(x, 0, 0)
    return new(x, x.shape[0], w_down.shape[1]), pre, y, *routing[:5]


@operator("experts")
def _experts(
    x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, b_gate_up: Tensor | None, b_down: Tensor | None,
    index: Tensor, s_gate_up: Tensor | None, s_down: Tensor | None, tile_rows: int, keep: bool, keep_y: bool,
    backend: str, interleaved: bool, precision: str, gate_numbers: Sequence[float],
) -> Outputs:  # fmt: skip
    """Return out, pre and y (both empty unless kept) and the routing; s_* are scales of weights that are codes.

    y is kept with fp8 products alone, for the gradients of the routing weights.
    """
    if index.numel() == 0 or w_gate_up.shape[0] == 0:
        out, *others = _outputs(x, w_gate_up, w_down, index, tile_rows, keep, keep_y)
        return out.zero_(), *others  # type: ignore[return-value]
    formula, exchange = formula_of(gate_numbers), _under_way.exchange
    if backend == PAIRS:
        if exchange is not None:
            exchange.wait()
        operands = x, w_gate_up, w_down, weights, b_gate_up, b_down, index
        out = portable_pairs.forward(operands, formula, interleaved)
        return out, *_outputs(x[:0], w_gate_up, w_down, index, tile_rows, keep, keep_y)[1:]
    routing, made, tokens = route(index, w_gate_up.shape[0], tile_rows), None, None
    if "fp8" in precision:
        of_weights = fp8_experts.weights_of((w_gate_up, w_down), (s_gate_up, s_down), precision.endswith(SUFFIX))
        y, pre = fp8_experts.products(x, of_weights, (b_gate_up, b_down), routing, formula, interleaved, keep, backend)
    else:
        kernels, stores = KERNELS[backend], (True, keep)
        rows, early, late = kernels.gather(x, routing), routing, routing
        if exchange is not None:
            early, late = split(routing, exchange.first)
            stores = kernels.gate_up(rows, w_gate_up, early, b_gate_up, formula, interleaved, stores)
            exchange.wait()
        h, pre = kernels.gate_up(rows, w_gate_up, late, b_gate_up, formula, interleaved, stores)
        del rows, stores
        y = kernels.down(h, w_down, late, b_down)
        if exchange is not None:
            made = combine(y, weights, routing, exchange.results(y.shape[1]), slice(exchange.first, None))
            exchange.send(made)
            kernels.down(h, w_down, early, b_down, y)
            tokens = slice(exchange.first)
        del h
    out = combine(y, weights, routing, made, tokens)
    return out, new(x, 0, 0) if pre is None else pre, y if keep_y else new(x, 0, 0), *routing[:5]


_experts.register_fake(_outputs)


def _gradients(
    d_out: Tensor, x: Tensor | None, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, needs: Sequence[bool]
) -> Gradients:
    """Allocate the six gradients; those that are not wanted are empty."""
    experts, both, hidden = w_gate_up.shape
    return (
        new(d_out, d_out.shape[0], hidden) if needs[X] else new(d_out, 0),
        torch.empty_like(w_gate_up) if needs[W_GATE_UP] else new(d_out, 0),
        torch.empty_like(w_down) if needs[W_DOWN] else new(d_out, 0),
        weights.new_empty(weights.shape) if needs[WEIGHTS] else new(d_out, 0),
        new(d_out, experts, both) if needs[B_GATE_UP] else new(d_out, 0),
        new(d_out, experts, w_down.shape[1]) if needs[B_DOWN] else new(d_out, 0),
    )


@operator("experts_backward")
def _experts_backward(
    d_out: Tensor, x: Tensor | None, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, pre: Tensor, y: Tensor,
    b_gate_up: Tensor | None, b_down: Tensor | None, pair: Tensor, row: Tensor, tile_expert: Tensor, starts: Tensor,
    counts: Tensor, needs: Sequence[bool], tile_rows: int, keep: bool, keep_y: bool, backend: str, interleaved: bool,
    precision: str, gate_numbers: Sequence[float], *, in_place: bool = False,
) -> Gradients:  # fmt: skip
    """Return the six gradients, empty where not wanted; x may be None where it is not read.

    `in_place` lets it overwrite pre and y, which the operator, being functional, must not.
    """
    experts, in_fp8, into_main_grad = w_gate_up.shape[0], "fp8" in precision, precision.startswith(MARK)
    if row.shape[0] == 0 or experts == 0:
        zeros = (gradient.zero_() for gradient in _gradients(d_out, x, w_gate_up, w_down, weights, needs))
        return tuple(zeros)  # type: ignore[return-value]
    kernels, formula = KERNELS[backend], formula_of(gate_numbers)
    routing = Routing(pair, row, tile_expert, starts, counts, weights.shape[1], tile_rows)
    results = [new(d_out, 0) for _ in range(6)]
    if not keep:
        assert x is not None, "the recomputation starts from x"
        if in_fp8:
            of_weights = fp8_experts.weights_of((w_gate_up, w_down), (None, None), precision.endswith(SUFFIX))
            y, made = fp8_experts.products(
                x, of_weights, (b_gate_up, b_down), routing, formula, interleaved, True, backend
            )
        else:
            rows = kernels.gather(x, routing)
            _, made = kernels.gate_up(rows, w_gate_up, routing, b_gate_up, formula, interleaved, (False, True))
            del rows
        assert made is not None, "it is asked for"
        pre = made
        del made
    free = in_place or not keep
    if needs[WEIGHTS] and in_fp8:
        results[WEIGHTS] = slot_grads(row_dots(d_out, y, routing), d_out, None, routing, weights.dtype)
        if free:
            plan.apply(_let_go, y)
    del y
    exchange, late, stores = _under_way.exchange, routing, (pre if free else True, needs[W_DOWN], True)
    read = kernels.gather(d_out, routing), w_down, pre, weights
    if exchange is not None:
        early, late = split(routing, exchange.first)
        stores = kernels.down_backward(*read, early, formula, interleaved, stores)
        exchange.wait()
    d_pre, wh, dots = kernels.down_backward(*read, late, formula, interleaved, stores)
    del read, stores
    if free and d_pre is not pre:
        plan.apply(_let_go, pre)
    del pre
    if needs[WEIGHTS] and not in_fp8:
        results[WEIGHTS] = slot_grads(dots, d_out, b_down, routing, weights.dtype)
    del dots
    if needs[B_DOWN]:
        results[B_DOWN] = row_sums(d_out, weights, routing, experts)
    sums = None
    # The gradients of the weights are larger than anything else here: the last to be made has the least beside it.
    if needs[X]:
        d_rows = kernels.rows_times(d_pre, w_gate_up, routing)
        into = None if exchange is None else exchange.results(d_rows.shape[1])
        results[X] = combine(d_rows, None, routing, into)
        del d_rows
        if exchange is not None:
            exchange.send(results[X], results[WEIGHTS] if needs[WEIGHTS] else None)
    if needs[W_GATE_UP]:
        assert x is not None, "the weight gradient is a product with x"
        given = d_pre, x, routing, w_gate_up, needs[B_GATE_UP]
        results[W_GATE_UP], sums = _weight_grad(kernels, given, into_main_grad)
    if needs[B_GATE_UP]:
        results[B_GATE_UP] = row_sums(d_pre, None, routing, experts) if sums is None else sums
    if free:
        plan.apply(_let_go, d_pre)
    del d_pre
    if needs[W_DOWN]:
        results[W_DOWN], _ = _weight_grad(kernels, (d_out, wh, routing, w_down, False), into_main_grad)
    return tuple(results)  # type: ignore[return-value]


_experts_backward.register_fake(_gradients)


def _weight_grad(
    kernels: ModuleType, given: tuple[Tensor, Tensor, Routing, Tensor, bool], into_main_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """Return a weight's gradient, or once it is in main_grad what stands for it, and maybe sums."""
    rows, _, _, weight, _ = given
    main = main_grad_of(weight) if into_main_grad else None
    if main is None:
        return kernels.weight_grad(*given)
    if rows.dtype in HALF and kernels is portable_experts:
        _, sums = portable_experts.weight_grad(*given, main)
    else:  # by hand with an addition behind it takes 0.74 of what the portable kernel does
        made, sums = kernels.weight_grad(*given)
        main.add_(made)
    return stand_in(weight), sums


def _let_go(tensor: Tensor) -> None:
    """Free the memory of a tensor that autograd's node still holds, and nobody else."""
    tensor.untyped_storage().resize_(0)


def _keep(ctx, tensors, options, output) -> None:
    x, w_gate_up, w_down, weights, b_gate_up, b_down, *_ = tensors
    _, keep, _, _, _, precision, _ = options
    _, pre, y, *routing = output
    saved_x = None if keep and not ctx.needs_input_grad[W_GATE_UP] else x
    parameters = w_gate_up, w_down, weights, None if keep else b_gate_up, b_down
    options = *options, _under_way.exchange
    save(ctx, saved_x, (*parameters, *routing), (pre, y), options, precision.startswith(MARK))


def _gradients_or_none(backward, d_out, saved, needs, options):
    x, w_gate_up, w_down, weights, *others, pre, y = saved
    needs, (*options, exchange) = needs[:6], options
    with under_way(exchange):
        gradients = backward(d_out, x, w_gate_up, w_down, weights, pre, y, *others, needs, *options)
    return [*(gradient if need else None for gradient, need in zip(gradients, needs, strict=True)), None, None, None]


register(_experts, _experts_backward, _keep, _gradients_or_none, tensors=9, preactivations=2)


def swiglu_experts(
    x: Tensor, w_gate_up: fp8.Operand, w_down: fp8.Operand, top_k_index: Tensor,
    top_k_weights: Tensor, *, b_gate_up: Tensor | None = None, b_down: Tensor | None = None,
    activation: str = "silu", alpha: float = 1.0, limit: Limit = None, up_offset: float = 0.0,
    interleaved: bool = False, recompute: bool = False, backend: str | None = None, precision: str = "bf16",
    kept: KeptCodes | None = None, accumulate_into_main_grad: bool = False,
) -> Tensor:  # fmt: skip
    """Return each token's sum over its k experts of weight * (h w_down[e]^T + b_down[e]), h = silu(gate) * up.

    gate and up are the halves, or the even and odd columns, of x w_gate_up[e]^T + b_gate_up[e].

    Source: the experts of Mixtral (Jiang et al. 2024, arXiv:2401.04088) and of the models after it.

    Args:
        x: [..., hidden]; as for `swiglu_glu`.
        w_gate_up: [experts, 2 * intermediate, hidden], any strides, dtype and device of x; for a transposed weight, as
            in gpt-oss, pass `gate_up_proj.mT`.
        w_down: [experts, hidden_out, intermediate], any strides, dtype and device of x.
        top_k_index: [..., k], any integer dtype: the experts of each token. An index outside of 0 to experts - 1 is
            skipped: it adds nothing, and its weight has no gradient (expert parallelism marks experts on other ranks
            this way).
        top_k_weights: [..., k], float32, float16 or bfloat16, float64 as well where x is; any strides; autocast leaves
            it alone.
        b_gate_up: [experts, 2 * intermediate], any strides, or None.
        b_down: [experts, hidden_out], any strides, or None.
        activation, alpha, limit, up_offset: the gate, as for `swiglu_glu` (gpt-oss: "silu", 1.702, 7, 1).
        interleaved: the rows of w_gate_up are gate, up, gate, up, ... (gpt-oss); else the gate's come first.
        recompute: keep only x and the routing for the backward, and recompute gate and up from them.
        backend: "portable", or "hopper" for the hand-scheduled kernels for compute capability 9.0; None takes what is
            fastest here.
        precision: "bf16", operands of products as they are; or "fp8-rowwise": those of the forward's products are
            quantised by rows to fp8, a token of x and of h, and an output feature of an expert's weight. The backward's
            stay in 16 bits. bfloat16 and float16 with hidden and intermediate sizes that are multiples of 16. Weights
            are quantised in every call, or once for many calls without a gradient: pass `quantise(w_gate_up,
            "rowwise")` of `ops.fp8.operation`, and that of w_down. `reference.swiglu_experts` has the definition.
        kept: as for `swiglu_mlp_fp8`, with fp8 alone.
        accumulate_into_main_grad: as for `swiglu_glu`; what the kernels by hand make is rounded before it is added.

    Returns:
        [..., hidden_out], contiguous, in x's dtype. Products, gate and the sum over a token's experts are fp32; h, each
        expert's result and the sum are rounded. Nothing waits for the GPU, and the bits are the same on every run.
        Differentiable once, in all floating-point arguments; a second backward of a retained graph is right.

    Raises:
        TypeError: an argument is not a tensor, or of another dtype than expected; a number is not one.
        ValueError: shapes or devices do not fit together, or an option has an unknown value; precision asks for fp8,
            which the GPU or the sizes do not allow, or a gradient is wanted for a weight that was given quantised.

    With precision="bf16", float64 operands, slowly, and those where no kernel can run (`backend_for(x) == "torch"`) are
    computed by `reference.swiglu_experts`.
    """
    tensors, biases = (x, w_gate_up, w_down, top_k_weights, top_k_index), (b_gate_up, b_down)
    gate, options = (activation, 1.0, alpha, limit, up_offset), (interleaved, recompute, backend, precision)
    if accumulate_into_main_grad or _under_way.exchange is not None:
        return _first_call(None, tensors, biases, gate, options, kept, accumulate_into_main_grad)
    kind, again = door.find("experts", tensors, biases, (*gate, *options))
    if again is not None:
        return again(*tensors[:4], *biases, top_k_index)
    return _first_call(kind, tensors, biases, gate, options, kept)


def _first_call(
    kind: door.Kind | None, tensors: tuple[Any, ...], biases: tuple[Any, ...], gate: tuple[Any, ...],
    options: tuple[bool, bool, str | None, str], kept: KeptCodes | None, into_main_grad: bool = False,
) -> Tensor:  # fmt: skip
    """Check the arguments, choose kernels, call the operator, and let calls of this kind be made again."""
    x, w_gate_up, w_down, top_k_weights, top_k_index = tensors
    b_gate_up, b_down = biases
    interleaved, recompute, backend, precision = options
    activation = gate[0]
    if backend is not None:
        check_option("backend", backend, tuple(KERNELS))
    formula = check_formula(*gate)
    gate_up, down, s_gate_up, s_down = fp8_experts.unpack(precision, w_gate_up, w_down)
    x, b_gate_up, b_down = autocast.operands(x, b_gate_up, b_down)
    shapes = gate_up, down  # whose checks know no fp8
    if s_gate_up is None:
        x, gate_up, down = autocast.operands(x, gate_up, down)
        shapes = gate_up, down
    elif isinstance(x, Tensor):
        shapes = tuple(weight.new_empty(1, dtype=x.dtype).expand(weight.shape) for weight in shapes)
    check_experts(x, *shapes, top_k_index, top_k_weights, b_gate_up, b_down)
    in_fp8 = precision != "bf16"
    if in_fp8:
        fp8_experts.check(x, gate_up)
    elif backend_for(x) == "torch":
        return definition.swiglu_experts(
            x, gate_up, down, top_k_index, top_k_weights,
            b_gate_up=b_gate_up, b_down=b_down, interleaved=interleaved, **formula.options,
        )  # fmt: skip
    rows = as_matrix(x)
    index, weights = (as_matrix(tensor) for tensor in (top_k_index, top_k_weights))
    with_grad = needs_backward(x, gate_up, down, weights, b_gate_up, b_down)
    if s_gate_up is not None and with_grad:
        raise ValueError("w_gate_up, w_down: expected 16 bits if a gradient is wanted, got fp8; use torch.no_grad()")
    multiplied: tuple[Tensor, Tensor] = (gate_up, down)
    if in_fp8 and not with_grad:
        multiplied = fp8_experts.like_codes(rows, *multiplied)
    backend, tile_rows, _ = choice.kernels_for(index, rows, multiplied, activation, with_grad, in_fp8, backend)
    keep = with_grad and not recompute
    operands = (rows, gate_up, down, weights, b_gate_up, b_down, index.contiguous(), s_gate_up, s_down)
    keep_y = in_fp8 and keep and weights.requires_grad
    if in_fp8 and kept is not None and s_gate_up is None and kept.take(gate_up, down):
        precision += SUFFIX
    if into_main_grad:
        precision = MARK + precision
    others = tile_rows, keep, keep_y, backend, interleaved, precision, formula.numbers
    out = call_and_keep(_experts, *operands, *others)
    if kind is not None and not in_fp8:
        door.remember(kind, of_matrix(x, _again(others, with_grad)))
    return like_leading(out, x)


def _again(options: Sequence[Any], with_grad: bool) -> door.Again:
    """Return what makes a call of a kind again."""
    series = Series()

    def again(rows: Tensor, *others: Any) -> Tensor:
        w_gate_up, w_down, weights, b_gate_up, b_down, index = others
        of_routing = as_matrix(weights), b_gate_up, b_down, as_matrix(index).contiguous()
        tensors = rows, w_gate_up, w_down, *of_routing, None, None
        if with_grad:
            return _experts.first_output(series, tensors, options)
        out: Tensor = series.call(_out_alone, tensors, options)
        return out

    return again


def _out_alone(*arguments: Any) -> Tensor:
    """Of what the operator returns."""
    return _experts.function(*arguments)[0]
