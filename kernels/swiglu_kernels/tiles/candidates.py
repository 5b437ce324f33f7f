"""Which tiles a tuner may try for each matrix kernel, and which one is shipped; everything by arithmetic, on no GPU.

A candidate has to be able to run: its fp32 accumulators fit into registers, its pipeline into shared memory, and it is
no taller than the tokens need. `candidates` yields the nearest to the shipped one, as each of them takes seconds to
compile. On Hopper most kernels can also be scheduled by hand (`hopper/forward.py`, `hopper/row.py`,
`hopper/products.py`); there, stages and groups vary.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch

from swiglu_kernels.hopper import forward, products, row, shared, transposed
from swiglu_kernels.launches.tiles import (
    MOST_PARTS,
    Capability,
    Tile,
    down_backward_tile,
    down_weight_grad_tile,
    expert_tile,
    expert_tile_rows,
    expert_weight_grad_tile,
    family_of,
    few_tokens_tile,
    forward_tile,
    input_grad_tile,
    recompute_tile,
    weight_grad_tile,
)
from swiglu_kernels.routing import capacity
from swiglu_kernels.tiles import cards

Schedule = Literal["portable", "ping-pong", "transposed", "cooperative", "gate", "torch"]
"""`torch`: PyTorch's products and one elementwise launch."""
MOST = 24
"""Portable candidates of a kernel and shape, unless asked for others."""
GRID = {
    "rows": (16, 32, 64, 128, 256),
    "columns": (16, 32, 64, 128, 256),
    "depth": (32, 64, 128, 256),
    "warps": (4, 8),
    "stages": (2, 3, 4, 5, 6),
}
"""What portable candidates are made of; the group of row tiles stays the shipped one's."""
GROUPS = (8, 16, 32)
"""Of a hand-written schedule; its stages are the shipped ones or one fewer."""
REGISTERS = (4, 128)
"""Of a thread's 255, for accumulators: below, threads have too little to do; above, the rest spills."""
SHARED_BYTES = {"hopper": 227 * 1024, "ampere": 99 * 1024}
TUNED_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Choice:
    """How one kernel is run: by which schedule, in which tile."""

    schedule: Schedule
    tile: Tile

    def __str__(self) -> str:
        if self.schedule == "torch":
            return "torch"
        tile = self.tile
        sizes = f"{tile.rows}x{tile.columns}x{tile.depth} {tile.warps}w {tile.stages}s g{tile.group}"
        sizes += f" /{tile.parts}" if tile.parts > 1 else ""
        return sizes if self.schedule == "portable" else f"{self.schedule} {sizes}"


BY_TORCH = Choice("torch", Tile(1, 1, 1, warps=1, stages=1, group=1))
"""Its tile has no meaning."""


@dataclass(frozen=True)
class Problem:
    """What a choice may depend on. `capability` None is that of Triton's interpreter."""

    tokens: int
    hidden: int
    intermediate: int
    dtype: torch.dtype
    capability: Capability | None
    multiprocessors: int = 132
    """Of the GPU; an H200's unless given."""
    experts: int = 0
    """Of a mixture, in which each token has `top_k`; 0: a dense block."""
    top_k: int = 1
    card: str = cards.H200
    """The model of the GPU; an H200 unless given."""

    @property
    def kept_for(self) -> int:
        """What a choice for it serves: that many tokens and fewer; of experts, tiles of that many rows."""
        pairs = self.tokens * self.top_k
        return expert_tile_rows(pairs, self.experts, self.dtype) if self.experts else bucket(self.tokens)


@dataclass(frozen=True)
class Kernel:
    """What arithmetic has to know of a kernel: accumulators of rows x columns, and operands of each stage."""

    rows_are: Literal["tokens", "hidden", "intermediate", "pairs"]
    """Of the tile; those of pairs of a token and an expert are as many as the routing says."""
    accumulators: int
    left: int
    """Operands of rows x depth."""
    right: int
    """Operands of depth x columns."""
    shipped: Callable[[Problem], Tile]
    on_the_fly: bool = False
    """Whether operands are formed in registers."""
    parts: bool = False
    """Whether several programs may share a sum."""
    by_torch: Callable[[Problem], bool] | None = None
    """Where `torch` is what runs, if nothing was tuned; None: it is no choice."""
    by_hand: dict[Schedule, Callable[[Problem], tuple[Tile, ...]]] = field(default_factory=dict)
    """Hand-written schedules that it has on Hopper, each in the tiles that are shipped for some shape."""
    shipped_by_hand: Callable[[Problem], Choice | None] = lambda problem: None
    """Which of them runs on Hopper where nothing was tuned; None: the portable kernel."""


