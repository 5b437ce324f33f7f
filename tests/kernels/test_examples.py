"""The examples of kernels/examples run; where the package that one is for is missing, with a stand-in for it."""

import copy
import functools
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from places import ROOT
from torch import nn

EXAMPLES = ROOT / "kernels" / "examples"
pytestmark = pytest.mark.skipif(not EXAMPLES.exists(), reason="the examples are not here")


@functools.cache
def loaded(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_trainer_of_hugging_face_learns_the_same(capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("transformers", minversion="5.0")
    pytest.importorskip("accelerate", reason="accelerate is missing, which the Trainer of transformers needs")
    sizes = ["--steps", "3", "--batch", "2", "--context", "16", "--hidden", "32", "--intermediate", "48"]
    stock, patched = loaded("hf_trainer").main(sizes)
    assert len(stock.losses) == len(stock.times_ms) == 3
    assert patched.losses == pytest.approx(stock.losses, rel=2e-2 if torch.cuda.is_available() else 1e-3)
    assert stock.losses[0] != stock.losses[-1]
    assert "LlamaMLP -> FusedSwiGLUMLP" in capsys.readouterr().out


class UnquantizedLinearMethod:
    """Stands for SGLang's."""


class MergedColumnParallelLinear(nn.Linear):
    """Stands for SGLang's, whose calls return a pair."""

    quant_method: object = UnquantizedLinearMethod()

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), None


class LlamaMLP(nn.Module):
    """As SGLang's."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(16, 48, bias=False)
        self.down_proj = MergedColumnParallelLinear(24, 16, bias=False)

    def forward(self, x: torch.Tensor, forward_batch: object = None, use_reduce_scatter: bool = False) -> torch.Tensor:
        gate, up = self.gate_up_proj(x)[0].chunk(2, -1)
        return self.down_proj(F.silu(gate) * up)[0]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_plugin_of_sglang_stands_around_its_mlps(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    hooks: dict[str, Callable[..., Any]] = {}
    registry = ModuleType("sglang.srt.plugins.hook_registry")
    registry.HookType = SimpleNamespace(AROUND="around")  # type: ignore[attr-defined]
    registry.HookRegistry = SimpleNamespace(  # type: ignore[attr-defined]
        register=lambda target, hook, kind: hooks.update({target: hook})
    )
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    plugin = loaded("sglang_plugin")
    plugin.register()
    around = hooks["sglang.srt.models.llama.LlamaMLP.forward"]
    calls: list[int] = []
    fused = plugin.swiglu_glu_packed
    monkeypatch.setattr(plugin, "swiglu_glu_packed", lambda *given: calls.append(1) or fused(*given))
    mlp, x = LlamaMLP().to(device), torch.randn(5, 16, device=device)
    with torch.no_grad():
        expected = mlp(x)
        torch.testing.assert_close(around(LlamaMLP.forward, mlp, x), expected)
        torch.testing.assert_close(around(LlamaMLP.forward, mlp, x, forward_batch=object()), expected)
        assert len(calls) == 2
        for change in ({"use_reduce_scatter": True}, {}):
            mlp.gate_up_proj.quant_method = object() if not change else mlp.gate_up_proj.quant_method
            assert torch.equal(around(LlamaMLP.forward, mlp, x, **change), expected)
    assert len(calls) == 2


class FeedForward(nn.Module):
    """As torchtitan's."""

    def __init__(self, hidden: int = 16, intermediate: int = 24) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(hidden, intermediate, bias=False) for _ in range(2))
        self.w2 = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Geglu(FeedForward):
    """What the converter leaves alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.gelu(self.w1(x)) * self.w3(x))


def test_a_converter_of_torchtitan_keeps_parameters_and_results() -> None:
    example = loaded("torchtitan_converter")
    model = nn.Sequential(FeedForward(), Geglu())
    keys, x = list(model.state_dict()), torch.randn(5, 16)
    expected, converter = model(x), example.SwiGLUConverter(object(), object())
    for _ in range(2):  # the second time nothing is left to convert
        converter.convert(model)
        converter.post_optimizer_hook(model)
    assert [isinstance(part, example.FusedForward) for part in model] == [True, False]
    assert isinstance(model[0], FeedForward)
    assert list(model.state_dict()) == keys
    torch.testing.assert_close(model(x), expected)
    on_meta = nn.Sequential(FeedForward()).to("meta")  # where torchtitan converts
    converter.convert(on_meta)
    assert isinstance(on_meta[0], example.FusedForward)


@pytest.mark.gpu
def test_a_converted_model_on_a_gpu() -> None:
    torch.set_default_device("cuda")
    try:
        model, x = nn.Sequential(FeedForward(512, 1376)).bfloat16(), torch.randn(300, 512, dtype=torch.bfloat16)
    finally:
        torch.set_default_device(None)
    truth = copy.deepcopy(model).double()(x.double())
    stock = model(x)
    loaded("torchtitan_converter").SwiGLUConverter().convert(model)
    with torch.profiler.profile() as profile:
        converted = model(x)
    stock_error, error = ((out.double() - truth).norm() / truth.norm() for out in (stock, converted))
    assert error <= 1.1 * stock_error
    assert any("swiglu" in event.key for event in profile.key_averages())


def test_an_override_of_torchtitan_itself() -> None:
    pytest.importorskip("torchtitan.config.override", reason="torchtitan 0.3 or newer is not installed")
    from torchtitan.models.common.feed_forward import FeedForward as Stock
    from torchtitan.models.common.linear import Linear

    example = loaded("torchtitan_converter")
    sizes = {"w1": (16, 24), "w2": (24, 16), "w3": (16, 24)}
    linears = {name: Linear.Config(in_features=size[0], out_features=size[1]) for name, size in sizes.items()}
    config = Stock.Config(**linears)
    stock, fused = config.build(), example.swiglu_kernels(config).build()
    for parameter in stock.parameters():
        nn.init.normal_(parameter, std=0.2)
    fused.load_state_dict(stock.state_dict())
    x = torch.randn(5, 16)
    torch.testing.assert_close(fused(x), stock(x))
    assert isinstance(fused, Stock)


def test_ones_own_triton_kernel_is_right_and_its_workflow_runs_its_tests(assert_swiglu: Any) -> None:
    folder = EXAMPLES / "own_kernel"
    where = {"shapes": "24x40", "tokens": [32], "device": "cpu", "in_process": True}
    rows = assert_swiglu(f"{folder / 'silu_mul.py'}:mine", scope="activation", **where)
    assert set(rows["status"]) == {"ok"}
    assert set(rows["dtype"]) == {"bfloat16", "float16", "float32"}
    jobs = yaml.safe_load((folder / "workflow.yml").read_text(encoding="utf-8"))["jobs"]
    steps = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    for step in steps:
        for word in step.split():
            if word.endswith(".py"):
                assert (folder / word).exists(), step
