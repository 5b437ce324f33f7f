"""Where a contender's processes keep what they compile: folders of its own, in which nobody else finds it.

A cache that contenders share can be edited by one, or left half-written by one that was killed, and another then runs
what it finds there. So each has its own, in the user's cache folder, kept from run to run; twins of the baseline and
processes that compile beforehand have those of their implementation. What the command itself keeps lies elsewhere.
Processes of one user can still look for each other's files: this keeps apart what follows its environment.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import platformdirs

from swiglu_bench.cases.implementation import Implementation

VARIABLES = {
    "XDG_CACHE_HOME": "cache", "TMPDIR": "tmp", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton",
    "TORCH_EXTENSIONS_DIR": "extensions", "CUDA_CACHE_PATH": "cuda", "CUPY_CACHE_DIR": "cupy",
    "CUTE_DSL_CACHE_DIR": "cute", "DG_JIT_CACHE_DIR": "deep_gemm", "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "NUMBA_CACHE_DIR": "numba", "TILELANG_CACHE_DIR": "tilelang",
}  # fmt: skip
"""What tells PyTorch, Triton, CUDA and other compilers where to keep things, and the folder that each gets."""
TUNING = "SWIGLU_KERNELS_TUNING"
KERNELS = "swiglu-kernels"
"""The folder in which tuning and the kernels' check keep what they have found, in a user's cache folder."""


def root() -> Path:
    """The folder that has those of all contenders; where the user's cache folder cannot be written, a temporary one."""
    found = Path(platformdirs.user_cache_path("swiglu-bench", appauthor=False)) / "contenders"
    with contextlib.suppress(OSError):
        found.mkdir(parents=True, exist_ok=True)
        if os.access(found, os.W_OK):
            return found
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    return Path(tempfile.gettempdir()) / f"swiglu-bench-{user}"


def _name_of(implementation: str, address: str) -> str:
    """What a contender's folder is called: short, for sockets in it may have paths of 107 characters."""
    address = os.path.abspath(address) if ".py:" in address else address
    digest = hashlib.sha256(f"{implementation}\n{address}".encode(errors="surrogatepass")).hexdigest()[:8]
    return f"{re.sub(r'[^A-Za-z0-9_-]+', '-', implementation)[:20]}-{digest}"


def of(implementation: Implementation) -> dict[str, str]:
    """The variables that lead an implementation's processes to its folders, which are there then.

    Where the user has named a folder for one of these, except of the user's cache, it is a folder inside that.
    """
    return of_address(implementation.name, _address(implementation))


def mark(implementation: Implementation, compiled: object) -> Path:
    """The file that is there once its processes have compiled something, by its description, which is cached since."""
    digest = hashlib.sha256(repr(compiled).encode(errors="surrogatepass")).hexdigest()[:16]
    return root() / _name_of(implementation.name, _address(implementation)) / "compiled" / digest


def _address(implementation: Implementation) -> str:
    return implementation.address or implementation.source


def of_address(implementation: str, address: str) -> dict[str, str]:
    """The same by its name and its address, which is that of a file, an entry point's or a module."""
    name = _name_of(implementation, address)
    own, found = root() / name, dict[str, str]()
    for variable, folder in VARIABLES.items():
        named = os.environ.get(variable, "") if variable != "XDG_CACHE_HOME" else ""
        place = Path(named) / "swiglu-bench" / name if named else own / folder
        with contextlib.suppress(OSError):  # whoever needs it will say that it cannot be had
            place.mkdir(parents=True, exist_ok=True)
        found[variable] = str(place)
    # What was downloaded from the hub stays where it is: large, and named by its content.
    found["HF_HOME"] = os.environ.get("HF_HOME") or str(_of_user() / "huggingface")
    return found | dict(_handed_in(Path(found["XDG_CACHE_HOME"])))


def _of_user() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())


def _handed_in(cache: Path) -> Iterator[tuple[str, str]]:
    """Copy what tuning and the kernels' check have found to where a process looks for it, anew for each process."""
    folder, given = cache / KERNELS, (_of_user() / KERNELS).glob("*.json")
    copies = {folder / file.name: file for file in given if file.is_file()}
    named = os.environ.get(TUNING, "")
    if named and named != "off":
        yield TUNING, str(folder / "named.json")
        copies[folder / "named.json"] = Path(named)
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        for stale in set(folder.glob("*.json")) - {copy for copy, file in copies.items() if file.is_file()}:
            stale.unlink(missing_ok=True)
    for copy, file in copies.items():
        with contextlib.suppress(OSError):
            _copy(file, copy)


def _copy(file: Path, to: Path) -> None:
    """Copy a file whole, or not at all, to be read only; processes that start side by side do so at the same time."""
    descriptor, temporary = tempfile.mkstemp(prefix=".", dir=to.parent)
    with os.fdopen(descriptor, "wb") as copy:
        copy.write(file.read_bytes())
    os.chmod(temporary, 0o444)
    os.replace(temporary, to)