def _forward(at: Problem) -> Tile:
    return forward_tile(at.tokens, at.hidden, at.intermediate, at.dtype, at.capability, True, at.multiprocessors)


MEASURED: Capability = (9, 0)
"""The only compute capability on which what is shipped was measured."""
PORTABLE_TOKENS, UNMEASURED_TOKENS = 128, 16
"""Up to so many, the portable forward is one launch on the measured capability and on others."""
SECTOR, LINE = 16, 64
"""Elements of 16 bits in what an L2 cache reads at once, and in its lines. Where rows do not begin at multiples of the
former, a product of ours takes some 1.5 times as long as PyTorch's, and of the latter up to 1.3 times where it reads or
writes columns (results/nvidia-h200/parts.csv)."""
UNALIGNED_TOKENS = 32
"""Of rows that begin anywhere, so many at most go to the row kernel, faster than PyTorch at 13, not at 79."""


def rows_begin_at(multiple: int, hidden: int, intermediate: int) -> bool:
    """Whether the rows of a layer's matrices begin at multiples of so many elements (SECTOR, LINE)."""
    return hidden % multiple == 0 and intermediate % multiple == 0


def portable_is_slower(tokens: int, hidden: int, measured: bool) -> bool:
    """Whether the portable forward takes longer than PyTorch's two products; `measured`: on a GPU that was."""
    return hidden % SECTOR > 0 or tokens > (PORTABLE_TOKENS if measured else UNMEASURED_TOKENS)


def multiplied_by_torch(at: Problem) -> bool:
    """Whether a forward without biases, with plain SiLU, is `torch` where nothing was tuned."""
    if at.capability is None or 0 in (at.tokens, at.hidden, at.intermediate):
        return False
    measured = at.capability == MEASURED
    if not measured or not by_hand_is_possible(at, "row forward" if at.tokens <= row.MOST_TOKENS else "forward"):
        return portable_is_slower(at.tokens, at.hidden, measured)
    return at.hidden % SECTOR > 0 and at.tokens > UNALIGNED_TOKENS


def hidden_grad_by_torch(at: Problem) -> bool:
    """Whether an MLP's d_gate, d_up and h are, with plain SiLU, where nothing was tuned."""
    if at.capability is None or 0 in (at.tokens, at.hidden, at.intermediate):
        return False
    in_lines = rows_begin_at(LINE, at.hidden, at.intermediate)
    by_hand = by_hand_is_possible(at, "hidden gradient")
    return not (by_hand and in_lines and products.gate_pays(at.tokens, at.intermediate))


UNALIGNED_ROWS_TOKENS, SECTOR_ROWS_TOKENS = 256, 512
"""Up to so many tokens leave dW faster by hand than by PyTorch, of rows that do not begin at multiples of 32 bytes, and
of those that do, but not of 128."""
UNALIGNED_ROWS_ELEMENTS = 50_000_000
"""Of a weight, at most, for the former. With dW by hand, a `glu` step of 36 million took 0.92 of torch.compile's,
of 79 million 1.09, of 195 million 1.20. Rows that begin inside of 32 bytes are written in parts, and where the L2 cache
does not hold the gradient until the other part comes, DRAM is read and written for each."""


def weight_grad_by_torch(at: Problem) -> bool:
    """Whether d_w_gate and d_w_up are PyTorch's products where nothing was tuned."""
    if at.capability is None or 0 in (at.tokens, at.hidden, at.intermediate):
        return False
    if at.tokens == 1 and at.capability == MEASURED:
        return False
    elements = at.hidden * at.intermediate
    if not by_hand_is_possible(at, "dW") or not cards.weight_grad_by_hand(at.card, at.tokens, elements):
        return True
    if rows_begin_at(LINE, at.hidden, at.intermediate):
        return False
    if rows_begin_at(SECTOR, at.hidden, at.intermediate):
        return at.tokens > SECTOR_ROWS_TOKENS
    return at.tokens > UNALIGNED_ROWS_TOKENS or elements > UNALIGNED_ROWS_ELEMENTS


