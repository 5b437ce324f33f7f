"""A clock that runs launches as fast as it is told."""

from collections.abc import Callable
from typing import Any

import torch

from swiglu_bench.measure.clock import Sample
from swiglu_kernels.standalone.workloads import Runnable


class FakeClock:
    """A launch takes as long as `speed` says, more or less. It runs where its outputs wait for it, full of NaN."""

    cache = "fake"

    def __init__(self, speed: Callable[[Runnable], float]) -> None:
        self.speed = speed
        self.samples = 0

    def sample(self, call: Any, lead_us: float, *_: object) -> Sample:
        given = call.__self__.arguments
        values = given.values() if isinstance(given, dict) else given
        parts = (part for value in values for part in (value if isinstance(value, tuple) else (value,)))
        tensors = [part for part in parts if isinstance(part, torch.Tensor)]
        if any(bool(tensor.isnan().any()) for tensor in tensors):
            call()
        self.samples += 1
        wobble = 1 + 0.002 * (self.samples * 7919 % 11 - 5) / 5
        return Sample(self.speed(call.__self__) * wobble, 1.0, 1.0, True, None)

    def synchronize(self) -> None:
        """Nothing is queued."""
