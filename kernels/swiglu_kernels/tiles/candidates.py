"""Which tiles a tuner may try for each matrix kernel, and which one is shipped; everything by arithmetic, on no GPU.

A candidate has to be able to run: its fp32 accumulators fit into registers, its pipeline into shared memory, and it is
no taller than the tokens need. `candidates` yields the nearest to the shipped one, as each of them takes seconds to
compile. On Hopper most kernels can also be scheduled by hand (`ops/glu/hopper_forward.py`, `ops/glu/hopper_row.py`,
`ops/glu/hopper_products.py`); there, stages and groups vary.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from swiglu_kernels.hopper import shared
from swiglu_kernels.runtime.backend import Capability
from swiglu_kernels.tiles import cards
from swiglu_kernels.tiles.rules import MOST_PARTS, Tile, expert_tile_rows, family_of, tile_of

Schedule = Literal["portable", "ping-pong", "transposed", "cooperative", "gate", "torch"]
"""`torch`: PyTorch's products and one elementwise launch."""
MOST = 24
"""Portable candidates of a kernel and shape, unless asked for others."""
_SIDES = (16, 32, 64, 128, 256)
GRID = {"rows": _SIDES, "columns": _SIDES, "depth": (32, 64, 128, 256), "warps": (4, 8), "stages": (2, 3, 4, 5, 6)}
"""What portable candidates are made of; the group of row tiles stays the shipped one's."""
GROUPS = (4, 8, 16, 32)
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
    why: str = field(default="", compare=False)
    """Why not a faster one, or "tuned"."""

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
class TileProblem:
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
    def sizes(self) -> tuple[int, int, int]:
        """Tokens, hidden and intermediate size."""
        return self.tokens, self.hidden, self.intermediate

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
    tile: Callable[[TileProblem, bool], Tile]
    """Of the portable kernel where nothing was tuned, for tensors that are aligned or not."""
    on_the_fly: bool = False
    """Whether operands are formed in registers."""
    parts: bool = False
    """Whether several programs may share a sum."""
    by_torch: Callable[[TileProblem], bool] | None = None
    """Where `torch` is what runs, if nothing was tuned; None: it is no choice."""
    by_hand: dict[Schedule, Callable[[TileProblem], tuple[Tile, ...]]] = field(default_factory=dict)
    """Hand-written schedules that it has on Hopper, each in the tiles that are shipped for some shape."""
    admitted_as: dict[Schedule, str] = field(default_factory=dict)
    """The name of each of them in `admission.KERNELS`."""
    shipped_by_hand: Callable[[TileProblem], Choice | None] = lambda problem: None
    """Which of them runs on Hopper where nothing was tuned; None: the portable kernel."""
    most_shares: int = 1
    """Programs among which a hand-written schedule may share a tile of its last wave."""


def by_table(kernel: str, rows_are: Literal["tokens", "hidden", "intermediate"]) -> Callable[[TileProblem, bool], Tile]:
    """Return the `Kernel.tile` of a kernel of `rules.TABLES`."""
    return lambda at, aligned: tile_of(kernel, getattr(at, rows_are), at.dtype, at.capability, aligned)


MEASURED: Capability = (9, 0)
"""The only compute capability on which what is shipped was measured."""
SECTOR, LINE = 16, 64
"""Elements of 16 bits in what an L2 cache reads at once, and in its lines. Where rows do not begin at multiples of the
former, a product of ours takes some 1.5 times as long as PyTorch's, and of the latter up to 1.3 times where it reads or
writes columns (results/nvidia-h200/parts.csv)."""


def rows_begin_at(multiple: int, hidden: int, intermediate: int) -> bool:
    """Whether the rows of a layer's matrices begin at multiples of so many elements (SECTOR, LINE)."""
    return hidden % multiple == 0 and intermediate % multiple == 0


KERNELS: dict[str, Kernel] = {}
"""By name; each operation's `choice.py` enters its own. `forward` stores z alone, `-preact` gate and up as well;
`-fused` forms d_gate and d_up on the fly.

The portable kernels of experts have tiles to choose; all groups of the hand-scheduled ones are the same within 1%."""


