import csv
import json
import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from places import ROOT, SUPPORT
from specimens import a_check

from swiglu_bench.rows.record import COLUMNS, SCHEMA_VERSION, GpuState, Record, Status, columns
from swiglu_bench.rows.run_folder import SAMPLE_COLUMNS, SAMPLE_KEY, create_folder, read_records, write_run_file
from swiglu_bench.spec.errors import BadInput
from swiglu_bench.writers import csv_file
from swiglu_bench.writers.csv_file import CsvFile


def make_record(**changes: Any) -> Record:
    values: dict[str, Any] = {
        "run_id": "run1", "command": "forward", "shape": "llama7b", "hidden": 4096, "intermediate": 11008,
        "tokens": 128, "dtype": "bfloat16", "scope": "glu", "mode": "forward", "seed": 0, "implementation": "eager",
        "weight_layout": "separate", "gradients": "x w_gate w_up", "status": Status.OK,
    }  # fmt: skip
    return Record(**{**values, **changes})


RESULTS = ROOT / "results"


def lines(path: Path) -> list[list[str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def write_all(folder: Path, *records: Record) -> None:
    writer = CsvFile(folder, warn=pytest.fail)
    for record in records:
        writer.write(record)
    writer.close()


class TestWriting:
    def test_the_header_is_there_before_the_first_record(self, tmp_path):
        CsvFile(tmp_path)
        assert lines(tmp_path / "records.csv") == [list(COLUMNS)]
        assert lines(tmp_path / "samples.csv") == [list(SAMPLE_COLUMNS)]

    def test_a_record_is_on_the_disk_when_write_returns(self, tmp_path):
        writer = CsvFile(tmp_path)
        writer.write(make_record())
        assert len(lines(tmp_path / "records.csv")) == 2

    def test_cells(self, tmp_path):
        write_all(
            tmp_path,
            make_record(
                status=Status.ERROR, reason="first\nsecond,\r\n \"third\"", time_ms=0.1 + 0.2, flops=2**60 + 1,
                comparable=False, error=math.nan, error_ratio=math.inf,
            ),
        )  # fmt: skip
        row = dict(zip(*lines(tmp_path / "records.csv"), strict=True))
        assert row["status"] == "error"
        assert row["reason"] == 'first second, "third"'
        assert row["time_ms"] == "0.3"
        assert row["flops"] == str(2**60 + 1)
        assert (row["comparable"], row["interpreted"]) == ("false", "false")
        assert (row["ratio"], row["baseline"]) == ("", "")
        assert (row["error"], row["error_ratio"]) == ("nan", "inf")
        assert (tmp_path / "records.csv").read_bytes().count(b"\n") == 2

    def test_every_sample_is_kept(self, tmp_path):
        write_all(
            tmp_path,
            make_record(samples_ms=(1.5, 1.25)),
            make_record(implementation="fused", samples_ms=(0.123456789,)),
        )
        key = len(SAMPLE_KEY)
        assert [row[: key + 2] for row in lines(tmp_path / "samples.csv")[1:]] == [
            ["run1", "llama7b", "128", "bfloat16", "glu", "forward", "eager", "0", "1.5"],
            ["run1", "llama7b", "128", "bfloat16", "glu", "forward", "eager", "1", "1.25"],
            ["run1", "llama7b", "128", "bfloat16", "glu", "forward", "fused", "0", "0.123456789"],
        ]

    def test_the_state_of_the_gpu_and_the_twin_stand_beside_a_sample(self, tmp_path):
        states = (GpuState(1980, 650.5, 61, "software-power-cap"), GpuState(1755, None, None, None))
        write_all(tmp_path, make_record(samples_ms=(1.5, 1.25), twin_ms=(1.4, 1.3), states=states))
        found = [row[len(SAMPLE_KEY) :] for row in lines(tmp_path / "samples.csv")[1:]]
        assert found == [
            ["0", "1.5", "1.4", "1980", "650.5", "61", "software-power-cap"],
            ["1", "1.25", "1.3", "1755", "", "", ""],
        ]

    def test_text_that_is_not_unicode_does_not_end_the_run(self, tmp_path):
        write_all(tmp_path, make_record(reason="caf\udce9 × 2"))
        assert read_records(tmp_path)["reason"][0] == "caf\\udce9 × 2"

    def test_numpy_figures_are_written_as_plain_numbers(self, tmp_path):
        numpy = pytest.importorskip("numpy")
        write_all(tmp_path, make_record(time_ms=numpy.float64(1.5), flops=numpy.int64(7)))
        row = dict(zip(*lines(tmp_path / "records.csv"), strict=True))
        assert (row["time_ms"], row["flops"]) == ("1.5", "7")


class TestAppending:
    def test_a_second_run_goes_on_under_the_same_header(self, tmp_path):
        write_all(tmp_path, make_record())
        write_all(tmp_path, make_record(run_id="run2"))
        assert [row[0] for row in lines(tmp_path / "records.csv")] == ["run_id", "run1", "run2"]
        assert len(lines(tmp_path / "samples.csv")) == 1

    @pytest.mark.parametrize("name", ["records.csv", "samples.csv"])
    @pytest.mark.parametrize("content", ["a,b\n1,2\n", "a,b", "run_id,command\n", "\n"])
    def test_other_columns_are_refused_and_left_alone(self, tmp_path, name, content):
        (tmp_path / name).write_text(content)
        with pytest.raises(BadInput, match=f"{name} has other columns"):
            CsvFile(tmp_path)
        assert (tmp_path / name).read_text() == content

    def test_a_spreadsheets_line_ends_are_accepted(self, tmp_path):
        write_all(tmp_path, make_record())
        path = tmp_path / "records.csv"
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
        write_all(tmp_path, make_record())
        assert len(read_records(path)) == 2

    @pytest.mark.parametrize("cut", [1, 30])
    def test_a_row_cut_short_is_skipped_by_readers_and_removed_by_the_next_run(self, tmp_path, cut):
        write_all(tmp_path, make_record(), make_record(run_id="cut"))
        path = tmp_path / "records.csv"
        os.truncate(path, path.stat().st_size - cut)
        assert list(read_records(path)["run_id"]) == ["run1"]
        write_all(tmp_path, make_record(run_id="run2"))
        assert [row[0] for row in lines(path)] == ["run_id", "run1", "run2"]

    @pytest.mark.parametrize("length", [0, 10])
    def test_a_header_cut_short_is_written_again(self, tmp_path, length):
        (tmp_path / "records.csv").write_text(",".join(COLUMNS)[:length])
        write_all(tmp_path, make_record())
        assert len(read_records(tmp_path)) == 1

    def test_a_file_deleted_during_the_run_begins_again_with_a_header(self, tmp_path):
        writer = CsvFile(tmp_path, warn=pytest.fail)
        (tmp_path / "records.csv").unlink()
        writer.write(make_record())
        assert len(read_records(tmp_path)) == 1

    def test_two_writers_do_not_mix_their_rows(self, tmp_path):
        def work(name: str) -> None:
            for _ in range(50):
                writers[name].write(make_record(implementation=name, reason=name * 2000, samples_ms=(1.0,) * 20))

        writers = {name: CsvFile(tmp_path, warn=pytest.fail) for name in "ab"}
        threads = [threading.Thread(target=work, args=(name,)) for name in writers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {len(row) for row in lines(tmp_path / "records.csv")} == {len(COLUMNS)}
        assert len(lines(tmp_path / "records.csv")) == 101
        assert len(lines(tmp_path / "samples.csv")) == 2001

    @pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL on this system")
    def test_a_kill_loses_at_most_the_row_being_written(self, tmp_path):
        code = (
            "import sys; from pathlib import Path; from test_csv_file import CsvFile, make_record\n"
            "writer = CsvFile(Path(sys.argv[1]))\n"
            "for number in range(10**9):\n"
            "    writer.write(make_record(seed=number, samples_ms=(1.0,) * 200)); print(number, flush=True)"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (Path(__file__).parent, SUPPORT, *sys.path)))},
        )
        assert process.stdout
        told = [int(process.stdout.readline()) for _ in range(20)]
        process.kill()
        told += [int(line) for line in process.stdout.read().split()]
        process.wait()
        seeds = list(read_records(tmp_path)["seed"])
        assert seeds[: len(told)] == told
        assert len(seeds) <= len(told) + 1