def down_weight_grad_by_torch(at: Problem) -> bool:
    """Whether d_w_down is, where nothing was tuned."""
    if at.capability is None or 0 in (at.tokens, at.hidden, at.intermediate):
        return False
    if not by_hand_is_possible(at, "dW"):
        return True
    fills = products.transposed_fills_waves(at.hidden, at.intermediate, at.multiprocessors)
    return not fills or not cards.weight_grad_by_hand(at.card, at.tokens, at.hidden * at.intermediate)


def _recompute(at: Problem) -> Tile:
    return recompute_tile(at.tokens, at.dtype, at.capability, True)


def _input_grad(on_the_fly: bool) -> Callable[[Problem], Tile]:
    return lambda at: input_grad_tile(at.tokens, at.dtype, at.capability, True, on_the_fly)


def _weight_grad(problem: Problem) -> Tile:
    return weight_grad_tile(problem.intermediate, problem.dtype, problem.capability, True)


def _down_backward(problem: Problem) -> Tile:
    return down_backward_tile(problem.tokens, problem.dtype, problem.capability, True)


def _down_weight_grad(problem: Problem) -> Tile:
    return down_weight_grad_tile(problem.hidden, problem.dtype, problem.capability, True)


def _expert(problem: Problem) -> Tile:
    return expert_tile(problem.kept_for, problem.dtype, problem.capability, True)


def _expert_weight_grad(at: Problem) -> Tile:
    rows = capacity(at.tokens * at.top_k, at.experts, at.kept_for) // at.experts if at.experts else 2 * at.kept_for
    return expert_weight_grad_tile(rows, at.dtype, at.capability, True)


def forward_by_hand(at: Problem, stores_preact: bool) -> Choice | None:
    """Return what makes the forward on Hopper where nothing was tuned; None: the portable kernel."""
    if at.tokens > row.MOST_TOKENS:
        tile = transposed.tile_for(at.tokens, at.hidden, at.intermediate, at.multiprocessors, stores_preact)
        if tile is not None and shared.why_off("transposed forward") is None:
            return Choice("transposed", tile)
        return Choice("ping-pong", forward.tile_for(at.tokens, at.intermediate, at.multiprocessors, stores_preact))
    in_sectors = rows_begin_at(SECTOR, at.hidden, at.intermediate)
    if in_sectors and few_tokens_tile(at.tokens, at.hidden, at.intermediate, at.multiprocessors) is not None:
        return None
    return Choice("cooperative", row.tile_for(at.intermediate, at.multiprocessors))


def _sum_by_hand(problem: Problem) -> Choice | None:
    at = problem.tokens, problem.hidden, problem.multiprocessors
    if not products.fills(*at):
        return None
    return _product("cooperative" if products.sum_schedule(*at) == "cooperative" else "ping-pong")


def _gate_by_hand(at: Problem) -> Choice | None:
    return _product("gate") if products.gate_pays(at.tokens, at.intermediate) else None


def _ping_pong(_: Problem) -> Choice:
    return _product("ping-pong")


def _product(schedule: Schedule) -> Choice:
    side, stages = products.TILE, products.STAGES[schedule]
    rows = 2 * side if schedule == "cooperative" else side
    tile = Tile(rows, side, products.DEPTH, shared.CONSUMER_WARPS, stages, products.GROUP)
    return Choice(schedule, tile)


def _products(*schedules: Schedule) -> dict[Schedule, Callable[[Problem], tuple[Tile, ...]]]:
    def tiles_of(schedule: Schedule) -> Callable[[Problem], tuple[Tile, ...]]:
        return lambda _: (_product(schedule).tile,)

    return {schedule: tiles_of(schedule) for schedule in schedules}


def _ping_pong_tiles(_: Problem) -> tuple[Tile, ...]:
    return tuple(replace(forward.TILE, columns=columns) for columns in forward.COLUMNS)


def _transposed_tiles(at: Problem) -> tuple[Tile, ...]:
    return tuple(transposed.tiles(at.tokens, at.hidden, at.intermediate, at.multiprocessors))


