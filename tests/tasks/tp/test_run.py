"""Cases on two ranks of a CPU, as a command has them measured."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import split_implementations as bad
import torch
import torch.distributed as dist
from from_files import from_file
from torch.distributed.device_mesh import init_device_mesh

from swiglu_bench import loop
from swiglu_bench.cases.cases import Dtype, Experts, Extras, Mode, Scope, Shape
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.check.inputs import Draw, make_problem
from swiglu_bench.contenders import experts, fused, pytorch, split
from swiglu_bench.contenders.split import async_tp
from swiglu_bench.rows.record import Status
from swiglu_bench.rows.run_folder import PARTS
from swiglu_bench.tasks.tp import ASYNC, SplitCase, judge
from swiglu_bench.tasks.tp.court import merged
from swiglu_bench.tasks.tp.run import RankGroups, default_rule, tp
from swiglu_bench.worker import forkserver
from swiglu_bench.worker.places import Work
from swiglu_bench.worker.policy import Settings, Task
from swiglu_bench.worker.ranks import Group
from swiglu_bench.worker.worker import CallReport, FaultReport, SampleReport

pytestmark = [
    pytest.mark.timed,
    pytest.mark.skipif(not dist.is_available(), reason="PyTorch without torch.distributed"),
]
SHAPE = Shape("16x32", 16, 32, "for tests", (8,))
FORWARD, STEP = (SplitCase(SHAPE, 8, Dtype.FLOAT32, Scope.MLP, mode) for mode in (Mode.FORWARD, Mode.STEP))
SETTINGS = Settings(Task.TIME, torch.device("cpu"), "c", "r", rule=replace(default_rule(0.1), min_rounds=4, min_s=0.0))
WRONG = [
    from_file(contender) for contender in (bad.fails, bad.forgets, bad.later, bad.no_weights, bad.spoils, bad.wrong)
]


class Measured:
    """The rows of cases by implementation, mode and way, and what is said while ranks measure them."""

    def __init__(
        self, logs: Path, size: int, cases: tuple[SplitCase, ...], implementations: list[Implementation],
        ways: tuple[bool, ...] = (False,), timeout_s: float = 60.0,
    ) -> None:  # fmt: skip
        forkserver.start("swiglu_bench.tasks.tp.run", "torch.distributed.tensor.parallel", "torch._dynamo")
        work = Work(tp, [each.declared() for each in implementations], SETTINGS, timeout_s, logs)
        split = [replace(case, ranks=size, ways=ways) for case in cases]
        self.said, self.machines, self.pids = list[str](), list[Any](), dict[int, int]()
        places = RankGroups(SETTINGS.device, split, {}, self.said.append)

        def met(machines: Any) -> None:
            assert places._ranks
            self.machines, self.pids = machines, places._ranks.pids

        places.met = met
        places.assemble()
        rows = loop.rows(places, split, work, lambda progress: None, self.said.append)
        self.rows = {(row.implementation, row.mode, row.sequence_parallel): row for row in rows}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    logs, right = tmp_path_factory.mktemp("logs"), [pytorch.eager, pytorch.eager_packed]
    return Measured(logs, 2, (FORWARD, STEP), [*right, async_tp, *WRONG], (False, True))


@pytest.mark.parametrize("mode", ["forward", "step"])
def test_what_is_right_is_timed_and_taken_apart(two: Measured, mode: str) -> None:
    for (name, of, way), row in two.rows.items():
        if name not in ("eager", "eager-packed") or of != mode:
            continue
        assert row.status is Status.OK, f"{name}: {row.reason}"
        for figure in ("time_ms", "compute_ms", "comm_ms", "single_ms", "efficiency", "bus_gbps", "bus_ceiling_gbps"):
            assert getattr(row, figure) > 0, figure
        assert row.rounds
        assert row.error_ratio is not None
        assert row.error_ratio <= 1
        assert row.peak_bytes
        assert row.ratio is not None
        assert row.scope == ("mlp-tp2-sp" if way else "mlp-tp2")
        assert {part: len(times) for part, times in row.series.items()} == dict.fromkeys(PARTS, row.rounds)
        assert (len(row.samples_ms), len(row.twin_ms)) == (row.rounds, row.rounds if name == "eager" else 0)


def test_what_is_wrong_costs_its_own_row_and_says_on_which_rank(two: Measured) -> None:
    found = {name: row for (name, mode, way), row in two.rows.items() if mode == "step" and not way}
    assert {name for name, row in found.items() if row.time_ms is not None} == {"eager", "eager-packed"}
    assert found["fails"].status is Status.ERROR
    assert found["fails"].reason == "ValueError: no such luck."
    incorrect = {"forgets": "w_gate: on rank 0 missing", "later": "in the timed loop", "spoils": "w_up"}
    incorrect["wrong"] = "w_down: on rank 1"
    for name, fact in incorrect.items():
        assert found[name].status is Status.INCORRECT
        assert fact in found[name].reason
    assert found["no-weights"].status is found[ASYNC].status is Status.SKIPPED
    assert "no weight gradients" in found["no-weights"].reason


def test_the_parent_knows_its_ranks_which_have_ended(two: Measured) -> None:
    assert two.said == []
    assert sorted(two.pids) == [0, 1]
    assert os.getpid() not in two.pids.values()
    assert [machine["torch"] for machine in two.machines] == [torch.__version__] * 2
    for pid in two.pids.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_experts_with_biases_limit_and_alpha(tmp_path: Path) -> None:
    extras = Extras(bias=True, limit=1.0, alpha=1.702, interleaved=True)
    shape = replace(SHAPE, experts=Experts(4, 2), extras=extras)
    cases = tuple(SplitCase(shape, 8, Dtype.FLOAT32, Scope.EXPERTS, mode) for mode in (Mode.FORWARD, Mode.STEP))
    wrong = map(from_file, (bad.unbiased, bad.misrouted))
    found = Measured(tmp_path, 2, cases, [pytorch.eager, experts.grouped, *split.MEGATRON, *wrong], (True,)).rows
    found |= Measured(
        tmp_path, 2, cases[:1], [pytorch.eager, from_file(bad.product)], (True,)
    ).rows  # it is interpreted
    for mode in ("forward", "step"):
        for name in ("eager", "grouped", "fused-experts")[: 3 if mode == "forward" else 2]:
            row = found[name, mode, True]
            assert row.status is Status.OK, f"{name}: {row.reason}"
            assert row.time_ms
            assert row.single_ms, row.single_reason
            assert row.comm_bytes == (2 if mode == "forward" else 4) * 8 * 2 * 16 * 4, "of all-to-alls"
        for known, needs in zip(split.MEGATRON, ("support float32", "megatron is not installed"), strict=True):
            assert found[known.name, mode, True].status is Status.SKIPPED
            assert needs in found[known.name, mode, True].reason
        for name in ("unbiased", "misrouted"):
            assert found[name, mode, True].status is Status.INCORRECT
            assert "output: on rank" in found[name, mode, True].reason


@pytest.mark.parametrize(
    ("contender", "fact"),
    [(bad.hangs, "rank 1: it took longer than 4 s"), (bad.fails_alone, "rank 1: ValueError: no such luck")],
    ids=["hangs", "fails alone"],
)
def test_a_rank_that_is_lost_names_itself(contender: Implementation, fact: str, tmp_path: Path) -> None:
    found = Measured(tmp_path, 2, (FORWARD,), [pytorch.eager, from_file(contender)], timeout_s=4.0)
    lost, eager = found.rows[contender.name, "forward", False], found.rows["eager", "forward", False]
    assert lost.status is Status.ERROR
    assert fact in lost.reason
    assert [contender.name in line for line in found.said] == [True]
    assert eager.status is Status.OK, eager.reason


def test_one_rank_needs_no_collectives(tmp_path: Path) -> None:
    (row,) = Measured(tmp_path, 1, (STEP,), [pytorch.eager], (True,)).rows.values()
    assert row.status is Status.OK, row.reason
    assert row.single_ms
    assert row.comm_ms is None


@pytest.mark.parametrize(("name", "aside"), [("fused-mlp-auto", None), ("fused-mlp-chunked", "chunk_tokens")])
def test_swiglu_mlp_is_measured_as_split_modules_call_it(name, aside, monkeypatch: pytest.MonkeyPatch) -> None:
    from swiglu_kernels.nn.split import Split

    problem, seen = make_problem(STEP, "cpu"), []

    def mlp(self: Any, x: Any, run: Any, aside: Any) -> Any:
        seen.append((self.sequence_dim, aside))
        return run(x, lambda *operands, **options: (len(operands), options["save"]))

    monkeypatch.setattr(Split, "mlp", mlp)
    built = split.split(fused.ROWS[name], None, problem, True).build(problem)
    assert built.forward(torch.ones(2, 16)) == (4, fused.MLP[name]["save"])
    assert seen == [(0, aside)]


def test_a_sum_that_is_not_the_answer_is_no_yardstick(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, other = (make_problem(STEP, "cpu", seed=seed) for seed in (1, 2))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        alone = Group(0, 1, torch.device("cpu"), dist.new_group(backend="gloo"), init_device_mesh("cpu", (1,)))
        real = split.split
        monkeypatch.setattr(
            judge, "split", lambda known, mesh, whole, by_sequence: real(known, mesh, other, by_sequence)
        )
        with pytest.raises(judge.NoReference, match="output"):
            judge.SplitJudge(alone, problem, [Draw(3)])
    finally:
        dist.destroy_process_group()


def test_a_time_is_the_slowest_rank_s_and_a_fault_names_its_rank() -> None:
    quick = SampleReport(ms=1, host_us=9, queue_us=9, queue_filled=True, delivered=["output", "x"], faults={})
    fault = FaultReport(check="form", reason="has another shape")
    slow = SampleReport(ms=3, host_us=5, queue_us=5, queue_filled=False, delivered=["output"], faults={"x": fault})
    both = merged([quick, slow])
    assert (both.ms, both.host_us, both.queue_filled, both.delivered) == (3, 9, False, ["output"])
    assert both.faults["x"].reason == "on rank 1 has another shape"
    calls = [CallReport(delivered=[], faults={}, conduct=conduct) for conduct in ({}, {"kept": "was changed"})]
    assert merged(calls).conduct == {"kept": "on rank 1 was changed"}
