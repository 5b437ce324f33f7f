import csv
import dataclasses
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trained import BY_NAME, contender, images

from swiglu_bench.measure.rounds import Rule
from swiglu_bench.rows.record import Status
from swiglu_bench.rows.training import PERMUTED, RUNS, STEPS, SUMMARY_COLUMNS, Row, Summary
from swiglu_bench.spec.errors import BadInput
from swiglu_bench.train import paired, session
from swiglu_bench.train.blocks import Contender
from swiglu_bench.train.files import CHECKPOINTS, Folder
from swiglu_bench.train.loop import Training
from swiglu_bench.train.session import Results, TrainingSchedule, run, summaries

ABOUT: dict[str, Any] = {"command": "", "run_id": "1", "settings": {"steps": 6, "seeds": 1}, "machine": {"torch": "2"}}
RULE = Rule(warmup_rounds=1, min_rounds=3, max_rounds=4, min_s=0, budget_s=1)


@pytest.fixture(autouse=True)
def _short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paired, "TURN_S", 0.001)


def plan(path: Path, *contenders: Contender, timed: bool = False, **changes: Any) -> TrainingSchedule:
    those = contenders or (contender("eager"), Contender(PERMUTED, BY_NAME["eager"], True), contender("eager-packed"))
    return TrainingSchedule(images(path), those, [0, 1], RULE, lambda one: timed and not one.permuted, **changes)


def folder(path: Path, resume: bool = False, warn: Callable[[str], object] = print) -> Folder:
    return Folder(path, ABOUT, resume, warn)


def rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.open()))


def about(one: Contender) -> Summary:
    return Summary("1", "mnist", "mnist", one.name, one.implementation.trains, Status.OK)


def test_everything_is_trained_timed_judged_and_kept(tmp_path: Path) -> None:
    files, results = folder(tmp_path / "run"), Results()
    whole = plan(tmp_path, timed=True)
    run(whole, results, files, lambda row, doing: None)
    found = summaries(whole, results, about)
    files.summarise(found)
    files.close()
    assert [one.implementation for one in found] == ["eager", PERMUTED, "eager-packed"]
    eager, permuted, packed = found
    assert eager.curve == ""
    assert permuted.curve == "same"
    assert packed.curve in ("same", "within seeds")
    assert eager.final_loss == pytest.approx(packed.final_loss, rel=1e-3)
    assert permuted.step_ms is None
    assert packed.expected_ratio
    assert packed.as_expected is not None
    assert eager.rate == pytest.approx(16e3 / (eager.step_ms or 0))
    assert not any(one.failed for one in found)
    steps = rows(tmp_path / "run" / STEPS)
    assert len(steps) == 3 * 2 * 6
    assert {row["step"] for row in steps} == set("012345")
    assert steps[0]["learning_rate"] == "0.01"
    assert len(rows(tmp_path / "run" / RUNS)) == 6
    assert tuple(rows(tmp_path / "run" / "summary.csv")[0]) == SUMMARY_COLUMNS
    assert not (tmp_path / "run" / CHECKPOINTS).exists()
    assert json.loads((tmp_path / "run" / "run.json").read_text())["settings"]["steps"] == 6


