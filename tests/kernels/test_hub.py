"""The hub kernel is loaded from a folder as the package `kernels` does it, beside the package that is installed."""

import importlib
import importlib.util
import json
import pkgutil
import runpy
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from places import ROOT

import swiglu_kernels
from swiglu_kernels import reference

HUB = ROOT / "kernels" / "hub.py"
pytestmark = pytest.mark.skipif(not HUB.exists(), reason="the script is not here")


@pytest.fixture(scope="module")  # operators are registered once in a process
def hub_kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    tmp_path = tmp_path_factory.mktemp("hub")
    package = runpy.run_path(str(HUB))["write"](tmp_path / "hub")
    assert package == tmp_path / "hub" / "build" / "torch-universal"
    name = json.loads((package / "metadata.json").read_text(encoding="utf-8"))["id"]
    spec = importlib.util.spec_from_file_location(name, package / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    yield module
    for one in [one for one in sys.modules if one.partition(".")[0] == name]:
        del sys.modules[one]


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
    names = [one.name for one in pkgutil.walk_packages(hub_kernel.__path__, f"{hub_kernel.__name__}.")]
    assert len(names) > 30
    for name in names:
        foreign = [
            one for one in vars(importlib.import_module(name)).values()
            if isinstance(one, ModuleType) and one.__name__.partition(".")[0] == "swiglu_kernels"
        ]  # fmt: skip
        assert not foreign


def test_an_import_without_a_relative_form_is_refused() -> None:
    relative = runpy.run_path(str(HUB))["relative"]
    assert relative("from swiglu_kernels.a.b import c\n", 0) == "from .a.b import c\n"
    assert relative("    from swiglu_kernels import c, d\n", 2) == "    from ... import c, d\n"
    with pytest.raises(ValueError, match="import swiglu_kernels"):
        relative("import swiglu_kernels.ops.glu.operation\n", 0)
