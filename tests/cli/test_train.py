import csv
import importlib.util
import json
import os
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from command_line import Ran, swiglu_bench
from trained import write_mnist

from swiglu_bench.cli.train import DEFAULT, TrainOptions, chosen_implementations
from swiglu_bench.tasks.train import run

pytestmark = pytest.mark.timed

MODEL = "task: mnist\nhidden: 16\nintermediate: 24\nbatch: 16\nlearning_rate: 1.0e-2\nepochs: 2\nsource: for tests\n"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "TURN_S", 0.001)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(MODEL)
    write_mnist(tmp_path)
    return path


def small(model: Path, *more: str | Path) -> Ran:
    fixed = ("--task", "mnist", "--model", model, "--data", model.parent, "--device", "cpu", "--budget", "0.01")
    return swiglu_bench("train", *fixed, *more, width=140)


def test_both_tables_the_files_and_every_reason(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = small(model, "--out", out, "--seeds", "1", "--steps", "8", "--impl", "eager-packed,fused,liger")
    assert result.code == 0, result.err
    text = " ".join(result.out.split())
    for part in (
        "MNIST from", "blocks 16x24, 16 tokens a step, 8 steps, float32", "Does it learn the same?", "eager, permuted",
        "Is it faster?", "Where time and memory go", "eager-packed, seed 0: step 8/8, loss",
        "skipped: liger, fused: Its Triton kernels need a GPU; --interpret",
    ):  # fmt: skip
        assert part in text, part
    if importlib.util.find_spec("vl_convert"):
        assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
        assert (out / "curves.svg").read_bytes().startswith(b"<svg")
    assert f"Curves: {out / 'curves.png'}" in text or "No picture of the curves: " in text
    rows = {row["implementation"]: row for row in csv.DictReader((out / "summary.csv").open())}
    assert list(rows) == ["eager", "eager, permuted", "eager-packed", "liger", "fused"]
    assert rows["fused"]["status"] == "skipped"
    assert float(rows["eager-packed"]["ratio"]) > 0
    assert rows["eager, permuted"]["step_ms"] == ""
    settings = json.loads((out / "run.json").read_text())["settings"]
    assert (settings["workload"]["hidden"], settings["seeds"], settings["budget_s"]) == (16, 1, 0.01)
    assert len(list(csv.DictReader((out / "train.csv").open()))) == 3 * 8
    assert "holds a training run" in small(model, "--out", out, "--steps", "8").complaint


def test_blocks_in_fp8_train_beside_bf16(model: Path, tmp_path: Path) -> None:
    model.write_text(MODEL.replace("24", "32"))
    out = tmp_path / "out"
    few = ("--seeds", "2", "--steps", "4", "--impl", "eager,fp8-reference", "--precision", "fp8-rowwise")
    result = small(model, "--out", out, *few)
    assert result.code == 0, result.err
    assert "bfloat16, blocks in fp8-rowwise." in " ".join(result.out.split())
    rows = {row["implementation"]: row for row in csv.DictReader((out / "summary.csv").open())}
    assert [rows[name]["precision"] for name in ("eager", "fp8-reference")] == ["", "fp8-rowwise"]
    mine = {name: float(rows["fp8-reference"][name]) for name in ("difference_low", "difference", "difference_high")}
    assert sorted(mine.values()) == list(mine.values())
    assert mine["difference"] != 0
    assert "±" in next(
        line for line in swiglu_bench("show", out, width=140).out.splitlines() if "fp8-reference" in line
    )


def test_the_interpreter_trains_and_is_not_timed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", "1"))
    result = small(model, "--interpret", "--steps", "2", "--seeds", "1", "--no-csv", "--impl", "fused,fused-mlp-auto")
    assert "fused-mlp-auto, seed 0: step 2/2" in result.out
    learning, _, speed = result.out.partition("Is it faster?")
    assert "(frozen)" in learning
    assert "fused-mlp-auto" not in speed.partition("fused yields no")[0]
    assert "fused yields no weight gradients" in speed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--epochs", "1", "--steps", "1"), "--epochs and --steps were given together"),
        (("--dtype", "fp16"), "not one that train takes; give bf16 or fp32"),
        (("--task", "mnist"), "needs --data FOLDER"),
        (("--task", "digits", "--data", "x"), "--data is for mnist and llama"),
        (("--task", "llama", "--epochs", "1"), "--epochs is for images"),
        (("--task", "llama"), "The task llama needs transformers"),
        (("--steps", "1000000000"), "hours on this CPU; give a smaller one or fewer --steps, or --budget"),
    ],
)
def test_bad_input_is_one_sentence(
    arguments: tuple[object, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert message in swiglu_bench("train", *map(str, arguments)).complaint


def test_json_is_all_there_is_on_stdout_and_losses_go_to_wandb(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = MagicMock()
    run_of = begin.return_value
    run_of.url_or_path = run_of.place = "somewhere"
    monkeypatch.setattr("swiglu_bench.show.wandb_run.WandbRun", begin)
    arguments = ("--no-csv", "--impl", "eager", "--steps", "3", "--seeds", "1", "--format", "json", "--log-wandb",
                 "--wandb-group", "a")  # fmt: skip
    result = small(model, *arguments)
    told = json.loads(result.out)
    eager, _ = told["rows"]
    assert (told["kind"], told["settings"]["steps"], eager["implementation"]) == ("training", 3, "eager")
    assert "seed 0: step 3/3" in result.err
    assert "W&B: somewhere" in result.err
    given = begin.call_args.kwargs
    assert (given["project"], given["group"], given["config"]["settings"]) == ("swiglu-bench", "a", told["settings"])
    logged = [call.args[0] for call in run_of.step.call_args_list]
    assert [(row.implementation, row.seed) for row in logged[:3]] == [("eager", 0)] * 3
    assert [len(row.series["loss"]) for row in logged] == [3] * 6, "one row, to which each step is added"
    assert run_of.write.call_args_list[0].args[0].time_ms == eager["step_ms"] > 0
    run_of.close.assert_called_once()


def test_a_model_that_is_too_large_is_refused_and_a_dry_run_trains_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.write_text(MODEL.replace("intermediate: 24", "intermediate: 16777216"))
    large = ("--out", tmp_path / "out", "--impl", "eager")
    monkeypatch.setattr("swiglu_bench.machine.machine.free_memory_bytes", lambda device: 1 << 30)
    for words in ("small.yaml needs about", "GiB", "smaller model"):
        assert words in small(model, *large).complaint
    plan = json.loads(small(model, *large, "--dry-run", "--format", "json").out)
    assert (plan["kind"], plan["command"], plan["rows"][0]["fits"]) == ("plan", "train", False)
    assert plan["rows"][0]["needed_bytes"] > 16 * 3 * 16 * 2**24
    assert " no " in small(model, *large, "--dry-run").out
    assert not (tmp_path / "out").exists()


def test_what_is_trained_by_default() -> None:
    names = [each.name for each in chosen_implementations(TrainOptions())]
    assert names[0] == "eager"
    assert {*DEFAULT, "liger", "quack"} <= set(names)
    assert not {"fused-preact", "quack-tuned", "compile-max-autotune"} & set(names)
    assert [each.name for each in chosen_implementations(TrainOptions(impl=["fused"]))] == ["eager", "fused"]
