"""Which modules of the package a steady-state call enters: those that CONTRIBUTING names."""

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import swiglu_kernels
from swiglu_kernels import swiglu_glu
from swiglu_kernels.runtime import backend
from swiglu_kernels.runtime.launch import Launch
from swiglu_kernels.runtime.shortcuts import door, plan

PACKAGE = Path(swiglu_kernels.__file__).parent
INFERENCE = {
    "ops/glu/operation.py", "runtime/shortcuts/door.py", "runtime/shortcuts/series.py", "runtime/shortcuts/plan.py",
}  # fmt: skip
TRAINING = INFERENCE | {"runtime/operator.py"}


class InterpretedPlan:
    """A plan that asks for hooks, as a direct launch does, and runs the kernel in the interpreter, untraced."""

    def __init__(self, launch: Launch, tensors: list[torch.Tensor]) -> None:
        self.launch, self.described_from = launch, tensors
        self.shortest = self.run

    def run(self, tensors: list[torch.Tensor]) -> None:
        plan.hooked()
        new = {id(before): now for before, now in zip(self.described_from, tensors, strict=True)}
        arguments = {name: new.get(id(value), value) for name, value in self.launch.arguments.items()}
        tracer = sys.getprofile()
        sys.setprofile(None)
        try:
            dataclasses.replace(self.launch, arguments=arguments).run_alone()
        finally:
            sys.setprofile(tracer)


@pytest.fixture
def _on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(door, "_shut", False)
    monkeypatch.setattr(door, "on_gpu", lambda _: True)
    monkeypatch.setattr(plan, "Plan", InterpretedPlan)
    monkeypatch.setattr(plan, "_run_and_keep_launchers", lambda launch, *_: launch.run() or True)
    plan.forget()
    yield
    plan.forget()


def entered(*given: torch.Tensor) -> set[str]:
    """The modules whose functions a call enters, the kernels' own aside."""
    files: set[str] = set()

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call":
            files.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        swiglu_glu(*given)
    finally:
        sys.setprofile(None)
    return {Path(file).relative_to(PACKAGE).as_posix() for file in files if Path(file).is_relative_to(PACKAGE)}


@pytest.mark.skipif(not backend.INTERPRETING, reason="needs Triton's interpreter")
@pytest.mark.usefixtures("_on_a_gpu")
@pytest.mark.parametrize(("wanted", "expected"), [(False, INFERENCE), (True, TRAINING)], ids=["inference", "training"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_call_of_a_known_kind_passes_through_five_modules_at_most(
    dtype: torch.dtype, wanted: bool, expected: set[str]
) -> None:
    shapes = (2, 3, 16), (32, 16), (32, 16)
    calls = [[torch.randn(shape).to(dtype).requires_grad_(wanted) for shape in shapes] for _ in range(3)]
    first, *_, last = [entered(*given) for given in calls]
    assert last == expected
    assert len(last) <= 5
    assert first > last, "the first call checks and chooses"


def test_they_are_those_that_contributing_names() -> None:
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (paragraph,) = (part for part in text.split("\n\n") if part.startswith("In `swiglu_kernels`"))
    assert all(f"`{file}`" in paragraph for file in TRAINING)
