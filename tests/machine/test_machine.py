import dataclasses
import json
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from specimens import result_or_complaint

from swiglu_bench import __version__
from swiglu_bench.machine import machine
from swiglu_bench.machine.machine import (
    DATASHEETS,
    Machine,
    describe,
    find_device,
    free_memory_bytes,
    gpu_state,
    host_memory_bytes,
    now,
)
from swiglu_bench.spec.errors import BadInput

CPU = torch.device("cpu")


def gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


# --device


@pytest.mark.parametrize(("count", "device"), [(0, "cpu"), (1, "cuda:0"), (4, "cuda:0")])
def test_a_gpu_is_taken_where_there_is_one(monkeypatch: pytest.MonkeyPatch, count: int, device: str) -> None:
    gpus(monkeypatch, count)
    assert find_device(None) == torch.device(device)


@pytest.mark.parametrize(
    ("text", "device"),
    [("cpu", "cpu"), ("cuda", "cuda:0"), ("cuda:0", "cuda:0"), ("cuda:3", "cuda:3"), ("cuda:01", "cuda:1")],
)
def test_devices_by_name(monkeypatch: pytest.MonkeyPatch, text: str, device: str) -> None:
    gpus(monkeypatch, 4)
    assert find_device(text) == torch.device(device)


@pytest.mark.parametrize("text", ["cuda", "cuda:0", "cuda:7"])
def test_cuda_where_there_is_none(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    gpus(monkeypatch, 0)
    with pytest.raises(BadInput, match=f"^--device: {text} was asked for, but this machine has no usable CUDA GPU"):
        find_device(text)


@pytest.mark.parametrize(
    ("count", "text", "words"),
    [
        (1, "cuda:1", "there is only cuda:0"),
        (2, "cuda:2", "there are only cuda:0 to cuda:1"),
        (2, "cuda:256", "there are only cuda:0 to cuda:1"),  # 256 = 0 in the eight bits that PyTorch has for an index
        (2, "cuda:9999", "there are only cuda:0 to cuda:1"),
    ],
)
def test_an_index_that_is_not_there(monkeypatch: pytest.MonkeyPatch, count: int, text: str, words: str) -> None:
    gpus(monkeypatch, count)
    with pytest.raises(BadInput, match=words):
        find_device(text)


@pytest.mark.parametrize(
    "text", ["", "gpu", "CPU", "mps", "cpu:0", "cuda:", "cuda:-1", "cuda:x", "cuda 0", "cuda:99999"]
)
def test_what_is_no_device(text: str) -> None:
    with pytest.raises(BadInput, match=r"is not a device; give cpu, cuda or cuda:INDEX\.$"):
        find_device(text)


@given(st.one_of(st.text(), st.from_regex(r"(cpu|cuda)(:\d*)?")))
def test_any_text_is_a_device_or_bad_input(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: 2)
        device = result_or_complaint(lambda: find_device(text))
    if isinstance(device, BadInput):
        assert str(device).startswith("--device: ")
    else:
        assert device in {CPU, torch.device("cuda:0"), torch.device("cuda:1")}


# What is known of a machine


def test_a_cpu_is_described() -> None:
    this = describe(CPU)
    assert (this.device_type, this.slug) == ("cpu", "cpu")
    assert this.device == this.cpu != ""
    assert this.memory_bytes > 2**28
    assert this.cpu_threads >= 1
    assert this.torch == torch.__version__
    assert this.python == ".".join(map(str, sys.version_info[:3]))
    assert re.fullmatch(rf"{re.escape(__version__)}(\+[0-9a-f]{{7,40}}(-dirty)?)?", this.version)
    assert this.sm_count is this.l2_bytes is this.power_limit_w is None
    assert this.driver == this.cuda == this.compute_capability == ""
    assert this.datasheet is None


def test_it_is_plain_data() -> None:
    this = describe(CPU)
    assert Machine(**json.loads(json.dumps(this.as_dict()))) == this


def named(device: str) -> Machine:
    return dataclasses.replace(describe(CPU), device=device, device_type="cuda")


@pytest.mark.parametrize(
    ("device", "slug"),
    [
        ("NVIDIA H200", "nvidia-h200"),
        ("NVIDIA A100-SXM4-80GB", "nvidia-a100-sxm4-80gb"),
        ("  Odd/../Name (TM) ", "odd-name-tm"),
    ],
)
def test_a_slug_is_a_folder_s_name(device: str, slug: str) -> None:
    assert named(device).slug == slug


@pytest.mark.parametrize(
    ("device", "tflops", "gbps"),
    [
        ("NVIDIA H200", 989.0, 4800.0),
        ("NVIDIA H100 80GB HBM3", 989.0, 3350.0),
        ("NVIDIA H100 PCIe", 756.0, 2000.0),
        ("NVIDIA A100-SXM4-80GB", 312.0, 2039.0),
    ],
)
def test_datasheets(device: str, tflops: float, gbps: float) -> None:
    sheet = named(device).datasheet
    assert sheet is not None
    assert (sheet.tflops, sheet.gbps) == (tflops, gbps)


def test_every_datasheet_is_plausible() -> None:
    for sheet in DATASHEETS.values():
        assert sheet.tflops / sheet.tf32_tflops == pytest.approx(2, rel=0.01)
        assert 1000 < sheet.gbps < 10_000


def test_an_unknown_device_has_no_datasheet() -> None:
    assert named("NVIDIA GeForce RTX 4090").datasheet is None


def test_a_package_that_is_missing_has_no_version() -> None:
    assert machine._version("surely-not-installed") == ""


def test_a_version_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", fail)
    assert machine._own_version() == __version__


def test_a_version_outside_a_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "swiglu_bench" / "machine" / "machine.py"))
    assert machine._own_version() == __version__


