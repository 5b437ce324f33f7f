"""Which kernels an MLP's backward takes through w_down; `ops/glu/choice.py` says on what measurements it rests."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from swiglu_kernels.ops.gate.formula import PLAIN, Formula
from swiglu_kernels.ops.glu import hopper_products
from swiglu_kernels.ops.glu.choice import ONLY_PLAIN, ping_pong, product_choice, products_by_hand
from swiglu_kernels.runtime.backend import INTERPRETING
from swiglu_kernels.runtime.launch import vectorises
from swiglu_kernels.tiles import candidates, cards, here
from swiglu_kernels.tiles.tuning import lookup


def hidden_grad_is_by_torch(at: candidates.TileProblem) -> bool:
    """Whether an MLP's d_gate, d_up and h are, with plain SiLU, where nothing was tuned."""
    if at.capability is None or 0 in at.sizes:
        return False
    in_lines = candidates.rows_begin_at(candidates.LINE, at.hidden, at.intermediate)
    by_hand = candidates.by_hand_is_possible(at, "hidden gradient")
    return not (by_hand and in_lines and hopper_products.gate_pays(at.tokens, at.intermediate))


def down_weight_grad_is_by_torch(at: candidates.TileProblem) -> bool:
    """Whether d_w_down is, where nothing was tuned."""
    if at.capability is None or 0 in at.sizes:
        return False
    if not candidates.by_hand_is_possible(at, "dW"):
        return True
    fills = hopper_products.transposed_fills_waves(at.hidden, at.intermediate, at.multiprocessors)
    return not fills or not cards.weight_grad_by_hand(at.card, at.tokens, at.hidden * at.intermediate)


def _gate_by_hand(at: candidates.TileProblem) -> candidates.Choice | None:
    return product_choice("gate") if hopper_products.gate_pays(at.tokens, at.intermediate) else None


candidates.KERNELS |= {
    "mlp-hidden-grad": candidates.Kernel(
        "tokens", 1, 1, 1, candidates.by_table("mlp-hidden-grad", "tokens"),
        by_torch=hidden_grad_is_by_torch, shipped_by_hand=_gate_by_hand, **products_by_hand("hidden gradient", "gate"),
    ),
    "mlp-weight-grad": candidates.Kernel(
        "hidden", 1, 1, 1, candidates.by_table("mlp-weight-grad", "hidden"),
        by_torch=down_weight_grad_is_by_torch, shipped_by_hand=ping_pong, **products_by_hand("dW", "ping-pong"),
    ),
}  # fmt: skip


def hidden_grad(
    d_out: torch.Tensor, w_down: torch.Tensor, stored: Sequence[torch.Tensor], formula: Formula = PLAIN,
    launch: bool = False,
) -> candidates.Choice:  # fmt: skip
    """Choose what makes d_gate, d_up and h.

    Args:
        d_out, w_down: [tokens, hidden] and [hidden, intermediate].
        stored: gate, up and what is written beside them, [tokens, intermediate].
        formula: the gate.
        launch: one launch is asked for, not a product by PyTorch with an elementwise launch behind it.
    """
    at = here.problem_of(d_out, (*d_out.shape, w_down.shape[1]))
    tuned = lookup("mlp-hidden-grad", d_out, *at.sizes)
    aside = None if formula == PLAIN else ONLY_PLAIN
    aside = aside or hopper_products.why_not("hidden gradient", [(d_out, w_down)], stored, at.capability)
    if not (launch or INTERPRETING or 0 in at.sizes):
        counts = tuned if formula == PLAIN or (tuned and tuned.schedule == "portable") else None
        if counts == candidates.BY_TORCH or (counts is None and (aside is not None or hidden_grad_is_by_torch(at))):
            return replace(candidates.BY_TORCH, why="tuned" if counts else aside or "")
    return here.choose("mlp-hidden-grad", at, tuned, aside, vectorises(d_out, w_down, *stored[:3]))


def down_weight_grad(d_out: torch.Tensor, h: torch.Tensor, d_w_down: torch.Tensor) -> candidates.Choice:
    """Choose the launch that makes d_w_down."""
    at = here.problem_of(d_out, (*d_out.shape, h.shape[1]))
    aside = hopper_products.why_not("dW", [(d_out, h)], [d_w_down], at.capability)
    tuned = lookup("mlp-weight-grad", d_out, *at.sizes)
    return here.choose("mlp-weight-grad", at, tuned, aside, vectorises(d_out, h, d_w_down))


def down_weight_grad_by_torch(d_out: torch.Tensor, intermediate: int) -> bool:
    """Whether "auto" makes an MLP's d_w_down by torch, where the other two weight gradients are by Triton."""
    at = here.problem_of(d_out, (*d_out.shape, intermediate))
    if (tuned := lookup("mlp-weight-grad", d_out, *at.sizes)) is not None:
        return tuned == candidates.BY_TORCH
    return here.hopper_multiprocessors(d_out.device, "dW") > 0 and down_weight_grad_is_by_torch(at)
