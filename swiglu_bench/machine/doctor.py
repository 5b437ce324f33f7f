"""What on this machine would spoil a measurement: one finding per question, each with what to do about it."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import torch
from packaging.requirements import Requirement
from packaging.version import Version

from swiglu_bench.machine.nvml import APPLICATION_CLOCKS, THROTTLES, Gpu, NoAnswer
from swiglu_bench.measure import crosscheck

TESTED = {"torch": ("2.11", "2.13"), "triton": ("3.6", "3.7"), "liger-kernel": ("0.8.5", "0.8.5")}
"""Oldest and newest minor versions that the suite was run with."""
BUSY_PERCENT = 5
HOT_MARGIN_C = 10
NEAR_TOP = 0.97
"""A clock of at least this share of the highest counts as the highest: it moves in steps of 15 MHz."""
FREE_SHARE = 0.9
FREE_DISK_BYTES = 2**30
LOAD_MS = 600


class Severity(StrEnum):
    """How bad a finding is. Only `fail` makes the exit status 1."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Finding:
    """The answer to one question."""

    check: str
    found: str
    severity: Severity
    advice: str = ""
    """What to do; empty where nothing is to be done."""


Answer = tuple[str, Severity, str]
OK, WARN, FAIL, UNKNOWN = Severity


def examine(device: torch.device, cross_check: bool = False) -> Iterator[Finding]:
    """All findings about a device and the machine around it; `cross_check` compares the clock with the profiler's."""
    yield from gpu_findings(device)
    yield from version_findings()
    yield from machine_findings(Path("/sys"), Path.cwd())
    if cross_check:
        yield from clock_findings(device)


def gpu_findings(device: torch.device) -> Iterator[Finding]:
    """Those about the GPU; one that says so where there is none."""
    if device.type != "cuda":
        yield Finding("GPU", "none in use", FAIL, "Only the PyTorch implementations can be timed, on the CPU.")
        return
    yield Finding("GPU", torch.cuda.get_device_name(device), OK)
    try:
        gpu = Gpu(device)
    except NoAnswer as reason:
        yield Finding("NVML", str(reason), WARN, "Without it, throttling and other users of the GPU go unseen.")
        return
    yield _finding("load by others", lambda: _load(gpu))  # before this process gives it any
    torch.cuda.synchronize(device)  # now the driver counts this process, which tells its numbers from a container's
    yield _finding("other processes", lambda: _others(gpu))
    yield _finding("free GPU memory", lambda: _memory(gpu))
    yield _finding("MIG", lambda: _mig(gpu))
    yield _finding("persistence mode", lambda: _persistence(gpu))
    yield _finding("power limit", lambda: _power(gpu))
    yield _finding("ECC", lambda: _ecc(gpu))
    yield _finding("pending memory repair", lambda: _repair(gpu))
    yield _finding("driver", lambda: _driver(gpu))
    with torch.cuda.device(device):
        _spin(LOAD_MS)
        yield _finding("clock under load", lambda: _clock(gpu))
        yield _finding("throttling", lambda: _throttling(gpu))
        yield _finding("temperature", lambda: _temperature(gpu))
        torch.cuda.synchronize(device)


def _spin(milliseconds: int) -> None:
    """Keep the GPU busy without heating it, and come back half-way: clocks have risen to where they may by then."""
    torch.cuda._sleep(2_000_000 * milliseconds)
    time.sleep(milliseconds / 2e3)


def _finding(check: str, ask: Callable[[], Answer]) -> Finding:
    try:
        return Finding(check, *ask())
    except NoAnswer as reason:
        return Finding(check, f"the driver does not say: {reason}", UNKNOWN)


def _others(gpu: Gpu) -> Answer:
    others = gpu.other_processes()
    if not others:
        return "none", OK, ""
    return f"processes {', '.join(map(str, others))}", FAIL, "End them, or choose another GPU with --device."


def _load(gpu: Gpu) -> Answer:
    percent = gpu.ask("UtilizationRates").gpu
    if percent <= BUSY_PERCENT:
        return f"{percent}%", OK, ""
    return f"{percent}% busy before this program used it", FAIL, "Something else runs on this GPU; wait or end it."


