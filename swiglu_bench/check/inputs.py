"""The tensors of a case, drawn from seeds: its weights once, its activations and upstream gradient for every call.

No seed is known before the call that it is for: the process that times draws it then, and sends it to the contender's
process and to the judge's, which draw the same values on the same device.
"""

import secrets
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, partial

import torch
from torch import Tensor

from swiglu_bench.cases.cases import ACTIVATIONS, BIASES, INDEX, PLAIN, WEIGHTS, Case, Experts, Extras, RoutingKind
from swiglu_bench.cases.problem import Problem

DEPTHS, HALF_DEPTHS = (0.4, 5.0), (0.4, 1.0)
"""How far the gates of the first and the last token are moved, in units of a problem's `gate_offset`; HALF_DEPTHS in
fp16, which has no normal numbers for a sigmoid below -10."""
LOADS = 25
"""Calls of which the median says how experts are loaded: 16 tokens have 77 to 88 of 128 experts."""
TILE_ROWS = 128
"""Of the tiles whose padding is told."""


class Values(StrEnum):
    """How the values of a call are distributed."""

    NORMAL = "normal"
    WIDE = "wide"
    """Tokens and channels of very different sizes, with gates beyond 30, as trained models have them."""
    UNEVEN_UPSTREAM = "uneven upstream"
    """Upstream gradients from 2^20 down to 2^-70 (fp16: 2^3 to 2^-8) the usual size, from token to token: as losses
    that are scaled up, and those over many tokens, yield them."""
    ZEROS = "zero"
    """Activations of zeros."""


@dataclass(frozen=True)
class Draw:
    """One call's activations and upstream gradient."""

    seed: int
    values: Values = Values.NORMAL
    upstream: int | None = None
    """The upstream gradient's own seed, told once a forward has returned; None: it follows from `seed`."""


def new_seed() -> int:
    """A seed that nothing else knows."""
    return secrets.randbits(62)


def new_draw() -> Draw:
    """A draw that nothing knows, its upstream gradient from a seed of its own."""
    return Draw(new_seed(), upstream=new_seed())


def torch_dtype(case: Case) -> torch.dtype:
    """The torch dtype of a case."""
    return getattr(torch, case.dtype.value)


def sizes(case: Case) -> dict[str, tuple[int, ...]]:
    """Sizes of every named tensor of a case; `upstream` has those of the output."""
    hidden, intermediate, experts = case.shape.hidden, case.shape.intermediate, case.shape.experts
    each = (experts.count,) if experts else ()
    return {
        "x": (case.tokens, hidden),
        **dict.fromkeys((INDEX, "top_k_weights"), (case.tokens, experts.top_k if experts else 1)),
        **dict.fromkeys(("gate", "up"), (case.tokens, intermediate)),
        **dict.fromkeys(("w_gate", "w_up"), (*each, intermediate, hidden)),
        "w_down": (*each, hidden, intermediate),
        **dict.fromkeys(("bias_gate", "bias_up"), (*each, intermediate)),
        "bias_down": (*each, hidden),
        "upstream": (case.tokens, hidden if "w_down" in WEIGHTS[case.scope] else intermediate),
    }


def make_problem(
    case: Case, device: torch.device | str, extras: Extras = PLAIN, seed: int | None = None, *, gate_offset: float = 0.0
) -> Problem:
    """Draw the weights of a case; `seed` None: from a new seed; `extras`, unless plain, replace those of the shape.

    They are normal with variance 1 / in_features, so that gate and up are of unit size for normal activations, where
    SiLU is neither linear nor flat, as in a trained model. Biases are normal with a tenth of that size. `gate_offset`
    moves the gates of activations drawn by a `Desk` with the same offset by about that much, times a token's depth.
    """
    device, found = torch.device(device), sizes(case)
    extras = case.shape.extras if extras == PLAIN else extras
    source = torch.Generator(device=device).manual_seed(new_seed() if seed is None else seed)

    def draw(name: str, scale: float) -> Tensor:
        values = torch.empty(found[name], device=device, dtype=torch.float32).normal_(generator=source).mul_(scale)
        return values.to(torch_dtype(case))

    weights = {name: draw(name, found[name][-1] ** -0.5) for name in WEIGHTS[case.scope]}
    biases = {name: draw(name, 0.1) for name in BIASES[case.scope]} if extras.bias else {}
    if gate_offset and "w_gate" in weights:
        weights["w_gate"] += gate_offset / case.shape.hidden  # a token's x has a mean of its depth then
    return Problem(case, device, weights, biases, extras)


