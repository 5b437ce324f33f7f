"""The commands about finished runs, on the committed ones and on small ones that are made here."""

import csv
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from places import ROOT
from reported import EVIL, trained
from specimens import a_record, without_time
from typer.testing import CliRunner, Result

from swiglu_bench.cli.app import app
from swiglu_bench.rows.finished_run import load_run
from swiglu_bench.rows.record import COLUMNS, Record, Status
from swiglu_bench.spec.errors import BadInput
from swiglu_bench.sweep import output
from swiglu_bench.writers.csv_file import CsvFile

RESULTS = ROOT / "results/nvidia-h200/2026-11-21"
FORWARD = RESULTS / "forward"


def invoke(*arguments: str | Path, width: int = 140) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": str(width), "NO_COLOR": "1"})


def complaint(*arguments: str | Path) -> str:
    result = invoke(*arguments)
    assert isinstance(result.exception, BadInput), result.output
    assert result.stdout == ""
    return str(result.exception)


def keep(folder: Path, *rows: Record) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    files = CsvFile(folder)
    for row in rows:
        files.write(row)
    files.close()
    return folder


# compare


@pytest.mark.parametrize(("form", "start"), [("table", "llama7b glu"), ("github", "### swiglu-bench: "), ("json", "{")])
def test_a_run_equals_itself(form: str, start: str) -> None:
    result = invoke("compare", FORWARD, FORWARD, "--impl", "eager,fused", "--format", form)
    assert result.exit_code == 0
    assert result.stdout.startswith(start)
    assert "no row is worse by more than 2.00%" in result.stdout or form == "json"


def test_a_regression_exits_1_and_what_cannot_be_told_3(tmp_path: Path) -> None:
    before = keep(tmp_path / "a", a_record(ratio=0.8, ratio_low=0.79, ratio_high=0.81))
    worse = keep(tmp_path / "b", a_record(ratio=0.9, ratio_low=0.89, ratio_high=0.91))
    vague = keep(tmp_path / "c", a_record(ratio=0.8, ratio_low=0.6, ratio_high=1.0))
    assert [invoke("compare", before, other).exit_code for other in (worse, vague, before)] == [1, 3, 3]
    assert invoke("compare", before, before, "--max-regression", "5%").exit_code == 0
    told = json.loads(invoke("compare", before, worse, "--format", "json").stdout)
    assert (told["outcome"], told["exit_status"], told["version"]) == ("regression", 1, 1)
    assert told["rows"][0]["quotient"] == pytest.approx(0.9 / 0.8)
    (row,) = csv.DictReader(io.StringIO(invoke("compare", before, worse, "--format", "csv").stdout))
    assert (row["implementation"], row["verdict"], row["outcome"]) == ("mine", "slower", "regression")


def test_what_compare_refuses() -> None:
    for arguments, words in (
        ((FORWARD, RESULTS / "backward"), "The runs have other modes"),
        ((RESULTS / "memory", RESULTS / "memory-mlp"), "The runs have other scopes"),
        ((FORWARD, FORWARD, "--max-regression", "2"), "'2' is not a percentage"),
        ((FORWARD, FORWARD, "--by", "tim"), "did you mean time"),
        ((FORWARD, FORWARD, "--format", "xml"), "'xml' is not one of table, github, json, jsonl, csv"),
        ((FORWARD, FORWARD, "--impl", "fusd"), "did you mean fused"),
    ):
        assert words in complaint("compare", *arguments)


# show


@pytest.mark.parametrize("command", ["forward", "step-mlp", "memory", "verify"])
@pytest.mark.parametrize("width", [60, 100])
def test_every_committed_run_can_be_shown(command: str, width: int) -> None:
    result = invoke("show", RESULTS / command, width=width)
    assert result.exit_code == 0
    assert "llama7b" in result.stdout
    assert all(len(line) <= width for line in result.stdout.splitlines())


