import csv
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Ran, swiglu_bench
from places import SUPPORT

from swiglu_bench.machine import machine

pytestmark = [
    pytest.mark.timed,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed"),
]
FAILING = SUPPORT / "split_implementations.py"


def small(*more: str | Path) -> Ran:
    fixed = ("--device", "cpu", "--shapes", "16x32", "--tokens", "8", "--budget", "0.1")
    return swiglu_bench("tp", *fixed, *more, width=140)


def rows_of(out: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((out / "tp.csv").open()))


@pytest.fixture(scope="module")
def two_sizes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ran, Path]:
    out = tmp_path_factory.mktemp("sizes") / "out"
    impl = f"eager-packed,liger,{FAILING}:wrong,{FAILING}:dies"
    return small("--gpus", "1,2", "--modes", "forward", "--impl", impl, "--out", out, "--format", "json"), out


def test_what_is_wrong_or_ends_the_group_costs_its_row(two_sizes: tuple[Ran, Path]) -> None:
    rows = [row for row in rows_of(two_sizes[1]) if row["ranks"] == "2"]
    found = {row["implementation"]: row for row in rows if row["sequence_parallel"] == "false"}
    assert found["wrong"]["status"] == "incorrect"
    assert "output: on rank" in found["wrong"]["reason"]
    assert found["dies"]["status"] == "error"
    assert "rank 1: its process ended with exit status 3" in found["dies"]["reason"]
    assert "forward mlp 16x32 8 tokens" in found["dies"]["reason"]
    assert found["liger"]["status"] == "skipped"
    assert not [row for row in rows if row["time_ms"] and row["status"] != "ok"]


def test_the_folder_has_rows_samples_machines_and_a_figure(two_sizes: tuple[Ran, Path]) -> None:
    result, out = two_sizes
    about = json.loads((out / "run.json").read_text())
    assert [rank["rank"] for rank in about["groups"]["2"]["ranks"]] == [0, 1]
    assert next(iter(about["groups"]["2"]["hosts"].values()))["torch"] == torch.__version__
    assert about["settings"]["environment"]["NCCL_NVLS_ENABLE"]
    samples = list(csv.DictReader((out / "tp_samples.csv").open()))
    assert {"time_ms", "compute_ms", "comm_ms", "single_ms", "twin_ms"} <= set(samples[0])
    assert (out / "scaling.png").stat().st_size > 10_000
    document: dict[str, Any] = json.loads(result.out)
    assert len(document["rows"]) == len(rows_of(out))


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
    assert processes[0].returncode == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--gpus", "3"), "--gpus: 16x32's intermediate size 32 is not divisible by 3; give one of 2, 4, 8, 16, 32."),
        (("--gpus", "2", "--tokens", "9"), "--tokens: 9 tokens are not divisible by 2 ranks"),
        (("--sequence-parallel", "maybe"), "--sequence-parallel: 'maybe' is not one of no, yes, both"),
        (("--impl", "nobody"), "--impl: no implementation is called 'nobody'"),
        (("--no-csv", "--out", "x"), "--out was given together with --no-csv"),
    ],
)
def test_bad_input_is_one_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    assert small(*arguments).complaint.startswith(sentence)


def test_experts_of_two_ranks_and_tokens_that_travel_to_them(tmp_path: Path) -> None:
    """Output and the gradients of x, weights and routing weights are those of all experts in one place."""
    fixed = ("--device", "cpu", "--gpus", "2", "--shapes", "smoke-experts", "--tokens", "8", "--budget", "0.1")
    impl = f"eager,grouped,{FAILING}:misrouted"
    ran = swiglu_bench("tp", *fixed, "--modes", "step", "--impl", impl, "--out", tmp_path)
    assert ran.code == 1, ran.err
    rows = {row["implementation"]: row for row in rows_of(tmp_path)}
    for name in ("eager", "grouped"):
        assert (rows[name]["status"], rows[name]["reason"], rows[name]["single_reason"]) == ("ok", "", "")
        assert rows[name]["sequence_parallel"] == "true"
        assert int(rows[name]["comm_bytes"]) == 4 * 8 * 2 * 64 * 4, "of four all-to-alls"
        assert float(rows[name]["compute_ms"]) > 0
    assert rows["misrouted"]["status"] == "incorrect"
    assert "on rank 1" in rows["misrouted"]["reason"]
    for more, sentence in (
        (("--sequence-parallel", "no"), "--sequence-parallel: with experts each rank has its part of the tokens"),
        (("--shapes", "smoke,smoke-experts"), "--shapes: mixtures of experts and dense blocks have other contenders"),
        (("--gpus", "3"), "--gpus: smoke-experts's number of experts 8 is not divisible by 3"),
    ):
        assert swiglu_bench("tp", *fixed, *more).complaint.startswith(sentence)


def test_another_command_s_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    assert "holds a run of another command" in small("--gpus", "2", "--out", tmp_path).complaint


def test_what_the_memory_does_not_hold_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "host_memory_bytes", lambda available=False: 2**30)
    monkeypatch.setattr("swiglu_bench.worker.forkserver.start", lambda *_: pytest.fail("processes were started"))
    ran = swiglu_bench("tp", "--device", "cpu", "--gpus", "4", "--shapes", "llama3-70b", "--tokens", "8")
    for part in ("llama3-70b", "4 processes", "1.0 GiB free", "--gpus"):
        assert part in ran.complaint


def test_a_dry_run_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swiglu_bench.worker.forkserver.start", lambda *_: pytest.fail("processes were started"))
    ran = small("--gpus", "1,2", "--dry-run")
    assert ran.code == 0
    for part in ("ranks", "16x32", "MiB"):
        assert part in ran.out
    plan = json.loads(small("--gpus", "1,2", "--dry-run", "--format", "json").out)
    assert (plan["kind"], [row["ranks"] for row in plan["rows"]]) == ("plan", [1, 1, 2, 2])


def test_a_case_that_does_not_fit_costs_its_own_rows(tmp_path: Path) -> None:
    small("--gpus", "1", "--tokens", "8,1000000000", "--modes", "forward", "--sequence-parallel", "no",
          "--impl", "eager", "--out", tmp_path)  # fmt: skip
    found = {row["tokens"]: row for row in rows_of(tmp_path)}
    assert found["1000000000"]["status"] == "skipped"
    assert "GiB" in found["1000000000"]["reason"]
    assert float(found["8"]["time_ms"]) > 0
