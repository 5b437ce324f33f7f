"""Where contenders' processes keep what they compile."""

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from courts import run_here
from from_files import from_file
from specimens import small_case

from swiglu_bench.cases.cases import Case, Mode
from swiglu_bench.cases.implementation import Implementation, Step, implementation
from swiglu_bench.contenders import pytorch
from swiglu_bench.machine import machine
from swiglu_bench.rows.record import Status
from swiglu_bench.tasks.time import _TimedCase
from swiglu_bench.worker import caches
from swiglu_bench.worker.court import Court
from swiglu_bench.worker.policy import Settings, Task


@pytest.fixture(autouse=True)
def user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A user's cache folder, and nothing named."""
    for variable in (*caches.VARIABLES, caches.TUNING, "HF_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    return tmp_path / "user" / caches.KERNELS


def test_each_has_folders_of_its_own_and_keeps_them() -> None:
    found = [caches.of(known) for known in (pytorch.eager, pytorch.eager_packed, pytorch.eager)]
    assert found[0] == found[2]
    for variable in caches.VARIABLES:
        assert found[0][variable] != found[1][variable]
        assert Path(found[0][variable]).is_dir()
    other = dataclasses.replace(pytorch.eager, address="somewhere/mine.py:eager")
    assert caches.of(other)["TRITON_CACHE_DIR"] != found[0]["TRITON_CACHE_DIR"], "names are unique in a run only"
    assert len(caches._name_of("a" * 64, "b")) < 32


def test_named_folders_have_one_for_each_inside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "mine"))
    folders = [Path(caches.of(known)["TRITON_CACHE_DIR"]) for known in (pytorch.eager, pytorch.eager_packed)]
    assert folders[0] != folders[1]
    assert all(tmp_path / "mine" in folder.parents for folder in folders)


def test_what_tuning_and_the_check_have_found_is_copied_for_each_process(
    monkeypatch: pytest.MonkeyPatch, user: Path, tmp_path: Path
) -> None:
    user.mkdir(parents=True)
    (user / "tuning.json").write_text("1")
    (user / "admitted.json").write_text("2")
    copies = Path(caches.of(pytorch.eager)["XDG_CACHE_HOME"]) / caches.KERNELS
    assert {file.name: file.read_text() for file in copies.iterdir()} == {"tuning.json": "1", "admitted.json": "2"}
    assert all(file.stat().st_mode & 0o777 == 0o444 for file in copies.iterdir())
    (copies / "tuning.json").unlink()
    (copies / "tuning.json").write_text("spoilt")
    (user / "admitted.json").unlink()
    assert (user / "tuning.json").read_text() == "1"
    named = tmp_path / "named"
    named.write_text("3")
    monkeypatch.setenv(caches.TUNING, str(named))
    told = Path(caches.of(pytorch.eager)[caches.TUNING])
    assert told != named
    assert told.read_text() == "3"
    assert {file.name: file.read_text() for file in copies.iterdir()} == {"tuning.json": "1", "named.json": "3"}
    monkeypatch.setenv(caches.TUNING, "off")
    assert caches.TUNING not in caches.of(pytorch.eager)


@implementation("told", scopes=["glu"], description="writes down what its process is told, and kept from before")
def told(problem):  # type: ignore[no-untyped-def]
    import tempfile

    from torch._inductor.runtime.cache_dir_utils import cache_dir

    own = Path(os.environ["XDG_CACHE_HOME"]) / "kept.json"
    before = json.loads(own.read_text())["runs"] if own.exists() else 0
    own.write_text(json.dumps({"runs": before + 1, "inductor": cache_dir(), "temporary": tempfile.gettempdir()}))
    return Step(lambda x: torch.nn.functional.silu(x @ problem.weights["w_gate"].T) * (x @ problem.weights["w_up"].T))


def test_a_process_is_told_its_folders_and_finds_them_again(tmp_path: Path) -> None:
    settings = Settings(Task.VERIFY, torch.device("cpu"), "c", "r")
    known, this = from_file(told), machine.describe(settings.device)
    for runs in (1, 2):
        (row,) = run_here([small_case(mode=Mode.FORWARD)], [known], settings, this, logs=tmp_path)
        assert row.status is Status.OK, row.reason
        own = caches.of(known)
        found = json.loads((Path(own["XDG_CACHE_HOME"]) / "kept.json").read_text())
        assert found["inductor"] == own["TORCHINDUCTOR_CACHE_DIR"]
        assert found["temporary"] == own["TMPDIR"]
        assert found["runs"] >= runs


def test_what_was_compiled_beforehand_is_not_again_until_a_version_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def aside(court: Court, wanted: Sequence[Implementation], at_once: int, work: Callable[[Any], object]) -> None:
        asked.extend(known.name for known in wanted)
        for known in wanted:
            work(SimpleNamespace(implementation=known))

    monkeypatch.setattr(Court, "aside", aside)
    both = [dataclasses.replace(pytorch.eager, name=name, backend="inductor") for name in ("a", "b")]
    this = machine.describe(torch.device("cpu"))
    settings = Settings(Task.TIME, torch.device("cpu"), "test", "test")

    def rehearsed(version: str, case: Case) -> list[str]:
        asked.clear()
        run = _TimedCase(Court(settings, dataclasses.replace(this, version=version)), case)
        run.admitting = SimpleNamespace(rehearse=lambda contender: None)  # type: ignore[assignment]
        run.rehearse(both, at_once=4)
        return list(asked)

    case = small_case(mode=Mode.STEP)
    assert rehearsed("1", case) == ["a", "b"]
    assert not rehearsed("1", dataclasses.replace(case, tokens=7))
    assert rehearsed("2", case) == ["a", "b"]
    assert rehearsed("1", dataclasses.replace(case, mode=Mode.FORWARD)) == ["a", "b"]
