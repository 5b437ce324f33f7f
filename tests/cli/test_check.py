"""audit, inspect and tune from the command line to their files and their exit status."""

import json
import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Ran, swiglu_bench
from fake_clock import FakeClock
from specimens import a_cell

from swiglu_bench import loop, request
from swiglu_bench.cases.cases import Dtype, Scope
from swiglu_bench.measure import clock as clock_module
from swiglu_bench.rows.record import AuditVerdict, Record
from swiglu_bench.tasks import tune as tuner
from swiglu_bench.tasks.contract import matrix
from swiglu_kernels.ops.experts.portable_experts import rows_launch
from swiglu_kernels.runtime.backend import backend_for
from swiglu_kernels.standalone import compiled
from swiglu_kernels.standalone.compiled import Resources
from swiglu_kernels.tiles import tuning
from swiglu_kernels.tiles.tuning import TunedMachine

AUDIT = ("audit", "--impl", "eager", "--scope", "activation", "--device", "cpu")


@pytest.fixture(autouse=True)
def _few_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "CHECKS", matrix.CHECKS[:2])


def test_an_audit_leaves_its_cells_and_says_what_it_counted() -> None:
    ran = swiglu_bench(*AUDIT, "--in-process", "--out", "audit")
    assert (ran.code, ran.err) == (0, "")
    assert {path.name for path in Path("audit").iterdir()} == {"audit.csv", "run.json"}
    assert "2 pass, 0 fail, 0 unsupported, 0 not run" in ran.out
    assert ran.out.rstrip().endswith("Cells and machine: audit")
    assert len(Path("audit/audit.csv").read_text(encoding="utf-8").splitlines()) == 1 + 2
    about = json.loads(Path("audit/run.json").read_text())
    assert (about["options"]["impl"], about["options"]["in_process"]) == (["eager"], True)
    assert about["machine"]["device_type"] == "cpu"


def cells(*verdicts: AuditVerdict, interrupt: bool = False) -> Callable[..., Generator[Record]]:
    """An audit in child processes that finds these."""

    def rows(places: Any, cases: Any, work: Any, show: Any, warn: Any) -> Generator[Record]:
        (asked,) = cases
        assert [known.name for known in work.implementations] == ["eager"]
        assert (asked.scopes, asked.dtype, work.timeout_s) == ([Scope.ACTIVATION], Dtype.BFLOAT16, 600.0)
        assert work.logs.is_dir()
        for verdict in verdicts:
            yield a_cell("eager", "activation", matrix.CHECKS[0].name, verdict, "why")
        if interrupt:
            raise KeyboardInterrupt

    return rows


@pytest.mark.parametrize(
    ("found", "more", "code"),
    [
        (cells(AuditVerdict.PASS, AuditVerdict.UNSUPPORTED), ["--strict"], 0),
        (cells(AuditVerdict.PASS, AuditVerdict.FAIL), [], 0),
        (cells(AuditVerdict.PASS, AuditVerdict.FAIL), ["--strict"], 1),
        (cells(AuditVerdict.FAIL, interrupt=True), ["--strict"], 130),
    ],
)
def test_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, found: Callable[..., Generator[Record]], more: list[str], code: int
) -> None:
    monkeypatch.setattr(loop, "rows", found)
    monkeypatch.setattr("swiglu_bench.worker.forkserver.start", lambda *_: None)
    ran = swiglu_bench(*AUDIT, "--dtype", "bf16", "--no-csv", "--format", "json", *more)
    assert ran.code == code
    assert ("Interrupted: 1 cells were kept." in ran.err) == (code == 130)
    assert (f"✗ {matrix.CHECKS[0].name}: why" in ran.err) == ('"fail"' in ran.out)
    told = json.loads(ran.out)
    assert (told["kind"], told["options"]["dtype"]) == ("audit", "bf16")
    assert len(told["rows"]) == (1 if code == 130 else 2)
    assert not Path("results").exists()


# inspect