def test_rows_are_sorted_by_a_figure() -> None:
    def order(*more: str) -> list[str]:
        text = invoke(
            "show", FORWARD, "--impl", "eager,liger,fused", "--pivot", "ratio", "--format", "csv", *more
        ).stdout
        return [row["implementation"] for row in csv.DictReader(io.StringIO(text))]

    assert order() == ["eager", "liger", "fused"]
    assert order("--sort", "ratio") == ["fused", "liger", "eager"]
    assert order("--sort", "ratio", "--reverse") == ["eager", "liger", "fused"]
    assert order("--sort", "implementation") == ["eager", "fused", "liger"]


def test_a_pivot_has_a_column_for_each_token_count() -> None:
    result = invoke("show", FORWARD, "--impl", "fused", "--tokens", "1,8k", "--pivot", "ratio", "--format", "github")
    assert result.stdout.splitlines()[0] == "| shape | scope | mode | dtype | implementation | 1 | 8192 |"
    ratios = {one.tokens: one.ratio for one in load_run(FORWARD).records if one.implementation == "fused"}
    expected = f"| llama7b | glu | forward | bfloat16 | fused | {ratios[1]:.4g} | {ratios[8192]:.4g} |"
    assert result.stdout.splitlines()[2] == expected
    assert "fused" in invoke("show", FORWARD, "--pivot", "time_ms", width=80).stdout


def test_ratios_to_another_baseline() -> None:
    told = invoke(
        "show", FORWARD, "--baseline", "compile", "--impl", "fused,compile", "--tokens", "8k", "--format", "json"
    )
    rows = {row["implementation"]: row for row in json.loads(told.stdout)["rows"]}
    assert rows["compile"]["ratio"] == 1.0
    assert rows["fused"]["baseline"] == "compile"
    assert rows["fused"]["ratio_low"] <= rows["fused"]["ratio"] <= rows["fused"]["ratio_high"] < 1
    assert rows["fused"]["verdict"] == "faster"
    assert invoke("show", FORWARD, "--baseline", "nobody").exit_code == 1