def a_run(run: str) -> Record:
    return make_record(run_id=run, reason=f"é, {run}", samples_ms=(1.0, 2.0), tensor_checks=(a_check(),))


class TestRemoving:
    def test_rows_and_their_samples_go_and_the_rest_stays_as_it_is(self, tmp_path):
        write_all(tmp_path, *(a_run(run) for run in "abc"))
        before = {path.name: path.read_bytes().splitlines(keepends=True) for path in tmp_path.iterdir()}
        writer = CsvFile(tmp_path, warn=pytest.fail)
        assert [row["reason"] for row in writer.rows()] == ["é, a", "é, b", "é, c"]
        writer.drop(lambda row: row["run_id"] == "b")
        after = {path.name: path.read_bytes().splitlines(keepends=True) for path in tmp_path.iterdir()}
        assert after["records.csv"] == [before["records.csv"][number] for number in (0, 1, 3)]
        assert after["samples.csv"] == [before["samples.csv"][number] for number in (0, 1, 2, 5, 6)]
        assert after["checks.csv"] == [before["checks.csv"][number] for number in (0, 1, 3)]
        assert set(after) == {"records.csv", "samples.csv", "checks.csv"}
        writer.write(make_record(run_id="d"))
        assert [row["run_id"] for row in writer.rows()] == ["a", "c", "d"]

    def test_samples_of_a_row_that_a_kill_prevented_go_too(self, tmp_path):
        write_all(tmp_path, make_record(samples_ms=(1.0,)))
        (tmp_path / "records.csv").write_text(",".join(COLUMNS) + "\n")
        writer = CsvFile(tmp_path, warn=pytest.fail)
        writer.drop(lambda row: False)
        assert lines(tmp_path / "samples.csv") == [list(SAMPLE_COLUMNS)]

    def test_what_cannot_be_removed_is_told_and_stays(self, tmp_path, monkeypatch):
        write_all(tmp_path, make_record())
        told: list[str] = []
        writer = CsvFile(tmp_path, warn=told.append)
        monkeypatch.setattr(os, "fsync", lambda file: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        writer.drop(lambda row: True)
        assert told == [f"{tmp_path / 'records.csv'} still has outdated rows: No space left on device."]
        assert {path.name for path in tmp_path.iterdir()} == {"records.csv", "samples.csv", "checks.csv"}
        assert len(read_records(tmp_path)) == 1


class TestFullDisk:
    """A limit on the size of files gives the same short write and error as a full disk does."""

    @pytest.fixture
    def limit(self):
        resource = pytest.importorskip("resource")
        before = resource.getrlimit(resource.RLIMIT_FSIZE)

        def set_limit(size: int | None) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, before if size is None else (size, before[1]))

        yield set_limit
        set_limit(None)

    def test_it_is_told_once_and_rows_are_written_when_there_is_room_again(self, tmp_path, limit):
        told: list[str] = []
        writer = CsvFile(tmp_path, warn=told.append)
        writer.write(make_record(seed=0))
        limit((tmp_path / "records.csv").stat().st_size + 40)
        for seed in (1, 2):
            writer.write(make_record(seed=seed, samples_ms=(1.0,) * 100))
        limit(None)
        assert len(told) == 1
        assert "samples.csv cannot be written: File too large; the run goes on" in told[0]
        assert list(read_records(tmp_path)["seed"]) == [0]
        writer.write(make_record(seed=3))
        writer.close()
        assert list(read_records(tmp_path)["seed"]) == [0, 1, 2, 3]
        assert len(lines(tmp_path / "samples.csv")) == 201
        assert len(told) == 1

    def test_the_end_tries_again(self, tmp_path, limit):
        writer = CsvFile(tmp_path, warn=lambda text: None)
        limit((tmp_path / "records.csv").stat().st_size)
        writer.write(make_record())
        limit(None)
        writer.close()
        assert len(read_records(tmp_path)) == 1

    def test_what_is_lost_at_the_end_is_counted(self, tmp_path, limit):
        told: list[str] = []
        writer = CsvFile(tmp_path, warn=told.append)
        limit((tmp_path / "records.csv").stat().st_size + 40)
        writer.write(make_record())
        writer.write(make_record())
        writer.close()
        assert len(told) == 2
        assert told[1].endswith("records.csv lacks its last 2 lines: File too large.")


