import os
from pathlib import Path

import pytest
import torch

from swiglu_bench.machine import ceilings_cache, machine
from swiglu_bench.measure.clock import CpuClock


@pytest.fixture(autouse=True, scope="session")
def _known_ceilings(_no_user_s_cache: None) -> None:
    """In the cache that child processes read: on a busy machine each judge would measure them again."""
    cpu = torch.device("cpu")
    folder = Path(os.environ["XDG_CACHE_HOME"]) / "swiglu-bench"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ceilings_cache, "copy_gbps", lambda *_: 10.0)
        patch.setattr(ceilings_cache, "matmul_tflops", lambda *_: 0.1)
        patch.setattr(ceilings_cache.LoadWatch, "load", lambda watch: None)
        limits = ceilings_cache.Limits(machine.describe(cpu), cpu, CpuClock(), folder=folder)
        limits.copy()
        limits.product(torch.float32)
