"""The machine that a run happened on: GPU, driver, versions, commit; its free memory and its clock time."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import importlib.util
import os
import platform
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiglu_bench.machine import sources
from swiglu_bench.machine.system import Gpu, NoAnswer, file_value, gpu_index, gpu_uuid, of_torch
from swiglu_bench.version import __version__

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Datasheet:
    """Vendor's figures: dense 16-bit matrix rate, memory bandwidth and dense TF32 matrix rate."""

    tflops: float
    gbps: float
    tf32_tflops: float

    def rate(self, dtype: str) -> float:
        """Dense matrix rate for a dtype by its name in torch, in 10^12 operations per second."""
        return self.tf32_tflops if dtype == "float32" else self.tflops


DATASHEETS = {
    "H200": Datasheet(989.0, 4800.0, 494.0),
    "H100 PCIe": Datasheet(756.0, 2000.0, 378.0),
    "H100 80GB HBM3": Datasheet(989.0, 3350.0, 494.0),
    "A100-SXM4-80GB": Datasheet(312.0, 2039.0, 156.0),
    "A100-SXM4-40GB": Datasheet(312.0, 1555.0, 156.0),
}
"""By a part of the device's name; from NVIDIA's product datasheets (dense rates, SXM unless named)."""


def slug_of(device: str) -> str:
    """A device's name as a folder name: nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


@dataclass(frozen=True)
class Machine:
    """What a reader of a figure needs to know about where it was measured."""

    host: str
    gpu_index: int | None
    """Number on this host, as `nvidia-smi` counts; None on a CPU, or where NVML does not answer."""
    gpu_uuid: str
    """"" on a CPU."""
    device: str
    device_type: str
    memory_bytes: int
    sm_count: int | None
    cache_bytes: int | None
    """Of a GPU the L2 cache, of a CPU its largest."""
    compute_capability: str
    power_limit_w: float | None
    driver: str
    cuda: str
    torch: str
    triton: str
    liger_kernel: str
    python: str
    system: str
    cpu: str
    cpu_threads: int
    version: str
    tuned_tiles: str
    """Digest of the tiles that `tune` has chosen for this device; "" where there are none."""

    @property
    def slug(self) -> str:
        """The device as a folder name: nvidia-h200, or cpu."""
        return "cpu" if self.device_type == "cpu" else slug_of(self.device)

    @property
    def datasheet(self) -> Datasheet | None:
        """The vendor's figures for this device, where known."""
        return next((sheet for part, sheet in DATASHEETS.items() if part in self.device), None)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for a JSON file or a W&B config."""
        return asdict(self)


def find_device(text: str | None) -> torch.device:
    """The device for 'cpu', 'cuda' or 'cuda:1'; None means a GPU if there is one. Raises BadInput for others."""
    import torch

    index = gpu_index(text, torch.cuda.device_count())
    return torch.device("cpu") if index is None else torch.device("cuda", index)


def describe(device: torch.device) -> Machine:
    """Read everything that a Machine states."""
    import torch

    from swiglu_kernels.tiles import tuning  # imports Triton, whose interpreter `request.find_device` chooses before

    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    nvml: Gpu | None = None
    with contextlib.suppress(NoAnswer):
        nvml = Gpu(device) if gpu else None
    found = without_torch(nvml) | {"cpu_threads": torch.get_num_threads(), "tuned_tiles": tuning.digest(device)}
    if gpu:
        found |= {
            "gpu_uuid": gpu_uuid(device), "device": gpu.name, "device_type": "cuda", "memory_bytes": gpu.total_memory,
            "sm_count": gpu.multi_processor_count, "cache_bytes": gpu.L2_cache_size, "cuda": torch.version.cuda or "",
            "compute_capability": capability(device),
        }  # fmt: skip
    return Machine(**found)


def without_torch(gpu: Gpu | None) -> dict[str, Any]:
    """What a Machine states of a GPU, or of a CPU for None, as far as NVML and the installed packages tell it."""
    name = (gpu.maybe(gpu.name) or "") if gpu else _cpu_name()
    memory_bytes = gpu.maybe(gpu.memory_bytes) if gpu else host_memory_bytes()
    return {
        "host": platform.node(), "gpu_index": gpu and gpu.maybe(gpu.index), "gpu_uuid": gpu.uuid if gpu else "",
        "device": name, "device_type": "cuda" if gpu else "cpu", "memory_bytes": memory_bytes, "sm_count": None,
        "cache_bytes": None if gpu else _cpu_cache_bytes(),
        "compute_capability": (gpu and gpu.maybe(gpu.capability)) or "",
        "power_limit_w": gpu and gpu.maybe(gpu.power_limit_w), "driver": (gpu and gpu.maybe(gpu.driver)) or "",
        "cuda": of_torch("cuda") if gpu else "", "torch": of_torch("__version__"), "triton": installed("triton"),
        "liger_kernel": installed("liger-kernel"), "python": platform.python_version(),
        "system": platform.platform(), "cpu": _cpu_name(), "version": _own_version(),
    }  # fmt: skip


def capability(device: torch.device) -> str:
    """The compute capability of a GPU, as "9.0"; "" for a CPU."""
    import torch

    return "{}.{}".format(*torch.cuda.get_device_capability(device)) if device.type == "cuda" else ""


def _cpu_cache_bytes(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int | None:
    sizes = [file_value(path, r"^(\d+)K$") for path in folder.glob("index*/size")]
    return max((int(size) * 1024 for size in sizes if size), default=None)


def free_memory_bytes(device: torch.device) -> int:
    """Bytes that a case may still take on the device."""
    if device.type == "cuda":
        import torch

        reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reusable
    return host_memory_bytes(available=True)


def host_memory_bytes(available: bool = False) -> int:
    """The machine's memory, or the part of it that programs may still take, in bytes."""
    field = "MemAvailable" if available else "MemTotal"
    if kib := file_value(Path("/proc/meminfo"), rf"^{field}:\s+(\d+) kB"):
        return int(kib) * 1024
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 8 * 2**30  # Windows has neither; a cautious guess that only limits which cases are tried


def now() -> str:
    """UTC, ISO 8601, to the second."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def run_id(began: str) -> str:
    """The name of a run: when it `began`, by `now`, and this process."""
    return f"{began.replace('-', '').replace(':', '')}-{os.getpid()}"


def installed(package: str) -> str:
    """Version of a package as an import would find it; "" where it is missing.

    A folder on the path hides an installed package, whose metadata still speaks of that one.
    """
    known: importlib.metadata.Distribution | None = None
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        known = importlib.metadata.distribution(package)
    version = known.version if known else ""
    spec = importlib.util.find_spec(package.replace("-", "_"))
    if spec is None or not spec.origin or not spec.origin.endswith("__init__.py"):
        return version
    source = Path(spec.origin)
    if known and Path(str(known.locate_file(""))).resolve() == source.parent.parent.resolve():
        return version
    said = re.search(r"^__version__ = [\"'](.+?)[\"']", source.read_text(encoding="utf-8"), re.MULTILINE)
    return said[1] if said else version


def _own_version() -> str:
    """The package's version, with the commit where it runs from a checkout."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return __version__
    commit = sources.git(root, "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*")
    return f"{__version__}+{commit}" if commit else __version__


def _cpu_name() -> str:
    return file_value(Path("/proc/cpuinfo"), r"^model name\s*:\s*(.+)$") or platform.processor() or platform.machine()
