"""The file of tuned choices, changed."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tuned import ENTRY

from swiglu_bench.cases.errors import BadInput
from swiglu_bench.tasks.tuning import tuned_file
from swiglu_kernels.tiles import tuning


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(tuning.VARIABLE, str(tmp_path / "there" / "tuning.json"))
    tuning.forget()
    yield tmp_path / "there" / "tuning.json"
    tuning.forget()


def test_a_choice_replaces_the_earlier_one_of_its_place_or_only_removes_it(path: Path) -> None:
    other, later = replace(ENTRY, tokens=16), replace(ENTRY, ratio=(0.8, 0.7, 0.9), at="later")
    for entry in (ENTRY, other, later):
        tuned_file.keep(path, entry, True, pytest.fail)
    assert tuning.read(path) == [other, later]
    tuned_file.keep(path, ENTRY, False, pytest.fail)
    assert tuning.read(path) == [other]


def test_many_at_once_lose_nothing(path: Path) -> None:
    entries = [replace(ENTRY, hidden=size) for size in range(1, 9)]
    writers = [threading.Thread(target=tuned_file.keep, args=(path, entry, True, pytest.fail)) for entry in entries]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert sorted(tuning.read(path), key=lambda entry: entry.hidden) == entries


def test_a_file_that_is_not_sound_is_moved_aside(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("somebody's letters")
    said: list[str] = []
    tuned_file.keep(path, ENTRY, True, said.append)
    assert tuning.read(path) == [ENTRY]
    assert path.with_name("tuning.json.unsound").read_text() == "somebody's letters"
    assert "it was moved to" in said[0]


def test_a_place_that_cannot_be_written(path: Path) -> None:
    path.parent.write_text("a file where a folder has to be")
    with pytest.raises(BadInput, match=r"cannot be written: .*; name another in SWIGLU_KERNELS_TUNING."):
        tuned_file.keep(path, ENTRY, True, pytest.fail)


def test_clearing_spares_a_file_of_another_kind_that_was_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tuned_file.clear(path) == f"Nothing is kept in {path}."
    tuned_file.keep(path, ENTRY, True, pytest.fail)
    assert tuned_file.clear(path) == f"Removed {path} with tuned choices: 1."
    assert list(path.parent.iterdir()) == []
    path.write_text("somebody's letters")
    with pytest.raises(BadInput, match=r"which is not a file of tuned choices .*; remove it yourself"):
        tuned_file.clear(path)
    assert path.exists()
    monkeypatch.delenv(tuning.VARIABLE)
    assert tuned_file.clear(path) == f"Removed {path}, which was not sound."
