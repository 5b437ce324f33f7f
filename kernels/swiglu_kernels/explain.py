"""explain, explain_experts: which kernels a call runs, and why; a line for the forward and one for the backward."""

from typing import Any

import torch

from swiglu_kernels.ops.experts import fp8_experts, parallel, portable_gemv
from swiglu_kernels.ops.experts.choice import PAIRS, kernels_for
from swiglu_kernels.ops.experts.exchange import RankSizes
from swiglu_kernels.ops.fp8 import operation as fp8
from swiglu_kernels.ops.fp8.choice import experts_pay, way_of_glu, where_it_pays
from swiglu_kernels.ops.gate.formula import Formula, Limit, check_formula
from swiglu_kernels.ops.glu import choice
from swiglu_kernels.ops.glu.block import needs_backward
from swiglu_kernels.ops.glu.choice import AUTO
from swiglu_kernels.ops.glu.hopper_transposed import shares_of
from swiglu_kernels.ops.glu.portable_forward import any_of
from swiglu_kernels.runtime.backend import backend_for, capability_of
from swiglu_kernels.runtime.checks import check_experts, check_glu, check_option
from swiglu_kernels.runtime.ranks import group_of
from swiglu_kernels.runtime.shortcuts.door import as_matrix
from swiglu_kernels.tiles import here
from swiglu_kernels.tiles.candidates import Choice
from swiglu_kernels.tiles.rules import fp8_glu_tile

FORWARD = {
    "portable": "portable Triton, tiles of {0.rows} x {0.columns}",
    "ping-pong": "hand-scheduled ping-pong for Hopper, tiles of {0.columns} columns",
    "transposed": "hand-scheduled transposed for Hopper, tiles of {0.rows} tokens",
    "cooperative": "hand-scheduled cooperative for Hopper, tiles of {0.columns} columns",
}
"""What a forward's schedule and tile are called."""


def explain(
    x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor, bias_gate: torch.Tensor | None = None,
    bias_up: torch.Tensor | None = None, *, activation: str = "silu", gate_multiplier: float = 1.0, alpha: float = 1.0,
    limit: Limit = None, up_offset: float = 0.0, weight_grad: str = "auto", save: str = "auto",
    input_grad: str = "auto", precision: str = "bf16",
) -> str:  # fmt: skip
    """Say which kernels `swiglu_glu` runs for these arguments on this machine, and why; nothing is launched.

    Args:
        x, w_gate, w_up, bias_gate, bias_up, activation, gate_multiplier, alpha, limit, up_offset, weight_grad, save,
            input_grad: as for `swiglu_glu`; `swiglu_mlp` takes the same kernels for its two first products. Outputs are
            allocated, so they have to fit.
        precision: as modules have it; with fp8, of `swiglu_glu_fp8`.

    Returns:
        Two lines, for the forward and for the backward. With gradients to compute, the forward is the one that trains.

    Raises:
        TypeError, ValueError: as `swiglu_glu` does.
    """
    formula = check_formula(activation, gate_multiplier, alpha, limit, up_offset)
    x, w_gate, w_up = check_glu(x, w_gate, w_up)
    check_option("precision", precision, fp8.PRECISIONS)
    if precision != "bf16":
        has_bias = any_of((bias_gate, bias_up))
        return _of_fp8(x, w_gate, has_bias, formula, precision.removeprefix("fp8-"), weight_grad)
    if backend_for(x) == "torch":
        return _all_by_torch(x)
    x, biases, intermediate = as_matrix(x).detach(), (bias_gate, bias_up), w_gate.shape[0]
    trains = any(parameter is not None and parameter.requires_grad for parameter in (w_gate, w_up, *biases))
    asked = {"dX": input_grad, "dW": weight_grad}
    weight_grad, save, input_grad = choice.resolve(weight_grad, save, input_grad, x, intermediate)
    stored, z = trains and save == "preact", x.new_empty((x.shape[0], intermediate))
    chosen = choice.forward(x, w_gate, w_up, z, stored, any_of(biases), formula)
    first = _of_forward(chosen, x, intermediate) + ("; gate and up are kept" if stored else "")
    parts = [] if save == "preact" else ["the products again"]
    if save == "input" or input_grad != "fused" or weight_grad == "torch":
        parts.append("d_gate and d_up by one launch")
    unmeasured = here.why_unmeasured(x.device) or here.why_slow_rows(x.shape[1], intermediate)

    def product(name: str, by: str, launched: Choice) -> str:
        why = unmeasured if by == "torch" and asked[name] == AUTO else ""
        if name == "dW" and asked[name] == AUTO:
            why = "; ".join(filter(None, dict.fromkeys((why, choice.why_weight_grad(x, intermediate)))))
        portable = launched.schedule == "portable"
        kernel = FORWARD["portable"].format(launched.tile) if portable else "hand-scheduled for Hopper"
        made = "two products by torch" if by == "torch" else f"one launch, {kernel}"
        return f"{name}: {made} ({why})" if why else f"{name}: {made}"

    dx = choice.input_grad([(z, w_gate), (z, w_up)], torch.empty_like(x))
    parts.append(product("dX", input_grad, dx))
    dw = choice.weight_grad([(z, x), (z, x)], [torch.empty_like(w_gate), torch.empty_like(w_up)])
    parts.append("no dW" if weight_grad == "none" else product("dW", weight_grad, dw))
    return f"forward: {first}\nbackward: {'; '.join(parts)}"


