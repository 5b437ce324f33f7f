"""Private names of PyTorch: with all of them everything is on, without them everything still works."""

import ast
import importlib.util
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torch

import swiglu_kernels
from swiglu_kernels.runtime import internals

SOURCES = Path(swiglu_kernels.__file__).parent
NAMES = (
    "_len_torch_dispatch_stack", "_len_torch_function_stack", "_are_functorch_transforms_active", "_get_tracing_state",
    "_AutoDispatchBelowAutograd", "_any_requires_grad", "_after_autograd_keyset", "_current_graph_task_id",
    "_storage_address", "_storage_Use_Count",
)  # fmt: skip
WITHOUT = """
import sys, warnings
import torch
from quick_interpreter import quicken
quicken()

class Without:  # what this package sees of torch._C while it is imported; PyTorch itself keeps all of it
    def __init__(self, real, names):
        self.__dict__.update(real=real, names=names)
    def __getattr__(self, name):
        if name in self.names:
            raise AttributeError(name)
        return getattr(self.real, name)

names = sys.argv[1:]
hidden = Without(torch._C, names)
hidden.__dict__["_autograd"] = Without(torch._C._autograd, names)
kept, torch._C = torch._C, hidden
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    from swiglu_kernels.runtime import internals
    import swiglu_kernels
torch._C = kept
for name in names:
    assert any(name in off for off in internals.OFF), (name, internals.OFF)
    assert any(name in str(warning.message) for warning in told), name

from swiglu_kernels import reference
from swiglu_kernels.runtime.shortcuts import door
door._shut, door.on_gpu = False, lambda tensor: True
for function, weights in (("swiglu_glu", 2), ("swiglu_mlp", 3)):
    for _ in range(3):
        shapes = [(4, 16), (16, 16), (16, 16), (16, 16)][:weights + 1]
        given = [torch.randn(shape, requires_grad=True) for shape in shapes]
        for options in ({}, {"save": "input"}):
            out = getattr(swiglu_kernels, function)(*given, **options)
            expected = getattr(reference, function)(*given)
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
            upstream = torch.randn_like(out)
            found, wanted = (torch.autograd.grad(result, given, upstream) for result in (out, expected))
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
        with torch.no_grad():
            getattr(swiglu_kernels, function)(*given)
x = torch.randn(4, 16, requires_grad=True)
torch.testing.assert_close(swiglu_kernels.silu_mul(x, x), reference.silu_mul(x, x))
swiglu_kernels.silu_mul(x, x).sum().backward()
print("fine")
"""


def test_without_them_everything_works_and_what_is_off_is_said() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", WITHOUT, *NAMES], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "fine"


def fresh() -> ModuleType:
    """The module, executed once more under another name."""
    spec = importlib.util.spec_from_file_location("internals_once_more", internals.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "name", ["_profiler_enabled", "_current_level", "_storage_Use_Count", "_any_requires_grad", "TensorGuards"]
)
def test_each_switches_off_what_needs_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner in (torch._C, torch._C._autograd, torch._C._dynamo.guards, torch.autograd.forward_ad):
        if hasattr(owner, name):
            monkeypatch.delattr(owner, name)
    with pytest.warns(UserWarning, match=name):
        module = fresh()
    assert any(name in off for off in module.OFF)
    assert module.can_count is (name != "_storage_Use_Count")
    assert not module.can_count or module.can_see_watchers is (name == "TensorGuards")
    assert (module.guard([torch.empty(2)]) is None) is (name == "TensorGuards")
    assert module.has_operators is (name != "_any_requires_grad")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.undo()
        assert fresh().OFF == (), "this PyTorch has all of them"


def test_no_other_file_uses_one() -> None:
    """Of torch: names that begin with an underscore; `torch._dynamo` is asked for in sys.modules alone."""
    for source in SOURCES.rglob("*.py"):
        if source.name == "internals.py":
            continue
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
                words = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch."):
                words = ast.unparse(node).split(".")
            else:
                continue
            assert not any(word.startswith("_") and not word.startswith("__") for word in words), (source, words)
