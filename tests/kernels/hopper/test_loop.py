"""The search for buffers in shared memory: what happens where it fails."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from on_hopper import needs_hopper

from swiglu_kernels.launches import backend

pytestmark = pytest.mark.skipif(not backend.TRITON_AVAILABLE, reason="Triton is not installed")

MESSAGES = """
import dataclasses
from swiglu_kernels.standalone.compiled import compile_launch
from swiglu_kernels.standalone.covering import covering

for name, launch in covering((9, 0)):
    if name in ("row forward, 16 tokens, 8 columns", "ping-pong forward, 64 columns"):
        print(compile_launch(launch, (9, 0)).asm["ptx"])
"""
LOST = """
import torch
from triton.experimental import gluon
from swiglu_kernels.hopper import forward, loop, row

@gluon.jit
def leaves_no_mark(buffer, pattern):
    pass

loop._mark = leaves_no_mark
x, weight, z = (torch.ones(shape, dtype=torch.bfloat16, device="cuda") for shape in ((128, 64), (128, 64), (128, 128)))
{module}.forward_launch(x, weight, weight, z, None).run()
torch.cuda.synchronize()
"""


def run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program from a file, for a jit function has to be in one."""
    file = folder / "program.py"
    file.write_text(program)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, file], env=environment, capture_output=True, text=True, timeout=120)


def test_the_program_s_end_names_the_kernel_and_the_version(tmp_path: Path) -> None:
    done = run(MESSAGES, tmp_path)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"assertMessage_\d+\[\d+\] = \{([\d, ]+)\}", done.stdout)
    texts = [bytes(int(one) for one in numbers.split(",")).rstrip(b"\0").decode() for numbers in found]
    version = f"under Triton {backend.triton.__version__}"
    for kernel in ("hopper/row.py", "hopper/forward.py"):
        assert any(kernel in text and version in text for text in texts), texts


class TestOnHopper:
    pytestmark = needs_hopper

    @pytest.mark.parametrize("module", ["row", "forward"])
    def test_a_mark_that_is_not_found_ends_the_program(self, module: str, tmp_path: Path) -> None:
        done = run(LOST.format(module=module), tmp_path)
        assert done.returncode != 0
        assert f"hopper/{module}.py does not find its buffers" in done.stdout + done.stderr
