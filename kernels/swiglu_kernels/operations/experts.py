"""swiglu_experts: a mixture of experts, each a SwiGLU block; out[token] is the weighted sum of its k experts' results.

Forward: the routing (`routing.py`), then two grouped products, the first with the gate in its epilogue, and the sum
over each token's rows. The kernels of `portable/experts.py` do it, or others with the same functions. In elements of
x's dtype, for P rows (T k pairs and the padding), hidden H and intermediate I; x, weights and gradients not counted:

                       alive from forward to backward    peak forward            peak backward
    recompute=False    2 P I (gate and up)               3 P I, then P I + P H   3 P I + P H, then 3 P I beside the
                                                                                 gradient of w_gate_up, P I beside both
      retain_graph                                                               2 P I more
    recompute=True     nothing                           P I + P H               as without it

and 4 bytes for each pair and row. Kernels that read sorted copies add P H in the forward, and parts of it beside the
gradients of the weights.

Backward: one product, d_out w_down, never stored, whose epilogue makes the gradients of gate and up (over the saved
gate and up where nobody else wants them), the weighted h and its part of the routing weights' gradients; then d_x as a
grouped product and a sum over each token's rows, and the gradients of both weights as a product for each expert.
All sums are fp32 in a fixed order.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from swiglu_kernels import reference
from swiglu_kernels.calls import autocast, repeat
from swiglu_kernels.calls.checks import check_experts, check_formula, check_option
from swiglu_kernels.calls.operator import operator
from swiglu_kernels.calls.saved import call_and_keep, register, save
from swiglu_kernels.hopper import experts as hopper
from swiglu_kernels.launches import plan
from swiglu_kernels.launches.backend import backend_for
from swiglu_kernels.launches.formula import formula_of
from swiglu_kernels.launches.series import Series
from swiglu_kernels.launches.tiles import expert_tile_rows
from swiglu_kernels.operations.glu import as_matrix, like_leading, needs_backward, new, of_matrix
from swiglu_kernels.portable import experts as portable
from swiglu_kernels.portable.experts import row_sums, slot_grads
from swiglu_kernels.routing import Routing, combine, new_routing, route
from swiglu_kernels.tiles.choices import why_not_hopper, why_portable

KERNELS: dict[str, ModuleType] = {"portable": portable, "hopper": hopper}
"""By what `backend` calls them; `routing.py` says what functions they have."""

# Positions in a list of needs or gradients.
X, W_GATE_UP, W_DOWN, WEIGHTS, B_GATE_UP, B_DOWN = range(6)


def _outputs(
    x: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor, index: torch.Tensor, tile_rows: int, keep: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocate out, pre (empty unless it is kept) and the routing."""
    routing = new_routing(index, w_gate_up.shape[0], tile_rows)
    pre = new(x, routing.pair.shape[0], w_gate_up.shape[1]) if keep else new(x, 0, 0)
    return new(x, x.shape[0], w_down.shape[1]), pre, *routing[:5]