INSPECT = ("inspect", "--target", "sm_80, 90a", "--shapes", "24x40", "--tokens", "1,8", "--dtype", "fp16")


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Nothing is compiled; the bytes that each kernel spills."""
    spills = {"forward": 0, "dX": 0}

    def report(name: str, tokens: int, hidden: int, intermediate: int, dtype: Any, capability: Any) -> Resources:
        assert (hidden, intermediate) == (24, 40)
        return Resources(name, "{}.{}".format(*capability), str(dtype), tokens, 128, spills[name], 2**16, 5, 0, 7, 3, 0)

    monkeypatch.setattr(compiled, "launches", lambda *_: spills)
    monkeypatch.setattr(compiled, "report", report)
    return spills


def test_every_kernel_is_shown_for_every_target_and_token_count_and_a_spill_exits_1(compiler: dict[str, int]) -> None:
    rows = json.loads(swiglu_bench(*INSPECT, "--format", "json").out)["rows"]
    assert [(row["capability"], row["tokens"], row["kernel"]) for row in rows] == [
        (capability, tokens, name) for capability in ("8.0", "9.0") for tokens in (1, 8) for name in ("forward", "dX")
    ]
    assert swiglu_bench(*INSPECT).code == 0
    assert "8192 tokens" in swiglu_bench("inspect", "--shapes", "24x40").out
    compiler["dX"] = 96
    ran = swiglu_bench(*INSPECT, width=140)
    assert (ran.code, ran.out.count("none"), ran.out.count("96 B")) == (1, 4, 4)


@pytest.mark.parametrize("end", [lambda: os._exit(134), lambda: int("a kernel of no target")])
def test_a_target_that_the_compiler_does_not_know_is_named(
    monkeypatch: pytest.MonkeyPatch, compiler: dict[str, int], end: Callable[[], object]
) -> None:
    monkeypatch.setattr(compiled, "report", lambda *_: end())
    complaint = swiglu_bench("inspect", "--target", "sm_12").complaint
    assert "--target" in complaint
    assert "sm_12 " in complaint
    assert "sm_90" in complaint


# tune, on a machine that looks like a GPU's, by a clock of the test's own

HERE = TunedMachine("NVIDIA Test", "9.0", "2.0", "3.0", "abc")
SMALL = ("--shapes", "32x64", "--dtype", "fp16", "--candidates", "3", "--budget", "0.05", "--tokens", "5")


def tune(*arguments: str) -> Ran:
    return swiglu_bench("tune", "--device", "cpu", *arguments, width=200)


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(tuning.VARIABLE, str(tmp_path / "tuning.json"))
    tuning.forget()
    yield tmp_path / "tuning.json"
    tuning.forget()


@pytest.fixture
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose launches take less time, the fewer stages they have; the shipped tile has three."""
    if backend_for(torch.device("cpu")) != "interpreter":
        pytest.skip("Triton's interpreter is not in use")
    monkeypatch.setattr(tuning, "machine_of", lambda device: HERE)
    monkeypatch.setattr(request, "device_type", lambda _: "cuda")
    monkeypatch.setattr(clock_module, "make_clock", lambda device: FakeClock(lambda launch: float(launch.num_stages)))


