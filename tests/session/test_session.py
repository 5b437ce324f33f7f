import dataclasses
import gc
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import user_implementations as mine
from specimens import small_case

from swiglu_bench.check import judge
from swiglu_bench.implementations import fused, liger, pytorch
from swiglu_bench.machine import ceilings_cache, machine
from swiglu_bench.machine.ceilings_cache import Ceilings
from swiglu_bench.measure.clock import CpuClock, DeviceLost, Sample
from swiglu_bench.measure.rounds import Rule
from swiglu_bench.rows.record import Record, Status
from swiglu_bench.session import case_timing
from swiglu_bench.session import session as runner
from swiglu_bench.session.session import run
from swiglu_bench.session.settings import Progress, Settings, Task
from swiglu_bench.spec.cases import VARIANTS, Case, Dtype, Mode, Scope, Shape, tensors
from swiglu_bench.spec.implementation import Implementation

CPU = torch.device("cpu")
THIS = machine.describe(CPU)
SHORT = Rule(warmup_rounds=1, min_rounds=4, max_rounds=4, budget_s=60.0)


TIDY = runner._tidy


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring the ceilings and collecting garbage would take most of the time of these tests."""
    monkeypatch.setattr(ceilings_cache, "ceilings", lambda *_: Ceilings(10.0, 0.1))
    monkeypatch.setattr(runner, "_tidy", lambda device: None)


def settings(task: Task = Task.TIME, **changes: Any) -> Settings:
    return Settings(**({"task": task, "device": CPU, "command": "c", "run_id": "r", "rule": SHORT} | changes))


def rows(
    cases: Case | Sequence[Case],
    implementations: Sequence[Implementation],
    how: Settings | None = None,
    this: machine.Machine = THIS,
    listen: Callable[[Progress], None] = lambda progress: None,
) -> dict[str, Record]:
    """The rows of a run of one case, by implementation; of several, by tokens as well."""
    listed = [cases] if isinstance(cases, Case) else list(cases)
    found = list(run(listed, implementations, how or settings(), this, listen))
    if len(listed) == 1:
        assert len({record.implementation for record in found}) == len(found)
        return {record.implementation: record for record in found}
    return {f"{record.implementation} {record.tokens}": record for record in found}


def assert_has_no_time(record: Record) -> None:
    for name in ("time_ms", "time_p10_ms", "time_p90_ms", "ratio", "ratio_low", "ratio_high", "tflops", "gbps"):
        assert getattr(record, name) is None, name
    assert record.samples_ms == ()


# Rows that are right


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("scope", list(Scope))
def test_eager_gives_a_complete_row(scope: Scope, mode: Mode) -> None:
    case = small_case(scope=scope, mode=mode)
    record = rows(case, [pytorch.eager])["eager"]
    assert (record.status, record.reason) == (Status.OK, "")
    assert (record.shape, record.hidden, record.intermediate, record.tokens) == ("small", 24, 40, 7)
    assert (record.dtype, record.scope, record.mode, record.seed) == ("float32", scope, mode, 0)
    assert (record.run_id, record.command, record.device) == ("r", "c", THIS.device)
    assert record.gradients.split() == list(tensors(scope))
    assert record.time_ms is not None
    assert record.time_p10_ms is not None
    assert record.time_p90_ms is not None
    assert 0 < record.time_p10_ms <= record.time_ms <= record.time_p90_ms
    assert (record.rounds, len(record.samples_ms), record.stopped_by) == (4, 4, "rounds")
    assert record.queue_filled == 1.0
    assert record.l2 == "cpu"
    assert (record.baseline, record.ratio, record.ratio_low, record.ratio_high) == ("eager", 1.0, 1.0, 1.0)
    assert record.comparable
    assert record.first_call_ms is not None
    assert record.error is not None
    assert record.eager_error is not None
    assert record.error_ratio is not None
    assert 0 < record.error_ratio <= 1
    names = ["output"] if mode is Mode.FORWARD else ["output", *tensors(scope)]
    assert [check.tensor for check in record.tensor_checks] == names
    assert [part.split("=")[0] for part in record.errors.split()] == names
    assert not record.interpreted
    assert record.timestamp.endswith("Z")


@pytest.mark.parametrize("dtype", list(Dtype))
def test_figures_follow_from_the_time(dtype: Dtype) -> None:
    record = rows(small_case(dtype=dtype), [pytorch.eager])["eager"]
    assert record.time_ms is not None
    assert record.flops is not None
    assert record.min_bytes is not None
    assert record.limit_ms is not None
    assert record.tflops == pytest.approx(record.flops / (record.time_ms * 1e-3) / 1e12)
    assert record.gbps == pytest.approx(record.min_bytes / (record.time_ms * 1e-3) / 1e9)
    assert record.limit_pct == pytest.approx(100 * record.limit_ms / record.time_ms)
    assert record.limit_ms >= record.min_bytes / 10e9 * 1e3 * (1 - 1e-9)
    assert (record.copy_gbps, record.matmul_tflops) == (10.0, 0.1)
    assert record.time_ms == pytest.approx(sorted(record.samples_ms)[1] / 2 + sorted(record.samples_ms)[2] / 2)


def test_an_elementwise_scope_is_limited_by_bytes() -> None:
    record = rows(small_case(scope=Scope.ACTIVATION), [pytorch.eager])["eager"]
    assert record.limit_kind == "bandwidth"


def test_products_limit_where_arithmetic_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings_cache, "ceilings", lambda *_: Ceilings(copy_gbps=1e6, matmul_tflops=1e-3))
    assert rows(small_case(), [pytorch.eager])["eager"].limit_kind == "matmul"
    monkeypatch.setattr(ceilings_cache, "ceilings", lambda *_: Ceilings(copy_gbps=1e-3, matmul_tflops=1e6))
    assert rows(small_case(), [pytorch.eager])["eager"].limit_kind == "bandwidth"


def test_a_limit_that_cannot_be_measured_costs_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> object:
        raise torch.OutOfMemoryError("no room for operands")

    monkeypatch.setattr(case_timing, "bare_products", full)
    record = rows(small_case(), [pytorch.eager])["eager"]
    assert (record.status, record.limit_kind) == (Status.OK, "bandwidth")


def test_ceilings_are_measured_once_a_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.dtype] = []

    def measure(this: machine.Machine, device: torch.device, dtype: torch.dtype, clock: object) -> Ceilings:
        asked.append(dtype)
        return Ceilings(10.0, 0.1)

    monkeypatch.setattr(ceilings_cache, "ceilings", measure)
    cases = [small_case(tokens=n, dtype=d) for d in (Dtype.FLOAT32, Dtype.BFLOAT16) for n in (1, 2)]
    rows(cases, [pytorch.eager])
    assert asked == [torch.float32, torch.bfloat16]


def test_packed_and_separate_are_compared() -> None:
    found = rows(small_case(), [pytorch.eager, pytorch.eager_packed])
    packed = found["eager-packed"]
    assert (packed.status, packed.baseline, packed.weight_layout) == (Status.OK, "eager", "packed")
    assert packed.ratio is not None
    assert packed.ratio_low is not None
    assert packed.ratio_high is not None
    assert packed.ratio_low <= packed.ratio <= packed.ratio_high


# Contenders that deserve no time


def test_a_wrong_implementation_is_incorrect_and_has_no_time() -> None:
    found = rows(small_case(), [pytorch.eager, mine.swapped])
    wrong = found["swapped"]
    assert wrong.status is Status.INCORRECT
    assert wrong.reason.startswith("output: relative error ")
    assert "w_gate: " in wrong.reason
    assert wrong.reason.endswith(".")
    assert wrong.error_ratio is not None
    assert wrong.error_ratio > 1000
    assert_has_no_time(wrong)
    assert found["eager"].status is Status.OK


def test_what_does_not_build_is_an_error_and_the_others_go_on() -> None:
    found = rows(small_case(), [mine.unbuilt, pytorch.eager, mine.mine])
    assert (found["unbuilt"].status, found["unbuilt"].reason) == (Status.ERROR, "RuntimeError: no such tile")
    assert_has_no_time(found["unbuilt"])
    assert [found[name].status for name in ("eager", "mine")] == [Status.OK, Status.OK]


def test_what_breaks_in_the_timed_loop_is_an_error() -> None:
    found = rows(small_case(mode=Mode.FORWARD), [pytorch.eager, mine.fragile])
    assert found["fragile"].status is Status.ERROR
    assert found["fragile"].reason == "In the timed loop: FloatingPointError: worn out"
    assert_has_no_time(found["fragile"])
    assert found["eager"].status is Status.OK


@pytest.mark.parametrize("count", [4, 5, 6, 7])
@pytest.mark.parametrize("mode", [Mode.FORWARD, Mode.BACKWARD])
@pytest.mark.parametrize("cheat", [mine.stale, mine.late], ids=lambda one: one.name)
def test_a_remembered_answer_is_caught_in_the_timed_loop(cheat: Implementation, mode: Mode, count: int) -> None:
    """It passed its first check; it must be caught whichever round happens to be the last."""
    rule = Rule(warmup_rounds=1, min_rounds=count, max_rounds=count, budget_s=60.0)
    found = rows(small_case(mode=mode), [pytorch.eager, cheat], settings(rule=rule))
    caught = found[cheat.name]
    assert caught.status in ({Status.INCORRECT} if mode is Mode.FORWARD else {Status.INCORRECT, Status.ERROR})
    assert "in the timed loop" in caught.reason.lower()
    assert_has_no_time(caught)
    assert found["eager"].status is Status.OK


@pytest.mark.parametrize("count", [4, 5])
def test_a_verdict_of_the_timed_loop_is_final(count: int) -> None:
    """A remembered answer is right for one of the variants; that must not replace what was found for the other."""
    rule = dataclasses.replace(SHORT, min_rounds=count, max_rounds=count)
    record = rows(small_case(mode=Mode.FORWARD), [mine.stale], settings(rule=rule))["stale"]
    assert record.status is Status.INCORRECT
    assert not record.tensor_checks[0].ok
    assert record.error_ratio is not None
    assert record.error_ratio > 1


def test_a_promised_gradient_that_is_missing_is_incorrect() -> None:
    record = rows(small_case(), [mine.forgetful])["forgetful"]
    assert record.status is Status.INCORRECT
    assert record.reason == "w_gate: missing: no gradient came back; w_up: missing: no gradient came back."
    assert_has_no_time(record)


def test_results_of_one_contender_do_not_pass_for_another_s() -> None:
    """Memory is poisoned before each contender, so what it does not write is not the last one's right answer."""
    told: list[str] = []

    class Watched(judge.Judge):
        def poison(self) -> None:
            told.append("poison")

        def judge(self, *arguments: Any) -> Any:
            told.append("judge")
            return super().judge(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        make = runner.make_judge
        patch.setattr(runner, "make_judge", lambda *given: Watched(**vars(make(*given))))
        rows(small_case(), [pytorch.eager, mine.mine], settings(Task.VERIFY))
    assert told == ["poison", *["poison", "judge"] * 2 * VARIANTS] * 2


def test_a_lost_device_ends_the_run_and_the_mark_names_the_culprit(monkeypatch: pytest.MonkeyPatch) -> None:
    """No later row of this process could be believed; `isolation.py` ends the process."""

    def dead(self: CpuClock) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    marks: list[str] = []
    session = runner.Session(settings(), THIS, marks.append)
    monkeypatch.setattr(CpuClock, "synchronize", dead)
    with pytest.raises(DeviceLost, match="no such tile"):
        list(session.run_case(small_case(), [mine.unbuilt, pytorch.eager], lambda doing, fraction: None))
    assert marks == ["unbuilt"]


def test_the_mark_follows_whose_code_runs() -> None:
    marks: list[str] = []
    session = runner.Session(settings(), THIS, marks.append)
    list(session.run_case(small_case(), [mine.unbuilt, pytorch.eager, mine.mine], lambda doing, fraction: None))
    assert marks[:6] == ["unbuilt", "", "eager", "", "mine", ""]
    assert {*marks[6:-1]} == {"eager", "mine", ""}, "the bare products are the suite's own"
    assert marks[-1] == ""


# Skipped, with the reason


def test_what_cannot_run_here_is_skipped_with_the_reason() -> None:
    found = rows(small_case(), [liger.liger, mine.foreign, pytorch.eager])
    assert found["liger"].status is Status.SKIPPED
    assert "Triton" in found["liger"].reason
    assert found["foreign"].reason == "The package surely_not_installed.part is not installed."
    assert found["eager"].status is Status.OK
    assert_has_no_time(found["liger"])


def test_a_scope_that_it_has_not_is_skipped() -> None:
    record = rows(small_case(scope=Scope.ACTIVATION), [pytorch.eager_packed])["eager-packed"]
    assert (record.status, record.reason) == (Status.SKIPPED, "It has no activation scope; it has glu, mlp.")


@pytest.mark.parametrize(
    ("mode", "status"), [(Mode.FORWARD, Status.OK), (Mode.BACKWARD, Status.SKIPPED), (Mode.STEP, Status.SKIPPED)]
)
def test_what_has_no_backward_is_timed_forward_only(mode: Mode, status: Status) -> None:
    record = rows(small_case(mode=mode), [mine.inference])["inference"]
    assert record.status is status
    assert record.reason == ("" if status is Status.OK else "It has no backward.")


def test_a_case_larger_than_the_device_is_skipped_with_the_bytes_and_the_sweep_goes_on() -> None:
    huge = small_case(shape=Shape("huge", 2**20, 2**20, "made up", (1,)), tokens=1)
    found = list(run([huge, small_case()], [pytorch.eager, mine.mine], settings(), THIS))
    assert [(record.shape, record.status) for record in found] == [
        ("huge", Status.SKIPPED), ("huge", Status.SKIPPED), ("small", Status.OK), ("small", Status.OK),
    ]  # fmt: skip
    assert found[0].reason.startswith("It needs about ")
    needed = float(found[0].reason.split("about ")[1].split(" GiB")[0].replace(",", ""))
    assert needed > 2 * 2**40 * 12 / 2**30
    assert "GiB free" in found[0].reason


@pytest.mark.parametrize("task", list(Task))
def test_every_task_looks_at_the_memory_first(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_memory_bytes", lambda device: 10)
    assert rows(small_case(), [pytorch.eager], settings(task))["eager"].status is Status.SKIPPED


def test_a_case_that_cannot_fit_the_budget_is_skipped_with_that_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings_cache, "ceilings", lambda *_: Ceilings(copy_gbps=1e-9, matmul_tflops=1e-9))
    record = rows(small_case(), [pytorch.eager])["eager"]
    assert record.status is Status.SKIPPED
    assert record.reason.startswith("Its fewest rounds would take about ")
    assert record.reason.endswith("more than the budget of 60 s.")
    assert_has_no_time(record)


def test_the_budget_matters_for_timing_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings_cache, "ceilings", lambda *_: pytest.fail("no timing, no ceilings"))
    for task in (Task.VERIFY, Task.MEMORY):
        assert rows(small_case(), [pytorch.eager], settings(task, rule=Rule(budget_s=0.0)))["eager"].status is Status.OK


