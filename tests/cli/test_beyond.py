import csv
import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from command_line import Ran, swiglu_bench
from places import SUPPORT
from trained import write_mnist

from swiglu_bench.machine import machine
from swiglu_bench.tasks.train import run as training

pytestmark = pytest.mark.timed
needs_distributed = pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed")
MODEL = "task: mnist\nhidden: 16\nintermediate: 24\nbatch: 16\nlearning_rate: 1.0e-2\nepochs: 2\nsource: for tests\n"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "TURN_S", 0.001)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(MODEL)
    write_mnist(tmp_path)
    return path


def train(model: Path, *more: str | Path) -> Ran:
    fixed = ("--task", "mnist", "--model", model, "--data", model.parent, "--device", "cpu", "--budget", "0.01")
    return swiglu_bench("train", *fixed, *more, width=140)


def test_both_tables_the_files_and_every_reason(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = train(model, "--out", out, "--seeds", "1", "--steps", "8", "--impl", "eager-packed,fused,liger")
    assert result.code == 0, result.err
    text = " ".join(result.out.split())
    assert "eager-packed, seed 0: step 8/8, loss" in text
    assert "skipped: liger, fused: Its Triton kernels need a GPU; --interpret" in text
    if importlib.util.find_spec("vl_convert"):
        assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
        assert (out / "curves.svg").read_bytes().startswith(b"<svg")
    rows = {row["implementation"]: row for row in csv.DictReader((out / "summary.csv").open())}
    assert list(rows) == ["eager", "eager, permuted", "eager-packed", "liger", "fused"]
    assert rows["fused"]["status"] == "skipped"
    assert float(rows["eager-packed"]["ratio"]) > 0
    assert rows["eager, permuted"]["step_ms"] == ""
    settings = json.loads((out / "run.json").read_text())["settings"]
    assert (settings["workload"]["hidden"], settings["seeds"], settings["budget_s"]) == (16, 1, 0.01)
    assert len(list(csv.DictReader((out / "train.csv").open()))) == 3 * 8
    assert "holds a training run" in train(model, "--out", out, "--steps", "8").complaint


def test_blocks_in_fp8_train_beside_bf16(model: Path, tmp_path: Path) -> None:
    model.write_text(MODEL.replace("24", "32"))
    out = tmp_path / "out"
    few = ("--seeds", "2", "--steps", "4", "--impl", "eager,fp8-reference", "--precision", "fp8-rowwise")
    result = train(model, "--out", out, *few)
    assert result.code == 0, result.err
    assert "bfloat16, blocks in fp8-rowwise." in " ".join(result.out.split())
    rows = {row["implementation"]: row for row in csv.DictReader((out / "summary.csv").open())}
    assert [rows[name]["precision"] for name in ("eager", "fp8-reference")] == ["", "fp8-rowwise"]
    mine = {name: float(rows["fp8-reference"][name]) for name in ("difference_low", "difference", "difference_high")}
    assert sorted(mine.values()) == list(mine.values())
    assert mine["difference"] != 0


def test_the_interpreter_trains_and_is_not_timed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", "1"))
    result = train(model, "--interpret", "--steps", "2", "--seeds", "1", "--no-csv", "--impl", "fused,fused-mlp-auto")
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
def test_bad_input_of_train_is_one_sentence(
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
    result = train(model, *arguments)
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
        assert words in train(model, *large).complaint
    plan = json.loads(train(model, *large, "--dry-run", "--format", "json").out)
    assert (plan["kind"], plan["command"], plan["rows"][0]["fits"]) == ("plan", "train", False)
    assert plan["rows"][0]["needed_bytes"] > 16 * 3 * 16 * 2**24
    assert " no " in train(model, *large, "--dry-run").out
    assert not (tmp_path / "out").exists()


# tp

FAILING = SUPPORT / "split_implementations.py"
EXPERTS = ("--shapes", "smoke-experts")


def split(*more: str | Path) -> Ran:
    fixed = ("--device", "cpu", "--shapes", "16x32", "--tokens", "8", "--budget", "0.1")
    return swiglu_bench("tp", *fixed, *more, width=140)


def rows_of(out: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((out / "tp.csv").open()))


@needs_distributed
def test_what_is_wrong_or_ends_the_group_costs_its_row(tmp_path: Path) -> None:
    out, impl = tmp_path / "out", f"eager-packed,liger,{FAILING}:wrong,{FAILING}:dies"
    result = split("--gpus", "1,2", "--modes", "forward", "--impl", impl, "--out", out, "--format", "json")
    rows = [row for row in rows_of(out) if row["ranks"] == "2"]
    found = {row["implementation"]: row for row in rows if row["sequence_parallel"] == "false"}
    assert found["wrong"]["status"] == "incorrect"
    assert "output: on rank" in found["wrong"]["reason"]
    assert found["dies"]["status"] == "error"
    assert "rank 1: its process ended with exit status 3" in found["dies"]["reason"]
    assert "forward mlp 16x32 8 tokens" in found["dies"]["reason"]
    assert found["liger"]["status"] == "skipped"
    assert not [row for row in rows if row["time_ms"] and row["status"] != "ok"]
    about = json.loads((out / "run.json").read_text())
    assert [rank["rank"] for rank in about["groups"]["2"]["ranks"]] == [0, 1]
    assert next(iter(about["groups"]["2"]["hosts"].values()))["torch"] == torch.__version__
    assert about["settings"]["environment"]["NCCL_NVLS_ENABLE"]
    samples = list(csv.DictReader((out / "tp_samples.csv").open()))
    assert {"time_ms", "compute_ms", "comm_ms", "single_ms", "twin_ms"} <= set(samples[0])
    assert (out / "scaling.png").stat().st_size > 10_000
    assert len(json.loads(result.out)["rows"]) == len(rows_of(out))


@needs_distributed
def test_torchrun_starts_the_ranks(tmp_path: Path) -> None:
    arguments = ("tp", "--device", "cpu", "--shapes", "16x32", "--tokens", "8", "--budget", "0.1", "--modes", "forward",
                 "--sequence-parallel", "no", "--impl", f"{FAILING}:wrong", "--out", str(tmp_path))  # fmt: skip
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    server.close()
    environment = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "swiglu_bench", *arguments], text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        first, second = (process.communicate(timeout=240)[0] for process in processes)
    finally:
        for process in processes:
            process.kill()
    rows = {row["implementation"]: row for row in rows_of(tmp_path)}
    assert float(rows["eager"]["time_ms"]) > 0, first
    assert rows["wrong"]["status"] == "incorrect"
    assert "1 GPU ms" in first
    assert "1 GPU ms" not in second
    assert [process.returncode for process in processes] == [1, 0], "torchrun ends rank 0 when another fails"


@needs_distributed
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--gpus", "3"), "--gpus: 16x32's intermediate size 32 is not divisible by 3; give one of 2, 4, 8, 16, 32."),
        (("--gpus", "2", "--tokens", "9"), "--tokens: 9 tokens are not divisible by 2 ranks"),
        (("--sequence-parallel", "maybe"), "--sequence-parallel: 'maybe' is not one of no, yes, both"),
        (("--impl", "nobody"), "--impl: no implementation is called 'nobody'"),
        (("--no-csv", "--out", "x"), "--out was given together with --no-csv"),
        ((*EXPERTS, "--sequence-parallel", "no"), "--sequence-parallel: with experts each rank has its part of"),
        ((*EXPERTS, "--routing", "uniform,local"), "--routing: local is what one rank of several sees; give balanced"),
        (("--routing", "zipf"), "--routing is for mixtures of experts, and 16x32 has no experts"),
        (("--shapes", "smoke,smoke-experts"), "--shapes: mixtures of experts and dense blocks have other contenders"),
        ((*EXPERTS, "--gpus", "3"), "--gpus: smoke-experts's number of experts 8 is not divisible by 3"),
    ],
)
def test_bad_input_of_tp_is_one_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    assert split(*arguments).complaint.startswith(sentence)