def test_rows_for_programs(tmp_path: Path) -> None:
    chosen = ("show", FORWARD, "--impl", "eager,fused", "--tokens", "1")
    told = json.loads(invoke(*chosen, "--format", "json").stdout)
    lines = [json.loads(line) for line in invoke(*chosen, "--format", "jsonl").stdout.splitlines()]
    assert told["rows"] == lines
    assert told["kind"] == "run"
    assert told["machine"]["device"] == "NVIDIA H200"
    assert list(lines[0]) == list(COLUMNS)
    text = invoke(*chosen, "--format", "csv").stdout
    with (FORWARD / "records.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for row in csv.DictReader(io.StringIO(text)):
        assert {name: row[name] for name in rows[0]} in rows, "the same texts as the file has"
    invoke(*chosen, "--format", "csv", "--output", tmp_path / "rows.csv")
    assert (tmp_path / "rows.csv").read_text() == text
    assert "is already there" in complaint(*chosen, "--format", "csv", "--output", tmp_path / "rows.csv")


def test_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pandas

    def no_engine(*_: Any, **__: Any) -> None:
        raise ImportError("Unable to find a usable engine")

    with monkeypatch.context() as patch:
        patch.setattr(pandas.DataFrame, "to_parquet", no_engine)
        told = complaint("show", FORWARD, "--format", "parquet", "-o", tmp_path / "rows.parquet")
    assert told == "--format parquet needs pyarrow or fastparquet; install one of them, or choose csv."
    assert not (tmp_path / "rows.parquet").exists()
    pytest.importorskip("pyarrow", reason="pandas has no engine for Parquet here")
    assert invoke("show", FORWARD, "--format", "parquet", "-o", tmp_path / "rows.parquet").exit_code == 0
    assert len(pandas.read_parquet(tmp_path / "rows.parquet")) == 133


def test_what_show_refuses() -> None:
    for arguments, words in (
        (("--pivot", "tim_ms"), "did you mean time_ms"),
        (("--sort", "device"), "'device' is not a figure of records.csv"),
        (("--format", "github"), "needs --pivot FIGURE"),
        (("--format", "parquet"), "give the file as --output FILE"),
        (("--output", "x"), "--output is for rows"),
    ):
        assert words in complaint("show", FORWARD, *arguments)


def test_a_training_is_shown_as_it_was_printed(tmp_path: Path) -> None:
    folder = trained(tmp_path / "run")
    result = invoke("show", folder, "--impl", "eager*,level,absent")
    assert result.exit_code == 0, result.output
    for words in ("Does it learn the same?", "eager, permuted", "0.990 ± 0.002", "skipped: absent: It broke"):
        assert words in result.stdout, words
    assert "frozen" not in result.stdout
    assert invoke("show", folder / "train.csv", "--format", "csv").stdout == (folder / "summary.csv").read_text()
    told = json.loads(invoke("show", folder, "--impl", "level", "--format", "json").stdout)
    assert (told["kind"], told["settings"]["dtype"], told["rows"][0]["ratio"]) == ("training", "float32", 0.99)


def test_what_show_refuses_of_a_training(tmp_path: Path) -> None:
    folder = trained(tmp_path / "run")
    for arguments, words in (
        (
            ("--sort", "ratio", "--detail"),
            "is a training run, which is shown by --impl, --format and --output; omit --sort, --detail.",
        ),
        (("--format", "github"), "omit --format github"),
        (("--impl", "levl"), "has no implementation 'levl'; did you mean level"),
        (("--output", "x"), "--output is for rows"),
    ):
        assert words in complaint("show", folder, *arguments)


# history


def test_runs_are_listed_newest_first(tmp_path: Path) -> None:
    keep(tmp_path / "gpu/old", a_record(timestamp="2025-01-01T00:00:00Z", ratio=0.7))
    keep(
        tmp_path / "gpu/new",
        a_record(timestamp="2025-02-01T00:00:00Z"),
        without_time(Status.ERROR, "broken", implementation="other"),
    )
    (keep(tmp_path / "broken", a_record()) / "run.json").write_text("[")
    lines = invoke("history", tmp_path).stdout.splitlines()
    assert [line.split()[0] for line in lines if line.startswith(" 2025")] == ["2025-02-01", "2025-01-01"]
    assert "1 ok, 1 failed" in invoke("history", tmp_path).stdout
    assert "not read: " in invoke("history", tmp_path).stdout
    told = json.loads(invoke("history", tmp_path, "--format", "json").stdout)
    assert [Path(row["folder"]).name for row in told["rows"]] == ["new", "old", "broken"]
    assert (told["rows"][1]["best"], told["rows"][1]["best_ratio"]) == ("mine", 0.7)
    assert len(invoke("history", tmp_path, "--limit", "1", "--format", "csv").stdout.splitlines()) == 2


def test_trainings_are_listed_too(tmp_path: Path) -> None:
    trained(tmp_path / "train")
    (trained(tmp_path / "cut") / "summary.csv").unlink()
    lines = invoke("history", tmp_path).stdout
    assert "5 ok" in lines
    assert "cut is a training run that has not ended" in " ".join(lines.split())
    row, cut = json.loads(invoke("history", tmp_path, "--format", "json").stdout)["rows"]
    assert (row["command"], row["shapes"], row["dtypes"], row["skipped"]) == ("train", ["small"], ["float32"], 1)
    assert (row["best"], row["best_ratio"]) == (EVIL, 0.9)
    assert cut["problem"]


@pytest.mark.parametrize("width", [90, 140, 200])
def test_the_committed_runs_are_one_line_each(width: int) -> None:
    lines = invoke("history", RESULTS.parent.parent, width=width).stdout.splitlines()
    runs = [file for name in ("records.csv", "train.csv") for file in RESULTS.parent.parent.rglob(name)]
    assert len([line for line in lines if line.strip().startswith("20")]) == len(runs)
    assert len(lines) <= len(runs) + 6, "and the head and the legend"
    assert any("Not shown in" in line for line in lines) is (width < 200)


def test_what_history_refuses(tmp_path: Path) -> None:
    assert "No run is in" in complaint("history", tmp_path)
    assert "is not a folder" in complaint("history", tmp_path / "none")


# publish


class FakeWandb:
    """Takes rows as WandbRun does."""

    url_or_path = "https://wandb.example/run"
    failed = False

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.rows: list[Record] = []
        self.closed = False

    def write(self, record: Record) -> None:
        self.rows.append(record)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> list[FakeWandb]:
    opened: list[FakeWandb] = []

    def begin(**options: Any) -> FakeWandb:
        opened.append(FakeWandb(**options))
        return opened[-1]

    monkeypatch.setattr("swiglu_bench.writers.wandb_run.WandbRun", begin)
    return opened


def test_a_finished_run_is_sent(wandb: list[FakeWandb]) -> None:
    result = invoke("publish", FORWARD, "--wandb-tags", "a,b", "--wandb-entity", "team", "--wandb-id", "x")
    assert (result.exit_code, result.stdout) == (0, "W&B: https://wandb.example/run\n")
    (run,) = wandb
    assert len(run.rows) == len(load_run(FORWARD).records) > 0
    assert run.closed
    assert run.options["name"] == "forward nvidia-h200"
    assert run.options["tags"] == ["forward", "nvidia-h200", "a", "b"]
    assert (run.options["entity"], run.options["run_id"], run.options["group"]) == ("team", "x", "forward")
    assert run.options["config"]["machine"]["device"] == "NVIDIA H200"
    assert output.Wandb().project == run.options["project"]


def test_what_could_not_be_sent_exits_1(wandb: list[FakeWandb], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeWandb, "failed", True)
    assert invoke("publish", FORWARD).exit_code == 1


# recommend


TRAINING = ("--run", RESULTS / "step-mlp", "--run", RESULTS / "memory-mlp", "--tokens", "8k")


def test_a_recommendation_from_a_run() -> None:
    result = invoke("recommend", *TRAINING)
    assert result.exit_code == 0
    for words in ("fused-mlp-auto", "patch_model(model)", " MiB", "longer"):
        assert words in result.stdout, words


def test_memory_decides() -> None:
    peaks = {one.implementation: one.peak_bytes for one in load_run(RESULTS / "memory-mlp").records}
    best, most = peaks["fused-mlp-auto"], peaks["compile"] / 2**20 - 1
    told = invoke("recommend", *TRAINING, "--max-memory", f"{min(best / 2**20, most) - 1:.0f}MiB", "--format", "json")
    (row,) = json.loads(told.stdout)["rows"]
    assert row["peak_bytes"] < min(best, peaks["compile"])
    assert row["peak_is_measured"]
    assert row["excluded"]["fused-mlp-auto"] == f"peak {best / 2**20:,.1f} MiB"
    assert invoke("recommend", *TRAINING, "--max-memory", "1MiB").exit_code == 1


def test_measured_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke(
        "recommend", "--shapes", "24x40", "--tokens", "3", "--impl", "eager,eager-packed", "--device", "cpu",
        "--budget", "0.3", "--max-memory", "1GiB", "--in-process", "--format", "json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)["rows"]
    assert row["implementation"] in {"eager", "eager-packed"}
    assert row["peak_is_measured"]
    assert row["confidence"] in {"clear", "tie"}
    assert not list(tmp_path.iterdir())


def test_what_recommend_refuses() -> None:
    for arguments, words in (
        (("--mode", "steps"), "did you mean step"),
        (("--max-memory", "1"), "'1' is not a size"),
        (("--run", RESULTS / "memory"), "No row has a time"),
        (("--run", RESULTS / "step", "--skip-impl", "x"), "--skip-impl is for measuring now"),
        (("--run", RESULTS / "forward"), "has no mode 'step'"),
    ):
        assert words in complaint("recommend", *arguments)


def test_rows_may_lack_what_older_versions_did_not_keep(tmp_path: Path) -> None:
    shutil.copytree(RESULTS / "backward", tmp_path / "old")
    (tmp_path / "old/samples.csv").unlink()
    result = invoke("recommend", "--run", tmp_path / "old", "--mode", "backward", "--tokens", "8k")
    assert result.exit_code == 0
    assert "not compared in common rounds" in result.stdout