def test_no_room_for_inputs_and_truth_is_skipped_and_the_sweep_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    real = runner.make_problem

    def full(case: Case, device: torch.device) -> Any:
        if case.tokens == 3:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 9 GiB")
        return real(case, device)

    monkeypatch.setattr(runner, "make_problem", full)
    found = rows([small_case(tokens=3), small_case(tokens=4)], [pytorch.eager])
    assert found["eager 3"].status is Status.SKIPPED
    assert "Tried to allocate 9 GiB" in found["eager 3"].reason
    assert "\n" not in found["eager 3"].reason
    assert found["eager 4"].status is Status.OK


# Comparison


@pytest.mark.parametrize("mode", [Mode.BACKWARD, Mode.STEP])
def test_fewer_gradients_are_never_put_in_a_ratio(mode: Mode) -> None:
    found = rows(small_case(mode=mode), [pytorch.eager, mine.frozen])
    frozen = found["frozen"]
    assert (frozen.status, frozen.comparable, frozen.gradients) == (Status.OK, False, "x")
    assert frozen.ratio is frozen.ratio_low is frozen.ratio_high is None
    assert frozen.time_ms is not None
    assert frozen.flops is not None
    assert found["eager"].flops is not None
    assert frozen.flops < found["eager"].flops


def test_a_forward_is_a_forward_whatever_is_trained() -> None:
    frozen = rows(small_case(mode=Mode.FORWARD), [pytorch.eager, mine.frozen])["frozen"]
    assert frozen.comparable
    assert frozen.ratio is not None


