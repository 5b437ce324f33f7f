"""The pytest fixtures for authors of kernels, in a project of such an author."""

from collections.abc import Iterator
from pathlib import Path

import pandas  # noqa: F401 -- these are imported once in a process, and pytester forgets what a run imports
import pytest
from places import SUPPORT
from quiet import quiet_machine

import swiglu_bench.loop  # noqa: F401
import swiglu_kernels  # noqa: F401
from swiglu_bench.rows import run_folder

pytestmark = pytest.mark.timed

pytest_plugins = ["pytester"]

TESTS = """
FEW = dict(shapes="24x40", tokens=[32], scope="glu", dtype="fp32", device="cpu", in_process=True)

def test_right(assert_swiglu):
    rows = assert_swiglu("mine.py:mine", **FEW)
    assert set(rows["status"]) == {"ok"}

def test_declared(assert_swiglu):
    from swiglu_bench.contenders.pytorch import eager
    assert_swiglu(eager, **FEW)

def test_wrong(assert_swiglu):
    assert_swiglu("mine.py:swapped", **FEW)

def test_not_here(assert_swiglu):
    assert_swiglu("quack", **FEW)

def test_in_part(assert_swiglu):
    assert_swiglu("mine.py:mine", **FEW | {"scope": "glu,mlp"})

def test_misspelt(assert_swiglu):
    assert_swiglu("mine.py:mnie", **FEW)
"""
SPEED = """
def test_speed(benchmark_swiglu):
    few = dict(shapes="24x40", tokens=3, device="cpu", in_process=True)
    rows = benchmark_swiglu("mine.py:mine", rounds=8, **few)
    assert set(rows["implementation"]) == {"eager", "mine"}
"""


@pytest.fixture
def project(pytester: pytest.Pytester) -> Iterator[pytest.Pytester]:
    pytester.makeconftest("pytest_plugins = ['swiglu_bench.pytest_plugin']")
    (pytester.path / "mine.py").write_text((SUPPORT / "user_implementations.py").read_text(), encoding="utf-8")
    with quiet_machine():
        yield pytester


def test_a_right_kernel_passes_a_wrong_one_fails_and_one_that_cannot_run_is_skipped(project: pytest.Pytester) -> None:
    project.makepyfile(TESTS)
    done = project.runpytest_inprocess()
    done.assert_outcomes(passed=3, failed=2, skipped=1, warnings=1)
    done.stdout.fnmatch_lines(["*24x40 32 tokens float32 glu: incorrect: *relative error*"])
    done.stdout.fnmatch_lines(["*mine.py has no implementation 'mnie'*", "*24x40 32 tokens float32 mlp: skipped: *"])
    done.stdout.no_fnmatch_line("*worker/child.py*")


def test_a_benchmark_saves_a_baseline_and_is_held_against_it(project: pytest.Pytester) -> None:
    project.makepyfile(SPEED)
    project.runpytest_inprocess("--swiglu-baseline", "main").assert_outcomes(passed=1, warnings=1)
    project.runpytest_inprocess("--swiglu-save-baseline", "main").assert_outcomes(passed=1)
    (records,) = (project.path / run_folder.BASELINES).rglob("records.csv")
    multiply(records, 1e12)
    project.runpytest_inprocess("--swiglu-baseline", "main").assert_outcomes(passed=1)
    multiply(records, 1e-24)
    done = project.runpytest_inprocess("--swiglu-baseline", "main")
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(["*slower than the baseline main*"])


def multiply(records: Path, factor: float) -> None:
    """Multiply, far beyond all noise, the contender's samples of a saved run."""
    file = records.with_name(run_folder.SAMPLES)
    lines = [line.split(",") for line in file.read_text(encoding="utf-8").splitlines()]
    place, name = lines[0].index("time_ms"), lines[0].index("implementation")
    for line in lines[1:]:
        if line[name] == "mine":
            line[place] = str(float(line[place]) * factor)
    file.write_text("\n".join(map(",".join, lines)) + "\n", encoding="utf-8")
