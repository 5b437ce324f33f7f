import os
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from swiglu_bench.machine import locks
from swiglu_bench.spec.errors import BadInput

UUID = "GPU-00000000-aaaa-bbbb-cccc-000000000000"


@pytest.fixture(autouse=True)
def _own_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(locks, "POLL_S", 0.01)


def test_a_folder_has_one_sweep(tmp_path: Path) -> None:
    with locks.folder(tmp_path, "swiglu-bench step --shapes x"):
        with pytest.raises(BadInput) as refused, locks.folder(tmp_path, "swiglu-bench forward"):
            pass
        expected = f"is being written by process {os.getpid()}: swiglu-bench step --shapes x; wait for it, or"
        assert expected in str(refused.value)
    assert list(tmp_path.iterdir()) == [], "nothing stays in a folder of results"
    with locks.folder(tmp_path, "swiglu-bench forward"):
        pass


def test_another_folder_is_free(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with locks.folder(tmp_path / "a", "one"), locks.folder(tmp_path / "b", "other"):
        pass


def test_a_gpu_has_one_sweep_and_the_next_waits_and_says_for_whom() -> None:
    told: list[str] = []
    got = threading.Event()

    def second() -> None:
        with locks.gpu(UUID, "second", True, told.append):
            got.set()

    with locks.gpu(UUID, "swiglu-bench step", True, pytest.fail):
        waiting = threading.Thread(target=second)
        waiting.start()
        assert not got.wait(0.3)
    waiting.join(10)
    assert got.is_set()
    assert told == [f"The GPU is in use by process {os.getpid()}: swiglu-bench step; waiting for it to end."]


def test_a_cpu_has_no_lock(tmp_path: Path) -> None:
    with locks.device(torch.device("cpu"), "first", False, pytest.fail):
        assert list(tmp_path.iterdir()) == []


def test_a_gpu_is_held_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(uuid=UUID.removeprefix("GPU-"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    with locks.gpu(UUID, "first", True, pytest.fail), pytest.raises(BadInput, match="in use by process"):
        ExitStack().enter_context(locks.device(torch.device("cuda", 0), "second", False, pytest.fail))


def test_a_gpu_in_use_can_be_refused() -> None:
    with locks.gpu(UUID, "first", True, pytest.fail):
        with pytest.raises(BadInput, match=r"by process \d+: first; wait for it to end, or leave out --no-wait\."):
            ExitStack().enter_context(locks.gpu(UUID, "second", False, pytest.fail))
        with locks.gpu(UUID.replace("a", "b"), "on another GPU", False, pytest.fail):
            pass


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from swiglu_bench.machine import locks\n"
        "with locks.folder(Path(sys.argv[1]), 'the killed one'): print('held', flush=True); time.sleep(60)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    program = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, env=environment)
    assert program.stdout is not None
    assert program.stdout.readline() == b"held\n"
    with pytest.raises(BadInput, match=f"process {program.pid}: the killed one"), locks.folder(tmp_path, "x"):
        pass
    program.kill()
    program.wait()
    with locks.folder(tmp_path, "x"):
        pass
