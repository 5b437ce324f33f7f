"""What on this machine would spoil a measurement: one finding per check, each with what to do about it."""

import importlib.metadata
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import torch
from packaging.requirements import Requirement
from packaging.version import Version

from swiglu_bench.contenders.fused import unsloth
from swiglu_bench.contenders.pytorch import compiled
from swiglu_bench.machine.machine import installed
from swiglu_bench.machine.system import APPLICATION_CLOCKS, THROTTLES, Gpu, NoAnswer, file_value, look, visible_gpus
from swiglu_bench.measure import profilers

TESTED = {"torch": ("2.11", "2.15"), "triton": ("3.6", "3.9"), "liger-kernel": ("0.8.5", "0.8.5")}
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
    """The answer to one check."""

    check: str
    found: str
    severity: Severity
    advice: str = ""
    """What to do; empty where nothing is to be done."""


OK, WARN, FAIL, UNKNOWN = Severity
Answer = tuple[str, bool, Severity, str]
"""What was found, whether it is bad and, for that case, how bad and what to do."""
ON = {True: "on", False: "off"}


def examine(device: torch.device, cross_check: bool = False) -> Iterator[Finding]:
    """All findings about a device and the machine around it; `cross_check` compares the clock with the profiler's."""
    yield from gpu_findings(device)
    yield from version_findings()
    yield kernel_finding(device)
    yield from machine_findings(Path("/sys"), Path.cwd())
    if cross_check:
        yield from clock_findings(device)


def gpu_findings(device: torch.device) -> Iterator[Finding]:
    """Those about the GPU; where there is none, what can be done without."""
    if device.type != "cuda":
        if visible_gpus() and not torch.cuda.device_count():
            advice = "Install a PyTorch for the CUDA version of the driver, or update the driver."
            yield Finding("GPU", "the driver lists one, and PyTorch cannot use it", FAIL, advice)
        else:
            advice = "The PyTorch implementations are timed on the CPU; `verify` checks the Triton kernels there, too."
            yield Finding("GPU", "none in use", WARN, advice)
        for what, known, interpreted in (("torch.compile", compiled, False), ("Triton's interpreter", unsloth, True)):
            reason = known.unavailable(device.type, interpreted)
            yield _judged(what, reason or "available", reason is not None, WARN, "Rows that need it are skipped.")
        return
    yield Finding("GPU", torch.cuda.get_device_name(device), OK)
    try:
        gpu = Gpu(device)
    except NoAnswer as reason:
        yield Finding("NVML", str(reason), WARN, "Without it, throttling and other users of the GPU go unnoticed.")
        return
    yield _asked("load by others", _load, gpu)  # before this process causes any
    torch.cuda.synchronize(device)  # now the driver lists this process, which tells its ids from a container's
    for check, ask in IDLE_CHECKS.items():
        yield _asked(check, ask, gpu)
    with torch.cuda.device(device):
        _spin(LOAD_MS)
        for check, ask in LOAD_CHECKS.items():
            yield _asked(check, ask, gpu)
        torch.cuda.synchronize(device)


def _spin(milliseconds: int) -> None:
    """Keep the GPU busy without heating it, and return half-way: its clocks have risen by then."""
    torch.cuda._sleep(2_000_000 * milliseconds)
    time.sleep(milliseconds / 2e3)


def _asked(check: str, ask: Callable[[Gpu], Answer], gpu: Gpu) -> Finding:
    try:
        return _judged(check, *ask(gpu))
    except NoAnswer as reason:
        return Finding(check, f"the driver does not say: {reason}", UNKNOWN)


def _judged(check: str, found: str, bad: bool, severity: Severity, advice: str) -> Finding:
    return Finding(check, found, severity, advice) if bad else Finding(check, found, OK)


def _load(gpu: Gpu) -> Answer:
    percent = gpu.ask("UtilizationRates").gpu
    advice = "Something else was running on this GPU before this program used it; wait for it or end it."
    return f"{percent}%", percent > BUSY_PERCENT, FAIL, advice


def _others(gpu: Gpu) -> Answer:
    others = gpu.other_processes()
    found = f"processes {', '.join(map(str, others))}" if others else "none"
    return found, bool(others), FAIL, "End them, or choose another GPU with --device."


def _memory(gpu: Gpu) -> Answer:
    info = gpu.ask("MemoryInfo")
    found = f"{info.free / 2**30:.1f} of {info.total / 2**30:.1f} GiB"
    return found, info.free < FREE_SHARE * info.total, WARN, "Large cases will be skipped; end what holds the memory."


