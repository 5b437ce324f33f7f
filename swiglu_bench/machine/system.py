"""What the system says of this machine: its files, its processes, the load of its CPUs, and its GPU's driver by NVML.

A contender's process stands still while others are timed, and its group with it. A process that has left the group goes
on; it is still a descendant, for a contender's process adopts what loses its parent. Linux only; elsewhere nothing is
known of processes and load. Importing this imports no torch, so that `list` and typos are told at once.
"""

from __future__ import annotations

import ctypes
import importlib.util
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from swiglu_bench.cases.errors import BadInput
from swiglu_bench.rows.record import GpuState, Load

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
TICK_S = 1 / os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0.01


def file_value(path: Path, pattern: str = r"^(\S+)") -> str | None:
    """The group of a pattern's first match in a file, by default the first word; None without the file or a match."""
    with suppress(OSError):
        if found := re.search(pattern, path.read_text(), re.MULTILINE):
            return found[1]
    return None


@dataclass(frozen=True)
class Process:
    """One line of the census."""

    pid: int
    parent: int
    group: int
    cpu_s: float
    tree_s: float
    """With that of its children that have ended and were waited for."""


def census() -> dict[int, Process]:
    """All processes of this machine."""
    found = (_process(int(entry.name)) for entry in Path("/proc").glob("[0-9]*"))
    return {process.pid: process for process in found if process}


def _process(pid: int) -> Process | None:
    with suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        own, ended = ((int(fields[at]) + int(fields[at + 1])) * TICK_S for at in (11, 13))
        return Process(pid, int(fields[1]), int(fields[2]), own, own + ended)
    return None


def descendants(pid: int, known: Mapping[int, Process] | None = None) -> list[Process]:
    """What a process has started, and what that has."""
    known = census() if known is None else known
    found, parents = list[Process](), {pid}
    while parents:
        children = [process for process in known.values() if process.parent in parents]
        found += children
        parents = {process.pid for process in children}
    return found


class Offspring:
    """What a process has started, with what that has; each look reads only processes that are new."""

    def __init__(self, pid: int) -> None:
        self._pid, self._own, self._seen = pid, {pid}, set[int]()

    def escaped(self) -> list[int]:
        """Those that have left its group and go on when that is stopped."""
        now = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        for pid in sorted(now - self._seen):
            process = _process(pid)
            if process and process.parent in self._own:
                self._own.add(pid)
        self._seen = now
        self._own &= now | {self._pid}
        found = map(_process, self._own - {self._pid})
        return [process.pid for process in found if process and process.group != self._pid]


def idle_share(pid: int, seconds: float) -> float:
    """The CPU time that a process and its descendants use while they have nothing to do, over the time that passes."""

    def used() -> float:
        known = census()
        return sum(process.cpu_s for process in (known.get(pid), *descendants(pid, known)) if process)

    before, began = used(), time.monotonic()
    time.sleep(seconds)
    return (used() - before) / (time.monotonic() - began)


class CpuUse:
    """Of contenders' processes that go on while the contender itself stands still."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        """Begin with these contenders' processes."""
        self._pids, self._began = dict(pids), time.monotonic()
        self._before = self._escaped()

    def while_suspended(self) -> dict[str, float]:
        """By contender, the CPU time since the beginning over the time that has passed; those that used any."""
        passed = max(time.monotonic() - self._began, TICK_S)
        used = {name: cpu_s - self._before[name] for name, cpu_s in self._escaped().items()}
        return {name: cpu_s / passed for name, cpu_s in used.items() if cpu_s > 0}

    def _escaped(self) -> dict[str, float]:
        known = census()
        return {
            name: sum(process.cpu_s for process in descendants(pid, known) if process.group != pid)
            for name, pid in self._pids.items()
        }


@dataclass(frozen=True)
class _Ticks:
    at: float
    busy: float
    steal: float
    own: float


class LoadWatch:
    """The load from now on."""

    def __init__(self) -> None:
        self._cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        self.before = self._read()
        """None where this system does not tell it."""

    def load(self) -> Load | None:
        """So far; None where it cannot be known."""
        before, now = self.before, self._read()
        if before is None or now is None or now.at - before.at < TICK_S:
            return None
        seconds = now.at - before.at
        others = max(0.0, now.busy - before.busy - (now.own - before.own)) / seconds
        steal = max(0.0, now.steal - before.steal) / seconds / len(self._cpus)
        return Load(len(self._cpus), others, steal)

    def _read(self) -> _Ticks | None:
        try:
            lines = Path("/proc/stat").read_text().splitlines()
            rows = {line.split()[0]: line.split()[1:9] for line in lines if line.startswith("cpu")}
            mine = [[int(ticks) * TICK_S for ticks in rows[f"cpu{number}"]] for number in self._cpus]
        except (OSError, ValueError, KeyError):
            return None
        if not mine or any(len(row) < 8 for row in mine):
            return None
        known, pid = census(), os.getpid()
        own = sum(process.tree_s for process in (known.get(pid), *descendants(pid, known)) if process)
        busy = sum(sum(row[:3]) + sum(row[5:7]) for row in mine)
        return _Ticks(time.monotonic(), busy, sum(row[7] for row in mine), own)


