import json
import os
import subprocess
import sys

import pytest
import torch

from swiglu_kernels.launches import backend
from swiglu_kernels.standalone.compiled import compile_launch, launches

pytestmark = pytest.mark.skipif(not backend.TRITON_AVAILABLE, reason="Triton is not installed")

SHARED_BYTES = {"8.0": 163 * 1024, "8.6": 99 * 1024, "9.0": 227 * 1024, "10.0": 227 * 1024}


SPILLS = {("dX on the fly", "9.0"): 24}
"""Bytes that a kernel may spill: this one, which nothing chooses by itself, under Triton 3.9."""


def compile_kernels(*arguments: str) -> list[dict]:
    """Compile in a process without the interpreter, whose kernels cannot be compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "swiglu_kernels.standalone.compiled", "--json", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def missing_tool(capability: str) -> str | None:
    name = "ptxas_blackwell" if capability == "10.0" else "ptxas"
    try:
        path = getattr(backend.triton.knobs.nvidia, name).path
    except (AttributeError, RuntimeError) as error:
        return f"this Triton has no {name}: {error}"
    return None if os.path.exists(path) else f"this Triton has no {name} at {path}"


@pytest.fixture(scope="module")
def reports() -> list[dict]:
    capabilities = [capability for capability in SHARED_BYTES if missing_tool(capability) is None]
    return compile_kernels(*(word for capability in capabilities for word in ("--capability", capability)))


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_kernels_compile_without_spills(reports, capability):
    reason = missing_tool(capability)
    if reason is not None:
        pytest.skip(reason)
    chosen = [report for report in reports if report["capability"] == capability]
    assert len(chosen) == 11
    for report in chosen:
        assert report["shared_bytes"] <= SHARED_BYTES[capability], report
        assert report["stack_bytes"] <= SPILLS.get((report["kernel"], capability), 0), report
        tensor_core_instructions = {"8": "mma", "9": "wgmma", "10": "tcgen05"}[capability.split(".")[0]]
        assert report[tensor_core_instructions] > 0, report


def test_float32_and_few_tokens_compile_without_spills():
    if reason := missing_tool("9.0"):
        pytest.skip(reason)
    names = ["--kernel", "forward, gate and up stored", "--kernel", "dX on the fly"]
    for report in compile_kernels(
        "--capability", "9.0", "--dtype", "float32", "--tokens", "1", "--tokens", "300", *names
    ):
        assert report["stack_bytes"] == 0, report


def test_few_tokens_and_narrow_weights_compile():
    if reason := missing_tool("9.0"):
        pytest.skip(reason)
    sizes = ("--hidden", "7168", "--intermediate", "2048", "--tokens", "1", "--tokens", "16", "--tokens", "128")
    reports = compile_kernels(
        "--capability", "9.0", *sizes, "--kernel", "forward", "--kernel", "forward, parts added up"
    )
    assert len(reports) == 6
    for report in reports:
        assert report["stack_bytes"] <= 8, report  # eight under Triton 3.9


def test_nothing_is_compiled_under_the_interpreter(monkeypatch):
    from swiglu_kernels.standalone import compiled

    monkeypatch.setattr(compiled, "INTERPRETING", True)
    launch = launches(8, 16, 16, torch.bfloat16, (9, 0))["forward"]()
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET is not set"):
        compile_launch(launch, (9, 0))
