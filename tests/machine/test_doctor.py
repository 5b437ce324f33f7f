import contextlib
import importlib.metadata
import os
import shutil
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_nvml import FakeNvml, NVMLError, install

from swiglu_bench.machine import doctor
from swiglu_bench.machine.doctor import Finding, Severity, examine, gpu_findings, machine_findings, version_findings
from swiglu_bench.measure import profilers
from swiglu_bench.measure.profilers import Agreement
from swiglu_bench.rows.record import Load

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
OK, WARN, FAIL, UNKNOWN = Severity


@pytest.fixture(autouse=True)
def _no_gpu_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "device", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(doctor, "_spin", lambda milliseconds: None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")


def found(monkeypatch: pytest.MonkeyPatch, pids: list[int] | None = None, **answers: Any) -> dict[str, Finding]:
    install(monkeypatch, FakeNvml(pids, **answers))
    return {finding.check: finding for finding in gpu_findings(CUDA)}


def test_a_healthy_gpu_has_no_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = found(monkeypatch)
    assert {(finding.severity, finding.advice) for finding in findings.values()} == {(OK, "")}, findings
    assert len(findings) == 13


SICK: list[tuple[str, dict[str, Any], Severity, str]] = [
    ("load by others", {"UtilizationRates": types.SimpleNamespace(gpu=87)}, FAIL, "87%"),
    ("other processes", {"pids": [1, os.getpid()]}, FAIL, "processes 1"),
    ("free GPU memory", {"MemoryInfo": types.SimpleNamespace(free=2**30, total=2**33)}, WARN, "1.0 of 8.0 GiB"),
    ("MIG", {"MigMode": [1, 1]}, WARN, "on"),
    ("persistence mode", {"PersistenceMode": 0}, WARN, "off"),
    ("power limit", {"EnforcedPowerLimit": 450_000}, WARN, "450 W, by default 700 W"),
    ("ECC", {"EccMode": [1, 0]}, WARN, "at the next reboot"),
    ("ECC", {"TotalEccErrors": 3}, FAIL, "3 uncorrected errors"),
    ("pending memory repair", {"RemappedRows": (0, 2, 0, 1)}, FAIL, "could not be remapped"),
    ("driver", {"cuda": 12080}, FAIL, "up to CUDA 12.8"),
    ("clock under load", {"ClockInfo": 1200}, WARN, "1200 MHz of 1980 MHz"),
    ("clock under load", {"ClockInfo": 1965}, OK, "1965 MHz"),  # the power limit lowers it, not a lock
    ("clock under load", {"CurrentClocksEventReasons": 2}, WARN, "held by application clocks"),
    ("throttling", {"CurrentClocksEventReasons": 0x44}, FAIL, "software-power-cap, hardware-thermal"),
    ("temperature", {"Temperature": 85}, WARN, "85 °C; it slows down at 92 °C"),
    ("temperature", {"TemperatureThreshold": None}, OK, "an unknown temperature"),
]


@pytest.mark.parametrize(("check", "answers", "severity", "text"), SICK, ids=[f"{row[0]}: {row[3]}" for row in SICK])
def test_a_gpu_that_is_not_healthy(
    monkeypatch: pytest.MonkeyPatch, check: str, answers: dict[str, Any], severity: Severity, text: str
) -> None:
    finding = found(monkeypatch, **answers)[check]
    assert (finding.severity, bool(finding.advice)) == (severity, severity in {WARN, FAIL})
    assert text in finding.found


def test_what_is_not_said_is_unknown_or_a_warning_and_no_gpu_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    questions = ("PersistenceMode", "EccMode", "RemappedRows", "UtilizationRates", "EnforcedPowerLimit")
    findings = found(monkeypatch, **dict.fromkeys(questions, NVMLError("Not Supported")))
    assert [finding.severity for finding in findings.values()].count(UNKNOWN) == len(questions)
    findings = found(monkeypatch, Init=NVMLError("Driver Not Loaded"))
    assert {name: finding.severity for name, finding in findings.items()} == {"GPU": OK, "NVML": WARN}
    monkeypatch.setattr(doctor, "visible_gpus", list)
    assert {finding.severity for finding in gpu_findings(CPU)} <= {OK, WARN}
    monkeypatch.setattr(doctor, "visible_gpus", lambda: ["9.0"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert next(gpu_findings(CPU)).severity is FAIL


GOOD = {"torch": "2.11.0+cu130", "triton": "3.6.0", "liger-kernel": "0.8.5"}


def versions(monkeypatch: pytest.MonkeyPatch, requires: list[str], versions: dict[str, str]) -> dict[str, Finding]:
    monkeypatch.setattr(doctor, "installed", lambda package: versions.get(package, ""))
    monkeypatch.setattr(importlib.metadata, "requires", lambda package: requires)
    return {finding.check: finding for finding in version_findings()}


@pytest.mark.parametrize("version", ["2.10.1", "2.99.0", "3.0"])
def test_a_version_out_of_the_tested_range(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    findings = versions(monkeypatch, ["triton==3.7.1"], GOOD | {"torch": version})
    assert (findings["torch"].severity, findings["triton"].severity) == (WARN, OK)
    assert (findings["torch and triton"].severity, "2.11 to 2.15" in findings["torch"].advice) == (FAIL, True)


def test_tested_versions_and_missing_packages_and_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: f"/bin/{tool}")
    findings = versions(monkeypatch, ["numpy", "triton==3.6.0; platform_system != 'Nowhere'"], GOOD)
    assert {finding.severity for finding in findings.values()} == {OK}
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    findings = versions(monkeypatch, ["triton==3.7.1"], {"torch": "2.11.0"})
    assert {findings[name].severity for name in ("triton", "liger-kernel", "nvcc", "ncu")} == {WARN}
    assert findings["torch and triton"].severity is UNKNOWN


GOVERNOR = "devices/system/cpu/cpu0/cpufreq/scaling_governor"


@pytest.mark.parametrize(
    ("check", "files", "severity"),
    [
        ("CPU governor", {GOVERNOR: "powersave"}, WARN), ("CPU governor", {GOVERNOR: "schedutil"}, OK),
        ("CPU governor", {}, UNKNOWN), ("power supply", {"class/power_supply/AC/online": "0"}, WARN),
        ("power supply", {"class/power_supply/AC/online": "0", "class/power_supply/USB/online": "1"}, None),
    ],
)  # fmt: skip
def test_files_of_the_system(tmp_path: Path, check: str, files: dict[str, str], severity: Severity | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text + "\n")
    findings = {finding.check: finding.severity for finding in machine_findings(tmp_path, tmp_path)}
    assert findings.get(check) is severity


@pytest.mark.parametrize(
    ("load", "free", "severities"),
    [(Load(16, 0.1, 0.0), 2**40, (OK, OK)), (Load(16, 12.0, 0.0), 2**20, (WARN, WARN)), (None, 2**40, (UNKNOWN, OK))],
)
def test_load_and_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: Load | None, free: int, severities: tuple[Severity, Severity]
) -> None:
    monkeypatch.setattr(doctor, "look", lambda: load)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=free))
    findings = {finding.check: finding.severity for finding in machine_findings(tmp_path, tmp_path)}
    assert (findings["CPU load"], findings["free disk"]) == severities


def test_the_clock_is_compared_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    agreements: list[Agreement | str] = [Agreement("copy", 100.0, 99.0), Agreement("product", 103.0, 100.0), "x: no."]
    monkeypatch.setattr(profilers, "agreements", lambda device: iter(agreements))
    install(monkeypatch, FakeNvml())
    compared = [finding for finding in examine(CUDA, cross_check=True) if finding.check == "clock and profiler"]
    assert [finding.severity for finding in compared] == [OK, FAIL, UNKNOWN]
    assert compared[0].found == "copy: 100.0 us, profiler 99.0 us (+1.0%)"
    assert "clock and profiler" not in {finding.check for finding in examine(CUDA)}
    assert [finding.severity for finding in examine(CPU, cross_check=True)][-1] is UNKNOWN, "without a GPU"
