import importlib.metadata
import shutil
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_nvml import FakeNvml, NVMLError, install
from packaging.version import Version

from swiglu_bench.machine import doctor
from swiglu_bench.machine.doctor import Finding, Severity, examine, gpu_findings, machine_findings, version_findings
from swiglu_bench.measure import crosscheck
from swiglu_bench.measure.crosscheck import Agreement

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _no_gpu_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "device", lambda *_: __import__("contextlib").nullcontext())
    monkeypatch.setattr(doctor, "_spin", lambda milliseconds: None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")


def found(monkeypatch: pytest.MonkeyPatch, pids: list[int] | None = None, **answers: Any) -> dict[str, Finding]:
    install(monkeypatch, FakeNvml(pids, **answers))
    return {one.check: one for one in gpu_findings(CUDA)}


def test_a_healthy_gpu_has_nothing_to_find(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = found(monkeypatch)
    assert {one.severity for one in findings.values()} == {Severity.OK}, findings
    assert not any(one.advice for one in findings.values())
    assert len(findings) == 13


USED = types.SimpleNamespace(free=30 * 2**30, total=140 * 2**30)
SICK: list[tuple[str, dict[str, Any], Severity, str]] = [
    ("load by others", {"UtilizationRates": types.SimpleNamespace(gpu=87)}, Severity.FAIL, "87% busy"),
    ("free GPU memory", {"MemoryInfo": USED}, Severity.WARN, "30.0 of 140.0 GiB"),
    ("MIG", {"MigMode": [1, 1]}, Severity.WARN, "on"),
    ("persistence mode", {"PersistenceMode": 0}, Severity.WARN, "off"),
    ("power limit", {"EnforcedPowerLimit": 450_000}, Severity.WARN, "450 W, by default 700 W"),
    ("ECC", {"EccMode": [0, 0]}, Severity.WARN, "off"),
    ("ECC", {"EccMode": [1, 0]}, Severity.WARN, "waits for a reboot"),
    ("ECC", {"TotalEccErrors": 3}, Severity.FAIL, "3 uncorrected errors"),
    ("pending memory repair", {"RemappedRows": (0, 2, 1, 0)}, Severity.WARN, "wait to be replaced"),
    ("pending memory repair", {"RemappedRows": (0, 2, 0, 1)}, Severity.FAIL, "could not be replaced"),
    ("clock under load", {"ClockInfo": 1200}, Severity.WARN, "1200 MHz of 1980 MHz"),
    ("clock under load", {"CurrentClocksEventReasons": 2}, Severity.WARN, "held by application clocks"),
    ("throttling", {"CurrentClocksEventReasons": 0x44}, Severity.FAIL, "software-power-cap, hardware-thermal"),
    ("throttling", {"CurrentClocksEventReasons": 0x4}, Severity.WARN, "software-power-cap"),
    ("temperature", {"Temperature": 85}, Severity.WARN, "85 °C; it slows down at 92 °C"),
    ("temperature", {"TemperatureThreshold": None}, Severity.OK, "not known"),
]


@pytest.mark.parametrize(("check", "answers", "severity", "text"), SICK, ids=[f"{one[0]}: {one[3]}" for one in SICK])
def test_a_sick_one_has(
    monkeypatch: pytest.MonkeyPatch, check: str, answers: dict[str, Any], severity: Severity, text: str
) -> None:
    one = found(monkeypatch, **answers)[check]
    assert one.severity is severity
    assert text in one.found
    assert bool(one.advice) is (severity in {Severity.WARN, Severity.FAIL})


def test_others_on_the_gpu_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    one = found(monkeypatch, pids=[1, os.getpid()])["other processes"]
    assert (one.severity, one.found) == (Severity.FAIL, "processes 1")
    assert found(monkeypatch, pids=[1])["other processes"].severity is Severity.UNKNOWN


def test_a_clock_that_the_power_limit_lowers_is_not_blamed_on_a_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(monkeypatch, ClockInfo=1965)["clock under load"].severity is Severity.OK


def test_what_the_driver_does_not_say_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    questions = ("PersistenceMode", "EccMode", "RemappedRows", "UtilizationRates", "EnforcedPowerLimit")
    findings = found(monkeypatch, **dict.fromkeys(questions, NVMLError("Not Supported")))
    unknown = [name for name, one in findings.items() if one.severity is Severity.UNKNOWN]
    assert len(unknown) == len(questions)
    assert all(findings[name].found == "the driver does not say: Not Supported" for name in unknown)


@pytest.mark.parametrize(("offers", "severity"), [(13010, Severity.OK), (13000, Severity.OK), (12080, Severity.FAIL)])
def test_the_driver_must_know_the_cuda_of_torch(
    monkeypatch: pytest.MonkeyPatch, offers: int, severity: Severity
) -> None:
    install(monkeypatch, FakeNvml()).cuda = offers
    (one,) = [one for one in gpu_findings(CUDA) if one.check == "driver"]
    assert one.severity is severity
    assert f"up to CUDA {offers // 1000}.{offers % 1000 // 10}" in one.found


def test_without_nvml_there_is_a_warning_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = found(monkeypatch, Init=NVMLError("Driver Not Loaded"))
    assert findings["NVML"].severity is Severity.WARN
    assert set(findings) == {"GPU", "NVML"}


def test_no_gpu_fails() -> None:
    (one,) = gpu_findings(CPU)
    assert (one.check, one.severity) == ("GPU", Severity.FAIL)


# Versions


def versions(monkeypatch: pytest.MonkeyPatch, requires: list[str], **installed: str) -> dict[str, Finding]:
    names = {name.replace("_", "-"): Version(text) for name, text in installed.items()}
    monkeypatch.setattr(doctor, "_installed", names.get)
    monkeypatch.setattr(importlib.metadata, "requires", lambda package: requires)
    return {one.check: one for one in version_findings()}


GOOD = {"torch": "2.11.0+cu130", "triton": "3.6.0", "liger_kernel": "0.8.5"}


def test_versions_that_are_known_and_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = versions(monkeypatch, ["numpy", "triton==3.6.0; platform_system != 'Nowhere'"], **GOOD)
    assert all(findings[name].severity is Severity.OK for name in ("torch", "triton", "torch and triton"))


@pytest.mark.parametrize("version", ["2.10.1", "2.99.0", "3.0"])
def test_a_version_out_of_the_tested_range(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    one = versions(monkeypatch, [], **GOOD | {"torch": version})["torch"]
    assert one.severity is Severity.WARN
    assert "2.11 to 2.13" in one.advice


def test_a_triton_that_torch_does_not_want(monkeypatch: pytest.MonkeyPatch) -> None:
    one = versions(monkeypatch, ["triton==3.7.1"], **GOOD)["torch and triton"]
    assert (one.severity, one.found) == (Severity.FAIL, "torch asks for triton==3.7.1, 3.6.0 is installed")


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    findings = versions(monkeypatch, ["triton==3.7.1"], torch="2.11.0")
    assert {findings[name].severity for name in ("triton", "liger-kernel", "nvcc", "ncu")} == {Severity.WARN}
    assert findings["torch and triton"].severity is Severity.UNKNOWN


def test_tools_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: f"/bin/{tool}")
    assert versions(monkeypatch, [], **GOOD)["ncu"].found == "/bin/ncu"


# The machine around it


def around(tmp_path: Path, **files: str) -> dict[str, Finding]:
    for name, text in files.items():
        path = tmp_path / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return {one.check: one for one in machine_findings(tmp_path, tmp_path)}


GOVERNOR = "devices__system__cpu__cpu0__cpufreq__scaling_governor"


@pytest.mark.parametrize(
    ("governor", "severity"),
    [("powersave", Severity.WARN), ("performance", Severity.OK), ("schedutil", Severity.OK), (None, Severity.UNKNOWN)],
)
def test_the_governor(tmp_path: Path, governor: str | None, severity: Severity) -> None:
    files = {GOVERNOR: governor} if governor else {}
    assert around(tmp_path, **files)["CPU governor"].severity is severity


def test_a_laptop_on_battery(tmp_path: Path) -> None:
    assert around(tmp_path, class__power_supply__AC__online="0")["power supply"].severity is Severity.WARN
    assert "power supply" not in around(tmp_path, class__power_supply__USB__online="1")


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert around(tmp_path)["free disk"].severity is Severity.OK or shutil.disk_usage(tmp_path).free < 2**30
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=2**20))
    assert around(tmp_path)["free disk"].severity is Severity.WARN


@pytest.mark.parametrize(("load", "severity"), [(0.1, Severity.OK), (100.0, Severity.WARN)])
def test_a_busy_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: float, severity: Severity) -> None:
    monkeypatch.setattr(doctor.os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(doctor.os, "cpu_count", lambda: 16)
    assert around(tmp_path)["CPU load"].severity is severity


# The clock


def test_the_clock_is_compared_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    agreements: list[Agreement | str] = [Agreement("copy", 100.0, 99.0), Agreement("product", 103.0, 100.0), "x: no."]
    monkeypatch.setattr(crosscheck, "agreements", lambda device: iter(agreements))
    install(monkeypatch, FakeNvml())
    compared = [one for one in examine(CUDA, cross_check=True) if one.check == "clock and profiler"]
    assert [one.severity for one in compared] == [Severity.OK, Severity.FAIL, Severity.UNKNOWN]
    assert compared[0].found == "copy: 100.0 us, profiler 99.0 us (+1.0%)"
    assert "clock and profiler" not in {one.check for one in examine(CUDA)}


def test_without_a_gpu_the_clock_has_no_second_source() -> None:
    assert [one.severity for one in examine(CPU, cross_check=True)][-1] is Severity.UNKNOWN
