"""The named choices of how gradients are made, and what "auto" stands for: what was fastest on H100s and H200s.

"auto" is save="preact" wherever memory is not the point, dX in two steps by Triton where its tiles fill their waves
(`sum_fills_waves`), and dW by Triton. What the portable kernels do instead is slower than PyTorch's products from two
tokens on, but for narrow layers, and so are the hand-scheduled ones where rows do not begin at multiples of 128 bytes
and tokens are many: "auto" then takes PyTorch's. Where no hand-scheduled kernel takes the tensors (other GPUs, other
versions of Triton, biases, other gates), the forward of more than PORTABLE_TOKENS is two products by torch with one
elementwise launch, unless a tile was tuned for it.

Nothing was measured on a compute capability other than 9.0. There a product of ours may lose to PyTorch's, while one
elementwise launch between PyTorch's products moves fewer bytes than eager's several: "auto" takes that, in both
directions; only the forward of up to UNMEASURED_TOKENS tokens is one launch. A tile that `tune` keeps is taken.

Measurements: results/kernel-attempts.md ("Which kernel") and results/nvidia-h200/parts.csv.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from swiglu_kernels.hopper import shared
from swiglu_kernels.ops.gate.formula import PLAIN, Formula
from swiglu_kernels.ops.glu import hopper_forward, hopper_products, hopper_row, hopper_transposed, hopper_weights
from swiglu_kernels.runtime.backend import INTERPRETING, capability_of, card_of
from swiglu_kernels.runtime.launch import vectorises
from swiglu_kernels.tiles import candidates, cards, here
from swiglu_kernels.tiles.candidates import BY_TORCH, KERNELS, SECTOR, Choice, Kernel, Schedule, TileProblem, by_table
from swiglu_kernels.tiles.rules import Tile, few_tokens_tile, forward_tile
from swiglu_kernels.tiles.tuning import lookup

AUTO = "auto"
ONLY_PLAIN = "the hand-scheduled kernels have plain SiLU only"
WEIGHT_GRADS = ("triton", "torch", "none", AUTO)
SAVES = ("preact", "input", AUTO)
INPUT_GRADS = ("fused", "two_step", "torch", AUTO)
PORTABLE_TOKENS, UNMEASURED_TOKENS = 128, 16
"""Up to so many, the portable forward is one launch on the measured capability and on others."""
UNALIGNED_TOKENS = 32
"""Of rows that begin anywhere, so many at most go to the row kernel, faster than PyTorch at 13, not at 79."""
UNALIGNED_ROWS_TOKENS, SECTOR_ROWS_TOKENS = 256, 512
"""Up to so many tokens leave dW faster by hand than by PyTorch, of rows that do not begin at multiples of 32 bytes, and
of those that do, but not of 128."""
UNALIGNED_ROWS_ELEMENTS = 50_000_000
"""Of a weight, at most, for the former: of larger ones the L2 cache does not hold a sector of the gradient until its
other part is written. A `glu` step of 36 million took 0.92 of torch.compile's, of 79 million 1.09."""
MOST_SLOWER_WAVES = 1.02
"""Of the time of the ping-pong schedule, what the waves of wide tiles may take by their sizes alone."""
FORWARDS: dict[Schedule, str] = {
    "ping-pong": "forward", "transposed": "transposed forward", "cooperative": "row forward",
}  # fmt: skip
"""The hand-written schedules of the forward, with their names in `admission.KERNELS`."""


def forward_is_by_torch(at: TileProblem, by_hand: bool) -> bool:
    """Whether a forward for which nothing was tuned is `torch`; `by_hand`: whether a kernel by hand can take it."""
    if 0 in at.sizes:
        return False
    if by_hand:
        return at.hidden % SECTOR > 0 and at.tokens > UNALIGNED_TOKENS
    most = PORTABLE_TOKENS if at.capability in (None, candidates.MEASURED) else UNMEASURED_TOKENS
    return at.hidden % SECTOR > 0 or at.tokens > most


