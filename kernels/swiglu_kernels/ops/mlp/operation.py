"""swiglu_mlp: out = h w_down^T + bias_down with h = silu(x w_gate^T + bias_gate) * (x w_up^T + bias_up).

Kernels: `portable_forward.py` on the way to h, `portable_mlp.py` on the way back through w_down, then those of
`portable_backward.py`. In tensors of tokens x intermediate (T), tokens x hidden (X) and intermediate x hidden (W), all
in the dtype of x; x, out's gradient and the weights themselves are not counted:

                                      alive from forward to backward   peak forward    peak backward
    save="preact"                     2 T (gate, up)                   3 T + X         3 T + W, then 2 T + X + 3 W
      with retain_graph=True                                                           5 T + W, then 4 T + X + 3 W
    save="input"                      nothing                          1 T + X         3 T + W, then 2 T + X + 3 W
    save="input", chunk_tokens=c      nothing                          c/tokens T + X  3 c/tokens T + 2 X + 3 W,
                                                                                       then 3 X + 3 W

Each gradient is allocated when its product runs.

Backward:

    1. save="input": the forward's launch again, for gate, up and h
       one launch: d_h = d_out w_down, never stored; its epilogue makes d_gate and d_up, and with save="preact" h, if
       w_down wants a gradient. They are written over gate and up, unless the forward kept these and the graph is
       retained (a second backward is right). On GPUs on which nothing was measured: a PyTorch product, which holds d_h
       meanwhile (1 T more), and elementwise launches.
    2. d_w_down = d_out^T h, after which h is given back
    3. dX = d_gate w_gate + d_up w_up: one launch ("fused" and "two_step" are the same here, since d_gate and d_up
       exist), or two PyTorch products into one output ("torch")
    4. d_w_gate = d_gate^T x, d_w_up = d_up^T x: one Triton launch, or PyTorch products

With chunk_tokens the backward works through slices of the intermediate dimension, about as many as there are chunks of
tokens in the forward (up to an eighth larger, where that fills the GPU better). Each slice makes its rows of d_w_gate
and d_w_up and its columns of d_w_down once and for all; dX is summed over the slices in fp32 (2 X where x has 16 bits),
and rounded once. Where no weight or bias wants a gradient, the backward works through the tokens, and sums nothing.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from swiglu_kernels.ops.gate.formula import PLAIN, Formula, check_formula, formula_of
from swiglu_kernels.ops.gate.operation import backward_launch as gate_backward_launch
from swiglu_kernels.ops.glu.choice import AUTO, INPUT_GRADS, SAVES, WEIGHT_GRADS, resolve
from swiglu_kernels.ops.glu.operation import (
    as_matrix,
    like_leading,
    multiply,
    multiply_plainly,
    multiply_transposed,
    needs_backward,
    new,
    of_matrix,
    product_of_transposed,
    sum_over_tokens,
    write_forward,
    write_input_grad,
    write_weight_grads,
)
from swiglu_kernels.ops.glu.portable_backward import input_grad_launch
from swiglu_kernels.ops.mlp import choice, definition
from swiglu_kernels.ops.mlp.portable_mlp import down_backward_launch, down_weight_grad_launch
from swiglu_kernels.runtime import autocast
from swiglu_kernels.runtime.backend import backend_for, multiprocessors
from swiglu_kernels.runtime.checks import check_chunk, check_down, check_glu, check_option, check_vector
from swiglu_kernels.runtime.operator import call_and_keep, operator, register, save
from swiglu_kernels.runtime.shortcuts import door, plan
from swiglu_kernels.runtime.shortcuts.plan import run
from swiglu_kernels.runtime.shortcuts.series import Series
from swiglu_kernels.tiles.rules import waves

TILE = 128
"""A slice of the intermediate dimension has a multiple of so many columns: no tile of any kernel is cut."""

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Of the seven tensors that an MLP is differentiated by."""

# Positions in a list of needs or gradients: those of the tensors in the op's arguments.
X, W_GATE, W_UP, W_DOWN, BIAS_GATE, BIAS_UP, BIAS_DOWN = range(7)


def _chunks(tokens: int, chunk_tokens: int) -> Iterator[slice]:
    """Cut the tokens into slices of chunk_tokens, 0 for one slice; no tokens are one empty slice."""
    step = chunk_tokens or max(tokens, 1)
    return (slice(first, min(first + step, tokens)) for first in range(0, max(tokens, 1), step))


