"""The gates of transformers' own modules: found by what they compute, and as docs/gates.md has them."""

import os
import re
import runpy
from typing import Any

import pytest
import torch
from accuracy import DEVICE
from places import ROOT

from swiglu_kernels import patch_model, register_experts
from swiglu_kernels.nn.experts_interface import gate_of

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", minversion="5.0")
SCRIPT, DOCUMENT = (ROOT / "docs" / name for name in ("model_gates.py", "gates.md"))
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="the script is not here")
SOFTCAP = "silu_softcap", 1.0, (4.0, 25.0), 0.0
MODELS = ("deepseek_v4", "minimax_m3_vl", "step3p7", "inkling2", "gpt_oss", "gemma", "llama", "modernbert", "llama4")


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


@pytest.mark.parametrize("model", MODELS)
def test_the_table_says_what_the_script_finds(script: dict[str, Any], model: str) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    if f"\ntransformers {transformers.__version__}:\n" not in text or not (found := script["rows"]([model])):
        pytest.skip(f"the table is that of another transformers than {transformers.__version__}")
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    for (gate, covered, what), names in found.items():
        row = next(row for row in cells if row[:3] == [gate, "yes" if covered else "no", what])
        assert names <= set(re.split("[:,] ", row[3]))


def built(script: dict[str, Any], model: str, name: str) -> Any:
    module = pytest.importorskip(f"transformers.models.{model}.modeling_{model}", reason="an older transformers")
    return script["built"](module, getattr(module, name)).to(DEVICE)


@pytest.mark.parametrize(
    ("model", "name"),
    [("deepseek_v4", "DeepseekV4MLP"), ("step3p7", "Step3p7MLP"), ("minimax_m3_vl", "MiniMaxM3VLDenseMLP")],
)
def test_mlps_with_a_limit_are_patched_by_it(script: dict[str, Any], model: str, name: str) -> None:
    mlp = built(script, model, name)
    for attribute in ("limit", "swiglu_limit"):
        if hasattr(mlp, attribute):
            setattr(mlp, attribute, 0.75)
    x = 3 * torch.randn(40, 64, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    expected = mlp(x)
    assert patch_model(mlp).changed
    assert mlp.gate_options["limit"] == 0.75
    torch.testing.assert_close(mlp(x), expected, rtol=1e-4, atol=1e-5)


def test_experts_with_softcaps(script: dict[str, Any]) -> None:
    experts = built(script, "inkling2", "Inkling2Experts")
    assert gate_of(experts) == SOFTCAP
    x, index = 3 * torch.randn(7, 64).to(DEVICE), torch.randint(0, 4, (7, 2), device=DEVICE)
    weights = torch.rand(7, 2, device=DEVICE)
    experts.config._experts_implementation = "eager"
    expected = experts(x, index, weights)
    register_experts()
    experts.config._experts_implementation = "swiglu_kernels"
    torch.testing.assert_close(experts(x, index, weights), expected, rtol=1e-4, atol=1e-4)