@operator("experts")
def _experts(
    x: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    weights: torch.Tensor,
    b_gate_up: torch.Tensor | None,
    b_down: torch.Tensor | None,
    index: torch.Tensor,
    tile_rows: int,
    keep: bool,
    backend: str,
    interleaved: bool,
    activation: str,
    alpha: float,
    limit: float | None,
    up_offset: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return out, pre (empty unless it is kept) and the routing."""
    if index.numel() == 0 or w_gate_up.shape[0] == 0:
        out, *others = _outputs(x, w_gate_up, w_down, index, tile_rows, keep)
        return out.zero_(), *others  # type: ignore[return-value]
    kernels, formula = KERNELS[backend], formula_of(activation, 1.0, alpha, limit, up_offset)
    routing = route(index, w_gate_up.shape[0], tile_rows)
    rows = kernels.gather(x, routing)
    h, pre = kernels.gate_up(rows, w_gate_up, routing, b_gate_up, formula, interleaved, True, keep)
    del rows
    y = kernels.down(h, w_down, routing, b_down)
    del h
    return combine(y, weights, routing), new(x, 0, 0) if pre is None else pre, *routing[:5]


_experts.register_fake(_outputs)


def _gradients(
    d_out: torch.Tensor,
    x: torch.Tensor | None,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    weights: torch.Tensor,
    needs: Sequence[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocate the six gradients; those that are not wanted are empty."""
    experts, both, hidden = w_gate_up.shape
    nothing = new(d_out, 0)
    return (
        new(d_out, d_out.shape[0], hidden) if needs[X] else nothing,
        torch.empty_like(w_gate_up) if needs[W_GATE_UP] else new(d_out, 0),
        torch.empty_like(w_down) if needs[W_DOWN] else new(d_out, 0),
        weights.new_empty(weights.shape) if needs[WEIGHTS] else new(d_out, 0),
        new(d_out, experts, both) if needs[B_GATE_UP] else new(d_out, 0),
        new(d_out, experts, w_down.shape[1]) if needs[B_DOWN] else new(d_out, 0),
    )


@operator("experts_backward")
def _experts_backward(
    d_out: torch.Tensor,
    x: torch.Tensor | None,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    weights: torch.Tensor,
    pre: torch.Tensor,
    b_gate_up: torch.Tensor | None,
    b_down: torch.Tensor | None,
    pair: torch.Tensor,
    row: torch.Tensor,
    tile_expert: torch.Tensor,
    starts: torch.Tensor,
    counts: torch.Tensor,
    needs: Sequence[bool],
    tile_rows: int,
    keep: bool,
    backend: str,
    interleaved: bool,
    activation: str,
    alpha: float,
    limit: float | None,
    up_offset: float,
    *,
    in_place: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the six gradients, empty where not wanted; x may be None where it is not read.

    `in_place` lets it overwrite pre, which the operator, being functional, must not.
    """
    experts = w_gate_up.shape[0]
    if row.shape[0] == 0 or experts == 0:
        return tuple(one.zero_() for one in _gradients(d_out, x, w_gate_up, w_down, weights, needs))  # type: ignore[return-value]
    kernels, formula = KERNELS[backend], formula_of(activation, 1.0, alpha, limit, up_offset)
    routing = Routing(pair, row, tile_expert, starts, counts, weights.shape[1], tile_rows)
    results = [new(d_out, 0) for _ in range(6)]
    if not keep:
        assert x is not None, "the recomputation starts from x"
        _, pre = kernels.gate_up(
            kernels.gather(x, routing), w_gate_up, routing, b_gate_up, formula, interleaved, False, True
        )
    free = in_place or not keep
    d_pre, wh, dots = kernels.down_backward(
        kernels.gather(d_out, routing), w_down, pre, weights, routing, formula, interleaved, needs[W_DOWN], free
    )
    if free and d_pre is not pre:
        plan.apply(_let_go, pre)
    del pre
    if needs[WEIGHTS]:
        results[WEIGHTS] = slot_grads(dots, d_out, b_down, routing, weights.dtype)
    del dots
    if needs[B_DOWN]:
        results[B_DOWN] = row_sums(d_out, weights, routing, experts)
    if needs[B_GATE_UP]:
        results[B_GATE_UP] = row_sums(d_pre, None, routing, experts)
    # The gradients of the weights are larger than anything else here: the last to be made has the least beside it.
    if needs[X]:
        results[X] = combine(kernels.rows_times(d_pre, w_gate_up, routing), None, routing)
    if needs[W_GATE_UP]:
        assert x is not None, "the weight gradient is a product with x"
        results[W_GATE_UP] = kernels.weight_grad(d_pre, x, routing, w_gate_up)
    if free:
        plan.apply(_let_go, d_pre)
    del d_pre
    if needs[W_DOWN]:
        results[W_DOWN] = kernels.weight_grad(d_out, wh, routing, w_down)
    return tuple(results)  # type: ignore[return-value]


_experts_backward.register_fake(_gradients)


def _let_go(tensor: torch.Tensor) -> None:
    """Free the memory of a tensor that autograd's node still holds, and nobody else."""
    tensor.untyped_storage().resize_(0)


def _keep(ctx, tensors, options, output) -> None:
    x, w_gate_up, w_down, weights, b_gate_up, b_down, _ = tensors
    _, keep, *_ = options
    _, pre, *routing = output
    saved_x = None if keep and not ctx.needs_input_grad[W_GATE_UP] else x
    save(ctx, saved_x, (w_gate_up, w_down, weights, None if keep else b_gate_up, b_down, *routing), (pre,), options)


def _gradients_or_none(backward, d_out, saved, needs, options):
    x, w_gate_up, w_down, weights, *others, pre = saved
    needs = needs[:6]
    gradients = backward(d_out, x, w_gate_up, w_down, weights, pre, *others, needs, *options)
    return [*(gradient if need else None for gradient, need in zip(gradients, needs, strict=True)), None]


register(_experts, _experts_backward, _keep, _gradients_or_none, tensors=7, preactivations=1)


def swiglu_experts(
    x: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    b_gate_up: torch.Tensor | None = None,
    b_down: torch.Tensor | None = None,
    activation: str = "silu",
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
    interleaved: bool = False,
    recompute: bool = False,
    backend: str | None = None,
) -> torch.Tensor:
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
        top_k_weights: [..., k], float32, float16 or bfloat16, any strides; autocast leaves it alone.
        b_gate_up: [experts, 2 * intermediate], any strides, or None.
        b_down: [experts, hidden_out], any strides, or None.
        activation, alpha, limit, up_offset: the gate, as for `swiglu_glu` (gpt-oss: "silu", 1.702, 7, 1).
        interleaved: the rows of w_gate_up are gate, up, gate, up, ... (gpt-oss); else the gate's come first.
        recompute: keep only x and the routing for the backward, and recompute gate and up from them.
        backend: "portable", or "hopper" for the hand-scheduled kernels for compute capability 9.0, which work on sorted
            copies of x; None takes what is fastest here.

    Returns:
        [..., hidden_out], contiguous, in x's dtype. Products, gate and the sum over a token's experts are fp32; h, each
        expert's result and the sum are rounded. Nothing waits for the GPU, and the bits are the same on every run.
        Differentiable once, in all floating-point arguments; a second backward of a retained graph is right.

    Raises:
        TypeError: an argument is not a tensor, or of another dtype than expected; a number is not one.
        ValueError: shapes or devices do not fit together, or an option has an unknown value.

    Where no kernel can run (`backend_for(x) == "torch"`), this is `reference.swiglu_experts`.
    """
    kind, again = repeat.find(
        "experts", (x, w_gate_up, w_down, top_k_weights, top_k_index), (b_gate_up, b_down),
        (activation, alpha, limit, up_offset, interleaved, recompute, backend),
    )  # fmt: skip
    if again is not None:
        return again(x, w_gate_up, w_down, top_k_weights, b_gate_up, b_down, top_k_index)
    if backend is not None:
        check_option("backend", backend, tuple(KERNELS))
    formula = check_formula(activation, 1.0, alpha, limit, up_offset)
    x, w_gate_up, w_down, b_gate_up, b_down = autocast.operands(x, w_gate_up, w_down, b_gate_up, b_down)
    check_experts(x, w_gate_up, w_down, top_k_index, top_k_weights, b_gate_up, b_down)
    if backend_for(x) == "torch":
        return reference.swiglu_experts(
            x, w_gate_up, w_down, top_k_index, top_k_weights,
            b_gate_up=b_gate_up, b_down=b_down, interleaved=interleaved, **formula,
        )  # fmt: skip
    rows = as_matrix(x)
    index, weights = (as_matrix(one) for one in (top_k_index, top_k_weights))
    with_grad = needs_backward(x, w_gate_up, w_down, weights, b_gate_up, b_down)
    if backend is None:
        portable_because = why_portable(index.numel(), rows, w_gate_up, w_down, activation, with_grad)
        backend = "portable" if portable_because else "hopper"
    elif backend == "hopper" and (reason := why_not_hopper(rows, w_gate_up, w_down, activation)):
        raise ValueError(f"backend: expected 'portable' or None, got 'hopper': {reason}")
    by_hand = backend == "hopper"
    tile_rows = hopper.ROWS if by_hand else expert_tile_rows(index.numel(), w_gate_up.shape[0], x.dtype)
    options = (
        tile_rows, with_grad and not recompute, backend, interleaved,
        activation, formula["alpha"], formula["limit"], formula["up_offset"],
    )  # fmt: skip
    out = call_and_keep(
        _experts, rows, w_gate_up, w_down, weights, b_gate_up, b_down, index.contiguous(), *options
    )  # fmt: skip
    if kind is not None:
        repeat.remember(kind, of_matrix(x, _again(options, with_grad)))
    return like_leading(out, x)


def _again(options: Sequence[Any], with_grad: bool) -> repeat.Again:
    """Return what makes a call of a kind again."""
    series = Series()

    def again(rows: torch.Tensor, *others: Any) -> torch.Tensor:
        w_gate_up, w_down, weights, b_gate_up, b_down, index = others
        tensors = rows, w_gate_up, w_down, as_matrix(weights), b_gate_up, b_down, as_matrix(index).contiguous()
        if with_grad:
            return _experts.first_output(series, tensors, options)
        out: torch.Tensor = series.call(_out_alone, tensors, options)
        return out

    return again


def _out_alone(*arguments: Any) -> torch.Tensor:
    """Of what the operator returns."""
    return _experts.function(*arguments)[0]
