"""Which modules of the package a steady-state call enters: those that CONTRIBUTING names."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from replayed import as_on_a_gpu

import swiglu_kernels
from swiglu_kernels import swiglu_glu
from swiglu_kernels.runtime import backend

PACKAGE = Path(swiglu_kernels.__file__).parent
INFERENCE = {
    "ops/glu/operation.py", "runtime/shortcuts/door.py", "runtime/shortcuts/series.py", "runtime/shortcuts/plan.py",
}  # fmt: skip
TRAINING = INFERENCE | {"runtime/operator.py"}


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
@pytest.mark.parametrize(("wanted", "expected"), [(False, INFERENCE), (True, TRAINING)], ids=["inference", "training"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_call_of_a_known_kind_passes_through_five_modules_at_most(
    dtype: torch.dtype, wanted: bool, expected: set[str]
) -> None:
    shapes = (2, 3, 16), (32, 16), (32, 16)
    calls = [[torch.randn(shape).to(dtype).requires_grad_(wanted) for shape in shapes] for _ in range(3)]
    with as_on_a_gpu():
        first, *_, last = [entered(*given) for given in calls]
    assert last == expected
    assert len(last) <= 5
    assert first > last, "the first call checks and chooses"


def test_they_are_those_that_contributing_names() -> None:
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (paragraph,) = (part for part in text.split("\n\n") if part.startswith("In `swiglu_kernels`"))
    assert all(f"`{file}`" in paragraph for file in TRAINING)