def _mig(gpu: Gpu) -> Answer:
    on = gpu.maybe(lambda: gpu.ask("MigMode")) not in (None, [0, 0], (0, 0))
    return ON[on], on, WARN, "A part of a GPU shares memory and power with the other parts; measure on a whole one."


def _persistence(gpu: Gpu) -> Answer:
    on = bool(gpu.ask("PersistenceMode"))
    return ON[on], not on, WARN, "The driver may unload between commands: `sudo nvidia-smi -pm 1`."


def _power(gpu: Gpu) -> Answer:
    limit_w, default_w = gpu.power_limit_w(), gpu.ask("PowerManagementDefaultLimit") / 1e3
    advice = f"Times are those of a slower card: `sudo nvidia-smi -pl {default_w:.0f}`."
    return f"{limit_w:.0f} W, by default {default_w:.0f} W", limit_w < default_w, WARN, advice


def _ecc(gpu: Gpu) -> Answer:
    current, pending = gpu.ask("EccMode")
    kind = gpu.nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, gpu.nvml.NVML_VOLATILE_ECC
    if errors := gpu.maybe(lambda: gpu.ask("TotalEccErrors", *kind)):
        return f"{errors} uncorrected errors since boot", True, FAIL, "Results may be wrong; reset or replace the card."
    if current != pending:
        return "a change takes effect at the next reboot", True, WARN, "Reboot, so that all runs have the same setting."
    advice = "Bandwidth is higher than with ECC on; mention it with the results."
    return "on, no uncorrected errors" if current else "off", not current, WARN, advice


def _repair(gpu: Gpu) -> Answer:
    _, _, pending, failed = gpu.ask("RemappedRows")
    if failed:
        return "a row of memory could not be remapped", True, FAIL, "Replace the card."
    return "rows of memory wait to be remapped" if pending else "none", bool(pending), WARN, "Reset the GPU or reboot."


def _driver(gpu: Gpu) -> Answer:
    number, wanted = gpu.ask_system("CudaDriverVersion"), torch.version.cuda or ""
    major, minor = number // 1000, number % 1000 // 10
    found = f"{gpu.driver()}, up to CUDA {major}.{minor}; PyTorch was built for {wanted or 'none'}"
    too_old = bool(wanted) and major < int(wanted.split(".")[0])
    return found, too_old, FAIL, "Update the driver, or install a PyTorch for its CUDA version."


def _clock(gpu: Gpu) -> Answer:
    now_mhz, most_mhz = gpu.sm_mhz(), int(gpu.ask("MaxClockInfo", gpu.nvml.NVML_CLOCK_SM))
    found = f"{now_mhz} MHz of {most_mhz} MHz"
    if gpu.reasons() & APPLICATION_CLOCKS:
        advice = "Restore the default: `sudo nvidia-smi -rac` and `-rgc`."
        return f"{found}, held by application clocks", True, WARN, advice
    advice = "If clocks are locked on purpose, mention it with the results; else `sudo nvidia-smi -rgc`."
    return found, now_mhz < NEAR_TOP * most_mhz, WARN, advice


def _throttling(gpu: Gpu) -> Answer:
    throttles = gpu.throttles()
    found = ", ".join(throttles) or "none"
    if set(throttles) - {THROTTLES[0x004]}:
        return found, True, FAIL, "Check cooling and power supply."
    return found, bool(throttles), WARN, "The card is at its power limit with almost no load."


def _temperature(gpu: Gpu) -> Answer:
    now_c = gpu.temperature_c()
    threshold = getattr(gpu.nvml, "NVML_TEMPERATURE_THRESHOLD_SLOWDOWN", 1)
    slow_c = gpu.maybe(lambda: gpu.ask("TemperatureThreshold", threshold))
    found = f"{now_c} °C; it slows down at {'an unknown temperature' if slow_c is None else f'{slow_c} °C'}"
    hot = slow_c is not None and now_c >= slow_c - HOT_MARGIN_C
    return found, hot, WARN, "Let it cool, or improve its cooling."


IDLE_CHECKS: dict[str, Callable[[Gpu], Answer]] = {
    "other processes": _others, "free GPU memory": _memory, "MIG": _mig, "persistence mode": _persistence,
    "power limit": _power, "ECC": _ecc, "pending memory repair": _repair, "driver": _driver,
}  # fmt: skip
LOAD_CHECKS: dict[str, Callable[[Gpu], Answer]] = {
    "clock under load": _clock, "throttling": _throttling, "temperature": _temperature,
}  # fmt: skip