@needs_distributed
def test_another_command_s_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    assert "holds a run of another command" in split("--gpus", "2", "--out", tmp_path).complaint


@needs_distributed
def test_what_the_memory_does_not_hold_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "host_memory_bytes", lambda available=False: 2**30)
    monkeypatch.setattr("swiglu_bench.worker.forkserver.start", lambda *_: pytest.fail("processes were started"))
    ran = swiglu_bench("tp", "--device", "cpu", "--gpus", "4", "--shapes", "llama3-70b", "--tokens", "8")
    for part in ("llama3-70b", "4 processes", "1.0 GiB free", "--gpus"):
        assert part in ran.complaint


@needs_distributed
def test_a_dry_run_of_tp_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swiglu_bench.worker.forkserver.start", lambda *_: pytest.fail("processes were started"))
    plan = json.loads(split("--gpus", "1,2", "--dry-run", "--format", "json").out)
    assert (plan["kind"], [row["ranks"] for row in plan["rows"]]) == ("plan", [1, 1, 2, 2])
    more = "--routing", "uniform,zipf", "--dry-run", "--impl", "mega*", "--format", "json"
    of_experts = json.loads(split(*EXPERTS, *more).out)
    assert {row["shape"] for row in of_experts["rows"]} == {"smoke-experts", "smoke-experts@zipf"}
    assert of_experts["implementations"] == ["grouped", "megatron-alltoall", "megatron-deepep"]


@needs_distributed
def test_a_case_that_does_not_fit_costs_its_own_rows(tmp_path: Path) -> None:
    split("--gpus", "1", "--tokens", "8,1000000000", "--modes", "forward", "--sequence-parallel", "no",
          "--impl", "eager", "--out", tmp_path)  # fmt: skip
    found = {row["tokens"]: row for row in rows_of(tmp_path)}
    assert found["1000000000"]["status"] == "skipped"
    assert "GiB" in found["1000000000"]["reason"]
    assert float(found["8"]["time_ms"]) > 0
