"""The hub kernel is loaded from a folder as the package `kernels` does it, beside the package that is installed."""

import ast
import base64
import hashlib
import importlib
import importlib.util
import json
import pkgutil
import re
import runpy
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from places import ROOT

import swiglu_kernels
from swiglu_kernels import reference

HUB = ROOT / "kernels" / "hub.py"
pytestmark = pytest.mark.skipif(not HUB.exists(), reason="the script is not here")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "hub"
    packages = runpy.run_path(str(HUB))["write"](folder)
    assert packages == [folder / "build" / variant for variant in ("torch-cuda", "torch-cpu")]
    return folder


def loaded(name: str, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", params=["torch-cuda", "torch-cpu"])  # operators are registered once in a process
def hub_kernel(repository: Path, request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    package = repository / "build" / request.param
    name = json.loads((package / "metadata.json").read_text(encoding="utf-8"))["id"]
    yield loaded(name, package / "__init__.py")
    for own in [own for own in sys.modules if own.partition(".")[0] == name]:
        del sys.modules[own]


def test_it_works_beside_the_installed_package(hub_kernel: ModuleType) -> None:
    assert hub_kernel.__all__ == swiglu_kernels.__all__
    x, w_gate, w_up = torch.randn(3, 24, requires_grad=True), torch.randn(40, 24), torch.randn(40, 24)
    found = hub_kernel.swiglu_glu(x, w_gate, w_up)
    torch.testing.assert_close(found, reference.swiglu_glu(x, w_gate, w_up))
    found.sum().backward()
    assert x.grad is not None
    operators = importlib.import_module(f"{hub_kernel.__name__}.runtime.operator").NAMESPACE
    assert operators == hub_kernel.__name__ != "swiglu_kernels"


def test_every_module_of_it_imports_from_it_alone(hub_kernel: ModuleType) -> None:
    names = [found.name for found in pkgutil.walk_packages(hub_kernel.__path__, f"{hub_kernel.__name__}.")]
    assert len(names) > 30
    for name in names:
        foreign = [
            value for value in vars(importlib.import_module(name)).values()
            if isinstance(value, ModuleType) and value.__name__.partition(".")[0] == "swiglu_kernels"
        ]  # fmt: skip
        assert not foreign


def test_older_loaders_find_it_one_folder_deeper(hub_kernel: ModuleType) -> None:
    package = Path(hub_kernel.__path__[0])
    deeper = loaded("any_name_of_an_old_loader", package / "swiglu_kernels" / "__init__.py")
    assert deeper.swiglu_glu is hub_kernel.swiglu_glu
    assert deeper.__all__ == hub_kernel.__all__


def test_the_metadata_has_a_digest_of_every_file_and_says_which_gpus_run_it(repository: Path) -> None:
    for package in (repository / "build").iterdir():
        about = json.loads((package / "metadata.json").read_text(encoding="utf-8"))
        for file, digest in about["digest"]["files"].items():
            assert base64.b64decode(digest) == hashlib.sha256((package / file).read_bytes()).digest()
        every = {file.relative_to(package).as_posix() for file in package.rglob("*") if file.suffix != ".pyc"}
        files = {file for file in every if (package / file).is_file()}
        assert files - {"metadata.json"} == set(about["digest"]["files"])
        backend = {"type": "cuda", "archs": ["8.0+PTX"]} if package.name == "torch-cuda" else {"type": "cpu"}
        assert about["backend"] == backend
    card = (repository / "README.md").read_text(encoding="utf-8")
    for call in re.findall(r"(?:get_kernel|LayerRepository)\(.*\)", card):
        assert {"version", "trust_remote_code"} <= {word.arg for word in ast.parse(call).body[0].value.keywords}, call


LAYERS = {
    "SwiGLUMLP": {"hidden_act": "silu"}, "SwiGLUMLP of Gemma": {"hidden_act": "gelu_pytorch_tanh"},
    "SwiGLUMLP of DeepSeek-V4": {"hidden_act": "silu"}, "SwiGLUPackedMLP": {"hidden_act": "silu"},
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_kernelize_puts_its_layers_into_a_model(repository: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("kernels.layer", reason="the package kernels, 0.17 or newer, is not installed")
    kernels: Any = importlib.import_module("kernels")
    transformers = pytest.importorskip("transformers", minversion="5.0")
    family = "Phi3" if name == "SwiGLUPackedMLP" else "Llama"
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "pad_token_id": 0}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
    model = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(**sizes, **heads, **LAYERS[name])
    )
    kind: Any = type(model.model.layers[0].mlp)
    if name.endswith("DeepSeek-V4"):

        def bounded(mlp: Any, x: torch.Tensor) -> torch.Tensor:
            up = mlp.up_proj(x).clamp(-mlp.limit, mlp.limit)
            return mlp.down_proj(mlp.act_fn(mlp.gate_proj(x).clamp(max=mlp.limit)) * up)

        monkeypatch.setattr(kind, "forward", bounded)
        monkeypatch.setattr(kind, "limit", 0.01, raising=False)
    tokens = torch.randint(3, 32, (2, 5))

    def loss_and_gradients(call: Any) -> list[torch.Tensor]:
        model.zero_grad()
        loss = call(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]

    expected = loss_and_gradients(model)
    own = kernels.LocalLayerRepository(repository, layer_name=name.partition(" ")[0])
    monkeypatch.setattr(kind, "kernel_layer_name", "MLP", raising=False)
    calls: list[int] = []
    kernel = kernels.get_local_kernel(repository)
    inner = kernel.layers.swiglu_mlp
    monkeypatch.setattr(kernel.layers, "swiglu_mlp", lambda *given, **more: calls.append(1) or inner(*given, **more))
    with kernels.use_kernel_mapping({"MLP": {"cpu": own}}):
        mode = kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE
        kernels.kernelize(model, mode=mode, device="cpu", use_fallback=False)
    for got, wanted in zip(loss_and_gradients(model), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)
    assert len(calls) == 2
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for got, wanted in zip(loss_and_gradients(compiled), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)


def test_a_layer_never_passes_over_what_it_does_not_know(hub_kernel: ModuleType) -> None:
    mlp = torch.nn.Module()
    mlp.gate_proj, mlp.up_proj, mlp.down_proj = (torch.nn.Linear(4, 4) for _ in range(3))
    mlp.forward = types.MethodType(hub_kernel.layers.SwiGLUMLP.forward, mlp)
    with pytest.raises(ValueError, match="shows none of the gates"):
        mlp(torch.ones(2, 4))
    mlp.up_proj.register_forward_hook(print)
    with pytest.raises(TypeError, match=r"up_proj: .*hooks"):
        mlp(torch.ones(2, 4))


def test_an_import_without_a_relative_form_is_refused() -> None:
    relative = runpy.run_path(str(HUB))["relative"]
    assert relative("from swiglu_kernels.a.b import c\n", 0) == "from .a.b import c\n"
    assert relative("    from swiglu_kernels import c, d\n", 2) == "    from ... import c, d\n"
    with pytest.raises(ValueError, match="import swiglu_kernels"):
        relative("import swiglu_kernels.ops.glu.operation\n", 0)