@pytest.mark.parametrize("baseline", ["nobody", "swapped", "unbuilt", "liger", ""])
def test_without_a_sound_baseline_there_is_no_ratio(baseline: str) -> None:
    found = rows(small_case(), [pytorch.eager, mine.swapped, mine.unbuilt, liger.liger], settings(baseline=baseline))
    assert (found["eager"].status, found["eager"].baseline, found["eager"].ratio) == (Status.OK, "", None)


@pytest.mark.parametrize("bad", [mine.stale, mine.fragile], ids=lambda one: one.name)
def test_a_baseline_that_fails_in_the_timed_loop_is_none(bad: Implementation) -> None:
    found = rows(small_case(mode=Mode.FORWARD), [bad, pytorch.eager], settings(baseline=bad.name))
    assert found[bad.name].status is not Status.OK
    assert (found["eager"].status, found["eager"].baseline, found["eager"].ratio) == (Status.OK, "", None)


# A clock that can be trusted, and one that cannot


class SteadyClock(CpuClock):
    """Every call takes the same time."""

    ms = 1.0

    def sample(self, call: Callable[[], Any], lead_us: float) -> Sample:
        return Sample(self.ms, 10.0, True, call())


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> SteadyClock:
    clock = SteadyClock()
    monkeypatch.setattr(runner, "make_clock", lambda device, cold_l2: clock)
    return clock