def _memory(gpu: Gpu) -> Answer:
    info = gpu.ask("MemoryInfo")
    text = f"{info.free / 2**30:.1f} of {info.total / 2**30:.1f} GiB"
    if info.free >= FREE_SHARE * info.total:
        return text, OK, ""
    return text, WARN, "Large cases will be skipped; end what holds the memory."


def _mig(gpu: Gpu) -> Answer:
    if gpu.maybe(lambda: gpu.ask("MigMode")) in (None, [0, 0], (0, 0)):
        return "off", OK, ""
    return "on", WARN, "A part of a GPU shares memory and power with its neighbours; measure on a whole one."


def _persistence(gpu: Gpu) -> Answer:
    if gpu.ask("PersistenceMode"):
        return "on", OK, ""
    return "off", WARN, "The driver may unload between commands: `sudo nvidia-smi -pm 1`."


def _power(gpu: Gpu) -> Answer:
    limit_w, default_w = gpu.power_limit_w(), gpu.ask("PowerManagementDefaultLimit") / 1e3
    if limit_w >= default_w:
        return f"{limit_w:.0f} W", OK, ""
    advice = f"Times are those of a slower card: `sudo nvidia-smi -pl {default_w:.0f}`."
    return f"{limit_w:.0f} W, by default {default_w:.0f} W", WARN, advice


def _ecc(gpu: Gpu) -> Answer:
    current, pending = gpu.ask("EccMode")
    errors = gpu.maybe(
        lambda: gpu.ask("TotalEccErrors", gpu.nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, gpu.nvml.NVML_VOLATILE_ECC)
    )
    if errors:
        return f"{errors} uncorrected errors since boot", FAIL, "Results may be wrong; reset or replace the card."
    if current != pending:
        return "a change waits for a reboot", WARN, "Reboot, so that runs before and after are of one kind."
    if not current:
        return "off", WARN, "Bandwidth is above that of the same card with ECC on; say so beside the results."
    return "on, no uncorrected errors", OK, ""


def _repair(gpu: Gpu) -> Answer:
    _, _, pending, failed = gpu.ask("RemappedRows")
    if failed:
        return "a row of memory could not be replaced", FAIL, "Replace the card."
    if pending:
        return "rows of memory wait to be replaced", WARN, "Reset the GPU or reboot."
    return "none", OK, ""


