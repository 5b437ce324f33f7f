"""swiglu-bench: measure, validate and compare implementations of SwiGLU.

From Python: `run` and `load` do what the commands do; `implementation` and `Step` register a kernel of one's own.
"""

import importlib
from typing import TYPE_CHECKING, Any

from swiglu_bench.version import __version__

if TYPE_CHECKING:
    from swiglu_bench.api import load, run
    from swiglu_bench.cases.implementation import Step, implementation

__all__ = ["Step", "__version__", "implementation", "load", "run"]

_HOMES = {"run": "api", "load": "api", "Step": "cases.implementation", "implementation": "cases.implementation"}


def __getattr__(name: str) -> Any:
    """Public names are imported when first asked for: the command line needs none of them, and its help is instant."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"swiglu_bench.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
