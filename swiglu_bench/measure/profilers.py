"""NVIDIA's profilers: hardware counters by Nsight Compute, and the suite's clock against kernel times of CUPTI.

Nsight Compute (`ncu`, which has to be installed) runs a program and replays each of its kernels as often as the
counters need; what is timed meanwhile is worthless.
"""

import csv
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from swiglu_bench.measure.clock import Clock, CudaClock
from swiglu_bench.measure.statistics import percentile

TIME = "gpu__time_duration.sum"
TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"
DRAM, L2, REGISTERS = "dram__bytes.sum", "lts__t_bytes.sum", "launch__registers_per_thread"
LIMIT_S = 600.0
NOT_PERMITTED = (
    "ncu may not read the GPU's counters (ERR_NVGPUCTRPERM): run it as root, or load the driver with "
    "NVreg_RestrictProfilingToAdminUsers=0"
)
REPEATS = 30
TOLERANCE = 0.02
LEAST_US = 50.0
"""What is shorter is not compared."""
MOST_BETWEEN_US = 10.0
"""An event is recorded some microseconds before the kernel behind it begins; if it were more, short calls would be
nothing else."""
SPIN = "spin_kernel"
"""The part of a kernel's name that tells the clock's own spin from the work."""


class NoCounters(RuntimeError):
    """Why hardware counters could not be read, in one phrase."""


@dataclass(frozen=True)
class Counters:
    """The counters of all kernels of one call together; None: this GPU does not have the counter."""

    tensor_pct: float | None
    """Cycles in which the tensor cores worked, of all: the kernels' mean, weighted by their times."""
    dram_bytes: int | None
    l2_bytes: int | None
    registers_per_thread: int | None
    """Of the kernel that takes longest."""