class TestFolder:
    def test_it_is_made_with_its_parents_and_left_empty(self, tmp_path):
        create_folder(tmp_path / "a" / "b")
        create_folder(tmp_path / "a" / "b")
        assert list((tmp_path / "a" / "b").iterdir()) == []

    def test_a_file_in_its_place(self, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(BadInput, match=r"--out: .*file is a file; give a folder\."):
            create_folder(tmp_path / "file")

    def test_a_path_through_a_file(self, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(BadInput, match=r"--out: .*sub cannot be written: Not a directory"):
            create_folder(tmp_path / "file" / "sub")

    @pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system that takes no files")
    def test_a_file_system_that_takes_no_files_even_from_root(self):
        with pytest.raises(BadInput, match="/proc cannot be written"):
            create_folder(Path("/proc"))

    @pytest.mark.skipif(getattr(os, "geteuid", lambda: 0)() == 0, reason="permissions do not bind this user")
    def test_a_read_only_folder(self, tmp_path):
        tmp_path.chmod(0o500)
        with pytest.raises(BadInput, match="cannot be written: Permission denied"):
            create_folder(tmp_path)

    def test_a_name_that_is_too_long(self, tmp_path):
        with pytest.raises(BadInput, match="File name too long"):
            create_folder(tmp_path / ("x" * 300))

    def test_a_csv_that_cannot_be_opened(self, tmp_path):
        (tmp_path / "records.csv").mkdir()
        with pytest.raises(BadInput, match=r"records\.csv cannot be written: Is a directory"):
            CsvFile(tmp_path)


class TestRunFile:
    def test_it_is_readable_json_and_replaces_the_last_one(self, tmp_path):
        write_run_file(tmp_path, {"command": "old"})
        write_run_file(tmp_path, {"command": "forward ×2", "settings": {"out": Path("x")}, "status": Status.OK})
        text = (tmp_path / "run.json").read_text(encoding="utf-8")
        assert json.loads(text) == {"command": "forward ×2", "settings": {"out": "x"}, "status": "ok"}
        assert text.startswith('{\n  "command": "forward ×2",\n')
        assert [path.name for path in tmp_path.iterdir()] == ["run.json"]

    def test_a_failure_leaves_the_last_one(self, tmp_path, monkeypatch):
        write_run_file(tmp_path, {"command": "old"})
        monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(BadInput, match=r"run\.json cannot be written: No space left on device"):
            write_run_file(tmp_path, {"command": "new"})
        assert json.loads((tmp_path / "run.json").read_text()) == {"command": "old"}
        assert [path.name for path in tmp_path.iterdir()] == ["run.json"]

    def test_a_missing_folder(self, tmp_path):
        with pytest.raises(BadInput, match="No such file or directory"):
            write_run_file(tmp_path / "missing", {})


class TestReading:
    def test_values_and_types_come_back(self, tmp_path):
        write_all(
            tmp_path,
            make_record(time_ms=1.5, ratio=math.nan, error_ratio=math.inf, flops=2**60 + 1, rounds=10, reason="NA"),
            make_record(status=Status.SKIPPED, reason="None, or null", comparable=False, gradients=""),
        )
        for path in (tmp_path, tmp_path / "records.csv"):
            frame = read_records(path)
            assert tuple(frame.columns) == COLUMNS
            assert list(frame["tokens"]) == [128, 128]
            assert frame["tokens"].dtype == "int64"
            assert frame["flops"].dtype == "Int64"
            assert frame["flops"][0] == 2**60 + 1
            assert frame["flops"].isna().tolist() == [False, True]
            assert frame["time_ms"].dtype == "float64"
            assert frame["time_ms"][0] == 1.5
            assert frame["ratio"].isna().all()
            assert frame["error_ratio"][0] == math.inf
            assert frame["comparable"].dtype == "bool"
            assert frame["comparable"].tolist() == [True, False]
            assert frame["status"].tolist() == ["ok", "skipped"]
            assert frame["reason"].tolist() == ["NA", "None, or null"]
            assert frame["gradients"].tolist() == ["x w_gate w_up", ""]
            assert frame["l2"].tolist() == ["", ""]

    def test_no_rows_yet(self, tmp_path):
        CsvFile(tmp_path)
        frame = read_records(tmp_path)
        assert len(frame) == 0
        assert frame["time_ms"].dtype == "float64"

    def test_missing(self, tmp_path):
        with pytest.raises(BadInput, match=r"nothing does not exist; give a records\.csv or a folder that holds one\."):
            read_records(tmp_path / "nothing")
        with pytest.raises(BadInput, match=r"records\.csv does not exist"):
            read_records(tmp_path)

    def test_unreadable(self, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(BadInput, match="cannot be read: Not a directory"):
            read_records(tmp_path / "file" / "sub")

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b"a,b\n1,2\n",
            b"\xff\xfe\x00\n",
            b"\0\0\0\n",
            b'"' + b"x" * 200_000 + b"\n",
            ",".join(COLUMNS[:-4] + COLUMNS[-3:]).encode() + b"\n",
        ],
    )
    def test_foreign(self, tmp_path, content):
        path = tmp_path / "other.csv"
        path.write_bytes(content)
        with pytest.raises(BadInput, match=r"other\.csv is not a records\.csv"):
            read_records(path)

    def test_a_figure_that_is_no_number(self, tmp_path):
        write_all(tmp_path, make_record(tokens="many"))
        with pytest.raises(BadInput, match=r"is not a records\.csv"):
            read_records(tmp_path)

    @pytest.mark.parametrize("folder", sorted({path.parent for path in RESULTS.rglob("records.csv")}), ids=str)
    def test_every_committed_run_can_be_read(self, folder):
        frame = read_records(folder)
        assert tuple(frame.columns) == COLUMNS
        assert len(frame) > 0

    def test_what_an_older_version_did_not_measure_is_missing(self, tmp_path):
        old = columns(1)
        assert len(old) < len(COLUMNS)
        row = dict.fromkeys(old, "1") | {"comparable": "true", "interpreted": "false", "status": "ok"}
        (tmp_path / "records.csv").write_text(",".join(old) + "\n" + ",".join(row.values()) + "\n")
        frame = read_records(tmp_path)
        assert frame["graph_us"].isna().all()
        assert list(frame["verdict"]) == [""]
        assert frame["other_processes"].isna().all()

    @pytest.mark.parametrize("columns", [COLUMNS, (*COLUMNS[:-1], "new_column", "schema")])
    def test_newer(self, tmp_path, columns):
        row = [str(SCHEMA_VERSION + 1) if name == "schema" else "1" for name in columns]
        (tmp_path / "records.csv").write_text(",".join(columns) + "\n" + ",".join(row) + "\n")
        with pytest.raises(
            BadInput,
            match=rf"a newer swiglu-bench \(schema {SCHEMA_VERSION + 1}; this one reads up to {SCHEMA_VERSION}\)\.",
        ):
            read_records(tmp_path)

    def test_an_older_schema_reads_with_empty_columns(self, tmp_path):
        write_all(tmp_path, make_record(time_ms=1.5))
        (header, row), old = lines(tmp_path / "records.csv"), columns(1)
        cells = dict(zip(header, row, strict=True)) | {"schema": "1"}
        text = "\n".join([",".join(old), ",".join(cells[name] for name in old), ""])
        (tmp_path / "records.csv").write_text(text, encoding="utf-8")
        frame = read_records(tmp_path)
        assert tuple(frame.columns) == COLUMNS
        assert (frame["time_ms"][0], frame["fingerprint"][0], frame["schema"][0]) == (1.5, "", 1)

    @pytest.mark.parametrize("file", sorted(ROOT.glob("results/**/records.csv")), ids=str)
    def test_the_committed_results_read(self, file):
        assert len(read_records(file)) > 0

    def test_the_writer_does_not_need_pandas(self):
        code = f"import sys, {csv_file.__name__}; assert not {{'pandas', 'torch', 'wandb'}} & set(sys.modules)"
        subprocess.run([sys.executable, "-c", code], check=True)