def h200() -> machine.Machine:
    return machine.Machine(**(THIS.as_dict() | {"device": "NVIDIA H200"}))


@pytest.mark.parametrize("scope", [Scope.ACTIVATION, Scope.GLU])
def test_rates_above_the_datasheet_are_rejected(steady: SteadyClock, scope: Scope) -> None:
    steady.ms = 1e-9
    record = rows(small_case(scope=scope), [pytorch.eager], this=h200())["eager"]
    assert record.status is Status.ERROR
    assert "above the datasheet's 494 and 4800: the timing is wrong." in record.reason
    assert_has_no_time(record)


def test_rates_below_the_datasheet_are_not(steady: SteadyClock) -> None:
    record = rows(small_case(), [pytorch.eager], this=h200())["eager"]
    assert (record.status, record.time_ms, record.ratio) == (Status.OK, 1.0, 1.0)


def test_each_dtype_has_its_own_datasheet_rate(steady: SteadyClock) -> None:
    """700 TFLOP/s are possible in bf16 on an H200, not in fp32."""
    wide = Shape("wide", 512, 512, "made up", (1,))
    found = {}
    for dtype in (Dtype.FLOAT32, Dtype.BFLOAT16):
        case = small_case(shape=wide, tokens=512, dtype=dtype, mode=Mode.FORWARD)
        steady.ms = 2 * 512**3 * 2 / 700e12 * 1e3
        found[dtype] = rows(case, [pytorch.eager], this=h200(), how=settings(cold_l2=True))["eager"]
    assert found[Dtype.FLOAT32].status is Status.ERROR
    assert found[Dtype.BFLOAT16].status is Status.OK