def _plain_forward_is_by_torch(at: TileProblem) -> bool:
    kernel = "row forward" if at.tokens <= hopper_row.MOST_TOKENS else "forward"
    return at.capability is not None and forward_is_by_torch(at, candidates.by_hand_is_possible(at, kernel))


def weight_grad_is_by_torch(at: TileProblem) -> bool:
    """Whether d_w_gate and d_w_up are PyTorch's products where nothing was tuned."""
    if at.capability is None or 0 in at.sizes or (at.tokens == 1 and at.capability == candidates.MEASURED):
        return False
    elements = at.hidden * at.intermediate
    if not candidates.by_hand_is_possible(at, "dW") or not cards.weight_grad_by_hand(at.card, at.tokens, elements):
        return True
    if candidates.rows_begin_at(candidates.LINE, at.hidden, at.intermediate):
        return False
    if candidates.rows_begin_at(SECTOR, at.hidden, at.intermediate):
        return at.tokens > SECTOR_ROWS_TOKENS
    return at.tokens > UNALIGNED_ROWS_TOKENS or elements > UNALIGNED_ROWS_ELEMENTS


def forward_by_hand(at: TileProblem, stores_preact: bool) -> Choice | None:
    """Return what makes the forward on Hopper where nothing was tuned; None: the portable kernel."""
    if at.tokens > hopper_row.MOST_TOKENS:
        tile = hopper_transposed.tile_for(at.tokens, at.hidden, at.intermediate, at.multiprocessors, stores_preact)
        if tile is not None and shared.why_off("transposed forward") is None:
            return Choice("transposed", tile)
        wide = hopper_forward.tile_for(at.tokens, at.intermediate, at.multiprocessors, stores_preact)
        return Choice("ping-pong", wide)
    in_sectors = candidates.rows_begin_at(SECTOR, at.hidden, at.intermediate)
    if in_sectors and few_tokens_tile(at.tokens, at.hidden, at.intermediate, at.multiprocessors) is not None:
        return None
    return Choice("cooperative", hopper_row.tile_for(at.intermediate, at.multiprocessors))


def _sum_by_hand(at: TileProblem) -> Choice | None:
    output = at.tokens, at.hidden, at.multiprocessors
    return product_choice(hopper_products.sum_schedule(*output)) if hopper_products.fills(*output) else None


def product_choice(schedule: Schedule) -> Choice:
    """Return a schedule of `hopper_products.py` in its own tile."""
    side, stages = hopper_products.TILE, hopper_products.STAGES[schedule]
    tile = hopper_products.TILE_ROWS[schedule], side, hopper_products.DEPTH
    return Choice(schedule, Tile(*tile, shared.CONSUMER_WARPS, stages, hopper_products.GROUP))


def ping_pong(at: TileProblem) -> Choice:
    """Return the schedule of one transposed product, in the card's tile."""
    choice = product_choice("ping-pong")
    return replace(choice, tile=replace(choice.tile, **cards.weight_grad_tile(at.card)))


def _weight_grad_by_hand(at: TileProblem) -> Choice:
    """Return that of two: in wide tiles where the L2 cache takes the time and they fill their waves as well."""
    large = at.hidden * at.intermediate >= cards.cooperative_from(at.card)
    if large and hopper_weights.slower_waves(at.hidden, at.intermediate, at.multiprocessors) <= MOST_SLOWER_WAVES:
        return Choice("cooperative", hopper_weights.TILE)
    return ping_pong(at)


def products_by_hand(admitted_as: str, *schedules: Schedule) -> dict[str, Any]:
    """Return what `Kernel` has of schedules of `hopper_products.py`, admitted by this name."""

    def tiles_of(_: TileProblem, schedule: Schedule) -> tuple[Tile, ...]:
        return (product_choice(schedule).tile,)

    by_hand = {schedule: partial(tiles_of, schedule=schedule) for schedule in schedules}
    return {"by_hand": by_hand, "admitted_as": dict.fromkeys(schedules, admitted_as)}


