"""The search for buffers in shared memory: what happens where it fails."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from on_hopper import needs_hopper

from swiglu_kernels.hopper import buffers
from swiglu_kernels.runtime import backend, launch

pytestmark = pytest.mark.skipif(not backend.TRITON_AVAILABLE, reason="Triton is not installed")

LOST = """
import torch
from triton.experimental import gluon
from swiglu_kernels.hopper import buffers
from swiglu_kernels.ops.glu import hopper_forward, hopper_row

@gluon.jit
def leaves_no_mark(buffer, pattern):
    pass

buffers._mark = leaves_no_mark
x, weight, z = (torch.ones(shape, dtype=torch.bfloat16, device="cuda") for shape in ((128, 64), (128, 64), (128, 128)))
hopper_{module}.forward_launch(x, weight, weight, z, None).run()
torch.cuda.synchronize()
"""


def run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program from a file, for a jit function has to be in one."""
    file = folder / "program.py"
    file.write_text(program)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, file], env=environment, capture_output=True, text=True, timeout=120)


def test_a_trap_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kernel:
        ran_once = False

    def broken() -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    kernel = Kernel()
    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    with pytest.raises(RuntimeError, match=r"row\.py does not find its buffers .* under Triton"):
        launch._wait_for_first(kernel, buffers.lost("ops/glu/hopper_row.py"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    launch._wait_for_first(kernel, "")
    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    launch._wait_for_first(kernel, "")  # it ran


class TestOnHopper:
    pytestmark = needs_hopper

    @pytest.mark.parametrize("module", ["row", "forward"])
    def test_a_mark_that_is_not_found_ends_the_program(self, module: str, tmp_path: Path) -> None:
        done = run(LOST.format(module=module), tmp_path)
        assert done.returncode != 0
        assert f"ops/glu/hopper_{module}.py does not find its buffers" in done.stdout + done.stderr
