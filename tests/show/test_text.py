"""Rows for other programs, and files that neither a kill nor a full disk spoils."""

import csv
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from places import SUPPORT
from specimens import a_bare_record, a_check

from swiglu_bench.cases.errors import BadInput
from swiglu_bench.rows.figures import CutShort
from swiglu_bench.rows.record import COLUMNS, LAYOUTS, GpuState, Record, Status
from swiglu_bench.rows.run_folder import SAMPLE_COLUMNS, read_rows
from swiglu_bench.show import text
from swiglu_bench.show.text import CsvFile

ROWS = [{"a": 1.5, "b": None, "c": True}, {"a": float("nan"), "b": "two\nlines", "c": False}]


def test_rows_are_what_every_parser_takes() -> None:
    told = json.loads(text.as_text("json", ROWS, {"kind": "test"}, "abc"), parse_constant=pytest.fail)
    assert told == {"kind": "test", "rows": [ROWS[0], {"a": None, "b": "two\nlines", "c": False}]}
    assert [json.loads(line)["a"] for line in text.as_text("jsonl", ROWS, {}, "abc").splitlines()] == [1.5, None]
    assert text.as_text("csv", ROWS, {}, "acb") == "a,c,b\n1.5,true,\nnan,false,two lines\n"


def lines(path: Path) -> list[list[str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def write_all(folder: Path, *records: Record) -> None:
    writer = CsvFile(folder, warn=pytest.fail)
    for record in records:
        writer.write(record)
    writer.close()


def test_a_record_is_on_the_disk_when_write_returns(tmp_path: Path) -> None:
    reason = 'first\nsecond,\r\n "third" caf\udce9 ×'
    figures = {"time_ms": np.float64(1.5), "flops": np.int64(7), "error": math.nan, "comparable": False}
    CsvFile(tmp_path).write(a_bare_record(status=Status.ERROR, reason=reason, **figures))
    row = dict(zip(*lines(tmp_path / "records.csv"), strict=True))
    assert (row["status"], row["reason"]) == ("error", 'first second, "third" caf\\udce9 ×')
    assert (row["time_ms"], row["flops"], row["error"]) == ("1.5", "7", "nan")
    assert (row["comparable"], row["ratio"], row["baseline"]) == ("false", "", "")
    assert (tmp_path / "records.csv").read_bytes().count(b"\n") == 2


def test_every_sample_is_kept_with_the_twin_and_the_state_of_the_gpu(tmp_path: Path) -> None:
    states = (GpuState(1980, 650.5, 61, "software-power-cap"), GpuState(1755, None, None, None))
    write_all(
        tmp_path,
        a_bare_record(samples_ms=(1.5, 1.25), twin_ms=(1.4, 1.3), states=states),
        a_bare_record(implementation="fused", samples_ms=(0.123456789,)),
    )
    key = ["20250102T030405Z-1", "small", "7", "float32", "glu", "forward"]
    assert lines(tmp_path / "samples.csv")[1:] == [
        [*key, "mine", "0", "1.5", "1.4", "1980", "650.5", "61", "software-power-cap"],
        [*key, "mine", "1", "1.25", "1.3", "1755", "", "", ""],
        [*key, "fused", "0", "0.123456789", "", "", "", "", ""],
    ]
    assert len(LAYOUTS["run"].key) == len(key) + 1


def test_a_second_run_goes_on_under_the_same_header(tmp_path: Path) -> None:
    for run_id in ("a", "b"):
        write_all(tmp_path, a_bare_record(run_id=run_id))
    assert [row[0] for row in lines(tmp_path / "records.csv")] == ["run_id", "a", "b"]
    assert len(lines(tmp_path / "samples.csv")) == 1
    (tmp_path / "samples.csv").write_text("a,b\n")
    with pytest.raises(BadInput, match=r"samples\.csv has other columns"):
        CsvFile(tmp_path)


@pytest.mark.parametrize("cut", [1, 30])
def test_a_row_cut_short_is_skipped_by_readers_and_removed_by_the_next_run(tmp_path: Path, cut: int) -> None:
    write_all(tmp_path, a_bare_record(run_id="a"), a_bare_record(run_id="cut"))
    path = tmp_path / "records.csv"
    os.truncate(path, path.stat().st_size - cut)
    with pytest.warns(CutShort, match=re.escape(str(path))):
        assert [row.run_id for row in read_rows(path)] == ["a"]
    with pytest.warns(UserWarning, match=re.escape(str(path))):
        CsvFile(tmp_path).close()
    write_all(tmp_path, a_bare_record(run_id="b"))
    assert [row[0] for row in lines(path)] == ["run_id", "a", "b"]


def test_a_header_is_there_at_once_and_again_in_a_file_that_was_deleted(tmp_path: Path) -> None:
    writer = CsvFile(tmp_path, warn=pytest.fail)
    assert lines(tmp_path / "records.csv") == [list(COLUMNS)]
    (tmp_path / "records.csv").unlink()
    writer.write(a_bare_record())
    assert len(read_rows(tmp_path)) == 1


def test_two_writers_do_not_mix_their_rows(tmp_path: Path) -> None:
    def work(name: str) -> None:
        for _ in range(20):
            writers[name].write(a_bare_record(implementation=name, reason=name * 2000, samples_ms=(1.0,) * 20))

    writers = {name: CsvFile(tmp_path, warn=pytest.fail) for name in "ab"}
    threads = [threading.Thread(target=work, args=(name,)) for name in writers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(row) for row in lines(tmp_path / "records.csv")] == [len(COLUMNS)] * 41
    assert len(lines(tmp_path / "samples.csv")) == 801


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL on this system")
def test_a_kill_loses_at_most_the_row_being_written(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from specimens import a_bare_record\n"
        "from swiglu_bench.show.text import CsvFile\n"
        "assert not {'pandas', 'torch', 'wandb'} & set(sys.modules), 'the writer needs none of them'\n"
        "writer = CsvFile(Path(sys.argv[1]))\n"
        "for number in range(10**9):\n"
        "    writer.write(a_bare_record(seed=number, samples_ms=(1.0,) * 200)); print(number, flush=True)"
    )
    paths = os.pathsep.join(map(str, (SUPPORT, *sys.path)))
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert process.stdout
    told = [int(process.stdout.readline()) for _ in range(20)]
    process.kill()
    told += [int(line) for line in process.stdout.read().split()]
    process.wait()
    seeds = [row.seed for row in read_rows(tmp_path)]
    assert seeds[: len(told)] == told
    assert len(seeds) <= len(told) + 1


def kept(folder: Path) -> dict[str, list[bytes]]:
    return {path.name: path.read_bytes().splitlines(keepends=True) for path in folder.iterdir()}


def test_rows_are_removed_with_their_samples_and_the_rest_stays_as_it_is(tmp_path: Path) -> None:
    for name in "abc":
        checks = (a_check(),)
        write_all(tmp_path, a_bare_record(run_id=name, reason="é", samples_ms=(1.0, 2.0), tensor_checks=checks))
    before, writer = kept(tmp_path), CsvFile(tmp_path, warn=pytest.fail)
    assert [row["reason"] for row in writer.rows()] == ["é"] * 3
    writer.drop(lambda row: row["run_id"] == "b")
    assert kept(tmp_path) == {
        "records.csv": [before["records.csv"][number] for number in (0, 1, 3)],
        "samples.csv": [before["samples.csv"][number] for number in (0, 1, 2, 5, 6)],
        "checks.csv": [before["checks.csv"][number] for number in (0, 1, 3)],
    }
    writer.write(a_bare_record(run_id="d"))
    assert [row["run_id"] for row in writer.rows()] == ["a", "c", "d"]


def test_samples_of_a_row_that_a_kill_prevented_go_too(tmp_path: Path) -> None:
    write_all(tmp_path, a_bare_record(samples_ms=(1.0,)))
    (tmp_path / "records.csv").write_text(",".join(COLUMNS) + "\n")
    CsvFile(tmp_path, warn=pytest.fail).drop(lambda row: False)
    assert lines(tmp_path / "samples.csv") == [list(SAMPLE_COLUMNS["run"])]


def test_what_cannot_be_removed_is_told_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_all(tmp_path, a_bare_record())
    told: list[str] = []
    writer, before = CsvFile(tmp_path, warn=told.append), kept(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda file: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    writer.drop(lambda row: True)
    assert told == [f"{tmp_path / 'records.csv'} still has outdated rows: No space left on device."]
    assert kept(tmp_path) == before


@pytest.fixture
def limit() -> Iterator[Callable[[int | None], None]]:
    """A limit on the size of files gives the same short write and error as a full disk does."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def set_limit(size: int | None) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, before if size is None else (size, before[1]))

    yield set_limit
    set_limit(None)


def test_a_full_disk_is_told_once_and_rows_are_written_when_there_is_room_again(
    tmp_path: Path, limit: Callable[[int | None], None]
) -> None:
    told: list[str] = []
    writer = CsvFile(tmp_path, warn=told.append)
    writer.write(a_bare_record(seed=0))
    limit((tmp_path / "records.csv").stat().st_size + 40)
    for seed in (1, 2):
        writer.write(a_bare_record(seed=seed, samples_ms=(1.0,) * 100))
    limit(None)
    assert (len(told), writer.lost) == (1, True)
    assert "samples.csv cannot be written: File too large" in told[0]
    assert [row.seed for row in read_rows(tmp_path)] == [0]
    writer.write(a_bare_record(seed=3))
    writer.close()
    assert [row.seed for row in read_rows(tmp_path)] == [0, 1, 2, 3]
    assert (len(lines(tmp_path / "samples.csv")), len(told)) == (201, 1)


@pytest.mark.parametrize(("room_at_the_end", "kept", "warnings"), [(True, 2, 1), (False, 0, 2)])
def test_the_end_tries_again_and_counts_what_is_lost(
    tmp_path: Path, limit: Callable[[int | None], None], room_at_the_end: bool, kept: int, warnings: int
) -> None:
    told: list[str] = []
    writer = CsvFile(tmp_path, warn=told.append)
    limit((tmp_path / "records.csv").stat().st_size + 40)
    writer.write(a_bare_record())
    writer.write(a_bare_record())
    if room_at_the_end:
        limit(None)
    writer.close()
    assert (len(read_rows(tmp_path)), len(told)) == (kept, warnings)
    assert room_at_the_end or "lacks its last 2 lines" in told[1]
