"""One timed sample, on a GPU or on a CPU."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Sample:
    """One timed call."""

    ms: float
    """GPU: between two events with the queue filled before the first; CPU: wall clock."""
    host_us: float
    """Time until the call returned to the host."""
    queue_us: float
    """From the spin that holds the GPU until everything was queued, what is prepared behind it included."""
    queue_filled: bool
    """The GPU reached the first event only after the host had queued everything, so no launch gap is in `ms`."""
    result: Any
    turn_ms: float = 0.0
    """By another process's clock: the call with its inputs and the handing over of its results, the spin taken off."""
    mhz: float | None = None
    """The GPU's clock behind the call: the cycles of a spin by the time between two events around it."""


Action = Callable[[], Any]


def _nothing() -> None:
    """Do nothing."""


class Clock:
    """Times one call."""

    cache = "cpu"

    def sample(self, call: Action, lead_us: float, prepare: Action = _nothing, hand_over: Action = _nothing) -> Sample:
        """Run `call` once and time it; the host needs about `lead_us` to queue it and what comes before.

        `prepare` lays out inputs, untimed, as late as possible before the call. `hand_over` takes its results at once.
        """
        raise NotImplementedError

    def pause(self) -> AbstractContextManager[None]:
        """Leave what happens in this context, within a call, out of its time."""
        raise NotImplementedError("nothing can be left out of this clock's samples")

    def synchronize(self) -> None:
        """Wait until everything queued has run; a CPU has no queue."""

    def flush(self) -> None:
        """Fill a GPU's cache with other data, if samples begin with a cold one."""

    def align(self) -> None:
        """Do nothing; a clock for several processes lets them start together here, on GPUs behind the spin."""


class DeviceLost(RuntimeError):
    """A contender broke the device for this process: after an illegal memory access, every call on a GPU fails."""


def answers(device: torch.device) -> bool:
    """Whether the device still works for this process."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


class CpuClock(Clock):
    """Wall clock; a CPU call has ended when it returns, and nothing is queued, so `lead_us` has no meaning."""

    def __init__(self) -> None:
        self._paused_s = 0.0

    def sample(self, call: Action, lead_us: float, prepare: Action = _nothing, hand_over: Action = _nothing) -> Sample:
        """Run `call` once and time it."""
        prepare()
        self.align()
        self._paused_s = 0.0
        start = time.perf_counter()
        result = call()
        seconds = time.perf_counter() - start - self._paused_s
        hand_over()
        return Sample(seconds * 1e3, seconds * 1e6, seconds * 1e6, True, result)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave what happens in this context out of the call's time."""
        start = time.perf_counter()
        yield
        self._paused_s += time.perf_counter() - start


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


class CudaClock(Clock):
    """CUDA events behind a filled queue, with the L2 cache full of other data before each sample.

    A short spin holds the GPU while the host queues inputs, event, work, event: launch gaps of the host do not count,
    and no stream of a contender's own finds the inputs before the call begins. After everything is queued the first
    event is queried: it must not have passed. The sample records the answer. A spin behind everything tells the clock.
    """

    MARGIN_US = 50.0
    SPIN_LIMIT_US = 50_000.0
    SPIN_BEHIND_US = 100.0
    L2_FACTOR = 2

    def __init__(self, device: torch.device, cold_l2: bool = True) -> None:
        properties = torch.cuda.get_device_properties(device)
        self.device = device
        self.cache = "cold" if cold_l2 else "hot"
        flush_bytes = self.L2_FACTOR * properties.L2_cache_size
        self._other_data = torch.zeros(flush_bytes // 4, device=device) if cold_l2 else None
        self._sum = torch.zeros((), device=device)
        self._pauses: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._paused_s = 0.0
        self._cycles_per_us = [self._mhz(2_000_000) for _ in range(2)][-1]

    def _mhz(self, cycles: int) -> float:
        start, end = _events()
        start.record()
        torch.cuda._sleep(cycles)
        end.record()
        end.synchronize()
        return cycles / (start.elapsed_time(end) * 1e3)

    def synchronize(self) -> None:
        """Wait until everything queued on the device has run."""
        torch.cuda.synchronize(self.device)

    def flush(self) -> None:
        """Fill the L2 cache with other data, where it is to be cold.

        The data is read, not written: written lines, some 50 MB of them, would be written back during the sample.
        """
        if self._other_data is not None:
            torch.sum(self._other_data, dim=0, out=self._sum)

    def sample(self, call: Action, lead_us: float, prepare: Action = _nothing, hand_over: Action = _nothing) -> Sample:
        """Run `call` once behind a spin that outlasts the `lead_us` in which the host queues it."""
        start, end = _events()
        self._pauses.clear()
        self._paused_s = 0.0
        spin_us = min(lead_us + self.MARGIN_US, self.SPIN_LIMIT_US)
        queued = time.perf_counter()
        torch.cuda._sleep(int(spin_us * self._cycles_per_us))
        prepare()
        self.flush()
        self.align()
        start.record()
        before = time.perf_counter()
        result = call()
        host_us = (time.perf_counter() - before - self._paused_s) * 1e6
        end.record()
        queue_us = (time.perf_counter() - queued) * 1e6
        filled = not start.query()
        hand_over()
        mhz = self._mhz(int(self.SPIN_BEHIND_US * self._cycles_per_us))
        paused_ms = sum(first.elapsed_time(last) for first, last in self._pauses)
        return Sample(start.elapsed_time(end) - paused_ms, host_us, queue_us, filled, result, mhz=mhz)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave what happens in this context out of the call's time."""
        first, last = _events()
        start = time.perf_counter()
        first.record()
        yield
        last.record()
        self._pauses.append((first, last))
        self._paused_s += time.perf_counter() - start


class LatencyClock(Clock):
    """The time that a caller waits: from an idle GPU through the call to an idle GPU, by the host's clock.

    The L2 cache is cold or hot before the call, as in samples of the given `clock`.
    """

    def __init__(self, clock: CudaClock) -> None:
        self.cache, self._clock = clock.cache, clock

    def synchronize(self) -> None:
        """Wait until everything queued on the device has run."""
        self._clock.synchronize()

    def sample(self, call: Action, lead_us: float, prepare: Action = _nothing, hand_over: Action = _nothing) -> Sample:
        """Run `call` once on an idle device; nothing is queued before it, so `lead_us` has no meaning."""
        prepare()
        self._clock.flush()
        self.synchronize()
        start = time.perf_counter()
        result = call()
        host_us = (time.perf_counter() - start) * 1e6
        self.synchronize()
        ms = (time.perf_counter() - start) * 1e3
        hand_over()
        return Sample(ms, host_us, host_us, True, result)


def make_clock(device: torch.device, cold_l2: bool = True) -> Clock:
    """The clock of a device."""
    return CudaClock(device, cold_l2) if device.type == "cuda" else CpuClock()