def _columns(tokens: int, intermediate: int, chunk_tokens: int, processors: int) -> Iterator[slice]:
    """Cut the intermediate dimension into slices as large as chunk_tokens of all tokens, 0 for one slice.

    Up to an eighth larger, where the tiles of all slices are fewer waves of programs then.
    """

    def waves_of_all(step: int) -> int:
        sizes = (min(step, intermediate - first) for first in range(0, intermediate, step))
        return sum(waves(tokens, size, TILE, TILE, processors) for size in sizes)

    step = max(intermediate, 1)
    if 0 < chunk_tokens < tokens:
        least = max(1, -(-intermediate * chunk_tokens // (tokens * TILE)))  # tiles
        step = min((tiles * TILE for tiles in range(least, least * 9 // 8 + 1)), key=waves_of_all)
    return (slice(first, min(first + step, intermediate)) for first in range(0, max(intermediate, 1), step))


def _forward_outputs(
    x: torch.Tensor, w_gate: torch.Tensor, w_down: torch.Tensor, save: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocate out, gate and up; gate and up are empty unless they are saved."""
    saved_shape = (x.shape[0], w_gate.shape[0]) if save == "preact" else (0, 0)
    return new(x, x.shape[0], w_down.shape[0]), new(x, *saved_shape), new(x, *saved_shape)


def write_hidden_grads(
    d_out: torch.Tensor, w_down: torch.Tensor, preactivations: tuple[torch.Tensor, torch.Tensor], d_gate: torch.Tensor,
    d_up: torch.Tensor, h: torch.Tensor | None, formula: Formula,
) -> None:  # fmt: skip
    """Write d_gate, d_up and, if it is given, h; arguments as of `down_backward_launch`."""
    chosen = choice.hidden_grad(d_out, w_down, [*preactivations, d_gate, d_up, *([] if h is None else [h])], formula)
    if chosen.schedule != "torch":
        run(down_backward_launch, d_out, w_down, preactivations, d_gate, d_up, h, None, formula, chosen)
    else:
        multiply_and_gate_backward(d_out, w_down, preactivations, d_gate, d_up, h, formula)


def multiply_and_gate_backward(
    d_out: torch.Tensor, w_down: torch.Tensor, preactivations: tuple[torch.Tensor, torch.Tensor], d_gate: torch.Tensor,
    d_up: torch.Tensor, h: torch.Tensor | None, formula: Formula,
) -> None:  # fmt: skip
    """Write the same by a product of PyTorch and one elementwise launch."""
    d_h = new(d_out, *d_gate.shape) if h is None else h  # written over d_h
    plan.apply(multiply_plainly, d_out, w_down, d_h, returning=torch.mm)
    run(gate_backward_launch, d_h, *preactivations, d_gate, d_up, formula, h)


def _gradient_shapes(
    d_out: torch.Tensor, w_gate: torch.Tensor, needs: Sequence[bool], weight_grad: str
) -> list[tuple[int, ...]]:
    """Return the shapes of the seven gradients; those that are not wanted are empty."""
    (M, H), (N, K) = d_out.shape, w_gate.shape
    frozen = weight_grad == "none"
    # One kernel makes both halves: where one is wanted, both are made.
    gate_up = not frozen and (needs[W_GATE] or needs[W_UP])
    bias = needs[BIAS_GATE] or needs[BIAS_UP]
    wanted = (needs[X], gate_up, gate_up, not frozen and needs[W_DOWN], bias, bias, needs[BIAS_DOWN])
    shapes: list[tuple[int, ...]] = [(M, K), (N, K), (N, K), (H, N), (N,), (N,), (H,)]
    return [shape if want else (0,) * len(shape) for want, shape in zip(wanted, shapes, strict=True)]


@operator("mlp")
def _mlp(
    x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor, w_down: torch.Tensor, bias_gate: torch.Tensor | None,
    bias_up: torch.Tensor | None, bias_down: torch.Tensor | None, weight_grad: str, save: str, input_grad: str,
    chunk_tokens: int, gate_numbers: Sequence[float],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return out, and gate and up if they are saved."""
    formula = formula_of(gate_numbers)
    out, gate, up = _forward_outputs(x, w_gate, w_down, save)
    for rows in _chunks(x.shape[0], chunk_tokens):
        h = new(x, rows.stop - rows.start, w_gate.shape[0])
        preactivations = (gate, up) if save == "preact" else None
        write_forward(x[rows], w_gate, w_up, h, preactivations, (bias_gate, bias_up), formula)
        plan.apply(multiply, h, w_down, bias_down, out[rows], returning=torch.nn.functional.linear)
    return out, gate, up


_mlp.register_fake(_forward_outputs)


@operator("mlp_backward")
def _mlp_backward(
    d_out: torch.Tensor, x: torch.Tensor | None, w_gate: torch.Tensor, w_up: torch.Tensor, w_down: torch.Tensor,
    gate: torch.Tensor, up: torch.Tensor, bias_gate: torch.Tensor | None, bias_up: torch.Tensor | None,
    needs: Sequence[bool], weight_grad: str, save: str, input_grad: str, chunk_tokens: int,
    gate_numbers: Sequence[float], *, in_place: bool = False,
) -> Gradients:  # fmt: skip
    """Return the gradients of the seven tensors, empty where not wanted; x may be None where it is not read.

    `in_place` lets it overwrite gate and up, which the operator, being functional, must not.
    """
    formula = formula_of(gate_numbers)
    shapes = _gradient_shapes(d_out, w_gate, needs, weight_grad)
    results: dict[int, torch.Tensor] = {}

    def result(position: int) -> torch.Tensor:
        """Return the gradient at a position, allocated when it is first asked for."""
        if position not in results:
            results[position] = new(d_out, *shapes[position])
        return results[position]

    wants_gate_up, wants_down = math.prod(shapes[W_GATE]) > 0, math.prod(shapes[W_DOWN]) > 0
    all_rows, all_columns = slice(0, d_out.shape[0]), slice(0, w_gate.shape[0])
    by_columns = any(needs[W_GATE:BIAS_DOWN])
    if by_columns:
        processors = multiprocessors(d_out.device)
        slices = _columns(d_out.shape[0], w_gate.shape[0], chunk_tokens, processors)
        parts = [(all_rows, columns) for columns in slices]
    else:
        parts = [(rows, all_columns) for rows in _chunks(d_out.shape[0], chunk_tokens)]
    sums_dx = by_columns and len(parts) > 1 and needs[X]
    dx_sum = d_out.new_zeros(shapes[X], dtype=torch.float32) if sums_dx else None
    for rows, columns in parts:
        x_rows, d_out_rows = None if x is None else x[rows], d_out[rows]
        size = d_out_rows.shape[0], columns.stop - columns.start
        weights, down = (w_gate[columns], w_up[columns]), w_down[:, columns]
        if save == "preact":
            preactivations = gate, up
            d_gate, d_up = preactivations if in_place else (new(d_out, *size), new(d_out, *size))
            h = wanted_h = new(d_out, *size) if wants_down else None
        else:
            assert x_rows is not None, "the recomputation starts from x"
            preactivations = d_gate, d_up = new(d_out, *size), new(d_out, *size)
            h, wanted_h = new(d_out, *size), None  # the forward makes it
            biases = (None if bias_gate is None else bias_gate[columns], None if bias_up is None else bias_up[columns])
            write_forward(x_rows, *weights, h, preactivations, biases, formula)
        write_hidden_grads(d_out_rows, down, preactivations, d_gate, d_up, wanted_h, formula)
        if wants_down:
            assert h is not None
            if weight_grad == "triton" or (
                weight_grad == AUTO and not choice.down_weight_grad_by_torch(d_out_rows, size[1])
            ):
                run(down_weight_grad_launch, d_out_rows, h, result(W_DOWN)[:, columns])
            else:
                out = result(W_DOWN)[:, columns]
                plan.apply(multiply_transposed, d_out_rows, h, out, returning=product_of_transposed)
        del h, wanted_h
        if dx_sum is not None:
            run(input_grad_launch, None, d_gate, d_up, *weights, dx_sum, None, PLAIN, True)
        elif needs[X]:
            write_input_grad(d_gate, d_up, *weights, result(X)[rows], input_grad)
        if wants_gate_up:
            assert x_rows is not None, "weight gradients are products with x"
            d_weights = result(W_GATE)[columns], result(W_UP)[columns]
            write_weight_grads(d_gate, d_up, x_rows, d_weights, weight_grad)
        if needs[BIAS_GATE] or needs[BIAS_UP]:
            plan.apply(sum_over_tokens, d_gate, result(BIAS_GATE)[columns])
            plan.apply(sum_over_tokens, d_up, result(BIAS_UP)[columns])
        del d_gate, d_up, preactivations  # before the next part allocates its own
    if needs[BIAS_DOWN]:
        plan.apply(sum_over_tokens, d_out, result(BIAS_DOWN))
    if dx_sum is not None:
        results[X] = dx_sum.to(d_out.dtype)
    return tuple(result(position) for position in range(7))  # type: ignore[return-value]


@_mlp_backward.register_fake
def _(d_out: torch.Tensor, w_gate: torch.Tensor, needs: Sequence[bool], weight_grad: str) -> tuple[torch.Tensor, ...]:
    return tuple(new(d_out, *shape) for shape in _gradient_shapes(d_out, w_gate, needs, weight_grad))


def _keep(ctx, tensors, options, output) -> None:
    x, w_gate, w_up, w_down, bias_gate, bias_up, _ = tensors
    _, gate, up = output
    if options[1] == "input":
        save(ctx, x, (w_gate, w_up, w_down, bias_gate, bias_up), (gate, up), options)
    else:
        save(ctx, None if options[0] == "none" else x, (w_gate, w_up, w_down), (gate, up), options)


def _gradients(backward, d_out, saved, needs, options):
    x, w_gate, w_up, w_down, *biases, gate, up = saved
    needs = list(needs)
    if options[0] == "none":
        needs[W_GATE] = needs[W_UP] = needs[W_DOWN] = False
    arguments = x, w_gate, w_up, w_down, gate, up, *(biases or (None, None)), tuple(needs)
    gradients = backward(d_out, *arguments, *options)
    return [gradient if need else None for gradient, need in zip(gradients, needs, strict=True)]


register(_mlp, _mlp_backward, _keep, _gradients, tensors=7, preactivations=2)


def swiglu_mlp(
    x: torch.Tensor,
    w_gate: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    bias_gate: torch.Tensor | None = None,
    bias_up: torch.Tensor | None = None,
    bias_down: torch.Tensor | None = None,
    *,
    activation: str = "silu",
    gate_multiplier: float = 1.0,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
    weight_grad: str = "auto",
    save: str = "auto",
    input_grad: str = "auto",
    chunk_tokens: int | None = None,
) -> torch.Tensor:
    """Return `swiglu_glu(x, w_gate, w_up, bias_gate, bias_up, ...) w_down^T + bias_down`.

    Source: Shazeer 2020, "GLU Variants Improve Transformer" (arXiv:2002.05202).

    Args:
        x: [..., hidden]; as for `swiglu_glu`.
        w_gate: [intermediate, hidden], any strides, dtype and device of x.
        w_up: as w_gate.
        w_down: [hidden_out, intermediate], any strides, dtype and device of x.
        bias_gate: [intermediate] or None.
        bias_up: [intermediate] or None.
        bias_down: [hidden_out] or None.
        activation, gate_multiplier, alpha, limit, up_offset: the gate, as for `swiglu_glu`.
        weight_grad: "triton" (two deterministic launches for the three weight gradients), "torch" (PyTorch products),
            "none" (weights and biases are frozen) or "auto", which may take the former for d_w_gate and d_w_up and the
            latter for d_w_down.
        save: what stays alive for the backward, in elements. "preact": gate and up, 2 x tokens x intermediate; h is
            recomputed from them. "input": nothing but x; three products run again. "auto": "preact", or "input" with
            chunk_tokens.
        input_grad: "fused", "two_step" (the same here: one launch for dX) or "torch" (two PyTorch products) or "auto".
        chunk_tokens: hold chunk_tokens x intermediate instead of tokens x intermediate at a time. The forward works
            through chunks of tokens; the backward through as many slices of the intermediate dimension, with dX summed
            over them in fp32, or through chunks of tokens where weights are frozen. Needs save="input" or "auto". None:
            all at once.

    Peak memory, next to x, out's gradient and the weights, in tensors T = tokens x intermediate, X = tokens x hidden,
    W = intermediate x hidden: forward 3 T + X ("preact") or 1 T + X ("input"; 2 T + X where torch makes its products,
    `ops/glu/choice.py`); backward 3 T + W, then 2 T + X + 3 W, with "preact" and a retained graph 2 T more. With
    chunk_tokens = c the forward has c / tokens T + X, the backward 3 c / tokens T + 2 X + 3 W, then 3 X + 3 W.

    Returns:
        out, [..., hidden_out], contiguous, in x's dtype. h is rounded once before the product with w_down. Without a
        gradient to compute, only h and out are written. Differentiable once; a second backward of a retained graph is
        correct: saved tensors are overwritten only in the last one.

    Raises:
        TypeError: an argument is not a tensor, or of another dtype than expected; a number is not one.
        ValueError: shapes or devices do not fit together, an option has an unknown value, a number is not finite,
            chunk_tokens is given with save="preact", or one dimension exceeds 2^31 - 1024.

    Where no kernel can run (`backend_for(x) == "torch"`), this is `reference.swiglu_mlp`, all tokens at once; of the
    options that choose how gradients are made, weight_grad="none" keeps its meaning.
    """
    tensors = x, w_gate, w_up, w_down, bias_gate, bias_up, bias_down
    gate, options = (activation, gate_multiplier, alpha, limit, up_offset), (weight_grad, save, input_grad)
    kind, again = door.find("mlp", tensors[:4], tensors[4:], (*gate, *options, chunk_tokens))
    return _first_call(kind, tensors, gate, options, chunk_tokens) if again is None else again(*tensors)


def _first_call(
    kind: door.Kind | None, tensors: tuple[Any, ...], gate: tuple[Any, ...], options: tuple[str, str, str],
    chunk_tokens: int | None,
) -> torch.Tensor:  # fmt: skip
    """Check the arguments, call the operator, and let calls of this kind be made again."""
    weight_grad, save, input_grad = options
    check_option("weight_grad", weight_grad, WEIGHT_GRADS)
    check_option("save", save, SAVES)
    check_option("input_grad", input_grad, INPUT_GRADS)
    chunk = check_chunk(chunk_tokens)
    if chunk and save == "preact":
        raise ValueError(f"save: expected 'input' or 'auto' with chunk_tokens={chunk_tokens}, got {save!r}")
    formula = check_formula(*gate)
    x, w_gate, w_up, w_down, bias_gate, bias_up, bias_down = autocast.operands(*tensors)
    x, w_gate, w_up = check_glu(x, w_gate, w_up)
    w_down = check_down(w_down, w_gate, x)
    weights = [w_gate, w_up, w_down]
    intermediate, hidden_out = w_gate.shape[0], w_down.shape[0]
    biases = [
        check_vector("bias_gate", bias_gate, intermediate, "the first dimension of w_gate", "x", x),
        check_vector("bias_up", bias_up, intermediate, "the first dimension of w_gate", "x", x),
        check_vector("bias_down", bias_down, hidden_out, "the first dimension of w_down", "x", x),
    ]
    if weight_grad == "none":
        weights = [weight.detach() for weight in weights]
        biases = [None if bias is None else bias.detach() for bias in biases]
    if backend_for(x) == "torch":
        return definition.swiglu_mlp(x, *weights, *biases, **formula.options)
    rows = as_matrix(x)
    asked = weight_grad
    weight_grad, save, input_grad = resolve(weight_grad, save, input_grad, rows, intermediate, chunk)
    if asked == AUTO and weight_grad == "triton" and not chunk:
        weight_grad = AUTO  # d_w_down is chosen for itself
    frozen = weight_grad == "none"  # and so these weights and biases are not those that were given
    if not any(weight.requires_grad for weight in weights):
        weight_grad = "none"
    with_grad = needs_backward(x, *weights, *biases)
    if not with_grad:
        save = "input"
    others = weight_grad, save, input_grad, chunk, formula.numbers
    out = call_and_keep(_mlp, rows, *weights, *biases, *others)
    if kind is not None and not (frozen and with_grad):
        series = Series()

        def again(*tensors: torch.Tensor | None) -> torch.Tensor:
            if with_grad:
                return _mlp.first_output(series, tensors, others)
            return series.call(_out_alone, tensors, others)

        if with_grad or not chunk:
            door.remember(kind, of_matrix(x, again))
    return like_leading(out, x)


def _out_alone(*arguments: Any) -> torch.Tensor:
    """Return the operator's first output, and allocate no others."""
    return _mlp.function(*arguments)[0]