@pytest.fixture
def fails_at(monkeypatch: pytest.MonkeyPatch) -> dict[str, BaseException]:
    """What tuning a kernel raises; other kernels are tuned."""
    fails: dict[str, BaseException] = {}
    really = tuner.Tuner.tune

    def sometimes(self: tuner.Tuner, kernel: str, *rest: object) -> tuner.TunedTile:
        if kernel in fails:
            raise fails[kernel]
        return really(self, kernel, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(tuner.Tuner, "tune", sometimes)
    return fails


@pytest.mark.usefixtures("_gpu")
def test_a_winner_is_kept_shown_used_and_removed(path: Path) -> None:
    ran = tune(*SMALL, "--kernel", "input-grad,recompute")
    assert ran.code == 0, ran.err
    kept = tuning.read(path)
    assert [(entry.kernel, entry.dtype, entry.tokens, entry.hidden, entry.intermediate) for entry in kept] == [
        ("input-grad", "float16", 8, 32, 64),
        ("recompute", "float16", 8, 32, 64),
    ]
    assert {entry.choice.tile.stages for entry in kept} == {2}
    used = tuning.lookup("input-grad", torch.empty(1, dtype=torch.float16), 7, 32, 64)
    assert used == kept[0].choice

    told = json.loads(tune("--show", "--format", "json").out)
    assert (told["kind"], told["file"]) == ("tuning", str(path))
    assert [row["choice"] for row in told["rows"]] == [str(entry.choice) for entry in kept]
    shown = tune("--show")
    assert shown.code == 0
    for text in (str(used), str(path), "input-grad", "recompute"):
        assert text in shown.out

    assert tune("--clear").out == f"Removed {path} with tuned choices: 2.\n"
    assert "No tuned tile is kept" in tune("--show").out


@pytest.mark.usefixtures("_gpu")
@pytest.mark.parametrize(
    ("kernels", "error", "code", "words"),
    [("forward,recompute", tuner.CannotTune("no room"), 1, "no room"),
     ("recompute,forward", KeyboardInterrupt(), 130, "faster")],
)  # fmt: skip
def test_what_cannot_be_tuned_costs_its_row_and_an_interruption_keeps_the_others(
    path: Path, fails_at: dict[str, BaseException], kernels: str, error: BaseException, code: int, words: str
) -> None:
    fails_at["forward"] = error
    ran = tune(*SMALL, "--kernel", kernels)
    assert ran.code == code
    assert words in ran.out
    told = json.loads(tune(*SMALL, "--kernel", kernels, "--format", "json").out)
    assert told["kind"] == "tuning"
    assert [words in row.values() for row in told["rows"]][:1] == [True]
    assert [entry.kernel for entry in tuning.read(path)] == ["recompute"]


@pytest.mark.usefixtures("_gpu")
def test_experts_are_tuned_for_the_rows_of_one(path: Path) -> None:
    ran = tune("--shapes", "smoke-experts", "--tokens", "9", *SMALL[2:-2], "--kernel", "forward,experts-down")
    assert ran.code == 0, ran.err
    (kept,) = tuning.read(path)
    assert (kept.kernel, kept.tokens, kept.hidden, kept.intermediate) == ("experts-down", 16, 64, 96)
    a, w, out = (torch.empty(size, dtype=torch.float16) for size in ((64, 96), (8, 64, 96), (64, 64)))
    pair, tile_expert = (torch.zeros(size, dtype=torch.int32) for size in (64, 4))
    assert rows_launch(a, w, out, pair, tile_expert, None).num_stages == kept.choice.tile.stages == 4
    assert rows_launch(a, w, out, pair, tile_expert[:2], None).num_stages == 5, "tiles of 32 rows were not tuned"


# Input


@pytest.mark.usefixtures("_gpu")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--kernel", "foward"), "--kernel: there is no kernel 'foward'; did you mean forward"),
        (("--dtype", "fp32"), "--dtype: float32 keeps its shipped tiles; give bf16 or fp16."),
        (("--tokens", "1000,1024"), "--tokens: 1000 and 1024 tokens share one tuned tile, kept for up to 1024 tokens"),
        (("--shapes", "40x64"), "--shapes: 40x64 keeps its shipped tiles; give sizes that are multiples of 16."),
        (("--kernel", "experts-*"), "--kernel: none of experts-* is of llama7b, a dense block; experts-* are those of"),
        (
            ("--shapes", "smoke-experts", "--tokens", "16,64"),
            "16 and 64 tokens share one tuned tile, kept for tiles of 16 rows",
        ),
    ],
)
def test_bad_input_is_one_sentence_before_any_work(
    arguments: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock_module, "make_clock", lambda device: pytest.fail("it began to measure"))
    assert words in tune(*arguments).complaint


def test_a_cpu_has_nothing_to_tune_and_switched_off_neither_has_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "tune needs an NVIDIA GPU" in tune().complaint
    monkeypatch.setenv(tuning.VARIABLE, "off")
    monkeypatch.setattr(request, "device_type", lambda _: "cuda")
    for option in ("--show", "--clear", "--kernel=forward"):
        assert tune(option).complaint.startswith("SWIGLU_KERNELS_TUNING is off")