def _of_forward(chosen: Choice, x: torch.Tensor, intermediate: int) -> str:
    if chosen.schedule == "torch":
        return f"two products by torch and one elementwise launch ({chosen.why})"
    text, added, of_what = f"one launch, {FORWARD[chosen.schedule].format(chosen.tile)}", 1, "shares of the last tiles"
    if chosen.schedule == "portable":
        text += f" ({chosen.why})" if chosen.why else ""
        added, of_what = chosen.tile.parts, "parts"
    elif chosen.schedule == "transposed":
        added = shares_of(chosen.tile, x, intermediate)
    return text + (f", and one that adds up {added} {of_what}" if added > 1 else "")


def _of_fp8(
    x: torch.Tensor, w_gate: torch.Tensor, has_bias: bool, formula: Formula, recipe: str, weight_grad: str
) -> str:
    check_option("weight_grad", weight_grad, fp8.WEIGHT_GRADS)
    (intermediate, hidden), blocks = w_gate.shape, recipe == "blockwise"
    fp8.check("x", x, (("hidden", hidden), ("intermediate", intermediate)))
    x = as_matrix(x)
    tile = fp8_glu_tile(x.shape[0], blocks, capability_of(x.device))
    schedule, why = way_of_glu(x, intermediate, blocks, x.dtype, has_bias, formula)
    kernel = {
        "hopper": "one launch, hand-scheduled for Hopper",
        "torch": f"two products by PyTorch, then the gate's pass ({why})",
        "portable": f"one launch, portable Triton, tiles of {tile.rows} x {tile.columns} ({why})",
    }[schedule]
    by = "blocks of 1 x 128 (weights 128 x 128)" if blocks else "rows"
    known = {"none": "no dW", **dict.fromkeys(("fp8", "auto"), "dW: two launches of fp8")}
    dw = known.get(weight_grad, f"dW: in {x.dtype}, by {weight_grad}")
    forward_from, step_from = (where_it_pays(recipe, trains, hidden, intermediate) for trains in (False, True))
    return (
        f"forward: x and weights quantised to fp8 by {by}; {kernel}; "
        f"faster than bf16 {forward_from}, with weights quantised before\n"
        f"backward: d_gate and d_up by one launch; they and the weights quantised for dX, which is one launch; {dw}; "
        f"a step is faster than in bf16 {step_from}"
    )


