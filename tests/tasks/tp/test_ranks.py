"""Two ranks on a CPU, asked as a run asks them."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from from_files import from_file
from split_implementations import dies, fails, fails_alone, forgets, hangs, later, no_weights, spoils, unbiased, wrong

from swiglu_bench.cases.cases import Case, Dtype, Experts, Extras, Mode, Scope, Shape
from swiglu_bench.contenders import experts, pytorch
from swiglu_bench.rows.record import Record, Status
from swiglu_bench.rows.samples import PARTS
from swiglu_bench.tasks.tp import case as way_of_a_case
from swiglu_bench.tasks.tp.case import blanks, run_case
from swiglu_bench.tasks.tp.contenders import async_tp
from swiglu_bench.tasks.tp.figures import key
from swiglu_bench.tasks.tp.place import RankPlace, merged
from swiglu_bench.tasks.tp.plan import ASYNC, Plan
from swiglu_bench.tasks.tp.ranks import GroupLost, Spawned
from swiglu_bench.worker import forkserver
from swiglu_bench.worker.admission import Drawn
from swiglu_bench.worker.child import ContenderFailed
from swiglu_bench.worker.reports import CallReport, FaultReport, SampleReport
from swiglu_bench.worker.settings import Settings, Task

pytestmark = [
    pytest.mark.timed,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed"),
]
SHAPE = Shape("16x32", 16, 32, "for tests", (8,))
CASE = Case(SHAPE, 8, Dtype.FLOAT32, Scope.MLP, Mode.STEP)
SETTINGS = Settings(Task.TIME, torch.device("cpu"), "c", "r")
TIMEOUT_S = 60.0
EVERYBODY = (
    pytorch.eager, pytorch.eager_packed, async_tp, experts.grouped,
    *(from_file(one) for one in (dies, fails, fails_alone, forgets, hangs, later, no_weights, spoils, unbiased, wrong)),
)  # fmt: skip


def place_of(size: int, logs: Path, timeout_s: float = TIMEOUT_S) -> RankPlace:
    forkserver.start("swiglu_bench.tasks.tp.bench", "torch.distributed.tensor.parallel", "torch._dynamo")
    return RankPlace(Spawned(size, SETTINGS, [one.declared() for one in EVERYBODY], timeout_s, logs), SETTINGS)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPlace]:
    place = place_of(2, tmp_path_factory.mktemp("logs"))
    yield place
    place.ranks.end()


def rows(place: RankPlace, *names: str, case: Case = CASE, ways: tuple[bool, ...] = (False,)) -> dict[str, Record]:
    """The rows of a case; with several ways of splitting, by both."""
    wanted = tuple(one for one in EVERYBODY if one.name in names)
    assert len(wanted) == len(names)
    plan = Plan("r", (case,), wanted, ways, 0.1, TIMEOUT_S)
    found = blanks(plan, case, place.machines, place.ranks.size)
    run_case(place, plan, case, found, lambda doing, share: None)
    return {name if len(ways) == 1 else f"{name} {way}": row for (name, way), row in found.items()}


@pytest.fixture(autouse=True)
def _few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = way_of_a_case.Rule(warmup_rounds=1, min_rounds=4, max_rounds=4)
    monkeypatch.setattr(way_of_a_case, "default_rule", lambda budget_s: rule)


@pytest.mark.parametrize("mode", [Mode.FORWARD, Mode.STEP])
def test_what_is_right_is_timed_and_taken_apart(two: RankPlace, mode: Mode) -> None:
    case = Case(SHAPE, 8, Dtype.FLOAT32, Scope.MLP, mode)
    found = rows(two, "eager", "eager-packed", case=case, ways=(False, True))
    for name, row in found.items():
        assert row.status is Status.OK, f"{name}: {row.reason}"
        for figure in ("time_ms", "compute_ms", "comm_ms", "single_ms", "efficiency", "bus_gbps", "bus_ceiling_gbps"):
            assert getattr(row, figure) > 0, figure
        assert row.rounds == 4
        assert row.error_ratio is not None
        assert row.error_ratio <= 1
        assert row.peak_bytes
        assert row.ratio is not None
        assert {name: len(times) for name, times in row.series.items()} == dict.fromkeys(PARTS, 4)
        assert (len(row.samples_ms), len(row.twin_ms)) == (4, 4 if name.startswith("eager ") else 0)


def test_what_is_wrong_costs_its_own_row_and_says_on_which_rank(two: RankPlace) -> None:
    found = rows(two, "eager", ASYNC, "fails", "forgets", "later", "no-weights", "spoils", "wrong")
    assert {name for name, row in found.items() if row.time_ms is not None} == {"eager"}
    assert found["fails"].status is Status.ERROR
    assert found["fails"].reason == "ValueError: no such luck."
    incorrect = {"forgets": "w_gate: on rank 0 missing", "later": "in the timed loop", "spoils": "w_up"}
    incorrect["wrong"] = "w_down: on rank 1"
    for name, fact in incorrect.items():
        assert found[name].status is Status.INCORRECT
        assert fact in found[name].reason
    assert found["no-weights"].status is found[ASYNC].status is Status.SKIPPED
    assert "no weight gradients" in found["no-weights"].reason


@pytest.mark.parametrize("mode", [Mode.FORWARD, Mode.STEP])
def test_experts_with_biases_limit_and_alpha(two: RankPlace, mode: Mode) -> None:
    extras = Extras(bias=True, limit=1.0, alpha=1.702, interleaved=True)
    shape = replace(SHAPE, experts=Experts(4, 2), extras=extras)
    case = Case(shape, 8, Dtype.FLOAT32, Scope.EXPERTS, mode)
    found = rows(two, "eager", "grouped", "unbiased", case=case, ways=(True,))
    for name in ("eager", "grouped"):
        assert found[name].status is Status.OK, f"{name}: {found[name].reason}"
        assert found[name].time_ms
        assert found[name].single_ms, found[name].single_reason
    assert found["unbiased"].status is Status.INCORRECT
    assert "output: on rank" in found["unbiased"].reason


def test_every_round_has_other_inputs(two: RankPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    outcomes = two.ranks.outcomes

    def note(method: str, arguments: tuple[object, ...]) -> dict[int, object]:
        if arguments[1:2] == ("sample",):
            asked.append((arguments[0], arguments[2].seed))  # type: ignore[attr-defined]
        return outcomes(method, arguments)

    monkeypatch.setattr(two.ranks, "outcomes", note)
    rows(two, "eager", "eager-packed")
    seeds = {name: [seed for one, seed in asked if one == name] for name, _ in asked}
    assert all(len(set(own)) == len(own) > 4 for own in seeds.values())
    assert len(set(seeds[key("eager", False)]) & set(seeds[key("eager-packed", False)])) > 3


def test_the_ranks_stay_together_where_all_fail_alike(two: RankPlace) -> None:
    two.own("begin_case", CASE, Drawn.new())
    contender = two.seat(EVERYBODY[0], False)
    with pytest.raises(ContenderFailed, match=r"^KeyError"):
        contender.tell("conduct")
    two.own("end_case")


@pytest.mark.parametrize(
    ("name", "timeout_s", "facts"),
    [
        ("dies", TIMEOUT_S, ("rank 1", "exit status 3")),
        ("hangs", 3.0, ("rank 1", "longer than 3 s")),
        ("fails-alone", 3.0, ("rank 1: ValueError: no such luck",)),
    ],
)
def test_a_rank_that_is_lost_names_itself(name: str, timeout_s: float, facts: tuple[str, ...], tmp_path: Path) -> None:
    place = place_of(2, tmp_path, timeout_s)
    try:
        with pytest.raises(GroupLost) as lost:
            rows(place, "eager", name, case=Case(SHAPE, 8, Dtype.FLOAT32, Scope.MLP, Mode.FORWARD))
    finally:
        place.ranks.end()
    assert place.whose == name
    for fact in facts:
        assert fact in str(lost.value)


def test_one_rank_needs_no_collectives(tmp_path: Path) -> None:
    place = place_of(1, tmp_path)
    try:
        (row,) = rows(place, "eager", ways=(True,)).values()
    finally:
        place.ranks.end()
    assert row.status is Status.OK, row.reason
    assert row.single_ms
    assert row.comm_ms is None


def test_a_time_is_the_slowest_rank_s_and_a_fault_names_its_rank() -> None:
    quick = SampleReport(ms=1, host_us=9, queue_us=9, queue_filled=True, delivered=["output", "x"], faults={})
    fault = FaultReport(check="form", reason="has another shape")
    slow = SampleReport(ms=3, host_us=5, queue_us=5, queue_filled=False, delivered=["output"], faults={"x": fault})
    both = merged([quick, slow])
    assert (both.ms, both.host_us, both.queue_filled, both.delivered) == (3, 9, False, ["output"])
    assert both.faults["x"].reason == "on rank 1 has another shape"
    calls = [CallReport(delivered=[], faults={}, conduct=conduct) for conduct in ({}, {"kept": "was changed"})]
    assert merged(calls).conduct == {"kept": "on rank 1 was changed"}
