import os
import subprocess
import sys

import pytest
import torch

from swiglu_kernels import backend_for
from swiglu_kernels.runtime import backend

WITHOUT_TRITON = """
import importlib.abc, sys

class NoTriton(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoTriton())
import torch
import swiglu_kernels
from swiglu_kernels import reference

x, w = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
assert swiglu_kernels.backend_for(x) == "torch"
z = swiglu_kernels.swiglu_glu(x, w, w)
assert torch.equal(z, reference.swiglu_glu(x, w, w))
assert torch.equal(swiglu_kernels.silu_mul(x, x), reference.silu_mul(x, x))
assert torch.equal(swiglu_kernels.unsloth_silu_mul(x, x), reference.silu_mul(x, x))
swiglu_kernels.swiglu_glu(x, w, w, weight_grad="none").sum().backward()
assert w.grad is None and x.grad is not None
e, g, dw = torch.randn(3, 4), torch.randn(3, 4), torch.ones(3, 4)
h = reference.silu_mul(e, g)
assert torch.equal(swiglu_kernels.swiglu_fg_kernel(e[None], g[None]), h[None])
f = torch.nn.functional.silu(e)
outputs = swiglu_kernels.swiglu_DWf_DW_dfg_kernel(dw, e, g)
assert outputs[0] is dw and outputs[1] is e and outputs[2] is g
assert torch.equal(dw, h) and torch.equal(e, f)
print("fine")
"""


def run(script: str, **environment: str) -> str:
    """Run Python in a process of its own, which alone decides about Triton and its interpreter."""
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", script], env=clean | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_without_triton_the_reference_runs():
    assert run(WITHOUT_TRITON) == "fine"


def test_the_interpreter_is_chosen_by_the_environment():
    pytest.importorskip("triton")
    script = "import torch, swiglu_kernels; print(swiglu_kernels.backend_for(torch.ones(1)))"
    assert run(script, TRITON_INTERPRET="1") == "interpreter"


@pytest.mark.parametrize(
    ("triton_available", "capability", "hip", "expected"),
    [
        (True, (9, 0), None, "triton"), (True, (8, 0), None, "triton"), (True, (7, 5), None, "torch"),
        (False, (9, 0), None, "torch"), (True, (9, 4), "6.0", "torch"),
    ],
)  # fmt: skip
def test_a_gpu_needs_cuda_triton_and_capability_8(monkeypatch, triton_available, capability, hip, expected):
    monkeypatch.setattr(backend, "INTERPRETING", False)
    monkeypatch.setattr(backend, "TRITON_AVAILABLE", triton_available)
    monkeypatch.setattr(backend, "capability_of", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert backend_for(torch.device("cuda", 0)) == expected
    assert backend_for(torch.ones(1)) == "torch"


@pytest.mark.gpu
def test_a_real_gpu_runs_triton():
    assert backend_for(torch.ones(1, device="cuda")) == "triton"


def test_dynamo_is_left_out_and_the_interpreter_unless_it_is_chosen() -> None:
    """The import of dynamo takes longer than that of all the rest of the package."""
    program = (
        "import sys, torch, swiglu_kernels; x = torch.ones(2, 2, requires_grad=True);"
        "swiglu_kernels.silu_mul(x, x).sum().backward();"
        "print(swiglu_kernels.backend_for(torch.ones(1)), 'torch._dynamo' in sys.modules)"
    )
    assert run(program) == "torch False"
