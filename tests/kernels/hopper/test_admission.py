"""Which hand-scheduled kernels run under a version of Triton: by the shipped verdicts, by this machine's, or none."""

import json
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from swiglu_kernels.hopper import admission, shared
from swiglu_kernels.hopper.admission import KERNELS, Verdicts
from swiglu_kernels.runtime import kept, sources
from swiglu_kernels.tiles.candidates import TileProblem, shipped

GPU = "NVIDIA H100 80GB HBM3"
NEW = "4.2.0"
PROBLEM = TileProblem(1024, 4096, 11008, torch.bfloat16, (9, 0))


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An H100, a Triton that nobody has tried, and an empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(admission, "_hopper_gpu", lambda: GPU)
    monkeypatch.setattr(admission, "triton_version", lambda: NEW)
    monkeypatch.setattr(admission, "_override", [])
    monkeypatch.setattr(shared, "GLUON_MISSING", None)
    forget()
    yield tmp_path / kept.FOLDER / "admitted.json"
    forget()


def forget() -> None:
    for cached in (admission._verdicts, admission._warn_once, kept.warn_once):
        cached.cache_clear()


def verdicts(version: str = NEW, **refused: str) -> Verdicts:
    kernels = {name: {"refused": refused.get(name, "")} for name in KERNELS}
    return Verdicts(version, torch.__version__, GPU, sources.of_kernels(), "2026-11-27T00:00:00Z", kernels)


def keep(found: Verdicts) -> None:
    place = admission.file()
    assert place is not None
    admission.keep(found, place)
    forget()


def test_what_ships_admits_every_kernel_with_the_tested_versions() -> None:
    found = kept.read(admission.SHIPPED, admission.WHAT, admission.of_content)
    assert {"3.6.0", "3.7.1", "3.8.0", "3.9.0"} <= {one.triton for one in found}
    assert {"NVIDIA H200", GPU} <= {one.gpu for one in found}
    for one in found:
        assert set(one.kernels) == set(KERNELS)
        assert not [name for name in KERNELS if one.refused(name)]
        for result in one.kernels.values():
            assert result["launches"] > 0
            assert 0 < result["roundings"] < 4
            assert 0 < result["ratio"] < 1.25


@pytest.mark.parametrize("version", ["3.6.0", "3.9.0"])
def test_a_tested_version_needs_no_setting(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(admission, "triton_version", lambda: version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [admission.why_aside(kernel) for kernel in (None, *KERNELS)] == [None] * (1 + len(KERNELS))
    assert shipped("forward", PROBLEM).schedule == "ping-pong"


def test_another_version_warns_once_and_names_the_command_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match="python -m swiglu_kernels.check") as caught:
        reasons = [admission.why_aside(kernel) for kernel in KERNELS]
    assert len(caught) == 1
    assert NEW in str(caught[0].message)
    assert "two minutes" in str(caught[0].message), "what it costs"
    assert all(reason and NEW in reason for reason in reasons)
    assert shipped("forward", PROBLEM).schedule == "torch"
    forget()
    monkeypatch.setattr(admission, "_hopper_gpu", lambda: "")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert admission.why_aside("dX")


def test_a_kernel_that_is_refused_stays_aside_and_the_others_run(file: Path) -> None:
    keep(verdicts(**{"transposed forward": "3 of 36 launches are wrong"}))
    assert admission.why_aside("forward") is None
    assert "3 of 36 launches are wrong" in str(admission.why_aside("transposed forward"))
    few = replace(PROBLEM, tokens=160)
    assert shipped("forward", few).schedule == "ping-pong"
    keep(verdicts(dW="it differs"))  # which takes the place of the first
    assert len(json.loads(file.read_bytes())["verdicts"]) == 1
    assert shipped("forward", few).schedule == "transposed"
    assert shipped("weight-grad", PROBLEM).schedule == "torch"
    assert shipped("mlp-hidden-grad", PROBLEM).schedule == "gate"


def test_this_machine_s_verdict_comes_before_what_ships(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "triton_version", lambda: "3.9.0")
    keep(verdicts("3.9.0", experts="its process ended with status -11"))
    assert "-11" in str(admission.why_aside("experts"))
    assert admission.why_aside("forward") is None


@pytest.mark.parametrize("changed", ["triton", "torch", "gpu", "sources"])
def test_a_verdict_holds_for_nothing_else(changed: str) -> None:
    keep(replace(verdicts(), **{changed: "another"}))
    with pytest.warns(UserWarning, match="not checked"):
        assert admission.why_aside("forward")
    keep(verdicts())
    assert admission.why_aside("forward") is None


CONTENT = {"schema": admission.SCHEMA, "verdicts": [asdict(verdicts())]}


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", CONTENT | {"schema": 0}, CONTENT | {"verdicts": [{"triton": NEW}]},
     CONTENT | {"verdicts": [asdict(verdicts()) | {"kernels": {"dX": {"refused": 3}}}]}],
)  # fmt: skip
def test_a_file_that_is_not_sound_costs_a_warning(file: Path, content: Any) -> None:
    file.parent.mkdir(parents=True)
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.warns(UserWarning, match="no verdict is taken from it"):
        assert admission.why_aside("forward")


@pytest.mark.parametrize("answer", [None, "they are off"])
def test_the_environment_and_tests_decide_for_all(answer: str | None) -> None:
    with admission.by_hand_aside(answer):
        assert {admission.why_aside(kernel) for kernel in KERNELS} == {answer}