def _row_tiles(problem: Problem) -> tuple[Tile, ...]:
    if problem.tokens > row.MOST_TOKENS:
        return ()
    return (row.tile_for(problem.intermediate, problem.multiprocessors),)


_forward_kernel = Kernel(
    "tokens", 2, 1, 2, _forward, parts=True, by_torch=multiplied_by_torch,
    by_hand={"ping-pong": _ping_pong_tiles, "transposed": _transposed_tiles, "cooperative": _row_tiles},
    shipped_by_hand=partial(forward_by_hand, stores_preact=False),
)  # fmt: skip
KERNELS = {
    "forward": _forward_kernel,
    "forward-preact": replace(_forward_kernel, shipped_by_hand=partial(forward_by_hand, stores_preact=True)),
    "recompute": Kernel("tokens", 2, 1, 2, _recompute),
    "input-grad": Kernel(
        "tokens", 1, 1, 1, _input_grad(False),
        by_hand=_products("ping-pong", "cooperative"), shipped_by_hand=_sum_by_hand,
    ),
    "input-grad-fused": Kernel("tokens", 2, 3, 2, _input_grad(True), on_the_fly=True),
    "weight-grad": Kernel(
        "intermediate", 2, 2, 1, _weight_grad,
        by_torch=weight_grad_by_torch, by_hand=_products("ping-pong"), shipped_by_hand=_ping_pong,
    ),
    "weight-grad-fused": Kernel("intermediate", 2, 3, 1, _weight_grad, on_the_fly=True),
    "mlp-hidden-grad": Kernel(
        "tokens", 1, 1, 1, _down_backward,
        by_torch=hidden_grad_by_torch, by_hand=_products("gate"), shipped_by_hand=_gate_by_hand,
    ),
    "mlp-weight-grad": Kernel(
        "hidden", 1, 1, 1, _down_weight_grad,
        by_torch=down_weight_grad_by_torch, by_hand=_products("ping-pong"), shipped_by_hand=_ping_pong,
    ),
    **dict.fromkeys(
        ("experts-gate-up", "experts-down", "experts-hidden-grad", "experts-input-grad"),
        Kernel("pairs", 1, 1, 1, _expert),
    ),
    "experts-weight-grad": Kernel("intermediate", 1, 1, 1, _expert_weight_grad),
    "experts-down-weight-grad": Kernel("hidden", 1, 1, 1, _expert_weight_grad),
}  # fmt: skip
"""By name: `forward` stores z alone, `-preact` gate and up as well; `-fused` forms d_gate and d_up on the fly.

The portable kernels of experts have tiles to choose; all groups of the hand-scheduled ones are the same within 1%."""


ADMITTED_AS: dict[tuple[str, Schedule], str] = {
    ("forward", "ping-pong"): "forward",
    ("forward", "transposed"): "transposed forward",
    ("forward", "cooperative"): "row forward",
    ("forward-preact", "ping-pong"): "forward",
    ("forward-preact", "transposed"): "transposed forward",
    ("forward-preact", "cooperative"): "row forward",
    ("input-grad", "ping-pong"): "dX",
    ("input-grad", "cooperative"): "dX",
    ("weight-grad", "ping-pong"): "dW",
    ("mlp-weight-grad", "ping-pong"): "dW",
    ("mlp-hidden-grad", "gate"): "hidden gradient",
}  # fmt: skip
"""The names in `admission.KERNELS` of the schedules of each kernel."""


def by_hand_is_possible(problem: Problem, kernel: str) -> bool:
    """Whether a kernel of `admission.KERNELS` can run for a GPU and dtype; tensors may still rule it out."""
    on_hopper = problem.capability is not None and problem.capability[0] == 9
    return on_hopper and problem.dtype in TUNED_DTYPES and shared.why_off(kernel) is None


def shipped(name: str, problem: Problem) -> Choice:
    """What runs where nothing was tuned."""
    kernel = KERNELS[name]
    if kernel.by_torch and kernel.by_torch(problem):
        return BY_TORCH
    by_hand = kernel.shipped_by_hand(problem)
    if by_hand is None or not by_hand_is_possible(problem, ADMITTED_AS[name, by_hand.schedule]):
        return Choice("portable", kernel.shipped(problem))
    return by_hand


