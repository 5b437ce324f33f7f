import csv
import json
import os
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
from trained import write_mnist
from typer.testing import CliRunner, Result

from swiglu_bench.cli import train
from swiglu_bench.cli.app import app
from swiglu_bench.measure.rounds import Rule
from swiglu_bench.spec.errors import BadInput
from swiglu_bench.train import paired

MODEL = """task: mnist
hidden: 16
intermediate: 24
batch: 16
learning_rate: 1.0e-2
epochs: 2
source: for tests
"""


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = Rule(warmup_rounds=1, min_rounds=3, max_rounds=4, min_s=0, budget_s=1)
    monkeypatch.setattr(paired, "default_rule", lambda budget_s: rule)
    monkeypatch.setattr(paired, "TURN_S", 0.001)


def invoke(*arguments: object) -> Result:
    environment = {"COLUMNS": "140", "NO_COLOR": "1"}
    return CliRunner().invoke(app, ["train", *map(str, arguments)], env=environment)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(MODEL)
    write_mnist(tmp_path)
    return path


def small(model: Path, *more: object) -> Result:
    return invoke("--task", "mnist", "--model", model, "--data", model.parent, "--device", "cpu", *more)


def test_both_tables_the_files_and_every_reason(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = small(model, "--out", out, "--seeds", 2, "--impl", "eager-packed,fused,liger")
    assert result.exit_code in (0, 1), result.output  # 1: so few steps may tell seeds apart
    text = " ".join(result.stdout.split())
    for part in (
        "MNIST from", "blocks 16x24, 16 tokens a step, 8 steps, float32", "Does it learn the same?", "eager, permuted",
        "Is it faster?", "Where time and memory go", "eager-packed, seed 1: step 8/8, loss",
        "skipped: liger, fused: Its Triton kernels need a GPU; --interpret",
    ):  # fmt: skip
        assert part.replace("liger, fused", "fused, liger") in text or part in text, part
    rows = {row["implementation"]: row for row in csv.DictReader((out / "summary.csv").open())}
    assert set(rows) == {"eager", "eager, permuted", "eager-packed", "liger", "fused"}
    assert rows["fused"]["status"] == "skipped"
    assert float(rows["eager-packed"]["ratio"]) > 0
    assert rows["eager, permuted"]["step_ms"] == ""
    about = json.loads((out / "run.json").read_text())
    assert about["settings"]["workload"]["hidden"] == 16
    assert len(list(csv.DictReader((out / "train.csv").open()))) == 3 * 2 * 8
    curves = "Curves: " if (out / "curves.png").exists() else "No picture of the curves: "
    assert curves in text


def test_the_interpreter_trains_and_is_not_timed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", "1"))
    result = small(model, "--interpret", "--steps", 2, "--seeds", 1, "--no-csv", "--impl", "fused,fused-mlp-auto")
    assert "fused-mlp-auto, seed 0: step 2/2" in result.stdout
    learning, _, speed = result.stdout.partition("Is it faster?")
    assert "(frozen)" in learning
    assert "fused-mlp-auto" not in speed.partition("fused yields no")[0]
    assert "fused yields no weight gradients" in speed


def test_a_finished_run_is_not_trained_again(model: Path, tmp_path: Path) -> None:
    arguments = ("--out", tmp_path / "out", "--impl", "eager", "--steps", 3)
    assert small(model, *arguments, "--seeds", 1).exit_code == 0
    again = small(model, *arguments, "--seeds", 2, "--resume")
    assert again.exit_code == 0, again.output
    assert "seed 0: step" not in again.stdout
    assert "eager, seed 1: step 3/3" in again.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--task", "digit"), "--task: 'digit' is not a task; did you mean digits"),
        (("--epochs", 1, "--steps", 1), "--epochs and --steps were given together"),
        (("--resume",), "--resume needs the folder"),
        (("--out", "x", "--no-csv"), "--out was given together with --no-csv"),
        (("--dtype", "fp16"), "not one that train takes; give bf16 or fp32"),
        (("--impl", "eagre"), "no implementation is called 'eagre'; did you mean eager"),
        (("--task", "mnist"), "needs --data FOLDER"),
        (("--task", "digits", "--data", "x"), "--data is for mnist and llama"),
        (("--task", "llama", "--epochs", 1), "--epochs is for images"),
        (("--device", "cuda:99"), "--device: cuda:99 was asked for"),
    ],
)
def test_bad_input_is_one_sentence(arguments: tuple[object, ...], message: str) -> None:
    error = invoke(*arguments).exception
    assert isinstance(error, BadInput)
    assert message in str(error)


def test_llama_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    error = invoke("--task", "llama", "--device", "cpu").exception
    assert "The task llama needs transformers" in str(error)


def test_losses_and_summary_go_to_wandb(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake:
        logged: ClassVar[list[dict[str, Any]]] = []
        url_or_path = "somewhere"

        def __init__(self, **about: Any) -> None:
            assert about["config"]["settings"]["steps"] == 3

        def define(self, figures: str, step: str) -> None:
            assert step == "step"

        def log(self, figures: dict[str, Any]) -> None:
            self.logged.append(figures)

        def conclude(self, figures: dict[str, Any]) -> None:
            self.logged.append(figures)

        def close(self) -> None:
            pass

    monkeypatch.setattr("swiglu_bench.writers.wandb_run.WandbRun", Fake)
    result = small(model, "--no-csv", "--impl", "eager", "--steps", 3, "--seeds", 1, "--log-wandb")
    assert result.exit_code == 0, result.output
    assert "W&B: somewhere" in result.stdout
    assert [one["step"] for one in Fake.logged[:3]] == [0, 1, 2]
    assert "loss/eager/seed0" in Fake.logged[0]
    assert Fake.logged[-1]["step_ms/eager"] > 0


def test_json_is_all_there_is_on_stdout(model: Path) -> None:
    result = small(model, "--no-csv", "--impl", "eager", "--steps", 2, "--seeds", 1, "--format", "json")
    told = json.loads(result.stdout)
    assert told["kind"] == "training"
    assert told["settings"]["steps"] == 2
    assert [row["implementation"] for row in told["rows"]] == ["eager", "eager, permuted"]
    assert told["rows"][0]["step_ms"] > 0
    assert "seed 0: step 2/2" in result.stderr


def test_what_is_trained_unless_told_otherwise() -> None:
    names = [one.name for one in train._choose(None, None)]
    assert names[0] == "eager"
    assert set(train.DEFAULT) <= set(names)
    assert not {"fused-preact", "quack-tuned", "compile-max-autotune"} & set(names)
    assert "quack" in names
    assert [one.name for one in train._choose(["fused"], None)] == ["eager", "fused"]
