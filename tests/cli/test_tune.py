"""`swiglu-bench tune` on a machine that looks like a GPU's, by a clock of the test's own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import Result
from fake_clock import FakeClock
from typer.testing import CliRunner

from swiglu_bench.cli import tune as tune_command
from swiglu_bench.cli.app import app
from swiglu_bench.measure import clock as clock_module
from swiglu_bench.spec.errors import BadInput
from swiglu_kernels.launches.backend import backend_for
from swiglu_kernels.tiles import tuning
from swiglu_kernels.tiles.tuning import Machine

HERE = Machine("NVIDIA Test", "9.0", "2.0", "3.0", "abc")
GPU = ((9, 0), 132)
SMALL = ("--shapes", "32x64", "--dtype", "fp16", "--candidates", "3", "--device", "cpu", "--budget", "0.05")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["tune", *arguments], env={"COLUMNS": "200", "NO_COLOR": "1"})


def complaint(*arguments: str) -> str:
    error = invoke(*arguments).exception
    assert isinstance(error, BadInput)
    assert "\n" not in str(error)
    return str(error)


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


@pytest.mark.usefixtures("_gpu")
def test_a_winner_is_kept_shown_used_and_removed(path: Path) -> None:
    ran = invoke(*SMALL, "--tokens", "5", "--kernel", "input-grad,recompute")
    assert ran.exit_code == 0, ran.output
    assert "faster" in ran.stdout
    assert "16x32x128 4w 3s g16" in ran.stdout
    assert "0.66" in ran.stdout
    kept = tuning.read(path)
    assert [(one.kernel, one.dtype, one.tokens, one.hidden, one.intermediate) for one in kept] == [
        ("input-grad", "float16", 8, 32, 64),
        ("recompute", "float16", 8, 32, 64),
    ]
    assert {one.choice.tile.stages for one in kept} == {2}
    used = tuning.lookup("input-grad", torch.empty(1, dtype=torch.float16), 7, 32, 64)
    assert used == kept[0].choice

    shown = invoke("--show", "--device", "cpu")
    assert shown.exit_code == 0
    title = "NVIDIA Test (9.0), torch 2.0, Triton 3.0, kernels abc: in use here"
    for text in (title, str(used), str(path), "input-grad", "recompute", "float16"):
        assert text in shown.stdout

    cleared = invoke("--clear")
    assert cleared.stdout == f"Removed {path} with tuned choices: 2.\n"
    assert "No tuned tile is kept" in invoke("--show", "--device", "cpu").stdout


@pytest.mark.usefixtures("_gpu")
def test_where_nothing_is_faster_nothing_is_kept(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock_module, "make_clock", lambda device: FakeClock(lambda launch: 1.0))
    ran = invoke(*SMALL, "--tokens", "5", "--kernel", "forward")
    assert ran.exit_code == 0, ran.output
    assert "tie" in ran.stdout
    assert tuning.read(path) == []


@pytest.mark.usefixtures("_gpu")
def test_what_cannot_be_tuned_costs_its_row(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from swiglu_bench.tuning import tuner

    tune = tuner.tune

    def sometimes(kernel: str, *rest: object) -> tuner.Found:
        if kernel == "forward":
            raise tuner.CannotTune("no room")
        return tune(kernel, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(tuner, "tune", sometimes)
    ran = invoke(*SMALL, "--tokens", "5", "--kernel", "forward,recompute")
    assert ran.exit_code == 1
    assert "no room" in ran.stdout
    assert [one.kernel for one in tuning.read(path)] == ["recompute"]


@pytest.mark.usefixtures("_gpu")
def test_what_was_found_before_an_interruption_is_kept_and_shown(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from swiglu_bench.tuning import tuner

    tune = tuner.tune

    def interrupted(kernel: str, *rest: object) -> tuner.Found:
        if kernel == "recompute":
            raise KeyboardInterrupt
        return tune(kernel, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(tuner, "tune", interrupted)
    ran = invoke(*SMALL, "--tokens", "5", "--kernel", "forward,recompute")
    assert ran.exit_code == 130
    assert "faster" in ran.stdout
    assert [one.kernel for one in tuning.read(path)] == ["forward"]


def test_every_kernel_by_a_glob() -> None:
    names = {job.kernel for job in tune_command._jobs("smoke", "1,128", "bf16", "*", GPU)}
    assert len(names) == 9
    assert len(tune_command._jobs("smoke", "1,128", "bf16,fp16", "forward*", GPU)) == 8


# Input


def test_a_cpu_has_nothing_to_tune() -> None:
    assert "tune needs an NVIDIA GPU" in complaint("--device", "cpu")


@pytest.mark.usefixtures("_gpu")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--kernel", "foward"), "--kernel: there is no kernel 'foward'; did you mean forward"),
        (("--kernel", ""), "--kernel: there is no kernel ''"),
        (("--dtype", "fp32"), "--dtype: float32 keeps its shipped tiles; give bf16 or fp16."),
        (("--tokens", "1000,1024"), "--tokens: 1000 and 1024 share one choice, that of up to 1024 tokens"),
        (("--tokens", "0"), "--tokens: '0' is not a token count"),
        (("--shapes", "llama77b"), "llama77b"),
        (("--shapes", "40x64"), "--shapes: 40x64 keeps its shipped tiles; give sizes that are multiples of 16."),
        (("--show", "--clear"), "--show was given together with --clear"),
    ],
)
def test_bad_input_is_one_sentence_before_any_work(
    arguments: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock_module, "make_clock", lambda device: pytest.fail("it began to measure"))
    assert words in complaint("--device", "cpu", *arguments)


def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tuning.VARIABLE, "off")
    for option in ("--show", "--clear", "--kernel=forward"):
        assert complaint(option).startswith("SWIGLU_KERNELS_TUNING is off")