def by_hand_is_possible(problem: TileProblem, kernel: str) -> bool:
    """Whether a kernel of `admission.KERNELS` can run for a GPU and dtype; tensors may still rule it out."""
    on_hopper = problem.capability is not None and problem.capability[0] == 9
    return on_hopper and problem.dtype in TUNED_DTYPES and shared.why_off(kernel) is None


def shipped(name: str, problem: TileProblem) -> Choice:
    """What runs where nothing was tuned."""
    kernel = KERNELS[name]
    if kernel.by_torch and kernel.by_torch(problem):
        return BY_TORCH
    by_hand = kernel.shipped_by_hand(problem)
    if by_hand is None or not by_hand_is_possible(problem, kernel.admitted_as[by_hand.schedule]):
        return Choice("portable", kernel.tile(problem, True))
    return by_hand


def why_illegal(name: str, choice: Choice, problem: TileProblem) -> str | None:
    """Say why a choice cannot run, as far as arithmetic tells, or return None."""
    kernel, tile = KERNELS[name], choice.tile
    if choice == BY_TORCH:
        return None if kernel.by_torch else "no kernel of this name is made of PyTorch's products"
    if choice.schedule != "portable":
        if choice.schedule == "transposed" and tile.parts <= kernel.most_shares:
            tile = replace(tile, parts=1)  # a launch shares its last wave where there is room
        admitted_as = kernel.admitted_as.get(choice.schedule)
        possible = admitted_as is not None and by_hand_is_possible(problem, admitted_as)
        known = possible and tile in _configurations(kernel, choice.schedule, problem)
        return None if known else f"not a configuration of a schedule {choice.schedule!r} here"
    if choice == Choice("portable", kernel.tile(problem, True)):
        return None
    in_grid = all(getattr(tile, name) in values for name, values in GRID.items())
    if not in_grid or not 1 <= tile.group <= 64 or not 1 <= tile.parts <= (MOST_PARTS if kernel.parts else 1):
        return "not of the grid"
    if kernel.rows_are == "pairs" and tile.rows != problem.kept_for:
        return "not of the routing's rows"
    rows = problem.kept_for if kernel.rows_are == "pairs" else getattr(problem, kernel.rows_are)
    if tile.rows > max(16, bucket(rows)):
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


def candidates(name: str, problem: TileProblem, most: int = MOST) -> list[Choice]:
    """The shipped choice first, `torch` and every hand-scheduled configuration, then the `most` nearest portable."""
    default, nearby = shipped(name, problem), KERNELS[name].tile(problem, True)
    by_hand = [BY_TORCH]
    for schedule in KERNELS[name].by_hand:
        by_hand += [Choice(schedule, tile) for tile in _configurations(KERNELS[name], schedule, problem)]
    grid = (dict(zip(GRID, sizes, strict=True)) for sizes in itertools.product(*GRID.values()))
    portable = [Choice("portable", Tile(**sizes, group=nearby.group, parts=nearby.parts)) for sizes in grid]
    portable.sort(key=lambda choice: _distance(choice.tile, nearby))
    legal = [
        [choice for choice in some if choice != default and why_illegal(name, choice, problem) is None]
        for some in (by_hand, portable)
    ]
    return [default, *legal[0], *legal[1][:most]]


def _configurations(kernel: Kernel, schedule: Schedule, problem: TileProblem) -> list[Tile]:
    """Configurations of a hand-written schedule; groups are of rows of tiles, so that few rows need only one."""
    if schedule not in kernel.by_hand:
        return []
    found = []
    for tile in kernel.by_hand[schedule](problem):
        groups = (tile.group,) if schedule == "transposed" or tile.group == 1 else GROUPS
        found += [replace(tile, stages=tile.stages - less, group=group) for less in (0, 1) for group in groups]
    return found


def _distance(tile: Tile, other: Tile) -> float:
    """How many halvings, doublings and stages lie between two tiles."""
    sizes = ((getattr(tile, name), getattr(other, name)) for name in ("rows", "columns", "depth", "warps"))
    return sum(abs(math.log2(mine / theirs)) for mine, theirs in sizes) + abs(tile.stages - other.stages)


def bucket(size: int) -> int:
    """The next power of two: what is tuned for one token count serves all of its bucket."""
    return 1 << (size - 1).bit_length() if size > 1 else 1
