"""Measuring in this process as on a machine that does nothing else: tests run beside each other."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from swiglu_bench.machine import ceilings_cache
from swiglu_bench.machine.system import LoadWatch
from swiglu_bench.worker.chains import Chains


@contextmanager
def quiet_machine() -> Iterator[None]:
    """No load is known, no call takes longer by the wall clock than by its samples, and limits are soon measured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ceilings_cache.COPY_BYTES, "cpu", 2**20)
        patch.setitem(ceilings_cache.PRODUCT_SIDE, "cpu", 64)
        patch.setattr(LoadWatch, "_read", lambda self: None)
        patch.setattr(Chains, "disagreements", lambda self, *given: {})
        yield
