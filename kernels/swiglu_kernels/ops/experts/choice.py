"""Which kernels a mixture of experts takes."""

from typing import NamedTuple

import torch

from swiglu_kernels.hopper import shared
from swiglu_kernels.ops.experts import hopper_experts
from swiglu_kernels.ops.experts.routing import capacity
from swiglu_kernels.ops.fp8.portable_codes import ALIGNMENT
from swiglu_kernels.runtime.backend import Capability, capability_of
from swiglu_kernels.runtime.launch import vectorises
from swiglu_kernels.tiles import here
from swiglu_kernels.tiles.candidates import KERNELS, Kernel, TileProblem
from swiglu_kernels.tiles.rules import Tile, expert_tile, expert_tile_rows, expert_weight_grad_tile, fp8_expert_tile
from swiglu_kernels.tiles.tuning import lookup, portable_tile


def _expert_weight_grad(at: TileProblem, aligned: bool) -> Tile:
    rows = capacity(at.tokens * at.top_k, at.experts, at.kept_for) // at.experts if at.experts else 2 * at.kept_for
    return expert_weight_grad_tile(rows, at.dtype, at.capability, aligned)


KERNELS |= {
    **dict.fromkeys(
        ("experts-gate-up", "experts-down", "experts-hidden-grad", "experts-input-grad"),
        Kernel("pairs", 1, 1, 1, lambda at, aligned: expert_tile(at.kept_for, at.dtype, at.capability, aligned)),
    ),
    "experts-weight-grad": Kernel("intermediate", 1, 1, 1, _expert_weight_grad),
    "experts-down-weight-grad": Kernel("hidden", 1, 1, 1, _expert_weight_grad),
}


def tile(
    kernel: str, sizes: tuple[int, int, int], capability: Capability | None, *matrices: torch.Tensor,
    mean_rows: int | None = None,
) -> Tile:  # fmt: skip
    """Return the tile of a portable product of sorted rows: the tuned one of a kernel in KERNELS, or the shipped one.

    sizes: rows of the routing's tiles, hidden and intermediate size. capability: None for that of the operands' device.
    mean_rows: of an expert, in a product that is a gradient of weights.
    """
    aligned, like = vectorises(*matrices, multiple=8), matrices[0]
    capability = capability or capability_of(like.device)
    if like.dtype == torch.float8_e4m3fn:
        return fp8_expert_tile(sizes[0], capability)
    tuned = portable_tile(lookup(kernel, like, *sizes), aligned)
    if mean_rows is not None:
        return tuned or expert_weight_grad_tile(mean_rows, like.dtype, capability, aligned)
    return tuned or expert_tile(sizes[0], like.dtype, capability, aligned)


def why_not_hopper(
    x: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor, activation: str, with_grad: bool,
    in_fp8: bool = False,
) -> str | None:  # fmt: skip
    """Say why experts cannot take the hand-scheduled kernels, or return None where they can."""
    for kernel in ("fp8 experts", "experts") if in_fp8 else ("experts",):
        if off := shared.why_off(kernel):
            return off
        if not here.hopper_multiprocessors(x.device, kernel):
            return f"the kernels are for compute capability 9.0, and x is on {x.device}"
    multiple = ALIGNMENT if in_fp8 and not with_grad else hopper_experts.BLOCK
    return hopper_experts.why_not(x, w_gate_up, w_down, activation, multiple)


def why_portable(
    pairs: int, x: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor, activation: str, with_grad: bool,
    in_fp8: bool = False,
) -> str | None:  # fmt: skip
    """Say why the portable kernels are the fastest for experts, or return None where the hand-scheduled ones are."""
    least = hopper_experts.LEAST_ROWS[with_grad]
    few = f"an expert has fewer than {least} rows on average" if pairs < least * w_gate_up.shape[0] else None
    return why_not_hopper(x, w_gate_up, w_down, activation, with_grad, in_fp8) or few


MOST_TOKENS, MOST_PAIRS = 32, 256
"""Of PAIRS."""
PAIRS = "pairs"
"""What "portable" is for few tokens and no gradients: no routing is made."""


class Kernels(NamedTuple):
    """Which kernels a mixture takes."""

    backend: str
    """"portable", "hopper" or PAIRS."""
    tile_rows: int
    """Of the routing."""
    why: str | None
    """Why not the hand-scheduled ones, or None."""


def kernels_for(
    index: torch.Tensor, x: torch.Tensor, weights: tuple[torch.Tensor, torch.Tensor], activation: str, with_grad: bool,
    in_fp8: bool, backend: str | None = None,
) -> Kernels:  # fmt: skip
    """Choose the kernels of a mixture.

    Args:
        index, x: [T, k], the experts of each token, and [T, H].
        weights: w_gate_up and w_down, or what lies in memory like their codes.
        activation: of the gate.
        with_grad, in_fp8: whether gradients will be computed, and whether the forward's products are in fp8.
        backend: what was asked for. Raises ValueError where the hand-scheduled kernels were, and cannot run.
    """
    if backend is None:
        why = why_portable(index.numel(), x, *weights, activation, with_grad, in_fp8)
        backend = "portable" if why else "hopper"
        if why and not with_grad and not in_fp8 and len(index) <= MOST_TOKENS and index.numel() <= MOST_PAIRS:
            backend = PAIRS
    else:
        why = why_not_hopper(x, *weights, activation, with_grad, in_fp8) if backend == "hopper" else "asked for"
        if backend == "hopper" and why:
            raise ValueError(f"backend: expected 'portable' or None, got 'hopper': {why}")
    by_hand = backend == "hopper"
    rows = hopper_experts.ROWS if by_hand else expert_tile_rows(index.numel(), weights[0].shape[0], x.dtype)
    return Kernels(backend, rows, why)