def numbers(case: Case, device: torch.device) -> str:
    """A mark of the random numbers that PyTorch draws here from one seed: where they differ, so do the inputs."""
    source = torch.Generator(device=device).manual_seed(1)
    drawn = torch.empty(2**20, device=device, dtype=torch.float32 if device.type == "cpu" else torch_dtype(case))
    order = torch.rand(2**10, device=device, generator=source).argsort()
    bits = drawn.normal_(generator=source).view(torch.int16).long()
    return f"{int(bits.mul_(torch.arange(len(bits), device=device)).sum())} {int(order[::7].sum())}"


def depths(case: Case) -> list[float]:
    """How far the gates of each token are moved, in units of a problem's `gate_offset`."""
    first, last = HALF_DEPTHS if torch_dtype(case) is torch.float16 else DEPTHS
    return [first + (last - first) * token / max(1, case.tokens - 1) for token in range(case.tokens)]


def draw_experts(experts: Experts, place: Tensor, source: torch.Generator) -> None:
    """Fill int64 [tokens, top_k] with the experts of each token: in no order, and all different but for -1."""
    (tokens, top_k), device = place.shape, place.device
    order = torch.rand(experts.count, device=device, generator=source).argsort()
    if experts.routing is RoutingKind.SINGLE:
        place.copy_(order[:top_k].expand(tokens, top_k))
    elif experts.routing is RoutingKind.BALANCED:
        turns = torch.arange(tokens * top_k, device=device).view(tokens, top_k)
        place.copy_(order[turns[torch.rand(tokens, device=device, generator=source).argsort()] % experts.count])
    else:  # the top_k largest of log(weight) plus Gumbel noise are a draw by weight without replacement
        scores = torch.rand(tokens, experts.count, device=device, generator=source).log_().neg_().log_().neg_()
        if experts.routing is RoutingKind.ZIPF:
            scores -= (order + 1).log()
        place.copy_(scores.topk(top_k).indices)
        if experts.routing is RoutingKind.LOCAL:
            away, pairs = torch.rand(tokens * top_k, device=device, generator=source).argsort(), place.view(-1)
            away = away[: len(pairs) // 2]
            pairs[away] = torch.where(away % 2 == 0, -1, pairs[away] + experts.count)


def of_other_ranks(experts: Experts, index: Tensor) -> Tensor:
    """Where the experts of a top_k_index lie on other ranks."""
    return (index < 0) | (index >= experts.count)


def rows_of_each(experts: Experts, index: Tensor) -> Tensor:
    """How many rows of a top_k_index each expert has."""
    return index[~of_other_ranks(experts, index)].bincount(minlength=experts.count)


@dataclass(frozen=True)
class ExpertLoad:
    """How many tokens the experts have in one call."""

    least: int
    median: float
    most: int
    idle: int
    """Experts without a token."""
    padding: float
    """The share of rows that are padding where every expert's are filled up to whole tiles of TILE_ROWS."""


def load_of(experts: Experts, index: Tensor) -> ExpertLoad:
    """Count how a call's top_k_index loads the experts."""
    counts = rows_of_each(experts, index)
    rows = (counts + TILE_ROWS - 1).div(TILE_ROWS, rounding_mode="floor").sum().item() * TILE_ROWS
    median, idle = counts.double().quantile(0.5).item(), int((counts == 0).sum())
    padding = 1 - int(counts.sum()) / rows if rows else 0.0
    return ExpertLoad(int(counts.min()), median, int(counts.max()), idle, padding)


class Desk:
    """Where the activations and the upstream gradient of each call lie: at the same addresses for every call.

    So an address says nothing about what lies there. `gate_offset` is that of the problem's weights.
    """

    def __init__(self, problem: Problem, gate_offset: float = 0.0) -> None:
        self.problem = problem
        self.names = ACTIVATIONS[problem.case.scope]
        self._offset = gate_offset
        self._source = torch.Generator(device=problem.device)

    def activations(self, draw: Draw) -> list[Tensor]:
        """Draw the activations of a call: new tensors over the same memory."""
        for number, name in enumerate(self.names):
            if name == INDEX:
                self.experts(draw)
                continue
            value = self._draw(name, draw.seed + number)
            if name == "top_k_weights":
                value.copy_(value.float().softmax(-1))
            if draw.values is Values.WIDE:
                value[::4] *= 16.0 if name in ("x", "gate") else 1.0
                value[:, :: max(1, value.shape[1] // 3)] *= 4.0
            elif draw.values is Values.ZEROS:
                value.zero_()
            if self._offset and name in ("x", "gate"):
                moved = torch.tensor(depths(self.problem.case), device=value.device)[:, None]
                value += moved if name == "x" else moved * self._offset
        if (experts := self.problem.case.shape.experts) and self.problem.case.shape.is_local:
            self.given["top_k_weights"].masked_fill_(of_other_ranks(experts, self.given[INDEX]), torch.nan)
        return [self.given[name].detach() for name in self.names]

    def experts(self, draw: Draw) -> Tensor:
        """Draw top_k_index alone, as `activations` has it."""
        assert self.problem.case.shape.experts
        place, seed = self.given[INDEX], draw.seed + self.names.index(INDEX)
        draw_experts(self.problem.case.shape.experts, place, self._seeded(seed))
        return place

    def upstream(self, draw: Draw) -> Tensor:
        """Draw the upstream gradient of a call."""
        value = self._draw("upstream", ~draw.seed if draw.upstream is None else draw.upstream)
        if draw.values is Values.UNEVEN_UPSTREAM:
            largest, least = (3, -8) if value.dtype is torch.float16 else (20, -70)
            value *= torch.linspace(largest, least, len(value), device=value.device).exp2()[:, None].to(value.dtype)
        return value.detach()

    def lay_out(self, draw: Draw) -> None:
        """Draw all of a call, for what uses the desk's own tensors."""
        with torch.no_grad():
            self.activations(draw)
            self.upstream(draw)

    @cached_property
    def typical_experts(self) -> Tensor:
        """The top_k_index of a typical call: of LOADS calls the median by experts without a token."""
        experts = self.problem.case.shape.experts
        assert experts
        calls = [self.experts(Draw(new_seed())).clone() for _ in range(LOADS)]
        loads = [(load_of(experts, index), index) for index in calls]
        return sorted(loads, key=lambda call: (call[0].idle, call[0].most))[LOADS // 2][1]

    @cached_property
    def given(self) -> dict[str, Tensor]:
        """The tensors on the desk by name, `upstream` among them; draws overwrite them."""
        found, zeros = sizes(self.problem.case), partial(torch.zeros, device=self.problem.device)
        types = dict.fromkeys((*self.names, "upstream"), torch_dtype(self.problem.case)) | {INDEX: torch.int64}
        return {name: zeros(found[name], dtype=types[name]) for name in (*self.names, "upstream")}

    def _draw(self, name: str, seed: int) -> Tensor:
        place, source = self.given[name], self._seeded(seed)
        if place.device.type == "cpu" and place.dtype is not torch.float32:  # 16 bits are drawn otherwise by others
            return place.copy_(torch.empty(place.shape).normal_(generator=source))
        return place.normal_(generator=source)

    def _seeded(self, seed: int) -> torch.Generator:
        return self._source.manual_seed(seed & (2**63 - 1))


def leaf(value: Tensor, wanted: bool = True) -> Tensor:
    """Let the tensor require a gradient where that is wanted and its dtype can have one."""
    return value.requires_grad_(wanted and value.is_floating_point())


def every_other_column(value: Tensor) -> Tensor:
    """The same values with gaps between the columns."""
    return value.new_zeros(value.shape[0], 2 * value.shape[1])[:, ::2].copy_(value)
