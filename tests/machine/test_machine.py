import dataclasses
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_nvml import FakeNvml, NVMLError, install

from swiglu_bench import __version__
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.machine import machine
from swiglu_bench.machine.machine import Machine, describe, find_device, free_memory_bytes, host_memory_bytes

CPU = torch.device("cpu")
THIS = describe(CPU)


@pytest.mark.parametrize(
    ("count", "text", "device"),
    [(0, None, "cpu"), (4, None, "cuda:0"), (4, "cpu", "cpu"), (4, "cuda", "cuda:0"), (4, "cuda:03", "cuda:3")],
)
def test_devices(monkeypatch: pytest.MonkeyPatch, count: int, text: str | None, device: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert find_device(text) == torch.device(device)


@pytest.mark.parametrize(
    ("count", "text", "words"),
    [
        (0, "cuda:7", "no usable CUDA GPU"),
        (1, "cuda:1", "there is only cuda:0."),
        (2, "cuda:256", "there are only cuda:0 to cuda:1."),  # = 0 in PyTorch's eight bits
        *((2, text, "is not a device") for text in ("", "gpu", "CPU", "cpu:0", "cuda:-1", "cuda 0", "cuda:99999")),
    ],
)
def test_devices_that_do_not_exist(monkeypatch: pytest.MonkeyPatch, count: int, text: str, words: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(BadInput, match=words) as caught:
        find_device(text)
    assert text in str(caught.value)


def test_a_cpu_is_described() -> None:
    assert (THIS.device_type, THIS.slug) == ("cpu", "cpu")
    assert THIS.device == THIS.cpu != ""
    assert THIS.memory_bytes > 2**28
    assert re.fullmatch(rf"{re.escape(__version__)}(\+[0-9a-f]{{7,40}}(-dirty)?)?", THIS.version)
    assert THIS.sm_count is THIS.power_limit_w is THIS.gpu_index is THIS.datasheet is None
    assert THIS.driver == THIS.cuda == THIS.compute_capability == THIS.gpu_uuid == ""
    assert Machine(**json.loads(json.dumps(THIS.as_dict()))) == THIS
    assert machine.without_torch(None).items() <= THIS.as_dict().items()


@pytest.mark.parametrize(
    ("answers", "driver", "power_limit_w"),
    [({"Index": 3}, "580.1", 700.0), ({"Init": NVMLError("Driver Not Loaded")}, "", None)],
)
def test_a_gpu_is_described_with_or_without_nvml(
    monkeypatch: pytest.MonkeyPatch, answers: dict[str, object], driver: str, power_limit_w: float | None
) -> None:
    install(monkeypatch, FakeNvml(**answers))
    properties = SimpleNamespace(
        name="NVIDIA H200", uuid="12", total_memory=2**37, multi_processor_count=132, L2_cache_size=2**25
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr("swiglu_kernels.tiles.tuning.digest", lambda device: "")
    this = describe(torch.device("cuda", 0))
    assert (this.device, this.compute_capability, this.sm_count) == ("NVIDIA H200", "9.0", 132)
    assert (this.driver, this.gpu_index, this.power_limit_w) == (driver, answers.get("Index"), power_limit_w)


def test_a_gpu_has_a_folder_name_and_may_have_a_datasheet() -> None:
    h200, odd = (
        dataclasses.replace(THIS, device=device, device_type="cuda")
        for device in ("NVIDIA H200", "  Odd/../Name (TM) ")
    )
    assert (h200.slug, h200.datasheet and h200.datasheet.gbps) == ("nvidia-h200", 4800.0)
    assert (odd.slug, odd.datasheet) == ("odd-name-tm", None)


def test_a_package_beside_an_installed_one_is_the_one_that_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "__init__.py").write_text('"""Another."""\n__version__ = "99.1"\n')
    usual = machine.installed("numpy")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "numpy")
    assert (usual == "99.1", machine.installed("numpy")) == (False, "99.1")


def test_a_system_with_and_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> str:
        raise FileNotFoundError(path)

    assert 0 < free_memory_bytes(CPU) == pytest.approx(host_memory_bytes(available=True), rel=0.5)
    assert host_memory_bytes(available=True) <= host_memory_bytes()
    text = "MemTotal:       16000 kB\nMemFree:         1000 kB\nMemAvailable:    9000 kB\n"
    monkeypatch.setattr(Path, "read_text", lambda path: text)
    assert (host_memory_bytes(), host_memory_bytes(available=True)) == (16000 * 1024, 9000 * 1024)
    monkeypatch.setattr(Path, "read_text", fail)
    assert host_memory_bytes() > 2**28
    monkeypatch.delattr(machine.os, "sysconf", raising=False)
    assert host_memory_bytes() == host_memory_bytes(available=True) == 8 * 2**30


@pytest.mark.gpu
def test_a_real_gpu_and_its_free_memory() -> None:
    """Memory that PyTorch could hand out again is free."""
    device = torch.device("cuda", 0)
    this = describe(device)
    assert (this.device, this.device_type) == (torch.cuda.get_device_name(device), "cuda")
    assert None not in (this.cache_bytes, this.sm_count, this.power_limit_w, this.gpu_index)
    assert this.driver
    before = free_memory_bytes(device)
    block = torch.empty(2**28, dtype=torch.uint8, device=device)
    held = free_memory_bytes(device)
    del block
    assert before - held >= 2**28 * 0.9
    assert free_memory_bytes(device) - held >= 2**28 * 0.9
