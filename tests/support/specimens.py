"""Small cases, rows and machines that several test files build on."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from swiglu_bench.cases.cases import Case, Dtype, Experts, Mode, Scope, Shape
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.cases.implementation import Implementation, Step, implementation
from swiglu_bench.cases.problem import Problem
from swiglu_bench.rows.record import COLUMNS, Record, Status, TensorCheck, row_of

SMALL = Shape("small", 24, 40, "made up", (3, 7))


T = TypeVar("T")


def result_or_complaint(call: Callable[[], T]) -> T | BadInput:
    """What a call returns or, where it refuses its input, why; any other exception comes through."""
    try:
        return call()
    except BadInput as error:
        return error


def complaint(call: Callable[..., object], *arguments: object) -> str:
    """The one sentence in which a call refuses its input."""
    with pytest.raises(BadInput) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith((".", "?"))
    return str(caught.value)


def small_case(
    *,
    scope: Scope = Scope.GLU,
    mode: Mode = Mode.STEP,
    tokens: int = 7,
    dtype: Dtype = Dtype.FLOAT32,
    shape: Shape = SMALL,
    seed: int = 0,
) -> Case:
    """A case that a CPU finishes in no time; at the scope of experts, of a mixture."""
    if scope is Scope.EXPERTS and not shape.experts:
        shape = dataclasses.replace(shape, experts=Experts(5, 2))
    return Case(shape, tokens, dtype, scope, mode, seed)


def declared(build: Callable[[Problem], Step], scope: Scope = Scope.GLU, **fields: Any) -> Implementation:
    """An implementation called "mine"."""
    return implementation("mine", scopes=[scope], description="d", **fields)(build)


def a_bare_record(**changes: Any) -> Record:
    """An `ok` row without any figure."""
    row = Record(
        run_id="20250102T030405Z-1", command="swiglu-bench forward", shape="small", hidden=24, intermediate=40,
        tokens=7, dtype="float32", scope="glu", mode="forward", seed=0, implementation="mine", weight_layout="separate",
        gradients="x w_gate w_up", status=Status.OK,
    )  # fmt: skip
    return dataclasses.replace(row, **changes)


def a_record(**changes: Any) -> Record:
    """An `ok` row of a timing run with every figure that such a row has."""
    figures = {
        "time_ms": 0.5, "time_p10_ms": 0.4, "time_p90_ms": 0.6, "rounds": 12, "stopped_by": "precision", "host_us": 3.0,
        "queue_filled": 1.0, "first_call_ms": 5.0, "l2": "cold", "baseline": "eager", "ratio": 0.8, "ratio_low": 0.79,
        "ratio_high": 0.81, "flops": 10**9, "min_bytes": 10**6, "tflops": 2.0, "gbps": 2.0, "limit_ms": 0.25,
        "limit_kind": "matmul", "limit_pct": 50.0, "copy_gbps": 4000.0, "matmul_tflops": 700.0, "error": 1e-7,
        "eager_error": 1e-7, "error_ratio": 0.6, "errors": "output=1e-07/1e-07", "device": "A GPU",
    }  # fmt: skip
    return a_bare_record(**figures | changes)


def a_summary(name: str, **columns: Any) -> Record:
    """A row of a training."""
    known = {"run_id": "1", "task": "digits", "model": "small", "trains": "everything", "status": Status.OK}
    return row_of("training", {}, implementation=name, **{**known, **columns})


def a_seed(name: str, seed: int, losses: list[float]) -> Record:
    """A row of a training from one seed, with its steps."""
    row = row_of("seeds", {}, implementation=name, seed=seed, steps=len(losses), parameters=100, held_out_loss=1.0,
                 metric_mean=0.5, seconds=1.0)  # fmt: skip
    row.series = {"loss": losses, "learning_rate": [0.1] * len(losses), "step_ms": [1.0] * len(losses)}
    return row


def a_cell(name: str, scope: str, check: str, verdict: str, reason: str = "") -> Record:
    """A cell of the contract matrix."""
    at = {"implementation": name, "scope": scope, "check": check, "dtype": "float32", "device": "cpu"}
    return row_of("audit", {}, verdict=verdict, reason=reason, **at)


def a_split_row(name: str, **columns: Any) -> Record:
    """A row of `tp` on four GPUs."""
    known = {
        "run_id": "1", "shape": "s", "hidden": 1024, "intermediate": 4096, "tokens": 1024, "dtype": "bfloat16",
        "mode": "forward", "seed": 0, "ranks": 4, "sequence_parallel": True, "experts": None, "status": Status.OK,
    }  # fmt: skip
    return row_of("tp", {}, implementation=name, **{**known, **columns})


def without_time(status: Status, reason: str, **changes: Any) -> Record:
    """A row that ended before it was timed."""
    figures = {
        name: None
        for name in COLUMNS
        if name.endswith(("_ms", "_pct", "_gbps", "_tflops")) or name in {"gbps", "tflops", "ratio"}
    } | {"samples_ms": (), "twin_ms": ()}
    return a_record(status=status, reason=reason, **figures, **changes)


def a_check(**changes: Any) -> TensorCheck:
    """A tensor that passed."""
    check = TensorCheck(
        tensor="output", ok=True, error=1e-7, eager_error=1e-7, allowed=2e-7, max_error=1e-6, eager_max_error=1e-6,
        max_allowed=4e-6,
    )  # fmt: skip
    return dataclasses.replace(check, **changes)