def look(seconds: float = 0.3) -> Load | None:
    """The load of the moment, while this process waits."""
    watch = LoadWatch()
    if watch.before:
        time.sleep(seconds)
    return watch.load()


# The GPU

THROTTLES = {
    0x004: "software-power-cap",
    0x008: "hardware-slowdown",
    0x020: "software-thermal",
    0x040: "hardware-thermal",
    0x080: "power-brake",
}
"""Bits of NVML's clock event reasons that hold the clocks below what was asked for; the others (idle, an application's
clocks, sync boost, display) are choices."""
APPLICATION_CLOCKS = 0x002


def _is_ours(pid: int) -> bool:
    """Whether a process is this one or one of the suite's: its first process, or a descendant of that."""
    first = multiprocessing.parent_process() or multiprocessing.current_process()
    while pid:
        if pid in (os.getpid(), first.pid):
            return True
        pid = int(file_value(Path(f"/proc/{pid}/status"), r"^PPid:\s+(\d+)$") or 0)
    return False


def gpu_uuid(device: torch.device) -> str:
    """A GPU's UUID, GPU-... or MIG-..., whatever its number in CUDA_VISIBLE_DEVICES; "" for a CPU."""
    if device.type != "cuda":
        return ""
    import torch

    uuid = str(torch.cuda.get_device_properties(device).uuid)
    # An instance of a partitioned GPU names itself MIG-...; NVML takes either name.
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def gpu_index(text: str | None, count: int | None) -> int | None:
    """The number of the GPU that --device names, of `count` or of any number; None: the CPU. Raises BadInput."""
    if text is None:
        return 0 if count else None
    if text == "cpu":
        return None
    if not (match := re.fullmatch(r"cuda(?::(\d{1,4}))?", text)):
        raise BadInput(f"--device: {text!r} is not a device; give cpu, cuda or cuda:INDEX.")
    if count == 0:
        raise BadInput(f"--device: {text} was asked for, but this machine has no usable CUDA GPU; give cpu.")
    index = int(match[1] or 0)  # torch.device itself reads cuda:300 as cuda:44
    if count is not None and index >= count:
        there = "there is only cuda:0" if count == 1 else f"there are only cuda:0 to cuda:{count - 1}"
        raise BadInput(f"--device: {text} was asked for, but {there}.")
    return index


def gpu_indices(text: str, count: int | None) -> list[int]:
    """The GPUs that --gpus names by index, or `all`, of `count` or of any number. Raises BadInput."""
    words = [word.strip() for word in text.split(",")]
    if text.strip() != "all" and not all(re.fullmatch(r"\d{1,4}", word) for word in words):
        raise BadInput(f"--gpus: {text!r} are no GPUs; give indices as 0,1,2,3, or all.")
    if count == 0:
        raise BadInput("--gpus: this machine has no usable CUDA GPU; leave it out.")
    indices = list(range(count or 0)) if text.strip() == "all" else [int(word) for word in words]
    if beyond := [index for index in indices if count is not None and index >= count]:
        there = "there is only GPU 0" if count == 1 else f"there are only GPUs 0 to {(count or 0) - 1}"
        raise BadInput(f"--gpus: {beyond[0]} was asked for, but {there}.")
    if len(set(indices)) < len(indices):
        raise BadInput(f"--gpus: {text} names a GPU twice; name each once.")
    return indices


