"""swiglu_mlp: out = h w_down^T + bias_down with h = silu(x w_gate^T + bias_gate) * (x w_up^T + bias_up).

Kernels: `portable_forward.py` on the way to h, `portable_mlp.py` on the way back through w_down, then those of
`portable_backward.py`. `swiglu_mlp` says how much memory that takes; each gradient is allocated when its product runs.

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

from collections.abc import Callable, Iterable

import torch

from swiglu_kernels.ops.gate.formula import PLAIN, Formula, Limit
from swiglu_kernels.ops.gate.operation import backward_launch as gate_backward_launch
from swiglu_kernels.ops.glu import operation as glu
from swiglu_kernels.ops.glu.block import Chosen, GatedOperation, Gradients, Operands, new
from swiglu_kernels.ops.glu.choice import AUTO
from swiglu_kernels.ops.glu.portable_backward import input_grad_launch
from swiglu_kernels.ops.glu.portable_forward import Pair
from swiglu_kernels.ops.mlp import choice
from swiglu_kernels.ops.mlp.portable_mlp import down_backward_launch, down_weight_grad_launch
from swiglu_kernels.runtime.backend import multiprocessors
from swiglu_kernels.runtime.shortcuts import door, plan
from swiglu_kernels.runtime.shortcuts.plan import run
from swiglu_kernels.tiles.rules import waves

TILE = 128
"""A slice of the intermediate dimension has a multiple of so many columns: no tile of any kernel is cut."""


def _chunks(size: int, step: int) -> list[slice]:
    """Cut rows or columns into slices of `step`, 0 for one slice; none of them are one empty slice."""
    step = step or max(size, 1)
    return [slice(first, min(first + step, size)) for first in range(0, max(size, 1), step)]


def _columns(tokens: int, intermediate: int, chunk_tokens: int, processors: int) -> list[slice]:
    """Cut the intermediate dimension into slices as large as chunk_tokens of all tokens, 0 for one slice.

    Up to an eighth larger, where the tiles of all slices are fewer waves of programs then.
    """
    if not 0 < chunk_tokens < tokens:
        return _chunks(intermediate, 0)

    def waves_of_all(step: int) -> int:
        sizes = (part.stop - part.start for part in _chunks(intermediate, step))
        return sum(waves(tokens, size, TILE, TILE, processors) for size in sizes)

    least = max(1, -(-intermediate * chunk_tokens // (tokens * TILE)))  # tiles
    return _chunks(intermediate, min((tiles * TILE for tiles in range(least, least * 9 // 8 + 1)), key=waves_of_all))


def write_hidden_grads(
    d_out: torch.Tensor, w_down: torch.Tensor, preactivations: Pair, d_gate: torch.Tensor, d_up: torch.Tensor,
    h: torch.Tensor | None, formula: Formula,
) -> None:  # fmt: skip
    """Write d_gate, d_up and, if it is given, h; arguments as of `down_backward_launch`."""
    chosen = choice.hidden_grad(d_out, w_down, [*preactivations, d_gate, d_up, *([] if h is None else [h])], formula)
    if chosen.schedule != "torch":
        run(down_backward_launch, d_out, w_down, preactivations, d_gate, d_up, h, formula, chosen)
    else:
        multiply_and_gate_backward(d_out, w_down, preactivations, d_gate, d_up, h, formula)


def multiply_and_gate_backward(
    d_out: torch.Tensor, w_down: torch.Tensor, preactivations: Pair, d_gate: torch.Tensor, d_up: torch.Tensor,
    h: torch.Tensor | None, formula: Formula,
) -> None:  # fmt: skip
    """Write the same by a product of PyTorch and one elementwise launch."""
    d_h = new(d_out, *d_gate.shape) if h is None else h  # written over d_h
    plan.apply(glu.multiply_plainly, d_out, w_down, d_h, returning=torch.mm)
    run(gate_backward_launch, d_h, *preactivations, d_gate, d_up, formula, h)


def _forward(given: Operands, options: Chosen, out: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> None:
    x, w_gate, w_up, bias_gate, bias_up, w_down, bias_down, *_ = given
    assert w_up is not None
    assert w_down is not None
    stored = (gate, up) if options.save == "preact" else None
    for rows in _chunks(x.shape[0], options.chunk_tokens):
        h = new(x, rows.stop - rows.start, w_gate.shape[0])
        glu.write_forward(x[rows], w_gate, w_up, h, stored, (bias_gate, bias_up), options.formula)
        plan.apply(glu.multiply, h, w_down, bias_down, out[rows], returning=torch.nn.functional.linear)


def write_gradients(
    d_out: torch.Tensor, given: Operands, preactivations: Pair, results: Gradients, options: Chosen, in_place: bool,
    arriving: Iterable[tuple[slice, torch.Tensor]] | None = None,
    send: Callable[[torch.Tensor, slice], None] | None = None,
) -> None:  # fmt: skip
    """Write the backward's results; on several ranks (`parallel.py`) `arriving` yields rows of d_out as they come.

    Then dX is made before the weights' gradients, and `send` begins to add it to that of the other ranks.
    """
    x, w_gate, w_up, bias_gate, bias_up, w_down, *_ = given
    assert w_up is not None
    assert w_down is not None
    formula = options.formula
    by_columns = any(map(results.wants, ("w_gate", "w_up", "w_down", "bias_gate", "bias_up")))
    (tokens, chunk), intermediate = (d_out.shape[0], options.chunk_tokens), w_gate.shape[0]
    if by_columns:
        slices = _columns(tokens, intermediate, chunk, multiprocessors(d_out.device))
        parts = [(slice(0, tokens), columns) for columns in slices]
    else:
        parts = [(rows, slice(0, intermediate)) for rows in _chunks(tokens, chunk)]
    sums_dx = by_columns and len(parts) > 1 and results.wants("x")
    dx_sum = d_out.new_zeros((d_out.shape[0], w_gate.shape[1]), dtype=torch.float32) if sums_dx else None
    for rows, columns in parts:
        x_rows, d_out_rows = None if x is None else x[rows], d_out[rows]
        size = d_out_rows.shape[0], columns.stop - columns.start
        weights, down = (w_gate[columns], w_up[columns]), w_down[:, columns]
        if options.save == "preact":
            saved = preactivations
            d_gate, d_up = saved if in_place else (new(d_out, *size), new(d_out, *size))
            h = wanted_h = new(d_out, *size) if results.wants("w_down") else None
        else:
            assert x_rows is not None, "the recomputation starts from x"
            saved = d_gate, d_up = new(d_out, *size), new(d_out, *size)
            h, wanted_h = new(d_out, *size), None  # the forward makes it
            of_part = [None if bias is None else bias[columns] for bias in (bias_gate, bias_up)]
            glu.write_forward(x_rows, *weights, h, saved, (of_part[0], of_part[1]), formula)
        if arriving is None:
            write_hidden_grads(d_out_rows, down, saved, d_gate, d_up, wanted_h, formula)
        for piece, of_d_out in arriving or ():
            made = d_gate[piece], d_up[piece], None if wanted_h is None else wanted_h[piece]
            write_hidden_grads(of_d_out, down, (saved[0][piece], saved[1][piece]), *made, formula)
        if send is not None and results.wants("x"):
            glu.write_input_grad(d_gate, d_up, *weights, results["x"], options.input_grad)
            send(results["x"], rows)
        if results.wants("w_down"):
            assert h is not None
            write_down_grad(d_out_rows, h, results["w_down"][:, columns], options.weight_grad)
        del h, wanted_h
        if dx_sum is not None:
            run(input_grad_launch, None, d_gate, d_up, *weights, dx_sum, PLAIN, True)
        elif results.wants("x") and send is None:
            glu.write_input_grad(d_gate, d_up, *weights, results["x"][rows], options.input_grad)
        if results.wants("w_gate"):
            assert x_rows is not None, "weight gradients are products with x"
            d_weights = results["w_gate"][columns], results["w_up"][columns]
            glu.write_weight_grads(d_gate, d_up, x_rows, d_weights, options.weight_grad)
        if results.wants("bias_gate"):
            plan.apply(glu.sum_over_tokens, d_gate, results["bias_gate"][columns])
            plan.apply(glu.sum_over_tokens, d_up, results["bias_up"][columns])
        del d_gate, d_up, saved  # before the next part allocates its own
    if results.wants("bias_down"):
        plan.apply(glu.sum_over_tokens, d_out, results["bias_down"])
    if dx_sum is not None:
        results["x"] = dx_sum.to(d_out.dtype)


def write_down_grad(d_out: torch.Tensor, h: torch.Tensor, d_w_down: torch.Tensor, weight_grad: str) -> None:
    """Write d_out^T h to d_w_down."""
    if weight_grad == "triton" or (weight_grad == AUTO and not choice.down_weight_grad_by_torch(d_out, h.shape[1])):
        run(down_weight_grad_launch, d_out, h, d_w_down)
    else:
        plan.apply(glu.multiply_transposed, d_out, h, d_w_down, returning=glu.multiply_transposed)


MLP = GatedOperation("mlp", 7, _forward, write_gradients)


def swiglu_mlp(
    x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor, w_down: torch.Tensor,
    bias_gate: torch.Tensor | None = None, bias_up: torch.Tensor | None = None, bias_down: torch.Tensor | None = None,
    *, activation: str = "silu", gate_multiplier: float = 1.0, alpha: float = 1.0, limit: Limit = None,
    up_offset: float = 0.0, weight_grad: str = "auto", save: str = "auto", input_grad: str = "auto",
    chunk_tokens: int | None = None, accumulate_into_main_grad: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Return `swiglu_glu(x, w_gate, w_up, bias_gate, bias_up, ...) w_down^T + bias_down`; source: as of that.

    Args:
        x, w_gate, w_up, bias_gate, bias_up, activation, gate_multiplier, alpha, limit, up_offset: as for `swiglu_glu`.
        w_down: [hidden_out, intermediate], any strides, dtype and device of x.
        bias_down: [hidden_out] or None.
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
        accumulate_into_main_grad: as for `swiglu_glu`.

    Peak memory, next to x, out's gradient and the weights, in tensors T = tokens x intermediate, X = tokens x hidden,
    W = intermediate x hidden: forward 3 T + X ("preact") or 1 T + X ("input"; 2 T + X where torch makes its products,
    `ops/glu/choice.py`); backward 3 T + W, then 2 T + X + 3 W, with "preact" and a retained graph 2 T more. With
    chunk_tokens = c the forward has c / tokens T + X, the backward 3 c / tokens T + 2 X + 3 W, then 3 X + 3 W.

    Returns:
        out, [..., hidden_out], contiguous, in x's dtype. h is rounded once before the product with w_down. Without a
        gradient to compute, only h and out are written. Differentiable once; a second backward of a retained graph is
        correct: saved tensors are overwritten only in the last one.

    Raises:
        TypeError, ValueError: as for `swiglu_glu`; ValueError also where chunk_tokens is given with save="preact".

    In float64, slowly, and where no kernel can run (`backend_for(x) == "torch"`), this is `reference.swiglu_mlp`, all
    tokens at once; of the options that choose how gradients are made, weight_grad="none" keeps its meaning.
    """
    tensors = x, w_gate, w_up, bias_gate, bias_up, w_down, bias_down
    gate = activation, gate_multiplier, alpha, limit, up_offset
    asked = weight_grad, save, input_grad
    if accumulate_into_main_grad:
        return MLP.first_call(None, tensors, gate, asked, chunk_tokens, into_main_grad=True)
    kind, again = door.find("mlp", tensors[:3], tensors[3:], (*gate, *asked, chunk_tokens))
    return MLP.first_call(kind, tensors, gate, asked, chunk_tokens) if again is None else again(*tensors)