def test_an_unknown_device_has_no_datasheet(steady: SteadyClock) -> None:
    steady.ms = 1e-9
    assert rows(small_case(), [pytorch.eager])["eager"].status is Status.OK


# Memory and verify


@pytest.mark.parametrize("scope", list(Scope))
def test_memory_is_measured_beside_its_prediction(scope: Scope) -> None:
    record = rows(small_case(scope=scope), [pytorch.eager], settings(Task.MEMORY))["eager"]
    assert record.status is Status.OK
    assert (record.saved_bytes, record.peak_bytes, record.workspace_bytes) == (
        record.predicted_saved_bytes, record.predicted_peak_bytes, record.predicted_workspace_bytes,
    )  # fmt: skip
    assert record.peak_bytes is not None
    assert record.peak_bytes > 0
    assert_has_no_time(record)


def test_what_declares_no_footprint_has_no_prediction() -> None:
    record = rows(small_case(), [mine.mine], settings(Task.MEMORY))["mine"]
    assert record.saved_bytes is not None
    assert record.predicted_saved_bytes is record.predicted_peak_bytes is record.predicted_workspace_bytes is None


def test_a_wrong_implementation_has_no_memory_figures() -> None:
    record = rows(small_case(), [mine.swapped], settings(Task.MEMORY))["swapped"]
    assert record.status is Status.INCORRECT
    assert record.saved_bytes is record.peak_bytes is None


def test_memory_of_one_that_has_no_backward() -> None:
    record = rows(small_case(), [mine.inference], settings(Task.MEMORY))["inference"]
    assert record.status is Status.OK
    assert record.peak_bytes is not None