def explain_experts(
    x: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor, top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor, *, activation: str = "silu", recompute: bool = False, precision: str = "bf16",
    group: Any = None,
) -> str:  # fmt: skip
    """Say which kernels `swiglu_experts` runs for these arguments on this machine, and why; nothing is launched.

    Args:
        x, w_gate_up, w_down, top_k_index, top_k_weights, activation, recompute, precision: as for `swiglu_experts`,
            weights that are not quantised; what else that takes has no part in the choice.
        group: as for `swiglu_experts_parallel`, which is then explained; all ranks ask together.

    Returns:
        Two lines, for the forward and for the backward; with a group one before them, for how rows travel.

    Raises:
        TypeError, ValueError: as `swiglu_experts` does.
    """
    check_formula(activation, 1.0, 1.0, None, 0.0)
    check_option("precision", precision, fp8_experts.PRECISIONS)
    check_experts(x, w_gate_up, w_down, top_k_index, top_k_weights, None, None)
    if group is not None:
        ranks = group_of(group)
        _, why = parallel.transport_for(x, ranks)
        exchange = f"by all-to-all, for whose counts the host waits ({why})"
        if why is None:
            size = RankSizes(ranks.size(), 0, len(w_down), *as_matrix(top_k_index).shape)
            pays = precision == "bf16" and parallel.overlap_pays(size, x.shape[-1], w_down.shape[2], x.dtype)
            by = "copy engines while products run" if pays else "another"
            exchange = f"through symmetric memory, written by one launch and read by {by}; nothing waits for the host"
        every = [as_matrix(tensor) for tensor in (x, top_k_index, top_k_weights)]
        x, index, weights = (tensor.new_empty(ranks.size() * len(tensor), tensor.shape[1]) for tensor in every)
        own = explain_experts(
            x, w_gate_up, w_down, index, weights, activation=activation, recompute=recompute, precision=precision
        )
        return f"exchange: a row for each token and rank, {exchange}\n{own}"
    in_fp8 = precision != "bf16"
    if in_fp8:
        fp8_experts.check(x, w_gate_up)
    elif backend_for(x) == "torch":
        return _all_by_torch(x)
    index, trains = as_matrix(top_k_index), needs_backward(x, w_gate_up, w_down, top_k_weights)
    multiplied = w_gate_up, w_down
    if in_fp8 and not trains:
        multiplied = fp8_experts.like_codes(x, *multiplied)
    backend, rows, why = kernels_for(index, as_matrix(x), multiplied, activation, trains, in_fp8)
    kernels = f"portable Triton ({why})" if why else "hand-scheduled for Hopper, on rows sorted by expert"
    kept = f"; {'x alone is' if recompute else 'gate and up are'} kept" if trains else ""
    again = "gate and up again; " if recompute else ""
    if in_fp8:
        pays = experts_pay(index.numel() / len(w_down), index.shape[1], w_down.shape[2])
        kept, again = kept.replace("gate and up", "gate, up and y"), again.replace("gate and up", "gate, up and y")
        return (
            f"forward: x and weights quantised to fp8 by rows; the routing and two grouped products, {kernels}, "
            f"tiles of {rows} rows; h quantised between them; the weighted sum{kept}; {'' if pays else 'not '}faster "
            f"than bf16, with weights quantised before\n"
            f"backward: {again}in {x.dtype}, d_gate and d_up by one launch; dX and dW by one launch each"
        )
    products = f"the routing and two grouped products, {kernels}, tiles of {rows} rows"
    if backend == PAIRS:
        which = f"each of an expert with all {len(index)} tokens"
        if portable_gemv.takes(index, w_gate_up.shape[0]):
            which = "each of a token's expert with this token"
        products = f"two products, {which}, {kernels}"
    return (
        f"forward: {products}; the weighted sum{kept}\n"
        f"backward: {again}d_gate and d_up by one launch; dX and dW by one launch each, of the same kernels"
    )


def _all_by_torch(x: torch.Tensor) -> str:
    device = x.device
    where = f"a {device.type.upper()}"
    if x.dtype is torch.float64:
        where = "float64"
    elif device.type == "cuda":
        where = f"compute capability {'.'.join(map(str, capability_of(device) or ()))}"
    why = f"there are no Triton kernels for {where}"
    return f"forward: PyTorch's own operations ({why})\nbackward: PyTorch's own operations ({why})"
