"""forward, backward, step, memory and verify from the command line to their files and their exit status."""

import csv
import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import swiglu_bench
from places import SUPPORT

from swiglu_bench import loop
from swiglu_bench.cases.cases import Precision, Scope
from swiglu_bench.contenders import CATALOGUE
from swiglu_bench.rows import run_folder
from swiglu_bench.rows.record import COLUMNS

pytestmark = pytest.mark.timed

SMALL = ("--shapes", "24x40", "--device", "cpu", "--in-process")
ONE = (*SMALL, "--tokens", "3")
QUICK = ("--budget", "0.1", "--impl", "eager,eager-packed")
FILES = {"records.csv", "samples.csv", "checks.csv", "run.json"}


@pytest.fixture
def user_file() -> Path:
    """Implementations in a user's own file."""
    return Path(shutil.copy(SUPPORT / "user_implementations.py", "mine.py"))


def records(folder: str | Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = run_folder.frame_of(run_folder.read_rows(Path(folder))).to_dict("records")
    return rows


def test_a_timing_run_leaves_its_rows_and_samples() -> None:
    folder = Path("my run")
    ran = swiglu_bench("forward", *SMALL, "--tokens", "3,7", "--scope", "glu,mlp", *QUICK, "--out", folder)
    assert (ran.code, ran.err) == (0, "")
    assert {path.name for path in folder.iterdir()} == FILES
    assert json.loads((folder / "run.json").read_text())["versions"].keys() == {"eager", "eager-packed"}
    rows = records(folder)
    keys = [(row["scope"], row["tokens"], row["implementation"]) for row in rows]
    assert keys == [
        (scope, tokens, name) for scope in ("glu", "mlp") for tokens in (3, 7) for name in ("eager", "eager-packed")
    ]
    for row in rows:
        assert (row["mode"], row["status"], row["dtype"], row["baseline"]) == ("forward", "ok", "float32", "eager")
        assert min(row["time_ms"], row["ratio"]) > 0
    samples = (folder / "samples.csv").read_text(encoding="utf-8").splitlines()
    assert len(samples) == 1 + sum(row["rounds"] for row in rows)


READ: dict[str, Callable[[str], Any]] = {
    "json": lambda text: json.loads(text)["rows"],
    "jsonl": lambda text: [json.loads(line) for line in text.splitlines()],
    "csv": lambda text: list(csv.DictReader(io.StringIO(text))),
}


@pytest.mark.parametrize(("command", "form"), [("forward", "json"), ("backward", "jsonl"), ("step", "csv")])
def test_only_rows_are_on_stdout_and_a_default_folder_has_them(command: str, form: str) -> None:
    ran = swiglu_bench(command, *ONE, *QUICK, "--format", form)
    assert ran.code == 0
    assert "eager: ok" in ran.err
    rows = READ[form](ran.out)
    assert [(row["implementation"], row["mode"], row["status"]) for row in rows] == [
        ("eager", command, "ok"), ("eager-packed", command, "ok"),
    ]  # fmt: skip
    assert tuple(rows[0]) == COLUMNS
    (file,) = Path("results").rglob("records.csv")
    assert re.fullmatch(rf"results/cpu/\d{{4}}-\d\d-\d\d/\d{{6}}-{command}/records\.csv", file.as_posix())


def test_a_recorded_workload_is_timed_and_summed_up() -> None:
    Path("seen.csv").write_text("tokens,weight\n3,9\n7,1\n", encoding="utf-8")
    arguments = ("forward", *SMALL, *QUICK, "--workload", "seen.csv", "--rounds", "8", "--warmup", "1", "--out", "run")
    ran = swiglu_bench(*arguments)
    assert ran.code == 0, ran.err
    assert {(row["tokens"], row["rounds"]) for row in records("run")} == {(3, 8), (7, 8)}
    with Path("run/workload.csv").open(encoding="utf-8") as file:
        eager, packed = csv.DictReader(file)
    time_ms = {row["tokens"]: row["time_ms"] for row in records("run") if row["implementation"] == "eager"}
    assert float(eager["time_ms"]) == pytest.approx((9 * time_ms[3] + time_ms[7]) / 10)
    assert float(packed["ratio_low"]) <= float(packed["ratio"]) <= float(packed["ratio_high"])
    assert "recorded workload" in ran.out
    assert "recorded workload" in swiglu_bench("show", "run").out
    told = json.loads(swiglu_bench("show", "run", "--format", "json").out)
    totals = [total["time_ms"] for total in told["workload_totals"]]
    assert totals == pytest.approx([float(total["time_ms"]) for total in (eager, packed)])
    assert "--tokens" in swiglu_bench(*arguments, "--tokens", "3").complaint


def test_a_named_baseline_is_compared_with_the_latest_run() -> None:
    arguments = ("memory", *ONE, "--impl", "eager")
    assert "Baseline main: .swiglu-bench" in swiglu_bench(*arguments, "--save-baseline", "main").out
    assert swiglu_bench(*arguments, "--out", "results/later").code == 0
    for more in ((), ("results/later",)):
        told = json.loads(swiglu_bench("compare", "main", *more, "--format", "json").out)
        assert (told["outcome"], told["after"]) == ("fine", "results/later")
        assert told["rows"]
    assert "--save-baseline" in swiglu_bench(*arguments, "--save-baseline", "main", "--no-csv").complaint
    assert "name" in swiglu_bench(*arguments, "--save-baseline", "../main").complaint


def test_memory_resumed_quiet_and_into_the_same_folder() -> None:
    arguments = ("memory", *ONE, "--impl", "eager,eager-packed", "--out", "run")
    ran = swiglu_bench(*arguments)
    assert (ran.code, ran.err) == (0, "")
    assert "MiB, workspace 0.000 MiB" in ran.out
    first = records("run")
    for row in first:
        assert row["saved_bytes"] == row["predicted_saved_bytes"] > 0
        assert row["peak_bytes"] == row["predicted_peak_bytes"] > row["saved_bytes"]
        assert row["time_ms"] != row["time_ms"], "memory is not timed"
    again = swiglu_bench(*arguments, "--resume", "--format", "jsonl")
    assert "1 of 1 cases are finished in run and are kept." in again.err
    kept = [json.loads(line) for line in again.out.splitlines()]
    assert [row["run_id"] for row in kept] == [row["run_id"] for row in first], "kept rows are among those for programs"
    assert len(records("run")) == 2
    assert "--force" in swiglu_bench(*arguments).complaint
    assert swiglu_bench(*arguments, "-q", "--force").out == "Rows, samples and machine: run\n"
    (row, _) = records("run")
    assert row["run_id"] != first[0]["run_id"]


@pytest.mark.parametrize(
    ("scope", "impl"),
    [("activation", "silu-mul,unsloth,liger"), ("glu", "fused*,unsloth"), ("mlp", "fused-mlp*,unsloth")],
)
def test_verify_on_a_cpu_checks_every_kernel_through_the_interpreter(scope: Scope, impl: str) -> None:
    from swiglu_kernels import backend_for

    if backend_for(torch.device("cpu")) != "interpreter":
        pytest.skip("Triton's interpreter is not in use: there is a GPU, or no Triton")
    few = ("--shapes", "20x24", "--tokens", "5", "--dtype", "fp32", "--scope", scope, "--impl", impl)
    ran = swiglu_bench("verify", "--device", "cpu", "--in-process", *few, "--no-csv", "--format", "json")
    assert ran.code == 0, ran.err
    for row in json.loads(ran.out)["rows"]:
        (known,) = (known for known in CATALOGUE if known.name == row["implementation"])
        if scope in known.scopes and known.interpretable == "yes" and Precision.UNQUANTISED in known.precisions:
            assert (row["status"], row["interpreted"]) == ("ok", True)
            names = [part.split("=")[0] for part in row["errors"].split()]
            assert names == ["output_(inference)", "output", *known.gradients(scope)]
        else:
            assert (row["status"], "interpret" in row["reason"]) == ("skipped", known.name == "liger")


@pytest.mark.parametrize(
    ("command", "names", "code"),
    [
        ("forward", {"mine": "ok", "swapped": "incorrect", "fragile": "error", "fused": "skipped"}, 1),
        ("verify", {"mine": "ok", "foreign": "skipped"}, 0),
    ],
)
def test_what_fails_exits_1_and_the_others_are_measured(
    user_file: Path, command: str, names: dict[str, str], code: int
) -> None:
    user_file.write_text(user_file.read_text() + "\nprint('loud')\n")
    impl = ",".join(["eager", *(name if name == "fused" else f"{user_file}:{name}" for name in names)])
    few = (*SMALL, "--tokens", "32", "--dtype", "fp32", "--scope", "glu", "--format", "json")
    ran = swiglu_bench(command, *few, "--impl", impl, "--out", "run")
    assert ran.code == code
    assert f"--impl runs the code of {user_file.resolve()}" in ran.err
    assert "loud" in ran.err
    found = {row["implementation"]: row for row in json.loads(ran.out)["rows"]}
    assert {name: row["status"] for name, row in found.items()} == {"eager": "ok", **names}
    for name, status in names.items():
        if status != "ok":
            assert found[name]["reason"]
            assert found[name]["time_ms"] is None, "no correctness, no number"
            assert f"{name}: {status}: " in ran.err or status == "skipped"


@pytest.mark.parametrize(
    ("line", "cases", "words"),
    [
        ("step --shapes 24x40 --tokens 3,7 --scope glu,mlp --dtype fp32,bf16 --impl eager*", 8, "eager, eager-packed"),
        ("forward --shapes 24x40 --tokens 3,1000000000", 2, "yes no"),
        ("verify --tokens 5", 21, "smoke odd activation glu mlp experts float32 float16 bfloat16"),
    ],
)
def test_a_dry_run_prints_the_cases_and_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str, cases: int, words: str
) -> None:
    monkeypatch.setattr(loop, "rows", lambda *_: pytest.fail("the work has started"))
    ran = swiglu_bench(*line.split(), "--device", "cpu", "--dry-run")
    assert (ran.code, ran.err) == (0, "")
    assert all(word in ran.out for word in words.split())
    assert list(tmp_path.iterdir()) == []
    told = json.loads(swiglu_bench(*line.split(), "--device", "cpu", "--dry-run", "--format", "json").out)
    assert (told["kind"], len(told["rows"])) == ("plan", cases)
    assert all(row["needed_bytes"] > 0 and row["fits"] == (row["tokens"] < 10**9) for row in told["rows"])
