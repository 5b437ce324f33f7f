"""Fixtures for the tests of a SwiGLU kernel: `assert_swiglu` (is it right) and `benchmark_swiglu` (is it slower now).

    def test_mine(assert_swiglu, benchmark_swiglu):
        assert_swiglu("mine.py:mine")
        benchmark_swiglu("mine.py:mine", shapes="llama7b", tokens=[1, 1024])

Both fail for rows that are incorrect or an error, where the command would exit with 1, and for bad input (2). What is
not known (3: a row is unsettled, or there was no memory or no budget for it) is a warning; where no row is ok, the test
is skipped.

pytest finds them wherever swiglu-bench is installed. Nothing heavy is imported before a test asks for one.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from swiglu_bench.api import Results
    from swiglu_bench.cases.implementation import Implementation
    from swiglu_bench.rows.record import Record

Check = Callable[..., "Results"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Which baseline benchmarks are compared with, and under which name they are saved."""
    group = parser.getgroup("swiglu-bench")
    group.addoption("--swiglu-baseline", metavar="NAME", help="Fail where benchmark_swiglu is slower than this one.")
    group.addoption("--swiglu-save-baseline", metavar="NAME", help="Save benchmark_swiglu's rows under this name.")


@pytest.fixture
def assert_swiglu(monkeypatch: pytest.MonkeyPatch) -> Check:
    """Call it with an implementation, and the options of `swiglu-bench verify` if need be.

    The test fails unless output and every gradient are as exact as eager's, at odd sizes and in every dtype, and in the
    ways in which a model uses a layer. It is skipped where the implementation cannot run. Returns the rows.
    """

    def check(implementation: str | Implementation, **options: Any) -> Results:
        # On a CPU, Triton kernels are checked by the interpreter, for this test alone.
        monkeypatch.setenv("TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", "0"))
        return _measured("verify", implementation, options)

    return check


@pytest.fixture
def benchmark_swiglu(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Check:
    """Call it with an implementation, a command (`forward` unless given) and the options of that command.

    With `--swiglu-baseline NAME` the test fails where the implementation is slower than it was when the baseline was
    saved by `--swiglu-save-baseline NAME`, by more than `max_regression` (0.02), relative to eager in the same rounds
    as `swiglu-bench compare` judges it. Returns the rows, for checks of your own.
    """

    def measure(
        implementation: str | Implementation, command: str = "forward", max_regression: float = 0.02, **options: Any
    ) -> Results:
        from swiglu_bench.api import load
        from swiglu_bench.rows import run_folder

        folder = tmp_path_factory.mktemp("swiglu") / command
        found = _measured(command, implementation, {"out": folder, **options})
        name, new_name = (request.config.getoption(f"swiglu_{option}") for option in ("baseline", "save_baseline"))
        what = f"{re.sub(r'[^A-Za-z0-9_.]+', '-', request.node.nodeid)}-{command}"
        if name and (run_folder.baseline_place(name, what)).exists():
            compared = load(run_folder.baseline_place(name, what)).compare(load(folder), max_regression)
            if compared.outcome == "regression":
                pytest.fail(f"slower than the baseline {name}:\n{compared}", pytrace=False)
            if compared.outcome != "fine":
                question = f"whether it is slower than the baseline {name}"
                warnings.warn(f"{question} cannot be decided:\n{compared}", stacklevel=2)
        elif name:
            warnings.warn(f"the baseline {name} has no {what}; save it with --swiglu-save-baseline", stacklevel=2)
        if new_name:
            run_folder.save_baseline(new_name, what, folder)
        return found

    return measure


def _measured(command: str, implementation: str | Implementation, options: dict[str, Any]) -> Results:
    """The rows of one implementation. Fails for a wrong one and for bad input, skips where none is right."""
    from swiglu_bench.api import run
    from swiglu_bench.cases.errors import BadInput
    from swiglu_bench.rows.record import Status

    address = _address(implementation)
    try:
        found = run(command, impl=[address], progress=False, **options)
    except BadInput as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None

    def said(headline: str, rows: list[Record]) -> str:
        lines = [f"{row.shape} {row.tokens} tokens {row.dtype} {row.scope}: {row.status}: {row.reason}" for row in rows]
        return "\n".join([f"{command} of {address} {headline}:", *lines])

    if wrong := [row for row in found.records if row.status in {Status.INCORRECT, Status.ERROR}]:
        pytest.fail(said("failed", wrong), pytrace=False)
    mine = [row for row in found.records if row.implementation != row.baseline] or list(found.records)
    absent = [row for row in mine if row.status != Status.OK]
    if len(absent) == len(mine):
        pytest.skip(f"{address}: {mine[0].reason}")
    if absent:
        warnings.warn(said("has no result at", absent), stacklevel=3)
    return found


def _address(implementation: str | Implementation) -> str:
    if isinstance(implementation, str):
        return implementation
    if implementation.source.startswith("swiglu_bench."):
        return implementation.name
    return implementation.address or f"{Path(implementation.file)}:{implementation.name}"