def check_address(address: str) -> None:
    """Raise BadInput for a --ray that is no address, or where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise BadInput("--ray needs Ray, which is not installed; install swiglu-bench[cluster].")
    if address != "auto" and ("://" in address or not re.fullmatch(r".+:\d{1,5}", address)):
        raise BadInput(f"--ray: {address!r} is no address; give auto or HOST:PORT, on a host of the cluster.")


def of_torch(name: str) -> str:
    """What the file version.py of the installed torch says of `__version__` or `cuda`, without its import."""
    found = importlib.util.find_spec("torch")
    version = Path(found.origin).with_name("version.py") if found and found.origin else None
    said = file_value(version, rf"^{name}\b[^=]*= *(\S+)") if version else None
    return "" if said in (None, "None") else str(said).strip("'\"")


def visible_gpus() -> list[Gpu] | None:
    """The GPUs that CUDA shows to this process, in its order, without torch.

    NVML tells them in some milliseconds. None where it cannot say which of the machine's GPUs these are.
    """
    import pynvml

    if not of_torch("cuda"):
        return []
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        known = [Gpu(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
        names = {gpu.name() for gpu in known}
    except (pynvml.NVMLError, NoAnswer):
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            return []  # without a driver there is no GPU
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None and len(names) <= 1:
        return known
    if visible in ("", "-1"):
        return []
    chosen = re.findall(r"\d+", visible or "")
    if len(names) > 1 or ",".join(chosen) != visible or len(set(chosen)) < len(chosen):
        return None  # in CUDA's own order, by UUID, or parts of a GPU
    return [known[int(index)] for index in chosen if int(index) < len(known)]


class NoAnswer(Exception):
    """NVML cannot answer; the message is one phrase that says why."""


class Gpu:
    """Questions to NVML about one GPU; each raises NoAnswer where the driver or the card does not support it."""

    def __init__(self, device: torch.device | str) -> None:
        """Open what CUDA calls `device`, or has this UUID. Raises NoAnswer without a driver, NVML or an identifier."""
        import pynvml

        self.nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
            self.uuid = device if isinstance(device, str) else gpu_uuid(device)
            self.handle = pynvml.nvmlDeviceGetHandleByUUID(self.uuid)
        except pynvml.NVMLError as error:
            raise NoAnswer(f"NVML does not answer: {error}") from None

    def ask(self, question: str, *arguments: Any) -> Any:
        """The answer of nvmlDeviceGet`question`."""
        return self._ask(f"nvmlDeviceGet{question}", self.handle, *arguments)

    def ask_system(self, question: str) -> Any:
        """The answer of nvmlSystemGet`question`."""
        return self._ask(f"nvmlSystemGet{question}")

    def _ask(self, question: str, *arguments: Any) -> Any:
        try:
            return getattr(self.nvml, question)(*arguments)
        except self.nvml.NVMLError as error:
            raise NoAnswer(str(error)) from None
        except AttributeError as error:  # an nvidia-ml-py or a library that is older than the question
            raise NoAnswer(f"not known to this version of NVML ({error})") from None

    def maybe(self, question: Callable[[], T]) -> T | None:
        """The answer to a question, or None where there is none."""
        with suppress(NoAnswer):
            return question()
        return None

    def name(self) -> str:
        """The model, as the driver names it."""
        return str(self.ask("Name"))

    def capability(self) -> str:
        """The compute capability, as "9.0"."""
        return "{}.{}".format(*self.ask("CudaComputeCapability"))

    def memory_bytes(self) -> int:
        """All of its memory, of which the driver keeps a part."""
        return int(self.ask("MemoryInfo").total)

    def driver(self) -> str:
        """Version of the driver."""
        return str(self.ask_system("DriverVersion"))

    def index(self) -> int:
        """Its number on this host, as `nvidia-smi` counts."""
        return int(self.ask("Index"))

    def sm_mhz(self) -> int:
        """Present clock of the multiprocessors."""
        return int(self.ask("ClockInfo", self.nvml.NVML_CLOCK_SM))

    def power_w(self) -> float:
        """Draw of the board; on recent GPUs the mean over the last second."""
        return float(self.ask("PowerUsage")) / 1e3

    def power_limit_w(self) -> float:
        """The limit in force."""
        return float(self.ask("EnforcedPowerLimit")) / 1e3

    def temperature_c(self) -> int:
        """Temperature of the GPU itself."""
        return int(self.ask("Temperature", self.nvml.NVML_TEMPERATURE_GPU))

    def energy_j(self) -> float:
        """Energy drawn since the driver was loaded."""
        return float(self.ask("TotalEnergyConsumption")) / 1e3

    def reasons(self) -> int:
        """NVML's bits for what decides the present clocks."""
        try:
            return int(self.ask("CurrentClocksEventReasons"))
        except NoAnswer:
            return int(self.ask("CurrentClocksThrottleReasons"))  # the name before driver 535

    def throttles(self) -> list[str]:
        """What holds the clocks down at present."""
        bits = self.reasons()
        return [name for bit, name in THROTTLES.items() if bits & bit]

    def other_processes(self) -> list[int]:
        """Ids of processes that compute on this GPU and are not of this run.

        Raises NoAnswer where this process is not among them: the ids of a container differ from the driver's.
        """
        found = {process.pid for process in self.ask("ComputeRunningProcesses")}
        others = sorted(pid for pid in found if not _is_ours(pid))
        if len(others) == len(found) > 0 and sys.modules["torch"].cuda.is_initialized():
            raise NoAnswer("process ids in here are not the driver's, as in a container")
        return others

    @contextmanager
    def locked(self, mhz: int) -> Iterator[None]:
        """Hold the clock of the multiprocessors at a frequency, if its power allows it; raises NoAnswer."""
        self._ask("nvmlDeviceSetGpuLockedClocks", self.handle, mhz, mhz)
        try:
            yield
        finally:
            self._ask("nvmlDeviceResetGpuLockedClocks", self.handle)

    def state(self) -> GpuState:
        """The figures that are kept of each round."""
        throttles = self.maybe(self.throttles)
        throttle = None if throttles is None else " ".join(throttles)
        return GpuState(self.maybe(self.sm_mhz), self.maybe(self.power_w), self.maybe(self.temperature_c), throttle)