def _driver(gpu: Gpu) -> Answer:
    number = gpu.ask_system("CudaDriverVersion")
    offers, wanted = (number // 1000, number % 1000 // 10), torch.version.cuda or ""
    text = f"{gpu.driver()}, up to CUDA {offers[0]}.{offers[1]}; PyTorch was built for {wanted or 'none'}"
    if wanted and offers[0] < int(wanted.split(".")[0]):
        return text, FAIL, "Update the driver, or install a PyTorch for its CUDA version."
    return text, OK, ""


def _clock(gpu: Gpu) -> Answer:
    now_mhz, most_mhz = gpu.sm_mhz(), gpu.max_sm_mhz()
    text = f"{now_mhz} MHz of {most_mhz} MHz"
    if gpu.reasons() & APPLICATION_CLOCKS:
        return f"{text}, held by application clocks", WARN, "`sudo nvidia-smi -rac` and `-rgc` give the default back."
    if now_mhz < NEAR_TOP * most_mhz:
        return text, WARN, "If clocks are locked on purpose, say so beside the results; else `sudo nvidia-smi -rgc`."
    return text, OK, ""


def _throttling(gpu: Gpu) -> Answer:
    throttles = gpu.throttles()
    if not throttles:
        return "none", OK, ""
    thermal = [name for name in throttles if name != THROTTLES[0x004]]
    advice = "Look at cooling and power supply." if thermal else "The card is at its power limit with next to no load."
    return ", ".join(throttles), FAIL if thermal else WARN, advice


def _temperature(gpu: Gpu) -> Answer:
    now_c = gpu.temperature_c()
    slowdown = getattr(gpu.nvml, "NVML_TEMPERATURE_THRESHOLD_SLOWDOWN", 1)
    slow_c = gpu.maybe(lambda: gpu.ask("TemperatureThreshold", slowdown))
    if slow_c is None:
        return f"{now_c} °C; where it slows down is not known", OK, ""
    text = f"{now_c} °C; it slows down at {slow_c} °C"
    return (text, OK, "") if now_c < slow_c - HOT_MARGIN_C else (text, WARN, "Let it cool, or improve its cooling.")


def version_findings() -> Iterator[Finding]:
    """Whether packages are versions that the suite was run with, and fit each other."""
    for package, (oldest, newest) in TESTED.items():
        version = _installed(package)
        if version is None:
            advice = "Rows that need it are skipped: `pip install -c constraints.txt .`."
            yield Finding(package, "not installed", WARN, advice)
        elif Version(oldest).release[:2] <= version.release[:2] <= Version(newest).release[:2]:
            yield Finding(package, str(version), OK)
        else:
            tested = oldest if oldest == newest else f"{oldest} to {newest}"
            yield Finding(package, str(version), WARN, f"Tested with {tested}: `pip install -c constraints.txt .`.")
    yield _pairing()
    for tool, loss in (("nvcc", "CUDA sources cannot be compiled"), ("ncu", "kernels cannot be profiled")):
        place = shutil.which(tool)
        advice = "" if place else f"Without it {loss}; nothing here needs it to measure."
        yield Finding(tool, place or "not found", OK if place else WARN, advice)


def _pairing() -> Finding:
    """A torch release is built and tested with one triton, and names it."""
    triton = _installed("triton")
    wanted = [Requirement(text) for text in importlib.metadata.requires("torch") or []]
    named = [one for one in wanted if one.name == "triton" and (one.marker is None or one.marker.evaluate())]
    if triton is None or not named:
        return Finding("torch and triton", "this torch names no triton", UNKNOWN)
    if named[0].specifier.contains(triton, prereleases=True):
        return Finding("torch and triton", f"torch asks for triton{named[0].specifier}", OK)
    found = f"torch asks for triton{named[0].specifier}, {triton} is installed"
    return Finding("torch and triton", found, FAIL, "Install the triton that torch names; compiled code may fail.")


def _installed(package: str) -> Version | None:
    try:
        return Version(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return None


def machine_findings(sys_folder: Path, folder: Path) -> Iterator[Finding]:
    """Disk, CPU clock and power supply; `sys_folder` is /sys, `folder` is where results go."""
    free = shutil.disk_usage(folder).free
    text = f"{free / 2**30:.1f} GiB"
    short = free < FREE_DISK_BYTES
    yield Finding("free disk", text, WARN if short else OK, "Samples and compiled kernels need room." if short else "")
    governor = _text(sys_folder / "devices/system/cpu/cpu0/cpufreq/scaling_governor")
    if governor is None:
        yield Finding("CPU governor", "not told, as in a virtual machine", UNKNOWN)
    elif governor == "powersave":
        advice = "Host time and latency vary: `sudo cpupower frequency-set -g performance`."
        yield Finding("CPU governor", governor, WARN, advice)
    else:
        yield Finding("CPU governor", governor, OK)
    busy = os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else 0.0
    yield Finding(
        "CPU load", f"{busy:.0%} of its threads", WARN if busy > 0.5 else OK,
        "Host time, latency and CPU times suffer; wait for the others." if busy > 0.5 else "",
    )  # fmt: skip
    mains = [_text(supply / "online") for supply in sorted((sys_folder / "class/power_supply").glob("*"))]
    if "0" in mains and "1" not in mains:
        yield Finding("power supply", "battery", WARN, "Plug it in: clocks are lower on battery.")


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def clock_findings(device: torch.device) -> Iterator[Finding]:
    """The suite's clock against the profiler's kernel durations."""
    check = "clock and profiler"
    if device.type != "cuda":
        yield Finding(check, "needs a GPU", UNKNOWN)
        return
    for one in crosscheck.agreements(device):
        if isinstance(one, str):
            yield Finding(check, one, UNKNOWN)
            continue
        found = f"{one.workload}: {one.ours_us:.1f} us, profiler {one.profiler_us:.1f} us ({one.difference:+.1%})"
        advice = "" if one.holds else f"They differ by more than {crosscheck.TOLERANCE:.0%}: do not trust times here."
        yield Finding(check, found, OK if one.holds else FAIL, advice)