def _forward_tiles(at: TileProblem, schedule: Schedule) -> tuple[Tile, ...]:
    """The tiles of a schedule of the forward."""
    if schedule == "ping-pong":
        return tuple(replace(hopper_forward.TILE, columns=columns) for columns in hopper_forward.COLUMNS)
    if schedule == "transposed":
        return tuple(hopper_transposed.tiles(*at.sizes, at.multiprocessors))
    few = at.tokens <= hopper_row.MOST_TOKENS
    return (hopper_row.tile_for(at.intermediate, at.multiprocessors),) if few else ()


_forward_kernel = Kernel(
    "tokens", 2, 1, 2,
    lambda at, aligned: forward_tile(*at.sizes, at.dtype, at.capability, aligned, at.multiprocessors),
    parts=True, by_torch=_plain_forward_is_by_torch,
    by_hand={name: partial(_forward_tiles, schedule=name) for name in FORWARDS}, admitted_as=FORWARDS,
    shipped_by_hand=partial(forward_by_hand, stores_preact=False), most_shares=hopper_transposed.MOST_SHARES,
)  # fmt: skip
KERNELS |= {
    "forward": _forward_kernel,
    "forward-preact": replace(_forward_kernel, shipped_by_hand=partial(forward_by_hand, stores_preact=True)),
    "recompute": Kernel("tokens", 2, 1, 2, by_table("recompute", "tokens")),
    "input-grad": Kernel(
        "tokens", 1, 1, 1, by_table("input-grad", "tokens"), shipped_by_hand=_sum_by_hand,
        **products_by_hand("dX", "ping-pong", "cooperative"),
    ),
    "input-grad-fused": Kernel("tokens", 2, 3, 2, by_table("input-grad-fused", "tokens"), on_the_fly=True),
    "weight-grad": Kernel(
        "intermediate", 2, 2, 1, by_table("weight-grad", "intermediate"), by_torch=weight_grad_is_by_torch,
        shipped_by_hand=_weight_grad_by_hand,
        by_hand=products_by_hand("dW", "ping-pong")["by_hand"] | {"cooperative": lambda at: (hopper_weights.TILE,)},
        admitted_as={"ping-pong": "dW", "cooperative": "dW"},
    ),
    "weight-grad-fused": Kernel("intermediate", 2, 3, 1, by_table("weight-grad", "intermediate"), on_the_fly=True),
}  # fmt: skip


def forward(
    x: Tensor, w_gate: Tensor, w_up: Tensor, z: Tensor, stored: bool = False,
    has_bias: bool = False, formula: Formula = PLAIN, launch: bool = False,
) -> Choice:  # fmt: skip
    """Choose what makes z.

    Args:
        x, w_gate, w_up: [tokens, hidden], [intermediate, hidden] and as that.
        z: [tokens, intermediate], or what lies in memory like it.
        stored: whether gate and up are kept.
        has_bias: whether gate or up have biases.
        formula: the gate.
        launch: one launch is asked for, not PyTorch's products.
    """
    name = "forward-preact" if stored else "forward"
    at = here.problem_of(x, (*x.shape, w_gate.shape[0]))
    tuned = lookup(name, x, *at.sizes) if formula == PLAIN and not has_bias else None
    aside = "the hand-scheduled kernels have no biases" if has_bias else None if formula == PLAIN else ONLY_PLAIN
    aside = aside or hopper_forward.why_not(x, w_gate, w_up, at.capability)
    why = here.why_unmeasured(x.device) or aside
    if not (launch or INTERPRETING or 0 in at.sizes):
        if tuned == BY_TORCH:
            return replace(BY_TORCH, why="tuned")
        if tuned is None and forward_is_by_torch(at, aside is None):
            return replace(BY_TORCH, why=why or here.why_slow_rows(*at.sizes[1:]))
    choice = here.choose(name, at, tuned, aside, vectorises(x, w_gate, w_up, z))
    return replace(choice, why=why or "") if choice.schedule == "portable" else choice


def recompute(dz: Tensor, x: Tensor, w_gate: Tensor, w_up: Tensor, d_gate: Tensor) -> Choice:
    """Choose the launch that makes d_gate and d_up where x alone was saved."""
    at = here.problem_of(x, (*x.shape, w_gate.shape[0]))
    tuned = lookup("recompute", x, *at.sizes)
    return here.choose("recompute", at, tuned, None, vectorises(x, w_gate, w_up, dz, d_gate))


