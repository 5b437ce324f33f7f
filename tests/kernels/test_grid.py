"""kernels/benchmarks/grid.py on a CPU, where PyTorch's own operations take the place of the kernels."""

import dataclasses
import importlib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from swiglu_bench.spec.cases import Shape
from swiglu_bench.spec.shapes import load_shapes
from swiglu_kernels.operations import glu, mlp

FOLDER = Path(__file__).parents[2] / "kernels" / "benchmarks"


@pytest.fixture
def grid(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("grid")


def test_the_cases_are_those_of_the_seed(grid: ModuleType) -> None:
    models = load_shapes(grid.MODELS)
    drawn = grid.draw(models, 200, 16384, 0)
    assert drawn == grid.draw(models, 200, 16384, 0) != grid.draw(models, 200, 16384, 1)
    assert len(models) == len({(one.hidden, one.intermediate) for one in models}) == 10
    assert len(drawn) == 20
    assert {len(tokens) for tokens in drawn.values()} == {10}
    for layer in list(drawn)[10:]:
        assert all(size % 16 == 8 for size in layer)
    tokens = [one for some in drawn.values() for one in some]
    assert 1 <= min(tokens) < 16 < 4096 < max(tokens) <= 16384


def test_a_run_is_kept_and_goes_on(
    grid: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in (glu, mlp):
        monkeypatch.setattr(module, "backend_for", lambda _: "torch")
    measured = []
    real = grid.measure
    monkeypatch.setattr(grid, "measure", lambda like, *rest: measured.append(like.case) or real(like, *rest))
    file = tmp_path / "grid.csv"
    tiny = ["--shapes", "16x24", "--cases", "2", "--most-tokens", "5", "--dtype", "fp32"]
    common = ["--csv", str(file), "--budget", "0.01", "--against", "eager", *tiny]
    grid.main([*common, "--seconds", "0"])
    assert not measured
    assert "the same command goes on" in capsys.readouterr().out
    grid.main([*common, "--part", "2/2"])
    assert len(measured) == 3
    grid.main(common)
    assert len(measured) == len(set(measured)) == 6
    rows = grid.read([file])
    assert len(rows) == 12
    assert {row.clock for row in rows} == {grid.DEVICE, grid.CALLER}
    for row in rows:
        assert row.verdict, row.note
        assert row.low <= row.ratio <= row.high
        assert row.calls == (1 if row.clock == grid.DEVICE else row.calls)
        assert row.calls <= grid.CALLS
    assert "the ten highest ratios" in capsys.readouterr().out
    pytest.importorskip("altair")
    grid.main(["--csv", str(file), "--picture", str(tmp_path / "grid")])
    assert len(measured) == 6
    assert (tmp_path / "grid.png").stat().st_size > 0


def test_wrong_results_have_no_time(grid: ModuleType) -> None:
    from swiglu_bench.check.inputs import make_problem
    from swiglu_bench.implementations import pytorch
    from swiglu_bench.spec.cases import Case, Dtype, Mode, Scope
    from swiglu_bench.spec.implementation import Step

    problem = make_problem(Case(Shape("a", 16, 24, "", ()), 4, Dtype.FLOAT32, Scope.GLU, Mode.FORWARD), "cpu", seed=1)
    wrong = dataclasses.replace(pytorch.eager, build=lambda problem: Step(lambda x: x @ problem.weights["w_up"].T))
    chosen = {grid.OURS: pytorch.eager, grid.AGAIN: pytorch.eager, "wrong": wrong}
    like = grid.Row(16, 24, 4, "forward", "", "")
    rows = grid.measure(like, chosen, problem, grid.make_clock(problem.device), grid.Rule(budget_s=0.01, min_s=0.0))
    assert [row.verdict for row in rows] == ["", ""]
    assert all("output: relative error" in row.note for row in rows)
    assert "no ratio to wrong, forward: output: relative error" in grid.summary(rows)


def test_slower_than_any_is_slower(grid: ModuleType) -> None:
    row = grid.Row(16, 24, 4, "forward", grid.DEVICE, "eager", ours_ms=1.0, theirs_ms=1.0)
    rows = [
        dataclasses.replace(row, against=name, ratio=ratio, low=low, high=1.3, verdict=verdict)
        for name, ratio, low, verdict in (("eager", 1.1, 1.05, "slower"), ("liger", 1.2, 0.9, "tie"))
    ]
    (worst,) = grid.hardest(rows)
    assert (worst.against, worst.verdict) == ("liger", "slower")


def test_rounds_end_when_every_verdict_is_clear(grid: ModuleType) -> None:
    from swiglu_bench.measure.clock import Sample
    from swiglu_bench.measure.rounds import Rounds, Timing

    def of(times: list[float]) -> Timing:
        return Timing([Sample(ms, 0.0, 0.0, True, None) for ms in times])

    ours, again = [1.0, 1.01] * 10, [1.01, 1.0] * 10
    assert grid.settled(Rounds({grid.OURS: of(ours), grid.AGAIN: of(again), "eager": of([1.2] * 20)}, ""))
    assert grid.settled(Rounds({grid.OURS: of(ours), grid.AGAIN: of(again), "eager": of([0.9] * 20)}, ""))
    assert grid.settled(Rounds({grid.OURS: of(ours), grid.AGAIN: of(again), "eager": of(ours)}, ""))
    near = {grid.OURS: of(ours), grid.AGAIN: of(again), "eager": of([1.2] * 20), "liger": of([0.97, 1.05] * 10)}
    assert not grid.settled(Rounds(near, ""))


def test_where_the_host_does_not_show_no_caller_is_asked(grid: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    row = grid.Row(16, 24, 4, "forward", grid.DEVICE, "eager", ours_ms=2 * grid.HOST_HIDDEN_MS, verdict="tie")
    monkeypatch.setattr(grid, "rows_of", lambda like, *_: [dataclasses.replace(row, clock=like.clock)])
    monkeypatch.setattr(grid, "built", lambda *_: ({}, {}))
    problem = SimpleNamespace(case=SimpleNamespace(mode=None))
    assert [one.clock for one in grid.measure(row, {}, problem, None, grid.Rule())] == [grid.DEVICE]
    row.ours_ms = grid.HOST_HIDDEN_MS / 2
    assert [one.clock for one in grid.measure(row, {}, problem, grid.make_clock(torch.device("cpu")), grid.Rule())] == [
        grid.DEVICE,
        grid.CALLER,
    ]


def test_a_part_that_is_none_is_refused(grid: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        grid.main(["--csv", "x.csv", "--part", "3/2"])
    assert ended.value.code == 2
    assert "--part: expected I/N" in capsys.readouterr().err
