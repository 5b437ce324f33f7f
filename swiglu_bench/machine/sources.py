"""The code and the kind of machine behind a row; rows of one run must agree in both."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterable
from pathlib import Path

MACHINE = ("device", "driver", "cuda", "torch", "triton", "python", "cpu", "cpu_threads")
PACKAGES = ("swiglu_bench", "swiglu_kernels")


def code() -> dict[str, str]:
    """A digest of the sources of each of the suite's packages, as they are installed here."""
    return {package: _sources(package) for package in PACKAGES}


def _sources(package: str) -> str:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    folders = spec.submodule_search_locations or []
    return digest(sorted(file for folder in folders for file in Path(folder).rglob("*.py")))


def digest(files: Iterable[Path]) -> str:
    """A hash of the names and contents of files."""
    found = hashlib.sha256()
    for file in files:
        found.update(file.name.encode(errors="surrogatepass") + b"\0" + file.read_bytes() + b"\0")
    return found.hexdigest()
