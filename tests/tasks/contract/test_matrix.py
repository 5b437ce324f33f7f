"""Each check of the contract, on implementations that keep it and on ones that break it."""

import os
from pathlib import Path
from typing import Any

import bad_implementations as bad
import pytest
import torch
from from_files import from_file
from specimens import declared, small_case
from torch import Tensor

from swiglu_bench.cases.cases import Case, Dtype, Mode, Scope, Shape
from swiglu_bench.cases.implementation import Implementation, Step
from swiglu_bench.cases.problem import Problem
from swiglu_bench.contenders import fused, peers, pytorch
from swiglu_bench.machine import machine
from swiglu_bench.rows.record import AuditVerdict, Record
from swiglu_bench.tasks.contract import matrix
from swiglu_bench.tasks.contract.inputs import Subject
from swiglu_bench.tasks.contract.matrix import CHECKS, checks_of
from swiglu_bench.tasks.selftest.run import SPECIMENS
from swiglu_bench.tasks.selftest.specimen import Differentiable, gate_gradients, glu, right_backward, right_forward
from swiglu_bench.tasks.untimed import Asked, audit, audit_here
from swiglu_bench.worker.court import Court
from swiglu_bench.worker.policy import Settings, Task

CPU = torch.device("cpu")
NAMES = [check.name for check in CHECKS if Scope.GLU in check.scopes]
IDLE = ("CUDA graph", "> 2^31 elements", "second GPU")
interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" or torch.cuda.is_available(), reason="Triton's interpreter is not in use"
)


def cells(one: Implementation, scope: Scope = Scope.GLU, *only: str) -> dict[str, Record]:
    return {cell.check: cell for cell in audit_here([one], Asked([scope], only=only), CPU)}


@pytest.mark.parametrize("scope", list(Scope))
def test_eager_keeps_the_whole_contract_that_it_offers(scope: Scope) -> None:
    found = cells(pytorch.eager, scope)
    assert list(found) == [check.name for check in checks_of(scope)]
    unsupported = {"packed weights", "opcheck"} | ({"bias"} if scope is Scope.ACTIVATION else set())
    if scope is Scope.EXPERTS:  # a loop over the experts that have a token
        unsupported |= {"0 tokens", "compile fullgraph"}
    assert {name for name, cell in found.items() if cell.verdict is AuditVerdict.UNSUPPORTED} == unsupported
    idle = {*IDLE, *({"far experts"} if scope is Scope.EXPERTS else ())}
    assert {name for name, cell in found.items() if cell.verdict is AuditVerdict.NOT_RUN} == idle
    assert {name for name, cell in found.items() if cell.verdict is AuditVerdict.FAIL} == set()
    assert all(cell.reason for cell in found.values() if cell.verdict is not AuditVerdict.PASS)


@pytest.mark.parametrize(
    ("name", "fails"),
    [
        ("shared-workspace", {"model use"}),
        ("input-changed", {"mutated inputs", "float32", "float16", "bfloat16", "odd sizes", "1 token", "outliers"}),
    ],
)
def test_wrong_implementations_fail_what_they_break_and_nothing_else(name: str, fails: set[str]) -> None:
    found = cells(SPECIMENS[name].implementation)
    failed = {name for name, cell in found.items() if cell.verdict is AuditVerdict.FAIL}
    assert list(found) == NAMES
    assert fails <= failed <= fails | {"compile fullgraph", "checkpointing"}
    assert all(found[name].reason for name in failed)


@interpreted
def test_a_kernel_of_ours_in_the_interpreter() -> None:
    wanted = ("0 tokens", "non-contiguous", "bias", "clamp", "packed weights", "second backward", "opcheck")
    found = cells(fused.ROWS["fused-dw-torch"], Scope.GLU, *wanted, "double backward")
    assert {name: cell.verdict for name, cell in found.items()} == dict.fromkeys(wanted, AuditVerdict.PASS) | {
        "double backward": AuditVerdict.UNSUPPORTED
    }


def test_what_cannot_run_here_is_never_a_pass() -> None:
    found = cells(peers.liger, Scope.GLU)
    assert {cell.verdict for cell in found.values()} == {AuditVerdict.NOT_RUN}
    assert all("Triton" in cell.reason or "GPU" in cell.reason for cell in found.values())


