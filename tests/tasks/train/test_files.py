from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from swiglu_bench.cases.errors import BadInput
from swiglu_bench.rows.training import TrainedSeed, TrainingStep
from swiglu_bench.show.writers.csv_file import Table
from swiglu_bench.tasks.train.files import TrainingFolder

ABOUT: dict[str, Any] = {"settings": {"steps": 2, "seeds": 1}, "machine": {"torch": "2"}}


def folder(path: Path, resume: bool = False, warn: Callable[[str], object] = print, **about: Any) -> TrainingFolder:
    return TrainingFolder(path, ABOUT | about, resume, warn)


def test_a_folder_is_begun_once_and_resumed_with_the_same_settings(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with pytest.raises(BadInput, match="holds no training run"):
        folder(path, resume=True)
    folder(path)
    with pytest.raises(BadInput, match="holds a training run; give --resume"):
        folder(path)
    folder(path, resume=True, settings={"steps": 2, "seeds": 5})
    with pytest.raises(BadInput, match="was run with steps = 2, now it is 7"):
        folder(path, resume=True, settings={"steps": 7, "seeds": 1})
    with pytest.raises(BadInput, match="machine's torch = '2', now it is '3'"):
        folder(path, resume=True, machine={"torch": "3"})


def test_a_full_disk_is_reported_and_what_has_no_steps_is_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    files = folder(tmp_path, warn=warnings.append)
    files.end(TrainedSeed("eager", 0, 1, 100, 1.0, 0.5, 3.0))
    files.write(TrainingStep("eager", 0, 0, 1.5, 0.1, 2.0))
    with monkeypatch.context() as patch:
        patch.setattr(Table, "append", MagicMock(side_effect=OSError(28, "No space left on device")))
        files.flush()
    assert "train.csv cannot be written: No space left on device" in warnings[0]
    assert files.finished() == {}, "its step is not there"
