"""A driver that answers what a test wants: questions to NVML as a module would take them."""

import os
import sys
import types
from typing import Any

import pytest
import torch


class NVMLError(Exception):
    """What NVML raises."""


HEALTHY: dict[str, Any] = {
    "UtilizationRates": types.SimpleNamespace(gpu=0, memory=0),
    "MemoryInfo": types.SimpleNamespace(free=139 * 2**30, total=140 * 2**30, used=2**30),
    "MigMode": [0, 0], "PersistenceMode": 1, "EnforcedPowerLimit": 700_000, "PowerManagementDefaultLimit": 700_000,
    "PowerUsage": 120_500, "EccMode": [1, 1], "TotalEccErrors": 0, "RemappedRows": (0, 0, 0, 0), "ClockInfo": 1980,
    "MaxClockInfo": 1980, "CurrentClocksEventReasons": 0, "Temperature": 40, "TemperatureThreshold": 92,
    "TotalEnergyConsumption": 5_000_000, "Count": 0,
}  # fmt: skip


class FakeNvml:
    """`answers` replaces those of a healthy GPU; an exception among them is raised, None makes the question unknown."""

    NVMLError = NVMLError
    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU, NVML_TEMPERATURE_THRESHOLD_SLOWDOWN = 1, 0, 1
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0

    def __init__(self, pids: list[int] | None = None, cuda: int = 13000, **answers: Any) -> None:
        processes = [types.SimpleNamespace(pid=pid) for pid in ([os.getpid()] if pids is None else pids)]
        self.answers = HEALTHY | {"ComputeRunningProcesses": processes} | answers
        self.cuda = cuda

    def nvmlInit(self) -> None:
        if "Init" in self.answers:
            raise self.answers["Init"]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.1"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return self.cuda

    def __getattr__(self, name: str) -> Any:
        question = name.removeprefix("nvmlDeviceGet")
        if name == question or self.answers.get(question) is None:
            raise AttributeError(name)

        def answer(*_: Any) -> Any:
            value = self.answers[question]
            if isinstance(value, Exception):
                raise value
            return value

        return answer


def install(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml) -> None:
    """Let this NVML answer for a GPU that is not there."""
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: types.SimpleNamespace(uuid="1234"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
