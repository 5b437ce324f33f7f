"""Whether shortcuts are taken: the one place that `run`, whole calls and their records ask.

Launches and calls that were made before are made again with less in between: `plan.py` keeps launches, `direct.py`
makes them past Triton's handling of arguments, `repeat.py` remembers whole calls, and `series.py` records what they do.
With the environment variable SWIGLU_KERNELS_SHORTCUTS=off, or while `closed`, every launch is described anew and goes
Triton's way: the same kernels and bits, in more of the host's time. In Triton's interpreter it is always so.
"""

import contextlib
import os
from collections.abc import Iterator

from swiglu_kernels.runtime.backend import INTERPRETING

VARIABLE = "SWIGLU_KERNELS_SHORTCUTS"
_shut = INTERPRETING or os.environ.get(VARIABLE) == "off"


def is_open() -> bool:
    """Tell whether shortcuts are taken."""
    return not _shut


@contextlib.contextmanager
def closed() -> Iterator[None]:
    """Take none meanwhile, in all threads; what was remembered stays."""
    global _shut
    before, _shut = _shut, True
    try:
        yield
    finally:
        _shut = before
