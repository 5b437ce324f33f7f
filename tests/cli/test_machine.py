import csv
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from swiglu_bench.cli import machine
from swiglu_bench.cli.app import app
from swiglu_bench.machine import ceilings_cache, doctor, locks
from swiglu_bench.machine.doctor import Finding, Severity
from swiglu_bench.measure import ceilings
from swiglu_bench.measure import noise as noise_module
from swiglu_bench.measure.noise import Pair
from swiglu_bench.measure.statistics import Interval
from swiglu_bench.spec.errors import BadInput


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "140", "NO_COLOR": "1"})


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (ceilings, ceilings_cache):
        monkeypatch.setitem(module.COPY_BYTES, "cpu", 2**18)
        monkeypatch.setitem(module.PRODUCT_SIDE, "cpu", 32)


# ceilings


@pytest.mark.usefixtures("_quick")
def test_ceilings_are_shown_and_kept() -> None:
    first, again = (invoke("ceilings", "--device", "cpu", "--dtype", "fp32") for _ in range(2))
    assert first.exit_code == 0, first.output
    assert first.stdout == again.stdout, "from the cache, to the digit"
    for text in ("copy, 0 MiB *", "float32 product, 32 cubed *", "smoke: 32x128 by 128x352", "GB/s", "TFLOP/s"):
        assert text in first.stdout
    assert "No datasheet is known for this device." in first.stdout
    assert invoke("ceilings", "--device", "cpu", "--dtype", "fp32", "--refresh").stdout != first.stdout


@pytest.mark.usefixtures("_quick")
def test_a_limit_that_does_not_fit_costs_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> float:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(ceilings_cache, "copy_gbps", full)
    result = invoke("ceilings", "--device", "cpu", "--dtype", "fp32")
    assert result.exit_code == 0
    assert "failed: out of memory" in result.stdout
    assert "TFLOP/s" in result.stdout


def test_a_dtype_that_is_none() -> None:
    assert isinstance(invoke("ceilings", "--dtype", "int3").exception, BadInput)


# noise


def pairs_of(monkeypatch: pytest.MonkeyPatch, *ratios: float) -> None:
    given = iter(ratios)

    def pair(*_: Any) -> Pair:
        middle = next(given)
        return Pair(2.0, Interval(middle, middle - 0.001, middle + 0.001), 0.002, 60, "precision")

    monkeypatch.setattr(noise_module, "measure_pair", pair)


def test_noise_counts_false_positives_and_keeps_every_pair(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pairs_of(monkeypatch, 1.0, 0.99, 1.0015)
    result = invoke("noise", "--pairs", "3", "--device", "cpu", "--tokens", "1", "--out", str(tmp_path / "n.csv"))
    assert result.exit_code == 1, "one of three is more than 5%"
    assert "1 of 3" in result.stdout
    assert "2 of 3" in result.stdout
    rows = list(csv.DictReader((tmp_path / "n.csv").open()))
    assert [row["verdict"] for row in rows] == ["tie", "faster", "tie"]
    assert tuple(rows[0]) == machine.NOISE_COLUMNS


def test_a_quiet_machine_exits_0(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pairs_of(monkeypatch, 1.0, 1.0005)
    result = invoke("noise", "--pairs", "2", "--device", "cpu", "--tokens", "1", "--out", str(tmp_path / "n.csv"))
    assert result.exit_code == 0
    assert "0 of 2" in result.stdout


def test_an_interruption_keeps_the_pairs_so_far(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    count = iter(range(9))

    def pair(*_: Any) -> Pair:
        if next(count) == 2:
            raise KeyboardInterrupt
        return Pair(2.0, Interval(1.0, 0.999, 1.001), 0.002, 60, "precision")

    monkeypatch.setattr(noise_module, "measure_pair", pair)
    result = invoke("noise", "--pairs", "9", "--device", "cpu", "--tokens", "1", "--out", str(tmp_path / "n.csv"))
    assert result.exit_code == 130
    assert "Interrupted after 2 pairs." in result.stdout
    assert len((tmp_path / "n.csv").read_text().splitlines()) == 3


def test_a_file_that_is_there_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "n.csv"
    path.write_text("earlier pairs")
    result = invoke("noise", "--device", "cpu", "--tokens", "1", "--out", str(path))
    assert isinstance(result.exception, BadInput)
    assert str(result.exception) == f"--out: {path} is already there; give a new file."
    assert path.read_text() == "earlier pairs"


def test_a_file_that_cannot_be_written_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = invoke("noise", "--device", "cpu", "--tokens", "1", "--out", str(tmp_path / "file" / "n.csv"))
    assert isinstance(result.exception, BadInput)


def test_each_run_has_a_file_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    pairs_of(monkeypatch, 1.0, 1.0)
    assert invoke("noise", "--pairs", "2", "--device", "cpu", "--tokens", "1").exit_code == 0
    (path,) = tmp_path.rglob("*-noise.csv")
    assert path.parts[-4:-2] == ("results", "cpu")


def test_noise_on_this_machine(tmp_path: Path) -> None:
    result = invoke(
        "noise",
        "--pairs",
        "2",
        "--device",
        "cpu",
        "--tokens",
        "1",
        "--budget",
        "0.05",
        "--out",
        str(tmp_path / "n.csv"),
    )
    assert result.exit_code in {0, 1}, result.output
    assert "smallest detectable" in result.stdout


# doctor


def findings(monkeypatch: pytest.MonkeyPatch, *severities: Severity) -> None:
    found = [Finding(f"check {one}", f"found [{one}]", one, "do [this]") for one in severities]
    monkeypatch.setattr(doctor, "examine", lambda device, cross_check: iter(found))


@pytest.mark.parametrize(
    ("severities", "status"),
    [((Severity.OK, Severity.WARN, Severity.UNKNOWN), 0), ((Severity.OK, Severity.FAIL), 1), ((), 0)],
)
def test_only_a_failure_is_one(monkeypatch: pytest.MonkeyPatch, severities: tuple[Severity, ...], status: int) -> None:
    findings(monkeypatch, *severities)
    for form in ("table", "json"):
        result = invoke("doctor", "--device", "cpu", "--format", form)
        assert result.exit_code == status
        if form == "json":
            assert [one["severity"] for one in json.loads(result.stdout)] == [str(one) for one in severities]
        else:
            for one in severities:
                assert f"check {one}" in result.stdout
                assert f"found [{one}]" in result.stdout
                assert "do [this]" in result.stdout


def test_a_format_that_is_none() -> None:
    assert isinstance(invoke("doctor", "--format", "xml").exception, BadInput)


@pytest.mark.parametrize("command", ["ceilings", "noise", "doctor"])
def test_a_gpu_that_another_sweep_uses_is_refused(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def held(device: Any, line: str, wait: bool, tell: Any) -> Any:
        assert (device.type, wait) == ("cpu", False)
        raise BadInput(f"held before {line}")

    monkeypatch.setattr(locks, "device", held)
    result = invoke(command, "--device", "cpu", "--no-wait")
    assert isinstance(result.exception, BadInput)
    assert str(result.exception).startswith("held before swiglu-bench")


def test_this_machine_has_no_gpu_to_examine() -> None:
    result = invoke("doctor", "--device", "cpu", "--clock")
    assert result.exit_code == 1
    assert "Only the PyTorch implementations can be timed, on the CPU." in result.stdout