def version_findings() -> Iterator[Finding]:
    """Whether packages are versions that the suite was run with, and are compatible with each other."""
    for package, (oldest, newest) in TESTED.items():
        if not (version := installed(package)):
            advice = "Rows that need it are skipped: `pip install -c constraints.txt .`."
            yield Finding(package, "not installed", WARN, advice)
            continue
        first, last = Version(oldest).release[:2], Version(newest).release[:2]
        advice = f"Tested with {' to '.join(dict.fromkeys((oldest, newest)))}: `pip install -c constraints.txt .`."
        yield _judged(package, version, not first <= Version(version).release[:2] <= last, WARN, advice)
    yield _pairing()
    for tool, loss in (("nvcc", "CUDA sources cannot be compiled"), ("ncu", "kernels cannot be profiled")):
        place = shutil.which(tool)
        yield _judged(tool, place or "not found", not place, WARN, f"Without it {loss}; measuring does not need it.")


def _pairing() -> Finding:
    """A torch release is built and tested with one triton, which its metadata names."""
    check, triton = "torch and triton", installed("triton")
    wanted = [Requirement(text) for text in importlib.metadata.requires("torch") or []]
    named = [asked for asked in wanted if asked.name == "triton" and (not asked.marker or asked.marker.evaluate())]
    if not triton or not named:
        return Finding(check, "this torch requires no triton" if triton else "triton is not installed", UNKNOWN)
    fits = named[0].specifier.contains(triton, prereleases=True)
    found = f"torch asks for triton{named[0].specifier}" + ("" if fits else f", {triton} is installed")
    return _judged(check, found, not fits, FAIL, "Install the triton that torch requires; compiled code may fail.")


def kernel_finding(device: torch.device) -> Finding:
    """Which kernels of swiglu_kernels are replaced by portable ones here."""
    from swiglu_kernels.hopper import shared

    reason = shared.why_aside(device)
    advice = "`swiglu-bench doctor --kernels` checks the others, and admits what is right."
    bad, found = reason is not None, reason or "not replaced"
    return _judged("hand-scheduled kernels", found, bad, WARN, f"Portable kernels run instead. {advice}")


def machine_findings(sys_folder: Path, folder: Path) -> Iterator[Finding]:
    """Disk, CPU clock and power supply; `sys_folder` is /sys, `folder` is where results are written."""
    free = shutil.disk_usage(folder).free
    advice = "Samples and compiled kernels need room."
    yield _judged("free disk", f"{free / 2**30:.1f} GiB", free < FREE_DISK_BYTES, WARN, advice)
    if (governor := file_value(sys_folder / "devices/system/cpu/cpu0/cpufreq/scaling_governor")) is None:
        yield Finding("CPU governor", "not reported, as in a virtual machine", UNKNOWN)
    else:
        advice = "Host time and latency vary: `sudo cpupower frequency-set -g performance`."
        yield _judged("CPU governor", governor, governor == "powersave", WARN, advice)
    if (load := look()) is None:
        yield Finding("CPU load", "not known on this system", UNKNOWN)
    else:
        found = f"others use {load.others:.1f} of {load.cpus} CPUs, {load.steal:.0%} stolen"
        advice = "Host time, latency and CPU times suffer; wait for the other programs."
        yield _judged("CPU load", found, bool(load.reason("cpu")), WARN, advice)
    mains = [file_value(supply / "online") for supply in (sys_folder / "class/power_supply").glob("*")]
    if "0" in mains and "1" not in mains:
        yield Finding("power supply", "battery", WARN, "Plug it in: clocks are lower on battery.")


def clock_findings(device: torch.device) -> Iterator[Finding]:
    """The suite's clock against the profiler's kernel durations."""
    check = "clock and profiler"
    if device.type != "cuda":
        yield Finding(check, "needs a GPU", UNKNOWN)
        return
    advice = f"They differ by more than {profilers.TOLERANCE:.0%}: do not trust times here."
    for agreement in profilers.agreements(device):
        if isinstance(agreement, str):
            yield Finding(check, agreement, UNKNOWN)
        else:
            between = f", {agreement.between_us:.1f} us between event and kernel" if agreement.between_us else ""
            both = f"{agreement.ours_us:.1f} us, profiler {agreement.profiler_us:.1f} us{between}"
            found = f"{agreement.workload}: {both} ({agreement.difference:+.1%})"
            yield _judged(check, found, not agreement.holds, FAIL, advice)
