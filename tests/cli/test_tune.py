"""`swiglu-bench tune` on a machine that looks like a GPU's, by a clock of the test's own."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from command_line import Ran, swiglu_bench
from fake_clock import FakeClock

from swiglu_bench.measure import clock as clock_module
from swiglu_bench.tasks import tune as tuner
from swiglu_kernels.ops.experts.portable_experts import rows_launch
from swiglu_kernels.runtime.backend import backend_for
from swiglu_kernels.tiles import tuning
from swiglu_kernels.tiles.tuning import TunedMachine

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
    for text in ("faster", "16x32x128 4w 3s g16", "0.66"):
        assert text in ran.out
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
    title = "NVIDIA Test (9.0), torch 2.0, Triton 3.0, kernels abc: in use here"
    for text in (title, str(used), str(path), "input-grad", "recompute", "float16"):
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
        (("--tokens", "1000,1024"), "--tokens: 1000 and 1024 share one choice, that of up to 1024 tokens"),
        (("--shapes", "40x64"), "--shapes: 40x64 keeps its shipped tiles; give sizes that are multiples of 16."),
        (("--kernel", "experts-*"), "--kernel: none of experts-* is of llama7b, a dense block; experts-* are those of"),
        (("--shapes", "smoke-experts", "--tokens", "16,64"), "16 and 64 share one choice, that of tiles of 16 rows"),
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
    for option in ("--show", "--clear", "--kernel=forward"):
        assert tune(option).complaint.startswith("SWIGLU_KERNELS_TUNING is off")
