"""Calls in a row, each on inputs that follow from what the call before it returned.

Calls whose inputs are all known when the first begins can be made as one, or ahead of time. Here a column of the inputs
keeps or changes its sign by a place in a long table of random signs, and that place follows from a mark of all results
of the call before, to the last bit. Whoever does not know the whole results does not know the next inputs, and what was
computed for other signs is of no use, because a product mixes columns. The values stay normally distributed.

Two programs that round differently have different marks and go on with different inputs. The judge therefore follows
the marks that a contender reports: it makes eager's calls on the contender's inputs, and holds each mark against its
own, within what rounding explains. Errors of one call do not reach the next.

Nothing waits for the host: a chain can be queued ahead, or recorded as a CUDA graph of one step and replayed.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from swiglu_bench.cases.cases import Mode
from swiglu_bench.check.built import Built, OwnLayout, Produced
from swiglu_bench.check.inputs import Draw
from swiglu_bench.measure.resources import capture

PLACES = 2**16
"""Where in the table of signs those of a call may begin; each call of a chain has some of its own, and none repeats."""
APART = 4099
"""Between the signs of two inputs of one call."""
SIGNED = ("x", "gate", "up", "upstream")
GROUPS = 4
"""Of columns of a result, each with a mark: to guess one is to guess it within what rounding explains."""

Marks = list[list[int]]
"""For each call, result and group of columns the bits of the mark."""


class Chain:
    """Some calls of a mode on one draw's inputs with changing signs; the sums of their results are kept."""

    def __init__(
        self, built: Built, mode: Mode, draw: Draw, calls: int, sums: Mapping[str, Tensor],
        flush: Callable[[], None], call: Callable[[], Produced] | None = None, told: Marks | None = None,
        layout: OwnLayout | None = None,
    ) -> None:  # fmt: skip
        """`sums` has a place for each result that counts; with `call`, that is made instead of the implementation's.

        With `told`, other marks, inputs follow from those, and `reaches` has what relative errors of one, independent
        of one another, would change each mark by; with a `layout`, gradients are marked and added up as they lie in it.
        Of backwards, all forwards are made here, each on inputs of its own, and only the backwards are in the chain.
        """
        self._calls, self._sums, self._flush, self._layout, desk = calls, sums, flush, layout, built.desk
        desk.lay_out(draw)
        self._given = {name: value for name, value in desk.given.items() if name in SIGNED}
        self._base = {name: value.clone() for name, value in self._given.items()}
        widest, device = max(value.shape[-1] for value in self._base.values()), built.problem.device
        self._columns = torch.arange(widest, device=device)
        source = torch.Generator(device=device).manual_seed(draw.seed)
        signs = torch.empty(PLACES + APART * len(SIGNED) + widest, device=device).bernoulli_(generator=source)
        self._signs = signs.mul_(2).sub_(1).to(next(iter(self._base.values())).dtype)
        self._place, self._key, self._count = torch.zeros(3, 1, dtype=torch.int64, device=device)
        self._groups = {name: _groups(value) for name, value in sums.items()}
        self._factors = 2 * torch.arange(GROUPS * len(sums), device=device) + 1
        self._marks = torch.zeros(calls, GROUPS * len(sums), device=device)
        self._told = None if told is None else torch.tensor(told, dtype=torch.int32, device=device)
        self.reaches = torch.zeros_like(self._marks)
        self._graph: Callable[[], None] | None = None
        backward = mode is Mode.BACKWARD
        self._inputs = [name for name in self._given if (name == "upstream") is backward or mode is Mode.STEP]
        self._waiting = [self._forward_of(built, number) for number in range(calls)] if backward and not call else []
        recorded = None if backward or call else built.recordable(mode)
        self._call = call or (recorded and (lambda: recorded()()))

    def _forward_of(self, built: Built, number: int) -> Callable[[], Produced]:
        self._place.fill_(number * 641 % PLACES)
        self._lay_out([name for name in self._given if name != "upstream"])
        return built.ready_for_backward()

    def record(self, device: torch.device) -> None:
        """Record one call as a CUDA graph, which is then replayed; raises what the call raises, or CUDA."""
        self._start(0)
        self._graph = capture(self._step, device).replay

    def run(self, key: int) -> Marks:
        """Make the calls and wait for them; the first inputs follow from `key`. The marks of all results."""
        self._start(key)
        for _ in range(self._calls):
            if self._graph:
                self._graph()
            else:
                self._step(self._waiting.pop(0) if self._waiting else None)
        return self._marks.view(torch.int32).tolist()

    def _start(self, key: int) -> None:
        for place in self._sums.values():
            place.zero_()
        self._key.fill_(key)
        self._place.fill_(key % (PLACES // self._calls) * self._calls)
        self._count.zero_()

    def _lay_out(self, names: Sequence[str]) -> None:
        for number, name in enumerate(names):
            base = self._base[name]
            signs = self._signs[self._columns[: base.shape[-1]] + (self._place + number * APART)]
            torch.mul(base, signs, out=self._given[name])

    def _step(self, call: Callable[[], Produced] | None = None) -> None:
        self._flush()
        with torch.no_grad():
            self._lay_out(self._inputs)
        call = call or self._call
        assert call
        produced = call()
        with torch.no_grad():
            if self._layout:
                produced = self._layout.as_they_lie(produced)
            for name, place in self._sums.items():
                place.add_(produced[name])
            number = self._count.clamp(max=self._calls - 1)
            marks = torch.cat([groups @ _signed_squares(produced[name]) for name, groups in self._groups.items()])
            self._marks.index_copy_(0, number, marks[None])
            bits = marks.view(torch.int32)
            if self._told is not None:
                fourth = [groups @ _by_column(produced[name].float() ** 4) for name, groups in self._groups.items()]
                self.reaches.index_copy_(0, number, 2 * torch.cat(fourth).sqrt()[None])
                bits = self._told.index_select(0, number)[0]
            self._count.add_(1)
            drawn = ((bits * self._factors).sum() + self._key).remainder(PLACES // self._calls)
            torch.add(self._count, drawn, alpha=self._calls, out=self._place)


def _signed_squares(value: Tensor) -> Tensor:
    """The sum of v |v| over each column, in fp32.

    It depends on every element, and by no rule that a product keeps: for sums of plain values, a product with the sum
    of the weights would be enough.
    """
    wide = value.float() if value.dtype is torch.float16 else value  # whose squares are beyond its range
    return _by_column(wide.abs().mul_(wide))


def _by_column(value: Tensor) -> Tensor:
    return value.reshape(-1, value.shape[-1]).sum(0, dtype=torch.float32)


def _groups(value: Tensor) -> Tensor:
    """Which columns of a result belong to which group, as ones in fp32 [groups, columns]."""
    of = torch.arange(value.shape[-1], device=value.device) * GROUPS // max(1, value.shape[-1])
    return torch.stack([of == number for number in range(GROUPS)]).float()
