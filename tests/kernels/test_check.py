"""The check that admits hand-scheduled kernels: what becomes of one that is wrong, crashes, hangs or is slow."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import swiglu_kernels
from swiglu_kernels.check import why_nothing_to_check
from swiglu_kernels.hopper import admission, shared

CHECK = sys.modules["swiglu_kernels.check"]
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
RIGHT = {"launches": 4, "roundings": 0.5, "refused": ""}
FATES: dict[str, Any] = {
    "dX": RIGHT | {"refused": "1 of 5 launches are wrong"},
    "dW": subprocess.TimeoutExpired([], 3),
    "experts": SimpleNamespace(stdout="", stderr="Traceback\nRuntimeError: illegal memory access\n", returncode=1),
    "fp8 experts": SimpleNamespace(stdout="", stderr="", returncode=-11),
    "fp8 forward": RIGHT,  # and then slower
    "row forward": RIGHT,  # and its timing is lost
}


def child(command: list[str], **_: Any) -> Any:
    """Takes the place of the processes."""
    if "--run" in command:
        fate = FATES.get(command[-1], RIGHT)
        if isinstance(fate, Exception):
            raise fate
        return SimpleNamespace(stdout=json.dumps(fate), stderr="", returncode=0) if isinstance(fate, dict) else fate
    kernels = [name for name in command[command.index("--time") + 1 :] if name != "row forward"]
    timed = {"at": "2 x 3 x 4", "portable_us": 10.0}
    lines = [
        json.dumps(timed | {"kernel": name, "by_hand_us": us, "ratio": us / 10})
        for name, us in ((name, 20.0 if name == "fp8 forward" else 8.0) for name in kernels)
    ]
    return SimpleNamespace(stdout="\n".join(lines), stderr="", returncode=0)


def test_each_kernel_is_admitted_or_refused_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CHECK, "why_nothing_to_check", lambda device: None)
    monkeypatch.setattr(CHECK, "card_of", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(CHECK.subprocess, "run", child)
    said: list[str] = []
    place = tmp_path / "there" / "admitted.json"
    found = swiglu_kernels.check(file=place, timeout_s=3, tell=said.append)
    refused = {name: found.refused(name) for name in admission.KERNELS if found.refused(name)}
    assert refused == {
        "dX": "1 of 5 launches are wrong",
        "dW": "it took more than 3 s",
        "experts": "its process ended with status 1: RuntimeError: illegal memory access",
        "fp8 experts": "its process ended with status -11: ",
        "fp8 forward": "it takes 2.00 times as long as the portable kernel at 2 x 3 x 4",
        "row forward": "it was not timed: its process ended without a result",
    }
    assert found.kernels["forward"] == RIGHT | {"at": "2 x 3 x 4", "by_hand_us": 8.0, "portable_us": 10.0, "ratio": 0.8}
    assert admission.of_content(json.loads(place.read_bytes())) == [found]
    assert "3 of 9 kernels admitted" in said[-1]


def test_where_it_cannot_be_kept_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CHECK, "why_nothing_to_check", lambda device: None)
    monkeypatch.setattr(CHECK, "card_of", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(CHECK.subprocess, "run", child)
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match="cannot be written"):
        swiglu_kernels.check(file=tmp_path / "file" / "admitted.json", tell=lambda line: None)


@pytest.mark.skipif(HOPPER, reason="there is something to check")
def test_elsewhere_there_is_nothing_to_check() -> None:
    assert "compute capability 9.0" in str(why_nothing_to_check(torch.device("cpu")))
    with pytest.raises(RuntimeError, match="are for GPUs of compute capability"):
        swiglu_kernels.check()


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")
@pytest.mark.parametrize("kernel", ["dW", "row forward"])
def test_a_kernel_on_trial(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from swiglu_kernels.check import trial

    assert shared.GLUON_MISSING is None
    found = trial.run(kernel, torch.device("cuda", 0))
    assert (found["refused"], found["launches"] > 0) == ("", True)
    assert trial.timed(kernel, torch.device("cuda", 0))["ratio"] > 0
    monkeypatch.setattr(trial, "_difference", lambda ours, theirs: float("nan"))
    assert "differs from the portable kernel" in trial.run(kernel, torch.device("cuda", 0))["refused"]