def test_verify_checks_the_output_both_ways_and_every_gradient() -> None:
    record = rows(small_case(scope=Scope.MLP), [pytorch.eager], settings(Task.VERIFY))["eager"]
    assert record.status is Status.OK
    assert [check.tensor for check in record.tensor_checks] == [
        "output (inference)", "output", *tensors(Scope.MLP),
    ]  # fmt: skip
    assert_has_no_time(record)


def test_verify_finds_a_forward_that_is_wrong_without_autograd_only() -> None:
    def build(problem: Any) -> Any:
        return mine.Step(lambda x: mine.glu(x, problem) * (1 if torch.is_grad_enabled() else 1.01))

    careless = mine.implementation("careless", scopes=["glu"], description="d")(build)
    record = rows(small_case(), [careless], settings(Task.VERIFY))["careless"]
    assert record.status is Status.INCORRECT
    assert record.reason.startswith("output (inference): relative error 1.00e-02")
    assert [check.ok for check in record.tensor_checks] == [False, True, True, True, True]


def test_verify_marks_what_the_interpreter_ran() -> None:
    """The kernels run for real where the tests run them through the interpreter."""
    from swiglu_kernels import backend_for

    if backend_for(CPU) != "interpreter":
        pytest.skip("Triton's interpreter is not in use: there is a GPU, or no Triton")
    found = rows(small_case(), [pytorch.eager, fused.ROWS["fused-dw-triton"]], settings(Task.VERIFY, interpreter=True))
    assert (found["fused-dw-triton"].status, found["fused-dw-triton"].interpreted) == (Status.OK, True)
    assert not found["eager"].interpreted


# One row at a time


def test_rows_come_as_soon_as_they_are_known() -> None:
    told: list[Progress] = []
    stream: Iterator[Record] = run(
        [small_case(tokens=n) for n in (1, 2, 3)], [pytorch.eager], settings(), THIS, told.append
    )
    assert not told, "nothing is done before a row is asked for"
    assert next(stream).tokens == 1
    assert {progress.case_number for progress in told} == {0}
    assert next(stream).tokens == 2
    assert {progress.case_number for progress in told} == {0, 1}


def test_an_interruption_ends_the_run_after_the_rows_so_far() -> None:
    def interrupt(progress: Progress) -> None:
        if progress.case_number == 1 and progress.doing.startswith("timing"):
            raise KeyboardInterrupt

    stream, kept = run([small_case(tokens=n) for n in (1, 2, 3)], [pytorch.eager], settings(), THIS, interrupt), []
    with pytest.raises(KeyboardInterrupt):
        kept.extend(record.tokens for record in stream)
    assert kept == [1]


def test_progress_goes_forward_and_names_what_runs() -> None:
    told: list[Progress] = []
    cases = [small_case(tokens=n) for n in (1, 2)]
    rows(cases, [pytorch.eager, mine.mine], listen=told.append)
    positions = [progress.case_number + progress.fraction for progress in told]
    assert positions == sorted(positions)
    assert all(0 <= progress.fraction <= 1 and progress.case_count == 2 for progress in told)
    assert [progress.case for progress in told if progress.doing == "preparing"] == cases
    doing = [progress.doing for progress in told if progress.case_number == 0]
    assert doing[:3] == ["preparing", "checking eager", "checking mine"]
    assert doing[3:] == [f"timing, round {number}" for number in (1, 2, 3, 4)]


def test_nothing_of_a_case_is_left_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_tidy", TIDY)
    alive: list[int] = []

    def count(progress: Progress) -> None:
        if progress.doing == "preparing":
            alive.append(sum(one.numel() > 1000 for one in gc.get_objects() if type(one) is torch.Tensor))

    rows([small_case(tokens=n) for n in (50, 50, 50, 50)], [pytorch.eager, pytorch.eager_packed], listen=count)
    assert alive[1] == alive[2] == alive[3]


def test_no_figure_is_nan() -> None:
    everyone = [pytorch.eager, mine.swapped, mine.unbuilt, mine.forgetful, mine.frozen, liger.liger]
    for record in rows(small_case(), everyone).values():
        for name, value in record.row().items():
            assert not (isinstance(value, float) and math.isnan(value)), (record.implementation, name)
