import csv
import json
from pathlib import Path
from typing import Any

import pytest
from command_line import swiglu_bench

from swiglu_bench.cases.errors import BadInput
from swiglu_bench.machine import ceilings_cache, doctor, locks
from swiglu_bench.machine.doctor import Finding, Severity
from swiglu_bench.machine.system import LoadWatch
from swiglu_bench.measure.statistics import Interval
from swiglu_bench.rows.record import LAYOUTS, Record
from swiglu_bench.tasks import noise

pytestmark = pytest.mark.timed


def measured(*more: str) -> str:
    ran = swiglu_bench("ceilings", "--device", "cpu", "--dtype", "fp32", *more, width=140)
    assert ran.code == 0
    return ran.out


def test_ceilings_are_shown_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings_cache, "ALIKE", 1e9)  # other tests run beside this one
    monkeypatch.setattr(LoadWatch, "_read", lambda self: None)
    first = measured()
    assert measured() == first, "from the cache, to the digit"
    assert measured("--refresh") != first
    rows = json.loads(measured("--format", "json"))["rows"]
    assert [row["what"] for row in rows if row["default"]] == ["copy, 1 MiB", "float32 product, 64 cubed"]
    assert all(row["value"] > 0 and row["measured_at"] and not row["failure"] for row in rows)


def test_a_limit_that_does_not_fit_costs_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> float:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(ceilings_cache, "copy_gbps", full)
    shown = measured()
    assert "failed: RuntimeError: out of memory" in shown
    assert "TFLOP/s" in shown


NOISE = ("noise", "--device", "cpu", "--tokens", "1", "--out", "n")


def pairs_of(monkeypatch: pytest.MonkeyPatch, *ratios: float) -> None:
    """The pairs that are measured, until a Ctrl-C."""
    given = iter(ratios)

    def pair(_: Any, __: Any, ___: Any, row: Record) -> Record:
        middle = next(given, None)
        if middle is None:
            raise KeyboardInterrupt
        return noise.judged(row, [2.0] * 60, Interval(middle, middle - 0.001, middle + 0.001), 0.002)

    monkeypatch.setattr(noise, "_built", lambda *_: [])
    monkeypatch.setattr(noise, "_pair", pair)


def test_noise_counts_false_positives_and_keeps_every_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs_of(monkeypatch, 1.0, 0.99, 1.0015)
    ran = swiglu_bench(*NOISE, "--pairs", "3")
    assert ran.code == 1, "one of three is more than 5%"
    assert "1 of 3" in ran.out
    assert "2 of 3" in ran.out
    rows = list(csv.DictReader(Path("n/noise.csv").read_text().splitlines()))
    assert [row["verdict"] for row in rows] == ["tie", "faster", "tie"]
    assert tuple(rows[0]) == LAYOUTS["noise"].header()


@pytest.mark.parametrize("count", [1, 2])
def test_an_interruption_keeps_the_pairs_so_far(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    pairs_of(monkeypatch, *[1.0] * count)
    ran = swiglu_bench(*NOISE, "--pairs", "9")
    assert ran.code == 130
    assert f"Interrupted after {count} pairs." in ran.out
    assert len(Path("n/noise.csv").read_text().splitlines()) == 1 + count


def test_a_file_that_is_there_is_kept_and_one_that_cannot_be_written_is_refused() -> None:
    Path("n").mkdir()
    Path("n/noise.csv").write_text("earlier\npairs\n")
    assert swiglu_bench(*NOISE).complaint == "--out: n/noise.csv is there already; give another folder."
    assert Path("n/noise.csv").read_text() == "earlier\npairs\n"
    assert swiglu_bench(*NOISE[:-1], "n/noise.csv").complaint == "--out: n/noise.csv is a file; give a folder."


def test_noise_on_this_machine() -> None:
    assert "smallest detectable" in swiglu_bench(*NOISE, "--pairs", "2", "--budget", "0.05", "--under-load").out


@pytest.mark.parametrize(
    ("severities", "status"),
    [((Severity.OK, Severity.WARN, Severity.UNKNOWN), 0), ((Severity.OK, Severity.FAIL), 1), ((), 0)],
)
def test_only_a_failure_is_one(monkeypatch: pytest.MonkeyPatch, severities: tuple[Severity, ...], status: int) -> None:
    found = [Finding(f"check {one}", f"found [{one}]", one, "do [this]") for one in severities]
    monkeypatch.setattr(doctor, "examine", lambda device, cross_check: iter(found))
    told, shown = (swiglu_bench("doctor", "--device", "cpu", "--format", form) for form in ("json", "table"))
    assert told.code == shown.code == status
    assert [one["severity"] for one in json.loads(told.out)["rows"]] == [str(one) for one in severities]
    assert all(f"found [{one}]" in shown.out for one in severities)


@pytest.mark.parametrize("command", ["ceilings", "noise", "doctor", "audit", "selftest"])
def test_a_gpu_that_another_sweep_uses_is_refused(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def held(device: Any, line: str, wait: bool, tell: Any) -> Any:
        assert (device.type, wait) == ("cpu", False)
        raise BadInput(f"held before {line}.")

    monkeypatch.setattr(locks, "device", held)
    complaint = swiglu_bench(command, "--device", "cpu", "--no-wait").complaint
    assert complaint.startswith(f"held before swiglu-bench {command} ")
