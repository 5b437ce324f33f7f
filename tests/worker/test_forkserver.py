import os
import signal
import subprocess
import sys
import time

import pytest

from swiglu_bench.worker import forkserver


def test_what_children_are_forked_from_is_light_and_has_not_touched_the_gpu() -> None:
    """A fork of a process that has asked CUDA for anything cannot use it."""
    code = (
        "import sys, torch\n"
        "def touched(*_): sys.exit('CUDA was asked')\n"
        "torch.cuda.is_available = torch.cuda.device_count = torch.cuda._lazy_init = torch.cuda.init = touched\n"
        "from swiglu_bench.worker.forkserver import PRELOAD\n"
        "for name in PRELOAD: __import__(name)\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert 'scipy.stats' not in sys.modules, 'its import takes half a second'\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("before", [None, "error"])
def test_what_is_set_for_a_start_is_put_back(monkeypatch: pytest.MonkeyPatch, before: str | None) -> None:
    monkeypatch.delenv("PYTHONWARNINGS", raising=False)
    if before is not None:
        monkeypatch.setenv("PYTHONWARNINGS", before)
    main, environment = sys.modules["__main__"], dict(os.environ)
    with forkserver._alone():
        assert sys.modules["__main__"] is not main
        assert os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"
    assert sys.modules["__main__"] is main
    assert dict(os.environ) == environment


def test_ctrl_c_that_was_held_back_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would go on without an owner, and print into folders that are gone."""
    process = forkserver.CONTEXT.Process(target=time.sleep, args=(60,))
    monkeypatch.setattr(forkserver.CONTEXT, "Process", lambda **_: process)
    start = type(process).start
    monkeypatch.setattr(type(process), "start", lambda process: (start(process), signal.raise_signal(signal.SIGINT)))
    with pytest.raises(KeyboardInterrupt):
        forkserver.fork(time.sleep, 60)
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.gpu
def test_a_fork_can_use_the_gpu() -> None:
    import torch

    torch.zeros(1, device="cuda")  # this process has
    process = forkserver.fork(_use_the_gpu)
    process.join(120)
    assert process.exitcode == 0


def _use_the_gpu() -> None:
    import torch

    assert not torch.cuda.is_initialized()
    assert (torch.ones(3, device="cuda") + 1).sum().item() == 6
