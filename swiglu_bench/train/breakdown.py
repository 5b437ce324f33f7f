"""Where the time of a training step goes: moments noted around the blocks, on a GPU by its own clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

STEPS = 5
WARM_STEPS = 5
"""Before them, not watched: the device has rested, and a rested one is faster than one at its power limit."""


@dataclass(frozen=True)
class Breakdown:
    """Medians over a few steps that were not timed otherwise."""

    step_ms: float
    block_forward_ms: float
    block_backward_ms: float
    optimizer_ms: float

    @property
    def share(self) -> float:
        """Of the blocks in the step, 0 to 1."""
        return (self.block_forward_ms + self.block_backward_ms) / self.step_ms


class Watch:
    """Notes when the blocks of one step begin and end, forward and backward."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: dict[str, list[object]] = {"enter": [], "leave": [], "back": [], "done": []}
        self._ends: list[object] = []

    def enter(self, x: Tensor) -> Tensor:
        """Before a block's forward; the gradient of what is returned is the end of its backward."""
        self._note("enter")
        if not x.requires_grad:
            return x
        x = x.view_as(x)
        x.register_hook(lambda _: self._note("done"))
        return x

    def leave(self, out: Tensor) -> Tensor:
        """After a block's forward; the gradient of `out` is the beginning of its backward."""
        if out.requires_grad:
            out.register_hook(lambda _: self._note("back"))
        self._note("leave")
        return out

    def mark(self) -> None:
        """Note a boundary of the step itself."""
        self._ends.append(self._now())

    def spent_ms(self, first: str, last: str) -> float:
        """Sum over blocks, once the step is done; backwards of blocks never overlap."""
        return sum(_between_ms(one, other) for one, other in zip(self._marks[first], self._marks[last], strict=True))

    def between_ms(self) -> list[float]:
        """From each boundary to the next."""
        return [_between_ms(one, other) for one, other in zip(self._ends, self._ends[1:], strict=False)]

    def _note(self, what: str) -> None:
        self._marks[what].append(self._now())

    def _now(self) -> object:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Watched(Protocol):
    """A block that tells a watch when it begins and ends, where it has one."""

    watch: Watch | None


def measure(
    blocks: Sequence[Watched], device: torch.device, learn: Callable[[int], None], update: Callable[[], None]
) -> Breakdown:
    """Run a few steps, each `learn(number)` (forward and backward) and `update()` (the optimiser), and take medians."""
    for number in range(WARM_STEPS):
        learn(number)
        update()
    found = []
    for number in range(STEPS):
        watch = Watch(device)
        for block in blocks:
            block.watch = watch
        try:
            watch.mark()
            learn(number)
            watch.mark()
            update()
            watch.mark()
        finally:
            for block in blocks:
                block.watch = None
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        learn_ms, update_ms = watch.between_ms()
        found.append(
            (learn_ms + update_ms, watch.spent_ms("enter", "leave"), watch.spent_ms("back", "done"), update_ms)
        )
    return Breakdown(*(statistics.median(column) for column in zip(*found, strict=True)))


def _between_ms(one: object, other: object) -> float:
    if isinstance(one, float) and isinstance(other, float):
        return (other - one) * 1e3
    elapsed: float = one.elapsed_time(other)  # type: ignore[attr-defined]
    return elapsed