def overwriting(dz: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    """As Liger's SiLU-mul: the backward leaves its results in what it saved, where autograd does not see it."""
    gradients = gate_gradients(dz, gate, up)
    for saved, gradient in zip((gate, up), gradients, strict=True):
        saved.data.copy_(gradient)
    return gradients


def around_overwriting(problem: Problem) -> Step:
    w_gate, w_up = problem.weights.values()
    gated = lambda gate, up: torch.nn.functional.silu(gate) * up  # noqa: E731
    return Step(lambda x: Differentiable.apply(gated, overwriting, x @ w_gate.T, x @ w_up.T))


def counts(problem: Problem) -> Step:
    calls: list[int] = []

    def backward(dz: Tensor, x: Tensor, w_gate: Tensor, w_up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        calls.append(1)
        dx, *dw = right_backward(dz, x, w_gate, w_up)
        return (dx.nextafter(dx + 1) if len(calls) == 3 else dx, *dw)  # type: ignore[return-value]

    return glu(problem, backward=backward)


def as_forward(forward: Any) -> Any:
    return lambda problem: glu(problem, forward)


def in_half(x: Tensor, *weights: Tensor) -> Tensor:
    return right_forward(*(value.half() for value in (x, *weights))).to(x.dtype)


def breaks_the_graph(problem: Problem) -> Step:
    step = pytorch.eager.build(problem)

    def forward(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return step.forward(x)

    return Step(forward)


def full(problem: Problem) -> Step:
    raise torch.OutOfMemoryError("no room")


FAIL, UNSUPPORTED, PASS, NOT_RUN = (
    AuditVerdict.FAIL, AuditVerdict.UNSUPPORTED, AuditVerdict.PASS, AuditVerdict.NOT_RUN,
)  # fmt: skip
BROKEN = [
    (SPECIMENS["ignores-strides"].implementation.build, "non-contiguous", FAIL,
     "with every other column: output: relative error"),
    (counts, "determinism", FAIL, "x of run 3 of 5 differs"),
    (SPECIMENS["nan-hidden"].implementation.build, "NaN and Inf", FAIL, "is finite where eager is not"),
    (as_forward(lambda *given: right_forward(*given) + 0 * right_forward(*given).sum()), "NaN and Inf", FAIL,
     "output is not finite where eager is"),
    (SPECIMENS["nan-hidden"].implementation.build, "very large", FAIL, "output is finite where eager is not"),
    (SPECIMENS["input-changed"].implementation.build, "mutated inputs", FAIL, "inference overwrites x"),
    (as_forward(lambda x, *w: right_forward(x, *w) * (len(x) / len(x))), "0 tokens", UNSUPPORTED,
     "raises ZeroDivisionError"),
    (as_forward(in_half), "outliers", FAIL, "output: "),
    (as_forward(in_half), "float32", FAIL, "output: relative error"),
    (lambda p: glu(p, backward=torch.no_grad()(right_backward)), "double backward", FAIL, "silently cut off"),
    (pytorch.eager.build, "packed weights", FAIL, "not one of (160, 48)"),
    (breaks_the_graph, "compile fullgraph", UNSUPPORTED, "raises "),
    (lambda p: Step(lambda x: right_forward(x.float(), *p.weights.values())), "autocast", PASS, ""),
    (around_overwriting, "second backward", FAIL, "the second backward silently differs: x: relative error"),
    (full, "float32", NOT_RUN, "no room"),
]  # fmt: skip


@pytest.mark.parametrize(("build", "check", "verdict", "words"), BROKEN)
def test_a_broken_contract_is_found(build: Any, check: str, verdict: AuditVerdict, words: str) -> None:
    cell = cells(declared(build, offers=("packed",)), Scope.GLU, check)[check]
    assert (cell.verdict, words in cell.reason) == (verdict, True), cell


def test_a_bias_or_bound_that_is_declared_and_left_out_is_a_failure() -> None:
    one = declared(lambda problem: glu(problem), offers=("bias", "limit"))
    found = cells(one, Scope.GLU, "bias", "clamp")
    assert {cell.verdict for cell in found.values()} == {AuditVerdict.FAIL}


def test_a_failure_of_the_device_ends_the_checks_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([True, False, *[False] * 100])
    monkeypatch.setattr(matrix, "answers", lambda device: next(answers))
    found = list(cells(pytorch.eager).values())
    assert [cell.verdict for cell in found[:3]] == [AuditVerdict.PASS, AuditVerdict.FAIL, AuditVerdict.NOT_RUN]
    assert found[1].reason.startswith("it broke the device")
    assert all("the device was lost in 'float16' of eager" in cell.reason for cell in found[2:])


# Beyond 2^31 elements: the same code, on small tensors


def test_rows_on_both_sides_of_every_boundary_are_judged() -> None:
    width = 8192
    rows = matrix.rows_to_judge(2 * 2**31 // width + 50, width)
    assert rows == sorted(set(rows))
    for edge in (0, 2**31 // width, 2 * 2**31 // width, 2 * 2**31 // width + 49):
        assert {row for row in range(edge - 4, edge + 5) if 0 <= row < 2 * 2**31 // width + 50} <= set(rows)


@pytest.mark.parametrize("scope", list(Scope))
def test_some_rows_of_a_case_are_judged_as_the_case_of_those_rows(scope: Scope) -> None:
    subject = Subject(pytorch.eager, scope, CPU, Dtype.BFLOAT16)
    case = small_case(scope=scope, tokens=60, dtype=Dtype.BFLOAT16)
    assert matrix._judge_rows(subject, case, [0, 1, 30, 31, 59]).verdict is AuditVerdict.PASS


@pytest.mark.parametrize("wraps", [True, False])
def test_rows_beyond_a_boundary_that_are_wrong_are_found(wraps: bool) -> None:
    def build(problem: Problem) -> Step:
        def forward(gate: Tensor, up: Tensor) -> Tensor:
            out = torch.nn.functional.silu(gate) * up
            return torch.cat([out[:32], out[: len(out) - 32] if wraps else 0 * out[32:]])

        return Step(forward)

    subject = Subject(declared(build, Scope.ACTIVATION), Scope.ACTIVATION, CPU, Dtype.BFLOAT16)
    case = Case(Shape("s", 24, 40, "made up", (60,)), 60, Dtype.BFLOAT16, Scope.ACTIVATION, Mode.STEP)
    found = matrix._judge_rows(subject, case, [0, 1, 30, 31, 33, 59])
    assert found.verdict is AuditVerdict.FAIL
    assert "output: relative error" in found.reason


# In child processes, as a command runs it

FEW = tuple(check for check in CHECKS if check.name in {"float32", "zeros", "CUDA graph"})


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "CHECKS", FEW)


def in_processes(logs: Path, one: Implementation, timeout_s: float = 60.0) -> list[Record]:
    settings = Settings(Task.VERIFY, CPU, "audit", "")
    court = Court(settings, machine.describe(CPU), timeout_s, logs, bench=matrix.AuditBench)
    try:
        return list(audit(court, Asked([Scope.GLU]), [one]))
    finally:
        court.end()


@pytest.mark.timed
@pytest.mark.usefixtures("few")
def test_a_death_costs_one_cell_and_says_how_and_else_cells_are_those_of_one_process(tmp_path: Path) -> None:
    assert in_processes(tmp_path, pytorch.eager) == list(audit_here([pytorch.eager], Asked([Scope.GLU]), CPU))
    found = in_processes(tmp_path, from_file(bad.aborts))
    assert [(cell.check, cell.verdict) for cell in found] == list(
        zip([check.name for check in FEW], [FAIL, FAIL, NOT_RUN], strict=True)
    )
    assert all(cell.reason.startswith("its process was killed by SIGABRT; ") for cell in found[:2])
    unstarted = in_processes(tmp_path / "missing", from_file(bad.sound))
    assert [cell.verdict for cell in unstarted] == [NOT_RUN] * 3
    assert "cannot be written" in unstarted[0].reason


@pytest.mark.timed
@pytest.mark.usefixtures("few")
def test_a_check_that_hangs_costs_one_cell(tmp_path: Path) -> None:
    *hung, last = in_processes(tmp_path, from_file(bad.hangs), timeout_s=3.0)
    assert [cell.verdict for cell in hung] == [FAIL] * 2
    assert all(cell.reason.startswith("it took longer than 3 s (--timeout); ") for cell in hung)
    if "longer than" in last.reason:
        pytest.skip("the machine is too busy to start a process in 3 s")
    assert last.verdict is NOT_RUN
