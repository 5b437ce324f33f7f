import dataclasses
import importlib.metadata
import importlib.util
import platform
import shutil
import types

import pytest
from specimens import small_case

from swiglu_bench.cases.errors import BadInput
from swiglu_bench.cases.implementation import Implementation, Step, implementation


def dummy(name: str, **fields: object) -> Implementation:
    declare = implementation(name, scopes=["glu"], description="does nothing", **fields)  # type: ignore[arg-type]
    return declare(lambda problem: Step(lambda x: x))


@pytest.mark.parametrize("name", ["eager (twin 1)", "bare products 0", "../../escapes", "", "a" * 65])
def test_a_name_that_the_suite_may_give_itself_or_a_file_is_refused(name: str) -> None:
    with pytest.raises(BadInput, match="a name has up to 64 letters"):
        dummy(name)


@pytest.mark.parametrize(
    ("declared", "reason"),
    [
        ({}, None),
        ({"dtypes": ["float16", "bfloat16"]}, "It does not support float32; it supports bfloat16, float16."),
        ({"multiple": 16}, "It needs hidden and intermediate sizes that are multiples of 16."),
        ({"scopes": ["mlp", "activation"]}, "It has no glu scope; it has activation, mlp."),
    ],
)
def test_cases_that_it_refuses(declared: dict[str, object], reason: str | None) -> None:
    """The case is float32, glu, 24 x 40."""
    one = dataclasses.replace(dummy("one"), **declared)  # type: ignore[arg-type]
    assert one.refuses(small_case()) == reason


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The modules that can be found; a test takes some away."""
    there = {"triton", "theirs"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: types.SimpleNamespace() if name in there else None)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    return there


TORCH, INDUCTOR, TRITON = dummy("torch"), dummy("inductor", backend="inductor"), dummy("triton", backend="triton")
THEIRS = dummy("theirs", backend="triton", package="theirs", interpretable="It cannot be interpreted.")


def test_triton_on_a_cpu_needs_the_interpreter(installed: set[str]) -> None:
    assert "Triton kernels need a GPU; `swiglu-bench verify`" in (TRITON.unavailable("cpu") or "")
    assert TRITON.unavailable("cpu", interpreter=True) is None
    assert THEIRS.unavailable("cpu", interpreter=True) == "It cannot be interpreted."
    assert THEIRS.unavailable("cuda") is None


def test_the_interpreter_has_its_needs(installed: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for triton, numpy, works in (("3.6.0", "2.3.5", True), ("3.6.0", "2.4.0", False), ("3.7.1", "2.5.0", True)):
        known = {"triton": triton, "numpy": numpy}
        found = lambda name, path, known=known: [types.SimpleNamespace(version=known[name])]  # noqa: E731
        monkeypatch.setattr(importlib.metadata, "distributions", found)
        reason = TRITON.unavailable("cpu", interpreter=True)
        assert reason is None if works else "needs a NumPy older than 2.4, and 2.4.0 is installed" in str(reason)


def test_what_is_not_installed(installed: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    installed.clear()
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert {TORCH.unavailable(device, way) for device in ("cpu", "cuda") for way in (False, True)} == {None}
    for device in ("cpu", "cuda"):
        assert "Triton is not installed" in (TRITON.unavailable(device, interpreter=True) or "")
    assert "needs Triton" in (INDUCTOR.unavailable("cuda") or "")
    assert INDUCTOR.unavailable("cpu") is None
    installed.add("triton")
    assert THEIRS.unavailable("cuda") == "The package theirs is not installed."
    monkeypatch.undo()
    nested = dummy("nested", package="surely_not_installed.part")  # find_spec raises for a parent that is missing
    assert nested.unavailable("cpu") == "The package surely_not_installed.part is not installed."


def test_compiling_on_a_cpu_needs_a_compiler(installed: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "needs a C++ compiler" in (INDUCTOR.unavailable("cpu") or "")
    assert INDUCTOR.unavailable("cuda") is None
    monkeypatch.setenv("CXX", "my-c++")
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/my-c++" if name == "my-c++" else None)
    assert INDUCTOR.unavailable("cpu") is None