def test_now_is_utc_to_the_second() -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", now())


# Memory


def test_available_memory_is_part_of_all() -> None:
    assert 0 < free_memory_bytes(CPU) == pytest.approx(host_memory_bytes(available=True), rel=0.5)
    assert host_memory_bytes(available=True) <= host_memory_bytes()


def test_memory_from_meminfo(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "MemTotal:       16000 kB\nMemFree:         1000 kB\nMemAvailable:    9000 kB\n"
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == "/proc/meminfo")
    monkeypatch.setattr(Path, "read_text", lambda path: text)
    assert host_memory_bytes() == 16000 * 1024
    assert host_memory_bytes(available=True) == 9000 * 1024


def test_memory_where_there_is_no_meminfo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda path: False)
    assert host_memory_bytes() > 2**28
    monkeypatch.delattr(machine.os, "sysconf", raising=False)
    assert host_memory_bytes() == host_memory_bytes(available=True) == 8 * 2**30


def test_a_cpu_s_name_where_there_is_no_cpuinfo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda path: False)
    monkeypatch.setattr(machine.platform, "processor", lambda: "")
    monkeypatch.setattr(machine.platform, "machine", lambda: "arm64")
    assert machine._cpu_name() == "arm64"


# NVML


def test_a_cpu_has_no_gpu_state() -> None:
    assert gpu_state(CPU) == {}


def test_nvml_that_does_not_answer_costs_its_figures_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class NVMLError(Exception):
        pass

    def fail() -> None:
        raise NVMLError("Driver Not Loaded")

    monkeypatch.setitem(sys.modules, "pynvml", types.SimpleNamespace(NVMLError=NVMLError, nvmlInit=fail))
    assert gpu_state(torch.device("cuda", 0)) == {}


@pytest.mark.gpu
def test_a_gpu_is_described() -> None:
    device = torch.device("cuda", 0)
    this, state = describe(device), gpu_state(device)
    assert this.device == torch.cuda.get_device_name(device)
    assert this.device_type == "cuda"
    assert this.l2_bytes
    assert this.sm_count
    assert this.memory_bytes > 2**30
    assert this.driver == state["driver"] != ""
    assert this.power_limit_w == state["power_limit_w"] > 0
    assert 0 <= state["sm_mhz"] <= state["sm_max_mhz"] * 1.1
    assert 0 < state["temperature_c"] < 120


@pytest.mark.gpu
def test_memory_that_pytorch_could_hand_out_again_is_free() -> None:
    device = torch.device("cuda", 0)
    before = free_memory_bytes(device)
    block = torch.empty(2**28, dtype=torch.uint8, device=device)
    held = free_memory_bytes(device)
    del block
    assert before - held >= 2**28 * 0.9
    assert free_memory_bytes(device) - held >= 2**28 * 0.9
