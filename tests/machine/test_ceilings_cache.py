import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from swiglu_bench.machine import ceilings_cache as limits_module
from swiglu_bench.machine import machine
from swiglu_bench.machine.ceilings_cache import FRESH, Limits, ceilings
from swiglu_bench.measure.clock import CpuClock

CPU = torch.device("cpu")
THIS = machine.describe(CPU)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was measured, in order; each measurement gives one more than the last."""
    done: list[str] = []

    def stand_in(what: str) -> Callable[..., float]:
        def measure(*_: Any) -> float:
            done.append(what)
            return 10.0 + len(done)

        return measure

    monkeypatch.setattr(limits_module, "copy_gbps", stand_in("copy"))
    monkeypatch.setattr(limits_module, "matmul_tflops", stand_in("product"))
    return done


def here(folder: Path, this: machine.Machine = THIS, refresh: bool = False) -> Limits:
    return Limits(this, CPU, CpuClock(), refresh, folder)


def test_a_figure_is_measured_once(tmp_path: Path, measured: list[str]) -> None:
    first, again = here(tmp_path).copy(), here(tmp_path).copy()
    assert first == again
    assert measured == ["copy"]


def test_each_size_and_dtype_is_a_figure_of_its_own(tmp_path: Path, measured: list[str]) -> None:
    one = here(tmp_path)
    calls: list[Callable[[], Any]] = [
        one.copy, lambda: one.copy(4096), lambda: one.product(torch.float32), lambda: one.product(torch.bfloat16),
        lambda: one.product(torch.float32, (1, 2, 3)), lambda: one.product(torch.float32, (3, 2, 1)),
    ]  # fmt: skip
    assert len({call().value for call in calls * 2}) == len(measured) == 6


def test_refresh_measures_again_and_keeps_that(tmp_path: Path, measured: list[str]) -> None:
    here(tmp_path).copy()
    renewed = here(tmp_path, refresh=True).copy()
    assert len(measured) == 2
    assert here(tmp_path).copy() == renewed


@pytest.mark.parametrize(("age", "times"), [(FRESH / 2, 1), (FRESH * 1.01, 2), (-FRESH / 2, 2)])
def test_old_figures_and_those_of_the_future_do_not_count(
    tmp_path: Path, measured: list[str], age: datetime.timedelta, times: int
) -> None:
    one = here(tmp_path)
    kept = one.copy()
    one._write("copy 268435456 B, GB/s", kept.model_copy(update={"at": kept.at - age}))
    one.copy()
    assert len(measured) == times


@pytest.mark.parametrize(
    "change", [{"device": "another"}, {"driver": "1.2"}, {"torch": "3.0"}, {"power_limit_w": 300.0}]
)
def test_another_machine_has_figures_of_its_own(tmp_path: Path, measured: list[str], change: dict[str, Any]) -> None:
    here(tmp_path).copy()
    here(tmp_path, machine.Machine(**(THIS.as_dict() | change))).copy()
    assert len(measured) == 2


CORRUPT: dict[str, Callable[[str], str]] = {
    "empty": lambda text: "",
    "cut short": lambda text: text[: len(text) // 2],
    "not JSON": lambda text: "\0\0\0\0",
    "a list": lambda text: "[]",
    "a digit changed": lambda text: text.replace("11.0", "91.0"),
    "negative": lambda text: text.replace("11.0", "-11.0"),
    "not a number": lambda text: text.replace("11.0", "NaN"),
    "endless": lambda text: text.replace("11.0", "1e999"),
    "text": lambda text: text.replace("11.0", '"fast"'),
    "another machine's": lambda text: text.replace(json.dumps(THIS.device), '"other"'),
    "no checksum": lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k != "checksum"}),
    "no figures": lambda text: json.dumps(json.loads(text) | {"figures": {}}),
}


@pytest.mark.parametrize("corrupt", CORRUPT.values(), ids=CORRUPT)
def test_a_corrupt_file_is_measured_again_and_repaired(
    tmp_path: Path, measured: list[str], corrupt: Callable[[str], str]
) -> None:
    one = here(tmp_path)
    assert one.copy().value == 11.0
    before = one.path.read_text()
    one.path.write_text(corrupt(before))
    assert one.path.read_text() != before
    assert here(tmp_path).copy().value == 12.0, "measured, not read"
    assert here(tmp_path).copy().value == 12.0
    assert len(measured) == 2


def test_bytes_that_are_no_text(tmp_path: Path, measured: list[str]) -> None:
    one = here(tmp_path)
    one.copy()
    one.path.write_bytes(b"\xff\xfe\x00" * 100)
    assert here(tmp_path).copy().value == 12.0


def test_a_figure_above_the_datasheet_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    h200 = machine.Machine(**(THIS.as_dict() | {"device": "NVIDIA H200"}))
    values = iter([9000.0, 4000.0, 1.0])
    monkeypatch.setattr(limits_module, "copy_gbps", lambda *_: next(values))
    assert [here(tmp_path, h200).copy().value for _ in range(3)] == [9000.0, 4000.0, 4000.0]


@pytest.mark.parametrize("kind", ["file", "missing"])
def test_a_folder_that_takes_no_file_costs_the_cache_only(tmp_path: Path, measured: list[str], kind: str) -> None:
    folder = tmp_path / "there"
    if kind == "file":
        folder.write_text("in the way")
    assert here(folder / "deeper").copy().value == 11.0
    assert here(folder / "deeper").copy().value == (12.0 if kind == "file" else 11.0)


def test_nothing_is_left_beside_the_file(tmp_path: Path, measured: list[str]) -> None:
    here(tmp_path).copy()
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


def test_sweeps_get_the_two_that_count_and_the_older_s_time(measured: list[str]) -> None:
    found = ceilings(THIS, CPU, torch.float32, CpuClock())
    again = ceilings(THIS, CPU, torch.float32, CpuClock())
    assert found == again
    assert measured == ["copy", "product"]
    assert (found.copy_gbps, found.matmul_tflops) == (11.0, 12.0)
    assert found.measured_at.endswith("Z")


def test_a_cpu_is_really_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(limits_module.COPY_BYTES, "cpu", 2**20)
    monkeypatch.setitem(limits_module.PRODUCT_SIDE, "cpu", 64)
    one = here(tmp_path)
    assert 0.01 < one.copy().value < 10_000
    assert 0 < one.product(torch.float32).value < 100
