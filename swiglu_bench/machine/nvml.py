"""One GPU as its driver reports it, through NVML: clocks, power, energy, throttling, other users."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from swiglu_bench.machine.system import file_value
from swiglu_bench.rows.record import GpuState

T = TypeVar("T")

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
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    # An instance of a partitioned GPU names itself MIG-...; NVML takes either name.
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


class NoAnswer(Exception):
    """NVML cannot answer; the message is one phrase that says why."""


class Gpu:
    """Questions to NVML about one GPU; each raises NoAnswer where the driver or the card does not support it."""

    def __init__(self, device: torch.device) -> None:
        """Open the GPU that CUDA calls `device`. Raises NoAnswer without a driver, NVML or the GPU's identifier."""
        import pynvml

        self.nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
            self.handle = pynvml.nvmlDeviceGetHandleByUUID(gpu_uuid(device))
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
        try:
            return question()
        except NoAnswer:
            return None

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
        if len(others) == len(found) > 0 and torch.cuda.is_initialized():
            raise NoAnswer("process ids in here are not the driver's, as in a container")
        return others

    def state(self) -> GpuState:
        """The figures that are kept of each round."""
        throttles = self.maybe(self.throttles)
        return GpuState(
            sm_mhz=self.maybe(self.sm_mhz),
            power_w=self.maybe(self.power_w),
            temperature_c=self.maybe(self.temperature_c),
            throttle=None if throttles is None else " ".join(throttles),
        )
