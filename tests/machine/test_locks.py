import multiprocessing
import os
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from swiglu_bench.cases.errors import BadInput
from swiglu_bench.machine import locks

UUID = "GPU-00000000-aaaa-bbbb-cccc-000000000000"


@pytest.fixture(autouse=True)
def _own_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(locks, "POLL_S", 0.01)


def test_a_folder_has_one_sweep(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with locks.folder(tmp_path, "swiglu-bench step --shapes x"), locks.folder(tmp_path / "other", "another"):
        with pytest.raises(BadInput) as refused, locks.folder(tmp_path, "swiglu-bench forward"):
            pass
        expected = f"is being written by process {os.getpid()}: swiglu-bench step --shapes x; wait for it, or"
        assert expected in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["other"], "no lock stays in a folder of results"


def test_a_gpu_has_one_sweep_and_the_next_waits_and_says_for_whom() -> None:
    told: list[str] = []
    waits, got = threading.Event(), threading.Event()

    def second() -> None:
        with locks.gpu(UUID, "second", True, lambda text: (told.append(text), waits.set())):
            got.set()

    with locks.gpu(UUID, "swiglu-bench step", True, pytest.fail):
        waiting = threading.Thread(target=second)
        waiting.start()
        assert waits.wait(10)
        assert not got.wait(0.05)
    waiting.join(10)
    assert got.is_set()
    assert told == [f"The GPU is in use by process {os.getpid()}: swiglu-bench step; waiting for it to end."]


def test_a_gpu_in_use_can_be_refused_and_is_known_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(uuid=UUID.removeprefix("GPU-"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    with locks.gpu(UUID, "first", True, pytest.fail):
        with pytest.raises(BadInput, match=r"by process \d+: first; wait for it to end, or leave out --no-wait\."):
            ExitStack().enter_context(locks.device(torch.device("cuda", 0), "second", False, pytest.fail))
        with locks.gpu(UUID.replace("a", "b"), "on another GPU", False, pytest.fail):
            pass
        with locks.device(torch.device("cpu"), "on no GPU", False, pytest.fail):
            pass


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    ours, theirs = multiprocessing.Pipe()

    def hold() -> None:
        with locks.folder(tmp_path, "the killed one"):
            theirs.send("held")
            time.sleep(60)

    process = multiprocessing.get_context("fork").Process(target=hold)
    process.start()
    assert ours.recv() == "held"
    with pytest.raises(BadInput, match=f"process {process.pid}: the killed one"), locks.folder(tmp_path, "x"):
        pass
    process.kill()
    process.join()
    with locks.folder(tmp_path, "x"):
        pass
