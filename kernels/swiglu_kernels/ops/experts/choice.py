"""Which kernels a mixture of experts takes."""

import torch

from swiglu_kernels.hopper import shared
from swiglu_kernels.ops.experts import hopper_experts
from swiglu_kernels.ops.experts.routing import capacity
from swiglu_kernels.tiles import here
from swiglu_kernels.tiles.candidates import KERNELS, Kernel, Problem
from swiglu_kernels.tiles.rules import Tile, expert_tile, expert_weight_grad_tile


def _expert(at: Problem, aligned: bool) -> Tile:
    return expert_tile(at.kept_for, at.dtype, at.capability, aligned)


def _expert_weight_grad(at: Problem, aligned: bool) -> Tile:
    rows = capacity(at.tokens * at.top_k, at.experts, at.kept_for) // at.experts if at.experts else 2 * at.kept_for
    return expert_weight_grad_tile(rows, at.dtype, at.capability, aligned)


KERNELS |= {
    **dict.fromkeys(
        ("experts-gate-up", "experts-down", "experts-hidden-grad", "experts-input-grad"),
        Kernel("pairs", 1, 1, 1, _expert),
    ),
    "experts-weight-grad": Kernel("intermediate", 1, 1, 1, _expert_weight_grad),
    "experts-down-weight-grad": Kernel("hidden", 1, 1, 1, _expert_weight_grad),
}


def why_not_hopper(
    x: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor, activation: str, in_fp8: bool = False
) -> str | None:
    """Say why experts cannot take the hand-scheduled kernels, or return None where they can."""
    for kernel in ("fp8 experts", "experts") if in_fp8 else ("experts",):
        if off := shared.why_off(kernel):
            return off
        if not here.hopper_multiprocessors(x.device, kernel):
            return f"the kernels are for compute capability 9.0, and x is on {x.device}"
    return hopper_experts.why_not(x, w_gate_up, w_down, activation)


def why_portable(
    pairs: int, x: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor, activation: str, with_grad: bool,
    in_fp8: bool = False,
) -> str | None:  # fmt: skip
    """Say why the portable kernels are the fastest for experts, or return None where the hand-scheduled ones are."""
    least = hopper_experts.LEAST_ROWS[with_grad]
    few = f"an expert has fewer than {least} rows on average" if pairs < least * w_gate_up.shape[0] else None
    return why_not_hopper(x, w_gate_up, w_down, activation, in_fp8) or few
