"""The files of a run's folder, and named baselines."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
from reported import write
from specimens import a_bare_record

from swiglu_bench.cases.errors import BadInput
from swiglu_bench.rows import run_folder
from swiglu_bench.rows.record import COLUMNS, LAYOUTS, SCHEMA_VERSION, Status
from swiglu_bench.rows.run_folder import attach, frame_of, read_rows, write_run_file


def test_run_json_is_readable_and_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run_file(tmp_path, {"command": "old"})
    write_run_file(tmp_path, {"command": "forward ×2", "settings": {"out": Path("x")}, "status": Status.OK})
    text = (tmp_path / "run.json").read_text(encoding="utf-8")
    assert json.loads(text) == {"command": "forward ×2", "settings": {"out": "x"}, "status": "ok"}
    assert text.startswith('{\n  "command": "forward ×2",\n')
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(BadInput, match=r"run\.json cannot be written: No space left on device"):
        write_run_file(tmp_path, {"command": "new"})
    assert (tmp_path / "run.json").read_text(encoding="utf-8") == text
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    with pytest.raises(BadInput, match="No such file or directory"):
        write_run_file(tmp_path / "missing", {})


def test_values_and_types_come_back(tmp_path: Path) -> None:
    figures = {"time_ms": 1.5, "error": math.nan, "error_ratio": math.inf, "flops": 2**60 + 1, "rounds": 10}
    write(
        tmp_path,
        a_bare_record(**figures, reason="NA"),
        a_bare_record(status=Status.SKIPPED, reason="None, or null", comparable=False, gradients=""),
    )
    records = tmp_path / "records.csv"
    records.write_bytes(records.read_bytes().replace(b"\n", b"\r\n"))  # a spreadsheet's line ends are accepted
    for path in (tmp_path, records):
        frame = frame_of(read_rows(path))
        assert tuple(frame.columns) == COLUMNS
        kinds = {"tokens": "int64", "flops": "Int64", "time_ms": "float64", "comparable": "bool"}
        assert {name: str(frame[name].dtype) for name in kinds} == kinds
        assert list(frame["tokens"]) == [7, 7]
        assert frame["flops"][0] == 2**60 + 1
        assert frame["flops"].isna().tolist() == [False, True]
        assert (frame["time_ms"][0], frame["error_ratio"][0]) == (1.5, math.inf)
        assert frame["ratio"].isna().all()
        texts = {"status": ["ok", "skipped"], "reason": ["NA", "None, or null"], "gradients": ["x w_gate w_up", ""]}
        assert {name: frame[name].tolist() for name in texts} == texts
        assert (frame["comparable"].tolist(), frame["l2"].tolist()) == ([True, False], ["", ""])


@pytest.mark.parametrize(
    ("name", "value"),
    [("time_ms", -5), ("time_ms", math.inf), ("ratio", math.nan), ("aa_low", 0.0), ("tokens", -1), ("tflops", -0.5)],
)
def test_a_figure_that_cannot_be_is_told(tmp_path: Path, name: str, value: float) -> None:
    write(tmp_path, dataclasses.replace(a_bare_record(time_ms=1.5), **{name: value}))
    with pytest.raises(BadInput, match=rf"line 2: {name} is {value:.9g}\."):
        read_rows(tmp_path)


def test_a_ratio_outside_its_interval_and_a_sample_that_cannot_be_are_told(tmp_path: Path) -> None:
    write(tmp_path, a_bare_record(time_ms=1.5, ratio=0.5, ratio_low=0.7, ratio_high=0.9))
    with pytest.raises(BadInput, match=r"line 2: ratio is 0\.5, outside its interval\."):
        read_rows(tmp_path)
    write(tmp_path, row := a_bare_record(time_ms=1.5, samples_ms=(1.5, math.nan)))
    with pytest.raises(BadInput, match=r"samples\.csv cannot be read: time_ms is nan"):
        attach([row], tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"a,b\n1,2\n", b"\xff\xfe\x00\n", b"\0\0\0\n", b'"' + b"x" * 200_000 + b"\n",
        ",".join(COLUMNS[:-5] + COLUMNS[-4:]).encode() + b"\n",
    ],
)  # fmt: skip
def test_another_file_is_told(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.csv"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=r"other\.csv is not a records\.csv"):
        read_rows(path)


def test_a_newer_schema_is_told(tmp_path: Path) -> None:
    names = (*COLUMNS[:-1], "new_column", "schema")
    row = [str(SCHEMA_VERSION + 1) if name == "schema" else "1" for name in names]
    (tmp_path / "records.csv").write_text(",".join(names) + "\n" + ",".join(row) + "\n")
    newer = rf"newer swiglu-bench \(schema {SCHEMA_VERSION + 1}; this one reads up to {SCHEMA_VERSION}\)\."
    with pytest.raises(BadInput, match=newer):
        read_rows(tmp_path)


@pytest.mark.parametrize("schema", range(1, SCHEMA_VERSION))
def test_an_older_schema_reads_with_empty_columns(tmp_path: Path, schema: int) -> None:
    old = LAYOUTS["run"].columns(schema)
    cells = {name: value for name, value in a_bare_record(time_ms=1.5).row().items() if name in old}
    texts = ["" if value is None else str(value).lower() for value in (cells | {"schema": schema}).values()]
    (tmp_path / "records.csv").write_text(",".join(cells) + "\n" + ",".join(texts) + "\n")
    frame = frame_of(read_rows(tmp_path))
    assert tuple(frame.columns) == COLUMNS
    assert (frame["time_ms"][0], frame["schema"][0], frame["remarks"][0]) == (1.5, schema, "")
    missing = [name for name in COLUMNS if name not in old]
    assert missing
    assert (frame[missing].isna() | (frame[missing] == "")).all(axis=None)


def test_a_baseline_is_a_copy_that_a_later_one_replaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("run")
    (folder / "logs").mkdir(parents=True)
    for text in ("first", "second"):
        (folder / "records.csv").write_text(text, encoding="utf-8")
        run_folder.save_baseline("main", "forward", folder)
    found = run_folder.find_baseline("main", "forward")
    assert [path.name for path in found.iterdir()] == ["records.csv"]
    assert (found / "records.csv").read_text(encoding="utf-8") == "second"
    assert [path.name for path in found.parent.iterdir()] == ["forward"]
