import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from places import SUPPORT
from typer.testing import CliRunner, Result

from swiglu_bench.cli import tp
from swiglu_bench.cli.app import app
from swiglu_bench.spec.errors import BadInput
from swiglu_bench.tp import launch

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed")
FAILING = SUPPORT / "split_implementations.py"


def invoke(*arguments: object) -> Result:
    environment = {"COLUMNS": "140", "NO_COLOR": "1"}
    return CliRunner().invoke(app, ["tp", *map(str, arguments)], env=environment)


def small(*more: object) -> Result:
    return invoke("--device", "cpu", "--shapes", "16x32", "--tokens", 8, "--budget", 0.1, *more)


def rows_of(out: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((out / "tp.csv").open()))


@pytest.fixture(scope="module")
def two_sizes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    out = tmp_path_factory.mktemp("sizes") / "out"
    impl = f"eager-packed,liger,{FAILING}:wrong,{FAILING}:fails,{FAILING}:forgets,{FAILING}:no-weights"
    return small("--gpus", "1,2", "--impl", impl, "--out", out, "--format", "json"), out


def test_what_is_right_is_timed_and_taken_apart(two_sizes: tuple[Result, Path]) -> None:
    result, out = two_sizes
    assert result.exit_code == 1, result.output
    rows = [row for row in rows_of(out) if row["status"] == "ok" and row["ranks"] == "2"]
    assert {(row["implementation"], row["mode"], row["sequence_parallel"]) for row in rows} >= {
        (name, mode, way) for name in ("eager", "eager-packed") for mode in ("forward", "step")
        for way in ("false", "true")
    }  # fmt: skip
    for row in rows:
        for figure in ("time_ms", "compute_ms", "comm_ms", "single_ms", "efficiency", "bus_gbps", "bus_ceiling_gbps"):
            assert float(row[figure]) > 0, figure
        assert int(row["rounds"]) >= 10
        assert float(row["error_ratio"]) <= 1
        assert int(row["peak_bytes"]) > 0
    forward = {row["sequence_parallel"]: int(row["comm_bytes"]) for row in rows if row["mode"] == "forward"}
    assert forward == {"false": 8 * 16 * 4, "true": 2 * 8 * 16 * 4}


def test_what_is_wrong_gets_no_time_and_says_on_which_rank(two_sizes: tuple[Result, Path]) -> None:
    rows = [row for row in rows_of(two_sizes[1]) if row["ranks"] == "2"]
    found = {(row["implementation"], row["mode"]): row for row in rows if row["sequence_parallel"] == "false"}
    assert found["wrong", "forward"]["status"] == "incorrect"
    assert "output: on rank" in found["wrong", "forward"]["reason"]
    assert found["fails", "step"]["reason"] == "ValueError: no such luck."
    assert found["forgets", "step"]["status"] == "incorrect"
    assert "w_gate: on rank 0 missing" in found["forgets", "step"]["reason"]
    assert "no weight gradients" in found["no-weights", "step"]["reason"]
    assert found["no-weights", "forward"]["status"] == "ok"
    assert "need a GPU" in found["liger", "step"]["reason"]
    assert not [row for row in rows if row["time_ms"] and row["status"] != "ok"]


def test_one_rank_needs_no_collectives(two_sizes: tuple[Result, Path]) -> None:
    rows = [row for row in rows_of(two_sizes[1]) if row["ranks"] == "1" and row["status"] == "ok"]
    assert rows
    assert {row["comm_ms"] for row in rows} == {""}
    assert {row["status"] for row in rows_of(two_sizes[1]) if row["implementation"] == "wrong"} == {"ok", "incorrect"}


def test_the_folder_has_rows_samples_machines_and_a_figure(two_sizes: tuple[Result, Path]) -> None:
    result, out = two_sizes
    about = json.loads((out / "run.json").read_text())
    assert [one["rank"] for one in about["groups"]["2"]["ranks"]] == [0, 1]
    assert next(iter(about["groups"]["2"]["hosts"].values()))["torch"] == torch.__version__
    assert about["settings"]["environment"]["NCCL_NVLS_ENABLE"]
    samples = list(csv.DictReader((out / "tp_samples.csv").open()))
    assert {"time_ms", "compute_ms", "comm_ms", "single_ms", "twin_ms"} <= set(samples[0])
    assert (out / "scaling.png").stat().st_size > 10_000
    document: dict[str, Any] = json.loads(result.stdout)
    assert len(document["rows"]) == len(rows_of(out))


def test_a_rank_that_dies_or_hangs_costs_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "GRACE_S", 1.0)
    result = small(
        "--gpus", 2, "--modes", "forward", "--sequence-parallel", "no", "--timeout", 5, "--out", tmp_path,
        "--impl", f"{FAILING}:dies,{FAILING}:hangs,eager-packed",
    )  # fmt: skip
    assert result.exit_code == 1
    rows = {row["implementation"]: row for row in rows_of(tmp_path)}
    assert rows["dies"]["status"] == rows["hangs"]["status"] == "error"
    assert "rank 1: its process ended with exit status 3" in rows["dies"]["reason"]
    assert "ended the group of 2 ranks at forward mlp 16x32 8 tokens" in rows["hangs"]["reason"]
    assert float(rows["eager"]["time_ms"]) > 0
    assert float(rows["eager-packed"]["time_ms"]) > 0
    text = " ".join(result.output.split())
    assert "error: dies: It ended the group" in text
    assert "1 GPU ms" in text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--gpus", "3"), "--gpus: 16x32's intermediate size 32 does not divide by 3; give one of 2, 4, 8, 16, 32."),
        (("--gpus", "2", "--tokens", "9"), "--tokens: 9 tokens do not divide by 2 ranks"),
        (("--gpus", "two"), "--gpus: 'two' is not a number of GPUs"),
        (("--sequence-parallel", "maybe"), "--sequence-parallel: 'maybe' is not one of no, yes, both"),
        (("--modes", "backward"), "--modes: 'backward' is not one of forward, step"),
        (("--impl", "nobody"), "--impl: no implementation is called 'nobody'"),
        (("--no-csv", "--out", "x"), "--out was given together with --no-csv"),
    ],
)
def test_bad_input_is_one_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    result = small(*arguments)
    assert isinstance(result.exception, BadInput)
    assert str(result.exception).startswith(sentence)


def test_torchrun_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tp._sizes(None, "cpu", (1, 16)) == [16]
    with pytest.raises(BadInput, match="torchrun started 16 processes"):
        tp._sizes("4", "cuda", (0, 16))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(BadInput, match="4 were asked for, and there are 0 here; over several hosts, use torchrun"):
        tp._sizes("4", "cuda", None)
    assert tp._sizes(None, "cpu", None) == [2]


def test_another_command_s_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    result = small("--gpus", 2, "--out", tmp_path)
    assert "holds a run of another command" in str(result.exception)


def test_the_environment_stays_as_it_is_and_is_passed_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "2")
    monkeypatch.delenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", raising=False)
    launch.default_environment()
    environment = launch._setting(tmp_path / "log", 2, "cuda").environment
    assert environment["NCCL_NVLS_ENABLE"] == "2"
    assert environment["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