def counters(ncu: str, program: Sequence[str]) -> Counters:
    """Run a program under `ncu`, between the starts and stops of the CUDA profiler in it. Raises NoCounters."""
    with tempfile.TemporaryDirectory(prefix="swiglu-bench-") as folder:
        log, printed = Path(folder) / "ncu.csv", Path(folder) / "printed"
        command = [
            ncu, "--csv", "--page", "raw", "--print-units", "base", "--metrics",
            ",".join((TIME, TENSOR, DRAM, L2, REGISTERS)), "--profile-from-start", "off", "--target-processes", "all",
            "--clock-control", "none", "--log-file", str(log), *program,
        ]  # fmt: skip
        # In another locale, ncu writes numbers with other separators.
        environment = os.environ | {"LC_ALL": "C", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            with printed.open("wb") as out:
                streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
                subprocess.run(command, env=environment, timeout=LIMIT_S, **streams)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NoCounters(f"ncu failed: {error}") from None
        texts = [file.read_text(encoding="utf-8", errors="replace") for file in (log, printed) if file.exists()]
    return parse("\n".join(texts))


def parse(text: str) -> Counters:
    """The counters in what `ncu --csv --page raw` wrote: a line of names, one of units, and one for each kernel.

    Raises NoCounters where there are none, with the reason that ncu or the program gave.
    """
    lines = text.splitlines()
    head = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    table = [line for line in lines[head:] if line.startswith('"')]
    kernels = [row for row in csv.DictReader(table) if (row["ID"] or "").isdigit()]
    if not kernels:
        raise NoCounters(_reason(lines))

    def values(metric: str) -> list[float]:
        """Those of all kernels; empty where a kernel has none."""
        try:
            return [float((row.get(metric) or "").replace(",", "")) for row in kernels]
        except ValueError:  # n/a
            return []

    times, tensor, registers = values(TIME), values(TENSOR), values(REGISTERS)
    if not times:
        raise NoCounters("ncu gave the kernels no times")
    share = sum(time * value for time, value in zip(times, tensor, strict=True)) / sum(times) if tensor else None
    dram, level2 = (round(sum(moved)) if moved else None for moved in (values(DRAM), values(L2)))
    return Counters(share, dram, level2, int(registers[times.index(max(times))]) if registers else None)


def _reason(lines: Sequence[str]) -> str:
    if any("ERR_NVGPUCTRPERM" in line for line in lines):
        return NOT_PERMITTED
    errors = [re.sub(r"^==(ERROR|WARNING)==\s*", "", line) for line in lines if re.match("==(ERROR|WARNING)==", line)]
    said = [line for line in lines if line.strip() and not line.startswith("==")]
    last = (errors[:1] or said[-1:] or ["it wrote nothing"])[0].strip().rstrip(".")
    return f"ncu saw no kernel: {last}"


# The suite's clock against the profiler's


@dataclass(frozen=True)
class Agreement:
    """The time of one workload by the suite's clock and by the profiler."""

    workload: str
    ours_us: float
    """Median of the suite's samples, half of them before and half after the profiler's."""
    profiler_us: float
    """Median over calls of the summed durations of a call's kernels."""
    between_us: float = 0.0
    """Between events and kernels: what ours is longer for one element. A part of every time of ours, long or short."""

    @property
    def difference(self) -> float:
        """The suite's time, less what lies between events and kernels, relative to the profiler's, minus 1."""
        return (self.ours_us - self.between_us) / self.profiler_us - 1

    @property
    def holds(self) -> bool:
        """Whether the difference is within the tolerance, and little lies between."""
        return abs(self.difference) <= TOLERANCE and self.between_us <= MOST_BETWEEN_US


def workloads(device: torch.device) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Calls that are one kernel each: two products, a copy and an elementwise operation, of 0.2 to 2 ms on an H200."""
    for side in (4096, 8192):
        a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
        yield f"product, {side} cubed, bf16", partial(torch.matmul, a, b)
    source = torch.randn(2**28, device=device)
    target = torch.empty_like(source)
    yield "copy, 1 GiB", lambda: target.copy_(source)
    yield "sigmoid of 2^28 numbers, fp32", lambda: torch.sigmoid(source, out=target)


def by_both(call: Callable[[], Any], clock: Clock) -> tuple[float, float]:
    """Medians of a call in us: by the clock, before and after so that a drift cancels, and by the profiler."""

    def timed() -> list[float]:
        return [clock.sample(call, 100.0).ms * 1e3 for _ in range(REPEATS // 2)]

    for _ in range(3):
        call()
    clock.synchronize()
    before, theirs, after = timed(), profiled_us(call, clock), timed()
    return percentile(before + after, 50), percentile(theirs, 50)


def profiled_us(call: Callable[[], Any], clock: Clock) -> list[float]:
    """The summed durations of the kernels, copies and fills of each of some calls, made the way the clock makes them.

    Raises RuntimeError where the profiler sees no kernels, or a number of them that differs from call to call.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(REPEATS):
            clock.sample(call, 200.0)
        clock.synchronize()
    seen = [event for event in profile.events() or [] if event.device_type.name == "CUDA" and SPIN not in event.name]
    found = sorted((event.time_range.start, event.time_range.elapsed_us()) for event in seen)
    return per_call([duration for _, duration in found])


def per_call(durations_us: list[float]) -> list[float]:
    """Durations in order of time, summed over equal parts, one for each call."""
    if not durations_us:
        raise RuntimeError("The profiler saw no kernels; reading its counters may need a permission.")
    each, rest = divmod(len(durations_us), REPEATS)
    if rest:
        raise RuntimeError(f"The profiler saw {len(durations_us)} kernels in {REPEATS} calls.")
    return [sum(durations_us[start : start + each]) for start in range(0, len(durations_us), each)]


def agreements(device: torch.device) -> Iterator[Agreement | str]:
    """Each workload by both clocks, or why it could not be compared."""
    clock = CudaClock(device, cold_l2=False)  # flushing the cache would be a kernel too
    element = torch.zeros(1, device=device)
    ours_us, profiler_us = by_both(lambda: element.add_(1.0), clock)
    for name, call in workloads(device):
        try:
            found = Agreement(name, *by_both(call, clock), max(0.0, ours_us - profiler_us))
        except RuntimeError as reason:
            yield f"{name}: {reason}"
            continue
        short = f"{name}: it takes {found.profiler_us:.1f} us, and a comparison needs at least {LEAST_US:g} us"
        yield found if found.profiler_us >= LEAST_US else short