def input_grad(
    pairs: Sequence[tuple[Tensor, Tensor]], dx: Tensor, dz: Tensor | None = None, accumulate: bool = False
) -> Choice:
    """Choose the launch that makes dX of (d_gate, w_gate) and (d_up, w_up), or on the fly of dz, gate and up."""
    (gate, w_gate), (_, w_up) = pairs
    name = "input-grad" if dz is None else "input-grad-fused"
    at = here.problem_of(gate, (gate.shape[0], dx.shape[1], gate.shape[1]))
    tuned = lookup(name, gate, *at.sizes)
    aside = hopper_products.why_not("dX", pairs, [dx], at.capability) if dz is None else None
    aligned = vectorises(gate if dz is None else dz, gate, w_gate, w_up, dx)
    choice = here.choose(name, at, None if accumulate else tuned, aside, aligned)
    return here.choose(name, at, tuned, "it adds", aligned) if accumulate and choice.schedule == "portable" else choice


def weight_grad(pairs: Sequence[tuple[Tensor, Tensor]], outs: Sequence[Tensor], dz: Tensor | None = None) -> Choice:
    """Choose the launch that makes both weight gradients of (d_gate, x) and (d_up, x), or of dz, gate, up and x."""
    gate, x = pairs[0]
    name = "weight-grad" if dz is None else "weight-grad-fused"
    at = here.problem_of(x, (*x.shape, gate.shape[1]))
    aside = hopper_products.why_not("dW", pairs, outs, at.capability) if dz is None else None
    aligned = vectorises(gate if dz is None else dz, gate, x, outs[0])
    choice = here.choose(name, at, lookup(name, x, *at.sizes), aside, aligned)
    lies_across = any(matrix.stride(1) != 1 for pair in pairs for matrix in pair)
    return ping_pong(at) if choice.schedule == "cooperative" and lies_across else choice


def resolve(
    weight_grad: str, save: str, input_grad: str, x: Tensor, intermediate: int, chunk_tokens: int = 0
) -> tuple[str, str, str]:
    """Return (weight_grad, save, input_grad) with every "auto" replaced by what is fastest for x [tokens, hidden].

    chunk_tokens are worked on at a time, so that memory is the point; 0 for all.
    """
    tokens, hidden = chunk_tokens or x.shape[0], x.shape[1]
    fits = x.dtype in (torch.float16, torch.bfloat16) and hidden % 8 == 0 and intermediate % 8 == 0
    if save == AUTO:
        save = "input" if chunk_tokens else "preact"
    if input_grad == AUTO:
        input_grad = "torch"
        if fits and candidates.rows_begin_at(candidates.LINE, hidden, intermediate):
            hopper = here.hopper_multiprocessors(x.device, "dX")
            if hopper and hopper_products.sum_fills_waves(tokens, hidden, intermediate, hopper):
                input_grad = "two_step"
    if weight_grad == AUTO:
        tuned = lookup("weight-grad", x, tokens, hidden, intermediate) if fits else None
        if tuned is not None:
            by_triton = tuned != BY_TORCH
        elif tokens == 1:
            by_triton = not here.why_unmeasured(x.device)
        else:
            by_triton = fits and here.hopper_multiprocessors(x.device, "dW") > 0
            by_triton = by_triton and not weight_grad_is_by_torch(here.problem_of(x, (tokens, hidden, intermediate)))
        weight_grad = "triton" if by_triton else "torch"
    return weight_grad, save, input_grad


def why_weight_grad(x: Tensor, intermediate: int) -> str:
    """Say on what "auto" bases its choice for weight gradients: a tuned choice, or a card that was measured."""
    card = card_of(x.device)
    if lookup("weight-grad", x, x.shape[0], x.shape[1], intermediate) is not None:
        return f"tuned on this {card}"
    return cards.measured_on(card) if capability_of(x.device) == candidates.MEASURED else here.why_unmeasured(x.device)
