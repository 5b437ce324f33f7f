"""Kernels compiled for a GPU that is not here, and side by side in processes that fill Triton's cache."""

import subprocess
import sys
from pathlib import Path

import pytest

from swiglu_kernels.runtime import compiling
from swiglu_kernels.runtime.backend import TRITON_AVAILABLE

COMPILE_TWICE = """
import os, torch
from swiglu_kernels.ops.glu import hopper_forward as forward, hopper_transposed as transposed
from swiglu_kernels.runtime import compiling
from swiglu_kernels.ops.gate import operation as silu_mul

def empty(*shape):
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")

x, weight, z = empty(256, 1024), empty(2112, 1024), empty(256, 2112)
shared = transposed.forward_launch(x, weight, weight, z, None, transposed.tile(160, 2))
launches = [silu_mul.forward_launch(z, z, z), forward.forward_launch(x, weight, weight, z, None), shared, shared.then]
assert len({compiling.kind_of(launch) for launch in launches}) == 4
assert compiling.compile_side_by_side([compiling.portable_form(launch) for launch in launches], (9, 0)) > 0

def compiled():
    return [file for _, _, files in os.walk(os.environ["TRITON_CACHE_DIR"]) for file in files if file.endswith("cubin")]

print(len(compiled()))
for launch in launches:
    assert compiling.compile_launch(launch, (9, 0)).asm["cubin"]
print(len(compiled()))
"""


@pytest.mark.skipif(not TRITON_AVAILABLE, reason="Triton is not installed")
def test_what_processes_have_compiled_is_found_by_whoever_launches_it(tmp_path: Path) -> None:
    environment = compiling.environment() | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", COMPILE_TWICE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["4", "4"], "nothing is compiled twice"