@pytest.mark.parametrize("stop", [3, 8])
def test_ctrl_c_keeps_the_state_and_resume_goes_on_as_if_nothing_had_been(tmp_path: Path, stop: int) -> None:
    whole = Results()
    one = plan(tmp_path)
    run(one, whole, None, lambda row, doing: None)

    def interrupt(row: Row | None, doing: str) -> None:
        seen.append(row)
        if row and len([row for row in seen if row]) == stop:
            signal.raise_signal(signal.SIGINT)

    seen: list[Row | None] = []
    files = folder(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        run(one, Results(), files, interrupt)
    files.close()
    assert len(rows(tmp_path / "run" / STEPS)) == stop
    assert len(list((tmp_path / "run" / CHECKPOINTS).iterdir())) == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    again, trained = Results(), []
    files = folder(tmp_path / "run", resume=True)
    run(one, again, files, lambda row, doing: trained.append(row) if row else None)
    files.close()
    assert len(trained) == 36 - stop
    assert again.losses == {
        name: {seed: pytest.approx(losses, rel=1e-6) for seed, losses in of.items()}
        for name, of in whole.losses.items()
    }
    assert again.parameters == whole.parameters
    assert not (tmp_path / "run" / CHECKPOINTS).exists()


def test_a_killed_run_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    one = plan(tmp_path, contender("eager"), checkpoint_every=2)
    files = folder(tmp_path / "run")

    def die(row: Row | None, doing: str) -> None:
        if row and row.step == 4:
            raise SystemExit

    with pytest.raises(SystemExit):
        run(one, Results(), files, die)
    files.close()
    assert len(rows(tmp_path / "run" / STEPS)) == 5
    seen: list[Row] = []
    files, results = folder(tmp_path / "run", resume=True), Results()
    run(one, results, files, lambda row, doing: seen.append(row) if row else None)
    files.close()
    assert seen[0].step == 4
    steps = [(row["seed"], row["step"]) for row in rows(tmp_path / "run" / STEPS)]
    assert sorted(steps) == [(seed, step) for seed in "01" for step in "012345"]
    assert results.losses["eager"][0] == pytest.approx(losses_of(tmp_path / "other"), rel=1e-6)


def losses_of(path: Path) -> list[float]:
    path.mkdir()
    training = Training(images(path), contender("eager"), 0)
    return [training.advance().loss for _ in range(6)]


def test_one_that_fails_costs_its_own_row(tmp_path: Path) -> None:
    def broken(problem: Any) -> Any:
        raise RuntimeError("no kernel for this")

    other = Contender("broken", dataclasses.replace(BY_NAME["eager"], build=broken))
    one, results = plan(tmp_path, contender("eager"), other, timed=True), Results()
    run(one, results, None, lambda row, doing: None)
    eager, failed = summaries(one, results, about)
    assert (failed.status, failed.reason) == (Status.ERROR, "Seed 0: RuntimeError: no kernel for this.")
    assert failed.failed
    assert eager.step_ms
    assert not eager.failed


def test_one_that_learns_otherwise_fails_unless_it_is_frozen() -> None:
    row = Summary("1", "digits", "digits", "x", "everything", Status.OK, curve="differs")
    assert row.failed
    assert not dataclasses.replace(row, trains="inputs").failed
    assert not dataclasses.replace(row, curve="within seeds").failed


def test_ratios_given_are_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session.alone, "measure", None)
    one = plan(tmp_path, contender("eager"), contender("eager-packed"), timed=True, step_ratios={"eager-packed": 0.5})
    results = Results()
    run(one, results, None, lambda row, doing: None)
    eager, packed = summaries(one, results, about)
    assert packed.block_ratio == 0.5
    assert packed.expected_ratio == pytest.approx(1 - 0.5 * (eager.block_share or 0))


def test_a_folder_is_begun_once_and_gone_on_with_by_the_same_settings(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with pytest.raises(BadInput, match="holds no training run"):
        folder(path, resume=True)
    folder(path).close()
    with pytest.raises(BadInput, match="holds a training run; give --resume"):
        folder(path)
    more = ABOUT | {"settings": {"steps": 6, "seeds": 5}}
    Folder(path, more, True, print).close()
    for other, text in (
        (ABOUT | {"settings": {"steps": 7, "seeds": 1}}, "was run with steps = 6, now it is 7"),
        (ABOUT | {"machine": {"torch": "3"}}, "machine's torch = '2', now it is '3'"),
    ):
        with pytest.raises(BadInput, match=text):
            Folder(path, other, True, print)


def test_a_full_disk_is_told_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    files = folder(tmp_path / "run", warn=said.append)
    path, real = files._steps.path, Path.open

    def full(self: Path, *args: Any, **kwargs: Any) -> Any:
        if self == path:
            raise OSError(28, "No space left on device")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", full)
    files.write(Row("eager", 0, 0, 1.5, 0.1, 2.0))
    files.flush()
    assert "No space left on device" in said[0]
    monkeypatch.undo()
    files.close()
    assert rows(path)[0]["loss"] == "1.5"
