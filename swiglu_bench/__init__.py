"""swiglu-bench: measure, validate and compare implementations of SwiGLU. `run` and `load` are its Python interface."""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["__version__", "load", "run"]

if TYPE_CHECKING:
    from swiglu_bench.api import load, run


def __getattr__(name: str) -> Any:
    """`run` and `load`, imported when first asked for: the command line needs neither, and its help is instant."""
    if name in {"load", "run"}:
        return getattr(importlib.import_module("swiglu_bench.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
