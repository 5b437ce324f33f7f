import csv
import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from places import SUPPORT
from typer.testing import CliRunner, Result

from swiglu_bench.cli.app import app
from swiglu_bench.machine import machine
from swiglu_bench.processes.pool.place import Place
from swiglu_bench.rows.record import COLUMNS
from swiglu_bench.spec.errors import BadInput

TINY = ("--shapes", "24x40", "--tokens", "3", "--device", "cpu", "--in-process", "--no-csv")
QUICK = (*TINY, "--budget", "0.2", "--impl", "eager,eager-packed")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "100", "NO_COLOR": "1"})


@pytest.mark.parametrize("form", ["json", "jsonl", "csv"])
def test_only_rows_are_on_stdout(form: str) -> None:
    result = invoke("forward", *QUICK, "--format", form)
    assert result.exit_code == 0
    assert "eager: ok" in result.stderr
    match form:
        case "json":
            told = json.loads(result.stdout)
            rows = told["rows"]
            assert told["settings"]["budget_s"] == 0.2
        case "jsonl":
            rows = [json.loads(line) for line in result.stdout.splitlines()]
        case _:
            rows = list(csv.DictReader(io.StringIO(result.stdout)))
    assert [row["implementation"] for row in rows] == ["eager", "eager-packed"]
    assert tuple(rows[0]) == COLUMNS


def test_what_an_implementation_prints_is_not_on_stdout(tmp_path: Path) -> None:
    own = Path(shutil.copy(SUPPORT / "user_implementations.py", tmp_path / "mine.py"))
    own.write_text(own.read_text() + "\nprint('loud')\n")
    result = invoke("memory", *TINY, "--impl", f"{own}:mine", "--format", "json")
    assert json.loads(result.stdout)["rows"], result.output
    assert "loud" in result.stderr


def test_kept_rows_are_among_those_for_programs(tmp_path: Path) -> None:
    arguments = ("memory", *TINY[:-1], "--impl", "eager", "--out", str(tmp_path / "run"), "--format", "jsonl")
    first, again = invoke(*arguments), invoke(*arguments, "--resume")
    assert "1 of 1 cases are finished" in again.stderr
    one, other = json.loads(first.stdout), json.loads(again.stdout)
    assert one["peak_bytes"] == other["peak_bytes"]
    assert one["run_id"] == other["run_id"]


def test_quiet_says_where_the_results_are_and_no_more(tmp_path: Path) -> None:
    result = invoke("memory", *TINY[:-1], "--impl", "eager", "--out", str(tmp_path / "run"), "-q")
    assert result.stdout == f"Rows, samples and machine: {tmp_path / 'run'}\n"


def test_another_format_is_refused_before_any_work() -> None:
    assert isinstance(invoke("forward", *QUICK, "--format", "parquet").exception, BadInput)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--gpus", "0"), "--gpus: this machine has no usable CUDA GPU; leave it out."),
        (("--gpus", "all", "--ray", "auto"), "--gpus and --ray were given together; give one of them."),
        (("--gpus", "0", "--device", "cuda:0"), "--gpus and --device were given together; give one of them."),
        (("--gpus", "0", "--in-process"), "--gpus needs child processes; leave --in-process out."),
        (("--ray", "auto", "--in-process"), "--ray needs child processes; leave --in-process out."),
        (("--ray", "auto", "--dry-run"), "--dry-run looks at this host only, and --ray at others."),
        (("--ray", "nowhere"), "--ray: 'nowhere' is no address; give auto or HOST:PORT."),
    ],
)
def test_places_that_cannot_be_had_are_refused(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], sentence: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr("swiglu_bench.processes.forkserver.start", lambda: None)
    refused = invoke("verify", "--shapes", "24x40", *arguments).exception
    assert isinstance(refused, BadInput)
    assert str(refused) == sentence


def test_a_team_runs_the_cases_of_a_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As `--gpus 0,1` on a machine with two, which here are CPUs."""
    this = machine.describe(torch.device("cpu"))
    monkeypatch.setattr(
        "swiglu_bench.processes.pool.place.gpus", lambda text: [Place(int(one), this) for one in text.split(",")]
    )
    result = invoke(
        "memory", "--shapes", "24x40", "--tokens", "3,5", "--impl", "eager", "--gpus", "0,1", "--out",
        str(tmp_path / "run"), "--format", "jsonl",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert sorted(row["tokens"] for row in rows) == [3, 5]
    assert {row["host"] for row in rows} == {this.host}
