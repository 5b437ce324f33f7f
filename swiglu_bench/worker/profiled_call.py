"""One call of one implementation in a process of its own: the program that `ncu` looks into."""

from __future__ import annotations

import base64
import contextlib
import pickle
import sys

import torch

from swiglu_bench.cases import registry
from swiglu_bench.cases.cases import Case
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.check.inputs import Draw, new_seed
from swiglu_bench.worker.settings import Settings
from swiglu_bench.worker.workbench import Workbench


def program(settings: Settings, implementation: Implementation, case: Case) -> list[str]:
    """The command line of such a process."""
    packed = pickle.dumps((settings, implementation.declared(), case))
    return [sys.executable, "-m", "swiglu_bench.worker.profiled_call", base64.b64encode(packed).decode()]


def main() -> None:
    """Make the call that the command line says; what is not the call is outside of the CUDA profiler's range."""
    settings, declared, case = pickle.loads(base64.b64decode(sys.argv[1]))
    bench = Workbench(settings, registry.find(declared))
    bench.build(case, new_seed())
    draws, on_gpu = [Draw(new_seed())], settings.device.type == "cuda"
    bench.profiled(draws, contextlib.nullcontext)  # which compiles and tunes
    bench.profiled(draws, torch.cuda.profiler.profile if on_gpu else contextlib.nullcontext)


if __name__ == "__main__":
    main()
