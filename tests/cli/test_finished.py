"""The commands about finished runs, on the committed ones and on small ones that are made here."""

import csv
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from command_line import swiglu_bench
from places import ROOT
from reported import EVIL, audited, trained, write
from specimens import a_record, without_time

from swiglu_bench.rows import run_folder
from swiglu_bench.rows.record import COLUMNS, Status

RESULTS = ROOT / "results/nvidia-h200"


def parsed(*arguments: str | Path) -> Any:
    """What a command prints for a program."""
    return json.loads(swiglu_bench(*arguments, "--format", "json").out)


def lines(*arguments: str | Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(swiglu_bench(*arguments, "--format", "csv").out)))


def rounds(seed: int, ratio: float) -> tuple[float, ...]:
    return tuple(ratio * np.exp(np.random.default_rng(seed).normal(0, 0.002, 40)))


@pytest.fixture(scope="module")
def forward(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three implementations at two token counts, with samples."""
    about = {"command": "swiglu-bench forward", "machine": {"device": "A GPU"}}
    rows = [
        a_record(
            implementation=name, tokens=tokens, time_ms=ratio, ratio=ratio, ratio_low=0.99 * ratio, rounds=40,
            ratio_high=1.01 * ratio, samples_ms=rounds(seed, ratio), aa_ratio=1.0, aa_low=0.999, aa_high=1.001,
        )
        for tokens in (1, 8192)
        for seed, (name, ratio) in enumerate((("eager", 1.0), ("liger", 0.9), ("fused", 0.8)))
    ]  # fmt: skip
    return write(tmp_path_factory.mktemp("runs") / "forward", *rows, **about)


def test_a_regression_exits_1_and_what_cannot_be_told_3(tmp_path: Path) -> None:
    before = write(tmp_path / "a", a_record(ratio=0.8, ratio_low=0.79, ratio_high=0.81))
    worse = write(tmp_path / "b", a_record(ratio=0.9, ratio_low=0.89, ratio_high=0.91))
    vague = write(tmp_path / "c", a_record(ratio=0.8, ratio_low=0.6, ratio_high=1.0))
    assert [swiglu_bench("compare", before, other).code for other in (worse, vague, before)] == [1, 3, 3]
    assert swiglu_bench("compare", before, before, "--max-regression", "5%").code == 0
    told = parsed("compare", before, worse)
    assert (told["outcome"], told["exit_status"], told["version"]) == ("regression", 1, 1)
    assert told["rows"][0]["quotient"] == pytest.approx(0.9 / 0.8)
    (row,) = lines("compare", before, worse)
    assert (row["implementation"], row["verdict"], row["outcome"]) == ("mine", "slower", "regression")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("compare RUN RUN --max-regression 2", "'2' is not a percentage"),
        ("compare RUN RUN --by tim", "did you mean time"),
        ("compare RUN RUN --impl fusd", "did you mean fused"),
        ("show RUN --pivot tim_ms", "did you mean time_ms"),
        ("show RUN --format github", "needs --pivot FIGURE"),
        ("show RUN --format parquet", "is binary and needs --output FILE"),
        ("show RUN --output x", "--output is for rows"),
        ("show RUN --baseline eagr", "did you mean eager"),
        ("history RUN/logs", "is not a folder"),
        ("recommend --mode steps", "did you mean step"),
        ("recommend --max-memory 1", "'1' is not a size"),
        ("recommend --run RUN --skip-impl x", "--skip-impl is for measuring now"),
        (f"recommend --run {RESULTS / 'tp/llama7b'}", "is a run of tp; give one of forward, backward, step or memory"),
        ("recommend --run RUN", "has rows of forward and none of step; give --mode forward"),
        ("report nowhere", "nowhere does not exist; give a run's folder"),
        ("report RUN -o RUN/records.csv", "exists and is not an HTML page; give another name"),
        ("report RUN -o RUN", "is a folder; give a file"),
        ("report RUN --svg RUN/records.csv", "records.csv cannot be written"),
        ("report RUN --dark", "--dark is for pictures"),
        ("report RUN --impl nobody", "no row of these runs is of 'nobody'"),
    ],
)
def test_bad_input_is_one_sentence(forward: Path, line: str, words: str) -> None:
    before = (forward / "records.csv").read_bytes()
    assert words in swiglu_bench(*line.replace("RUN", str(forward)).split()).complaint
    assert (forward / "records.csv").read_bytes() == before


def test_a_name_is_compared_with_the_newest_run_of_its_command(forward: Path, tmp_path: Path) -> None:
    """Not with that of another command, nor with one that was interrupted before its first row."""
    run_folder.save_baseline("main", "forward", forward)
    assert "no run of forward below results/" in swiglu_bench("compare", "main").complaint
    assert swiglu_bench("compare", "mian").complaint.endswith("did you mean main.")
    for age, name in enumerate(("rowless", "another", "forward")):
        shutil.copytree(forward, tmp_path / "results" / name)
        for file in (tmp_path / "results" / name).iterdir():
            os.utime(file, (2e9 - age, 2e9 - age))
    rows = tmp_path / "results/rowless/records.csv"
    rows.write_text(rows.read_text(encoding="utf-8").partition("\n")[0] + "\n", encoding="utf-8")
    os.utime(rows, (2e9, 2e9))
    rows = tmp_path / "results/another/records.csv"
    rows.write_text(rows.read_text(encoding="utf-8").replace("swiglu-bench forward", "swiglu-bench step"))
    assert parsed("compare", "main")["after"] == "results/forward"


def test_rows_are_sorted_by_a_figure(forward: Path) -> None:
    def order(*more: str) -> list[str]:
        return [row["implementation"] for row in lines("show", forward, "--pivot", "ratio", *more)]

    assert order() == ["eager", "liger", "fused"]
    assert order("--sort", "ratio") == ["fused", "liger", "eager"]
    assert order("--sort", "ratio", "--reverse") == ["eager", "liger", "fused"]
    assert order("--sort", "implementation") == ["eager", "fused", "liger"]


def test_a_pivot_has_a_column_for_each_token_count(forward: Path) -> None:
    chosen = ("show", forward, "--impl", "fused", "--tokens", "1,8k", "--pivot")
    head, _, row = swiglu_bench(*chosen, "time_ms", "--format", "github").out.splitlines()
    assert head == "| shape | scope | mode | dtype | implementation | 1 | 8192 |"
    assert row == "| small | glu | forward | float32 | fused | 0.8 | 0.8 |"
    assert "No row has peak_bytes." in swiglu_bench(*chosen, "peak_bytes").out


def test_rows_for_programs(tmp_path: Path, forward: Path) -> None:
    chosen = ("show", forward, "--impl", "eager,fused", "--tokens", "1")
    told = parsed(*chosen)
    found = [json.loads(line) for line in swiglu_bench(*chosen, "--format", "jsonl").out.splitlines()]
    assert told["rows"] == found
    assert (told["kind"], told["machine"]["device"], list(found[0])) == ("run", "A GPU", list(COLUMNS))
    head, eager, _, fused, *_ = (forward / "records.csv").read_text().splitlines(keepends=True)
    file = tmp_path / "rows.csv"
    swiglu_bench(*chosen, "--format", "csv", "--output", file)
    assert file.read_text() == head + eager + fused, "the same texts as the file has"
    assert "is already there" in swiglu_bench(*chosen, "--format", "csv", "--output", file).complaint


def test_a_training_is_shown_as_it_was_printed(tmp_path: Path) -> None:
    folder = trained(tmp_path / "run")
    result = swiglu_bench("show", folder, "--impl", "eager*,level,absent")
    assert result.code == 0, result.err
    for words in ("Does it learn the same?", "eager, permuted", "0.990 ± 0.002", "skipped: absent: It broke"):
        assert words in result.out, words
    assert "frozen" not in result.out
    assert swiglu_bench("show", folder / "train.csv", "--format", "csv").out == (folder / "summary.csv").read_text()
    told = parsed("show", folder, "--impl", "level")
    assert (told["kind"], told["settings"]["dtype"], told["rows"][0]["ratio"]) == ("training", "float32", 0.99)
    assert "did you mean level" in swiglu_bench("show", folder, "--impl", "levl").complaint
    assert "has no rounds to compute other ratios from" in swiglu_bench("show", folder, "--baseline", "level").complaint
    names = [row["implementation"] for row in lines("show", folder, "--pivot", "final_loss", "--sort", "ratio")]
    assert names[:3] == ["frozen", EVIL, "level"]
    assert swiglu_bench("compare", folder, folder).code in {0, 3}


def test_what_tp_wrote_is_shown_and_compared_like_other_runs() -> None:
    chosen = (RESULTS / "tp/llama7b", "--impl", "eager,liger", "--tokens", "1k", "--mode", "step")
    for words in ("sequence parallel", "Where its time goes", "1 GPU ms"):
        assert words in swiglu_bench("show", *chosen).out
    told = parsed("show", *chosen, "--scope", "mlp-tp4-sp")
    assert (told["kind"], [row["ranks"] for row in told["rows"]]) == ("tp", [4, 4])
    rebased = parsed("show", *chosen, "--scope", "mlp-tp4", "--baseline", "liger")["rows"]
    assert [row["ratio"] == 1 for row in rebased] == [False, True]
    (row, *_) = lines("show", *chosen, "--pivot", "efficiency")
    assert 0 < float(row["1024"]) <= 1.1
    assert parsed("compare", chosen[0], *chosen)["outcome"] in {"fine", "cannot tell"}


def test_runs_are_listed_newest_first(tmp_path: Path) -> None:
    other = without_time(Status.ERROR, "broken", implementation="other")
    write(tmp_path / "gpu/old", a_record(timestamp="2025-01-01T00:00:00Z", ratio=0.7, ratio_low=0.69))
    write(tmp_path / "gpu/new", a_record(timestamp="2025-02-01T00:00:00Z"), other)
    (write(tmp_path / "broken", a_record()) / "run.json").write_text("[")
    trained(tmp_path / "train")
    (trained(tmp_path / "cut") / "summary.csv").unlink()
    shown = " ".join(swiglu_bench("history", tmp_path).out.split())
    assert all(words in shown for words in ("1 ok, 1 failed", "not read: ", "cut is a training run that has not ended"))
    rows = parsed("history", tmp_path)["rows"]
    assert [Path(row["folder"]).name for row in rows] == ["train", "new", "old", "broken", "cut"]
    training, _, old, *unread = rows
    assert (old["best"], old["best_ratio"], old["shapes"]) == ("mine", 0.7, ["small"])
    assert (training["command"], training["shapes"], training["dtypes"]) == ("train", ["small"], ["float32"])
    assert (training["best"], training["best_ratio"], training["skipped"]) == (EVIL, 0.9, 1)
    assert all(row["problem"] for row in unread)
    (row,) = lines("history", tmp_path, "--limit", "1")
    assert (row["command"], row["scopes"]) == ("train", "model")


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """What opens a run at W&B."""
    begin = MagicMock()
    begin.return_value.configure_mock(url_or_path="https://a", place="https://a", upload="", failed=False)
    monkeypatch.setattr("swiglu_bench.show.wandb_run.WandbRun", begin)
    return begin


@pytest.mark.parametrize("failed", [False, True])
def test_a_finished_run_is_sent(forward: Path, begin: MagicMock, failed: bool) -> None:
    begin.return_value.failed = failed
    result = swiglu_bench("publish", forward, "--wandb-tags", "a,b", "--wandb-entity", "team", "--wandb-id", "x")
    assert (result.code, result.out) == (int(failed), "W&B: https://a\n")
    assert begin.return_value.write.call_count == 6
    begin.return_value.close.assert_called_once()
    told = begin.call_args.kwargs
    assert (told["name"], told["tags"]) == ("forward cpu", ["forward", "cpu", "a", "b"])
    assert (told["entity"], told["run_id"], told["group"]) == ("team", "x", "forward")
    assert told["config"]["machine"]["device"] == "A GPU"


@pytest.mark.parametrize(("which", "rows", "steps"), [("training", 6, 5 * 2 * 4), ("tp", 144, 0)])
def test_trainings_and_several_gpus_are_sent_like_other_runs(
    which: str, rows: int, steps: int, tmp_path: Path, begin: MagicMock
) -> None:
    told = parsed("publish", trained(tmp_path / "run") if which == "training" else RESULTS / "tp/llama3-70b")
    assert [told[name] for name in ("kind", "failed", "url_or_path")] == ["publication", False, "https://a"]
    assert told["rows_sent"] == begin.return_value.write.call_count == rows
    assert begin.return_value.step.call_count == steps


TRAINING = ("--run", RESULTS / "step-mlp", "--run", RESULTS / "memory-mlp", "--tokens", "8k")


def test_a_recommendation_from_a_run() -> None:
    assert "fused-mlp-auto" in swiglu_bench("recommend", *TRAINING).out
    told = parsed("recommend", *TRAINING, "--max-memory", "600MiB")
    (row,) = told["rows"]
    assert (row["peak_is_measured"], row["excluded"]["fused-mlp-auto"]) == (True, "peak 730.0 MiB")
    assert row["peak_bytes"] < told["max_memory_bytes"] == 600 << 20
    (row,) = lines("recommend", *TRAINING, "--max-memory", "1MiB")
    assert row["implementation"] == ""
    assert "fused-mlp-auto" in row["excluded"].split()
    assert swiglu_bench("recommend", *TRAINING, "--max-memory", "1MiB").code == 1


def test_measured_now(tmp_path: Path) -> None:
    result = swiglu_bench(
        "recommend", "--shapes", "24x40", "--tokens", "3", "--impl", "eager,eager-packed", "--device", "cpu",
        "--budget", "0.1", "--max-memory", "1GiB", "--in-process", "--format", "json",
    )  # fmt: skip
    assert result.code == 0, result.err
    (row,) = json.loads(result.out)["rows"]
    assert row["implementation"] in {"eager", "eager-packed"}
    assert row["peak_is_measured"]
    assert row["confidence"] in {"clear", "tie"}
    assert not list(tmp_path.iterdir())


def test_a_page(tmp_path: Path) -> None:
    pytest.importorskip("altair", reason="the extra `report` is not installed")
    checked = {"command": "verify", "time_ms": None}
    write(tmp_path / "runs" / "run", a_record(**checked), a_record(**checked, implementation="b"))
    audited(tmp_path / "runs" / "audit")
    assert "Report: report.html" in swiglu_bench("report", "runs").out
    assert "Contract matrix" in Path("report.html").read_text(encoding="utf-8")
    told = parsed("report", "runs")
    assert (told["kind"], told["page"], len(told["runs"])) == ("report", "report.html", 2)
    assert "mine" in swiglu_bench("report", "runs", "--impl", "mine,none*").complaint
    assert swiglu_bench("report", "runs", "--impl", "mine").code == 0, "over the page that was there"
    assert "Contract matrix" not in Path("report.html").read_text(encoding="utf-8")


def test_pictures(tmp_path: Path) -> None:
    pytest.importorskip("vl_convert", reason="the extra `report` is not installed")
    checked, without = a_record(command="verify", time_ms=None), a_record(command="verify", time_ms=None, error=None)
    runs = [write(tmp_path / "run", checked), write(tmp_path / "none", without), trained(tmp_path / "train")]
    folders = {form: tmp_path / form for form in ("svg", "png")}
    chosen = ("--impl", "mine,eager,level,frozen")
    said = swiglu_bench("report", *runs, "--svg", folders["svg"], "--png", folders["png"], "--dark", *chosen).out
    assert "no none-glu-verify-float32-error: These rows carry no error that is a number" in said
    assert f"2 pictures: {folders['png']}" in said
    for form, folder in folders.items():
        names = [f"run-glu-verify-float32-error.{form}", f"train-curves.{form}"]
        assert sorted(path.name for path in folder.iterdir()) == names
    assert (folders["png"] / "train-curves.png").read_bytes().startswith(b"\x89PNG")
    assert "below: without frozen" in (folders["svg"] / "train-curves.svg").read_text(encoding="utf-8")
    said = swiglu_bench("report", runs[-1], "--svg", tmp_path / "none", "--impl", "absent").out
    assert "no train-curves: Nothing was trained to the end" in said
