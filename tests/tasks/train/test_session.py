import csv
import dataclasses
import signal
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from trained import BY_NAME, images, permuted, trainee

from swiglu_bench.rows.record import LAYOUTS, Status
from swiglu_bench.rows.training import TrainingStep
from swiglu_bench.tasks.train import session, step_costs
from swiglu_bench.tasks.train.blocks import Trainee
from swiglu_bench.tasks.train.files import CHECKPOINTS, TrainingFolder
from swiglu_bench.tasks.train.model import Experiment
from swiglu_bench.tasks.train.options import TrainOptions
from swiglu_bench.tasks.train.session import Listen, TrainingSession

ABOUT: dict[str, Any] = {"settings": {"steps": 6, "seeds": 1}, "machine": {"torch": "2"}}


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    return images(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def whole(experiment: Experiment) -> list[Trainee]:
    """What a session that nothing stopped has found."""
    trainees = everyone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "time_steps", lambda *_: None)
        run(experiment, trainees)
    return trainees


def everyone() -> list[Trainee]:
    return [trainee("eager"), permuted(), trainee("eager-packed")]


def rows(file: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(file.open()))


def run(
    experiment: Experiment, trainees: list[Trainee], path: Path | None = None, *, listen: Listen = lambda _: None,
    ratios: dict[str, float] | None = None, **options: int,
) -> TrainingFolder | None:  # fmt: skip
    """A session in a new folder, or in one where another has ended."""
    folder = TrainingFolder(path, ABOUT, (path / "run.json").exists(), print) if path else None
    wanted = TrainOptions(**{"seeds": 2, "budget": 0.01} | options)  # type: ignore[arg-type]
    try:
        TrainingSession(experiment, trainees, wanted, ratios, folder).run(listen)
    finally:
        if folder:
            folder.flush()
    return folder


def stopping(how: Any, after: int) -> Listen:
    """Does something after so many steps."""
    count = iter(range(1000))
    return lambda event: how() if isinstance(event, TrainingStep) and next(count) + 1 == after else None


def die() -> None:
    raise SystemExit


def test_everything_is_trained_timed_judged_and_kept_and_one_that_fails_costs_its_own_row(
    experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_costs, "TURN_S", 0.001)
    broken = dataclasses.replace(BY_NAME["eager"], build=MagicMock(side_effect=RuntimeError("no kernel for this")))
    trainees, path = [*everyone(), trainee("broken", broken)], tmp_path / "run"
    folder = run(experiment, trainees, path)
    assert folder
    eager, twin, packed, failed = found = [one.row for one in trainees]
    folder.summarise(found)
    assert (eager.curve, twin.curve, twin.step_ms) == ("", "same", None)
    assert packed.curve in ("same", "within seeds")
    assert eager.final_loss == pytest.approx(packed.final_loss, rel=1e-3)
    assert packed.expected_ratio
    assert packed.as_expected is not None
    assert (failed.status, failed.reason) == (Status.ERROR, "Seed 0: RuntimeError: no kernel for this.")
    assert [(one.failed, one.seeds) for one in found] == [(False, 2)] * 3 + [(True, 0)]
    assert [len(rows(path / name)) for name in ("train.csv", "runs.csv", "summary.csv")] == [3 * 2 * 6, 3 * 2, 4]
    assert tuple(rows(path / "summary.csv")[0]) == LAYOUTS["training"].columns()
    assert not (path / CHECKPOINTS).exists()


@pytest.mark.parametrize(
    ("how", "after", "refused", "checkpoint_every", "left"),
    [
        pytest.param(lambda: signal.raise_signal(signal.SIGINT), 3, 0, 0, 33, id="Ctrl-C"),
        pytest.param(lambda: signal.raise_signal(signal.SIGINT), 8, 0, 0, 28, id="Ctrl-C in the second training"),
        pytest.param(die, 5, 0, 2, 32, id="killed one step after a checkpoint"),
        pytest.param(lambda: signal.raise_signal(signal.SIGINT), 3, 1, 0, 36, id="a step that a full disk refused"),
    ],
)
def test_a_stopped_run_is_resumed_as_if_nothing_had_happened(
    experiment: Experiment, whole: list[Trainee], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    how: Any, after: int, refused: int, checkpoint_every: int, left: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(session, "time_steps", lambda *_: None)
    path, stopped = tmp_path / "run", everyone()
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        run(experiment, stopped, path, listen=stopping(how, after), checkpoint_every=checkpoint_every)
    assert [one.row.status for one in stopped] == [Status.OK if one.losses else Status.SKIPPED for one in stopped]
    assert "--resume" in stopped[-1].row.reason
    assert len(rows(path / "train.csv")) == after
    assert len(list((path / CHECKPOINTS).iterdir())) == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    lines = (path / "train.csv").read_text().splitlines(keepends=True)
    (path / "train.csv").write_text("".join(lines[: len(lines) - refused]))

    events: list[Any] = []
    again = everyone()
    run(experiment, again, path, listen=events.append)
    assert len([event for event in events if isinstance(event, TrainingStep)]) == left
    for one, other in zip(whole, again, strict=True):
        assert other.losses == {seed: pytest.approx(losses, rel=1e-6) for seed, losses in one.losses.items()}
    steps = [(row["implementation"], row["seed"], row["step"]) for row in rows(path / "train.csv")]
    assert sorted(steps) == sorted((one.name, seed, step) for one in whole for seed in "01" for step in "012345")
    assert not (path / CHECKPOINTS).exists()


def test_given_ratios_are_not_measured(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_costs, "TURN_S", 0.001)
    monkeypatch.setattr(session, "measure_ratios", None)
    trainees = [trainee("eager"), trainee("eager-packed")]
    run(experiment, trainees, ratios={"eager-packed": 0.5}, seeds=1)
    eager, packed = (one.row for one in trainees)
    assert packed.block_ratio == 0.5
    assert packed.expected_ratio == pytest.approx(1 - 0.5 * (eager.block_share or 0))
