"""explain: what it says is what the launches are."""

import importlib

import pytest
import torch

from swiglu_kernels import explain, explain_experts
from swiglu_kernels.ops.fp8 import operation as fp8
from swiglu_kernels.runtime.backend import backend_for

CPU = torch.device("cpu")
needs_kernels = pytest.mark.skipif(backend_for(CPU) == "torch", reason="Triton's interpreter is off")


def weights(requires_grad: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(40, 24, requires_grad=requires_grad), torch.empty(40, 24, requires_grad=requires_grad)


@needs_kernels
def test_one_line_each_way() -> None:
    forward, backward = explain(torch.empty(5, 24), *weights(True)).splitlines()
    assert forward.startswith("forward: one launch, portable Triton, tiles of")
    assert "gate and up are kept" in forward
    two = "two products by torch (not a multiple of 64: hidden 24 and intermediate 40)"
    assert backward == f"backward: d_gate and d_up by one launch; dX: {two}; dW: {two}"
    by_kernels = explain(torch.empty(5, 24), *weights(True), input_grad="two_step", weight_grad="triton")
    assert "dX: one launch, portable Triton" in by_kernels
    assert "dW: one launch, portable Triton" in by_kernels


@needs_kernels
def test_experts() -> None:
    layer = torch.empty(4, 64, 24, requires_grad=True), torch.empty(4, 24, 32)
    call = torch.empty(5, 24), *layer, torch.zeros(5, 2, dtype=torch.int64), torch.empty(5, 2)
    forward, backward = explain_experts(*call).splitlines()
    assert "tiles of 16 rows" in forward
    assert forward.endswith("gate and up are kept")
    assert "gate and up again" in explain_experts(*call, recompute=True).splitlines()[1]
    assert "again" not in backward
    with torch.no_grad():
        assert "each of an expert with all 5 tokens, portable Triton (" in explain_experts(*call)
    with pytest.raises(ValueError, match="top_k_index"):
        explain_experts(*call[:3], torch.zeros(4, 2, dtype=torch.int64), call[4])


@pytest.mark.skipif(fp8.why_not(torch.device("cpu")) is not None, reason="no kernel can run here: no Triton")
def test_experts_in_fp8() -> None:
    layer = [torch.empty(4, 64, 48, dtype=torch.bfloat16), torch.empty(4, 48, 32, dtype=torch.bfloat16)]
    rows = torch.empty(5, 48, dtype=torch.bfloat16)
    call = *layer, torch.zeros(5, 2, dtype=torch.int64), torch.empty(5, 2)
    assert "quantised to fp8 by rows" in explain_experts(rows, *call, precision="fp8-rowwise")
    with pytest.raises(ValueError, match="precision: expected one of"):
        explain_experts(rows, *call, precision="fp8-blockwise")


def test_where_no_kernel_runs_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("swiglu_kernels.explain"), "backend_for", lambda _: "torch")
    assert "PyTorch's own operations (there are no Triton kernels for a CPU)" in explain(torch.empty(5, 24), *weights())


def test_wrong_arguments_are_refused_as_the_call_refuses_them() -> None:
    with pytest.raises(ValueError, match="w_gate"):
        explain(torch.empty(5, 8), *weights())