def why_illegal(name: str, choice: Choice, problem: Problem) -> str | None:
    """Say why a choice cannot run, as far as arithmetic tells, or return None."""
    kernel, tile = KERNELS[name], choice.tile
    if choice == BY_TORCH:
        return None if kernel.by_torch else "no kernel of this name is made of PyTorch's products"
    if choice.schedule != "portable":
        if choice.schedule == "transposed" and tile.parts <= transposed.MOST_SHARES:
            tile = replace(tile, parts=1)  # a launch shares its last wave where there is room
        admitted_as = ADMITTED_AS.get((name, choice.schedule))
        possible = admitted_as is not None and by_hand_is_possible(problem, admitted_as)
        known = possible and tile in _configurations(kernel, choice.schedule, problem)
        return None if known else f"not a configuration of a schedule {choice.schedule!r} here"
    if choice == Choice("portable", kernel.shipped(problem)):
        return None
    in_grid = all(getattr(tile, name) in values for name, values in GRID.items())
    if not in_grid or not 1 <= tile.group <= 64 or not 1 <= tile.parts <= (MOST_PARTS if kernel.parts else 1):
        return "not of the grid"
    if kernel.rows_are == "pairs" and tile.rows != problem.kept_for:
        return "not of the routing's rows"
    sizes = {"tokens": problem.tokens, "hidden": problem.hidden, "intermediate": problem.intermediate}
    sizes["pairs"] = problem.kept_for
    if tile.rows > max(16, bucket(sizes[kernel.rows_are])):
        return "taller than the matrix"
    registers = kernel.accumulators * tile.rows * tile.columns / (32 * tile.warps)
    if not REGISTERS[0] <= registers <= REGISTERS[1]:
        return f"{registers:g} registers a thread for accumulators"
    family = family_of(problem.capability)
    stage_bytes = (kernel.left * tile.rows + kernel.right * tile.columns) * tile.depth * problem.dtype.itemsize
    # wgmma reads every stage from shared memory; mma.sync, and what is formed on the fly, the last one from registers.
    held = tile.stages if family == "hopper" and not kernel.on_the_fly else tile.stages - 1
    if stage_bytes * held > SHARED_BYTES[family]:
        return "its stages do not fit into shared memory"
    return None


def candidates(name: str, problem: Problem, most: int = MOST) -> list[Choice]:
    """The shipped choice first, `torch` and every hand-scheduled configuration, then the `most` nearest portable."""
    default, nearby = shipped(name, problem), KERNELS[name].shipped(problem)
    by_hand = [BY_TORCH] + [
        Choice(schedule, tile)
        for schedule in KERNELS[name].by_hand
        for tile in _configurations(KERNELS[name], schedule, problem)
    ]
    grid = (dict(zip(GRID, sizes, strict=True)) for sizes in itertools.product(*GRID.values()))
    portable = [Choice("portable", Tile(**sizes, group=nearby.group, parts=nearby.parts)) for sizes in grid]
    portable.sort(key=lambda choice: _distance(choice.tile, nearby))
    legal = [
        [choice for choice in some if choice != default and why_illegal(name, choice, problem) is None]
        for some in (by_hand, portable)
    ]
    return [default, *legal[0], *legal[1][:most]]


def _configurations(kernel: Kernel, schedule: Schedule, problem: Problem) -> list[Tile]:
    """Configurations of a hand-written schedule; groups are of rows of tiles, so that few rows need only one."""
    if schedule not in kernel.by_hand:
        return []
    return [
        replace(tile, stages=stages, group=group)
        for tile in kernel.by_hand[schedule](problem)
        for stages, group in itertools.product(
            (tile.stages, tile.stages - 1), (tile.group,) if schedule == "transposed" or tile.group == 1 else GROUPS
        )
    ]


def _distance(one: Tile, other: Tile) -> float:
    """How many halvings, doublings and stages lie between two tiles."""
    ratios = ((one.rows, other.rows), (one.columns, other.columns), (one.depth, other.depth), (one.warps, other.warps))
    return sum(abs(math.log2(mine / theirs)) for mine, theirs in ratios) + abs(one.stages - other.stages)


def bucket(size: int) -> int:
    """The next power of two: what is tuned for one token count serves all of its bucket."""
    return 1 << (size - 1).bit_length() if size > 1 else 1
