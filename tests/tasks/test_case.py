"""Runs in this process: from cases and implementations to rows."""

import dataclasses
import gc
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import user_implementations as mine
from courts import run_here
from specimens import small_case

from swiglu_bench.cases.cases import Case, Dtype, Extras, Mode, Scope, Shape, tensors
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.contenders import peers, pytorch
from swiglu_bench.loop import Progress
from swiglu_bench.machine import ceilings_cache, machine
from swiglu_bench.machine.ceilings_cache import Ceilings
from swiglu_bench.measure.clock import DeviceLost
from swiglu_bench.measure.rounds import Rule
from swiglu_bench.rows.record import Record, Status
from swiglu_bench.worker import court, judge_bench, policy, workbench
from swiglu_bench.worker.chains import Chains
from swiglu_bench.worker.policy import Settings, Task

CPU = torch.device("cpu")
THIS = machine.describe(CPU)
SHORT = Rule(warmup_rounds=1, min_rounds=4, max_rounds=4, min_s=0.0, budget_s=60.0)
NO_TIME = ("time_ms", "time_p10_ms", "time_p90_ms", "ratio", "ratio_low", "ratio_high", "tflops", "gbps")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ceilings take long, as does collecting garbage; chains need processes that are alone."""
    monkeypatch.setattr(ceilings_cache, "ceilings", lambda *_: Ceilings(10.0, 0.1, "2026-01-01T00:00:00Z"))
    monkeypatch.setattr(Chains, "disagreements", lambda *_: {})


def settings(task: Task = Task.TIME, **changes: Any) -> Settings:
    return Settings(**({"task": task, "device": CPU, "command": "c", "run_id": "r", "rule": SHORT} | changes))


def rows(
    cases: Case | Sequence[Case], implementations: Sequence[Implementation], how: Settings | None = None,
    this: machine.Machine = THIS, listen: Callable[[Progress], None] = lambda progress: None,
) -> dict[str, Record]:  # fmt: skip
    """The rows of a run of one case, by implementation; of several, by tokens as well."""
    listed = [cases] if isinstance(cases, Case) else list(cases)
    found = list(run_here(listed, implementations, how or settings(), this, listen))
    name = "{0.implementation}" if len(listed) == 1 else "{0.implementation} {0.tokens}"
    by_name = {name.format(record): record for record in found}
    assert len(by_name) == len(found)
    return by_name


def assert_has_no_time(record: Record) -> None:
    assert {name: getattr(record, name) for name in NO_TIME} == dict.fromkeys(NO_TIME)
    assert record.samples_ms == ()


# Rows that are right


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("scope", list(Scope))
def test_eager_gives_a_complete_row(scope: Scope, mode: Mode) -> None:
    record = rows(small_case(scope=scope, mode=mode, dtype=Dtype.BFLOAT16), [pytorch.eager])["eager"]
    assert (record.status, record.reason) == (Status.OK, "")
    assert (record.dtype, record.scope, record.mode, record.tokens) == ("bfloat16", scope, mode, 7)
    assert record.gradients.split() == list(tensors(scope))
    assert (record.rounds, len(record.samples_ms), record.stopped_by) == (4, 4, "rounds")
    assert record.time_ms == pytest.approx(sum(sorted(record.samples_ms)[1:3]) / 2)
    assert record.time_p10_ms <= record.time_ms <= record.time_p90_ms  # type: ignore[operator]
    assert record.tflops == pytest.approx(record.flops / record.time_ms / 1e9)  # type: ignore[operator]
    assert record.gbps == pytest.approx(record.min_bytes / record.time_ms / 1e6)  # type: ignore[operator]
    assert not record.limit_ms or record.limit_pct == pytest.approx(100 * record.limit_ms / record.time_ms)
    ratios = ("", None, None, None) if scope is Scope.EXPERTS else ("eager", 1.0, 1.0, 1.0)  # grouped is not there
    assert (record.baseline, record.ratio, record.ratio_low, record.ratio_high) == ratios
    assert record.error_ratio <= 1  # type: ignore[operator]
    names = ["output"] if mode is Mode.FORWARD else ["output", *tensors(scope)]
    assert [check.tensor for check in record.tensor_checks] == names
    assert len(set(record.drawn.split())) == 3, "weights and two calls"
    assert record.first_call_ms
    assert record.sm_mhz is record.latency_us is record.graph_us is record.energy_j is None
    assert not any(isinstance(value, float) and math.isnan(value) for value in record.row().values())


# Contenders that deserve no time


def test_a_wrong_implementation_is_incorrect_and_has_no_time() -> None:
    found = rows(small_case(), [pytorch.eager, mine.swapped])
    wrong = found["swapped"]
    assert (wrong.status, found["eager"].status) == (Status.INCORRECT, Status.OK)
    assert {check.tensor for check in wrong.tensor_checks if not check.ok} == {"output", *tensors(Scope.GLU)}
    assert "w_gate: " in wrong.reason
    assert wrong.error_ratio is not None
    assert wrong.error_ratio > 1000
    assert_has_no_time(wrong)


def test_a_lost_device_ends_the_run_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workbench, "answers", lambda device: False)
    case = small_case(mode=Mode.FORWARD, shape=Shape("small", 64, 96, "made up", (7,)))
    broken = dataclasses.replace(mine.unbuilt, build=lambda problem: mine.Step(_fails_in_use(problem)))
    with pytest.raises(DeviceLost, match="worn out"):
        rows(case, [broken, pytorch.eager])


def _fails_in_use(problem: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        if problem.case.mode is Mode.STEP:
            raise RuntimeError("worn out")
        result: torch.Tensor = mine.glu(x, problem)
        return result

    return forward


# Skipped, with the reason


def test_what_cannot_run_here_is_skipped_with_the_reason() -> None:
    found = rows(small_case(), [peers.liger, mine.foreign, pytorch.eager])
    assert {name: record.status for name, record in found.items()} == {
        "liger": Status.SKIPPED, "foreign": Status.SKIPPED, "eager": Status.OK,
    }  # fmt: skip
    assert "Triton" in found["liger"].reason
    assert "surely_not_installed.part" in found["foreign"].reason
    assert_has_no_time(found["liger"])
    record = rows(small_case(scope=Scope.ACTIVATION), [pytorch.eager_packed])["eager-packed"]
    assert (record.status, "activation" in record.reason) == (Status.SKIPPED, True)


def test_a_case_larger_than_the_device_is_skipped_with_the_bytes_and_the_sweep_goes_on() -> None:
    huge = small_case(shape=Shape("huge", 2**20, 2**20, "made up", (1,)), tokens=1)
    found = list(run_here([huge, small_case()], [pytorch.eager, mine.mine], settings(), THIS))
    assert [(record.shape, record.status) for record in found] == [
        ("huge", Status.SKIPPED), ("huge", Status.SKIPPED), ("small", Status.OK), ("small", Status.OK),
    ]  # fmt: skip
    assert {record.stopped_by for record in found if record.shape == "huge"} == {"memory"}
    needed, free = (float(number) for number in re.findall(r"([\d.]+) GiB", found[0].reason))
    assert needed > 2 * 2**40 * 12 / 2**30 > free


def test_a_case_that_cannot_fit_the_budget_is_skipped_with_that_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings_cache, "ceilings", lambda *_: Ceilings(copy_gbps=1e-9, matmul_tflops=1e-9))
    record = rows(small_case(), [pytorch.eager])["eager"]
    assert (record.status, "budget of 60 s" in record.reason) == (Status.SKIPPED, True)
    assert (record.stopped_by, record.unknown) == ("budget", True)
    monkeypatch.setattr(ceilings_cache, "ceilings", lambda *_: pytest.fail("no timing, no ceilings"))
    for task in (Task.VERIFY, Task.MEMORY):
        assert rows(small_case(), [pytorch.eager], settings(task, rule=Rule(budget_s=0.0)))["eager"].status is Status.OK


@pytest.mark.parametrize("place", ["make_problem", "Judge.truth"])
def test_no_room_for_inputs_and_truth_is_skipped_and_the_sweep_goes_on(
    monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    owner = judge_bench if place == "make_problem" else judge_bench.Judge
    name = place.rpartition(".")[2]
    real = getattr(owner, name)

    def full(first: Any, *more: Any, **options: Any) -> Any:
        if (first if owner is judge_bench else first.problem.case).tokens == 3:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 9 GiB")
        return real(first, *more, **options)

    monkeypatch.setattr(owner, name, full)
    found = rows([small_case(tokens=3), small_case(tokens=4)], [pytorch.eager])
    assert (found["eager 3"].status, found["eager 4"].status) == (Status.SKIPPED, Status.OK)
    assert "Tried to allocate 9 GiB" in found["eager 3"].reason
    assert "\n" not in found["eager 3"].reason


# Comparison


@pytest.mark.parametrize("mode", list(Mode))
def test_fewer_gradients_are_never_put_in_a_ratio(mode: Mode) -> None:
    found = rows(small_case(mode=mode), [pytorch.eager, mine.frozen, pytorch.eager_packed])
    frozen, packed, same = found["frozen"], found["eager-packed"], mode is Mode.FORWARD
    assert (frozen.status, frozen.comparable, frozen.gradients) == (Status.OK, same, "x")
    assert frozen.time_ms is not None
    assert (frozen.ratio is not None) == (frozen.ratio_low is not None) == (frozen.ratio_high is not None) == same
    assert (packed.baseline, packed.weight_layout, packed.comparable) == ("eager", "packed", True)
    assert packed.ratio_low is not None
    assert packed.ratio is not None
    assert packed.ratio_high is not None
    assert packed.ratio_low <= packed.ratio <= packed.ratio_high


@pytest.mark.parametrize("baseline", ["nobody", "swapped", "unbuilt", "liger", "stale", "fragile", ""])
def test_without_a_sound_baseline_there_is_no_ratio(baseline: str) -> None:
    unsound = [mine.swapped, mine.unbuilt, peers.liger, mine.stale, mine.fragile]
    found = rows(small_case(mode=Mode.FORWARD), [pytorch.eager, *unsound], settings(baseline=baseline))
    assert (found["eager"].status, found["eager"].baseline, found["eager"].ratio) == (Status.OK, "", None)
    assert {name for name, record in found.items() if record.status is Status.OK} == {"eager"}


def test_where_not_all_fit_a_process_ends_whatever_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    class Noted(court.Contender):
        def ask(self, kind: Any, method: str, *arguments: Any) -> Any:
            told.append(f"{self.name} {method}")
            return super().ask(kind, method, *arguments)

        def end(self) -> None:
            told.append(f"{self.name} end")
            super().end()

    monkeypatch.setattr(court, "Contender", Noted)
    monkeypatch.setattr(policy, "seats", lambda *_, **__: 1)
    implementations = [pytorch.eager, mine.swapped, mine.unbuilt, pytorch.eager_packed]
    found = rows(small_case(mode=Mode.FORWARD), implementations)
    assert (found["swapped"].status, found["unbuilt"].status) == (Status.INCORRECT, Status.ERROR)
    before = told[: next(index for index, one in enumerate(told) if one.startswith("eager-packed "))]
    assert {"eager end", "swapped end", "unbuilt end"} <= set(before), "the others need the memory"


def test_a_row_of_experts_says_how_they_are_loaded_and_what_their_products_take() -> None:
    record = rows(small_case(scope=Scope.EXPERTS, tokens=3), [pytorch.eager])["eager"]
    assert (record.experts, record.top_k, record.routing) == (5, 2, "uniform")
    assert 0 <= record.expert_tokens_min <= record.expert_tokens_median <= record.expert_tokens_max <= 3  # type: ignore[operator]
    assert record.padding_share == pytest.approx(1 - 6 / (128 * (5 - record.idle_experts)))
    assert record.grouped_ms
    shape = dataclasses.replace(small_case(scope=Scope.EXPERTS).shape, extras=Extras(bias=True, limit=7.0, alpha=1.702))
    biased = rows(small_case(scope=Scope.EXPERTS, tokens=3, shape=shape), [pytorch.eager])["eager"]
    assert (biased.status, biased.reason) == (Status.OK, "")


# Memory and verify


def test_memory_of_others() -> None:
    found = rows(small_case(), [mine.mine, mine.swapped, mine.inference], settings(Task.MEMORY))
    assert found["mine"].saved_bytes is not None
    assert found["mine"].predicted_saved_bytes is found["mine"].predicted_peak_bytes is None, "it declares no footprint"
    assert (found["swapped"].status, found["swapped"].peak_bytes) == (Status.INCORRECT, None)
    assert found["inference"].status is Status.OK
    assert found["inference"].peak_bytes


def test_verify_finds_a_forward_that_is_wrong_without_autograd_only() -> None:
    def build(problem: Any) -> Any:
        return mine.Step(lambda x: mine.glu(x, problem) * (1 if torch.is_grad_enabled() else 1.01))

    careless = mine.implementation("careless", scopes=["glu"], description="d")(build)
    record = rows(small_case(), [careless], settings(Task.VERIFY))["careless"]
    assert record.status is Status.INCORRECT
    assert [one.tensor for one in record.tensor_checks if not one.ok] == ["output (inference)"]


# One row at a time


def test_nothing_of_a_case_is_left_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[int] = []

    def count(progress: Progress) -> None:
        if progress.doing == "preparing":
            alive.append(sum(one.numel() > 1000 for one in gc.get_objects() if type(one) is torch.Tensor))

    list(run_here([small_case(tokens=50)] * 3, [pytorch.eager, pytorch.eager_packed], settings(), THIS, count))
    assert alive[1] == alive[2]
