import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from swiglu_bench.cases.errors import BadInput
from swiglu_bench.rows.csv_table import cell, read, texts, typed
from swiglu_bench.rows.record import Status
from swiglu_bench.show.text import Table


@dataclasses.dataclass
class Line:
    name: str
    status: Status
    count: int | None
    share: float | None = None
    right: bool | None = None
    sure: bool = False


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""), (True, "true"), (0.1 + 0.2, "0.3"), (2**60 + 1, str(2**60 + 1)), (math.nan, "nan"),
        (math.inf, "inf"), ("two\r\n lines", "two lines"), (Status.OK, "ok"), (["a", 1.5], "a 1.5"),
        ({"a": "why", "b": "why"}, "a b"), ((3, 4), "(3, 4)"),
    ],
)  # fmt: skip
def test_cells(value: Any, text: str) -> None:
    assert cell(value) == text


def test_a_line_is_what_it_was() -> None:
    row = {"name": "", "status": "ok", "count": "3", "share": "", "right": "true", "sure": "FALSE"}
    assert typed(Line, row) == Line("", Status.OK, 3, None, True, False)
    found = typed(Line, {"name": "a", "status": "error", "count": "", "share": "nan", "right": "", "sure": "TRUE"})
    assert math.isnan(found.share or 0.0)
    assert (found.count, found.right, found.sure) == (None, None, True), "a spreadsheet writes TRUE"
    older = typed(Line, {"name": "a", "status": "ok", "count": "1"})
    assert older == Line("a", Status.OK, 1), "columns of an older version have their defaults"


@pytest.mark.parametrize(
    "row",
    [
        {"name": "a", "status": "ok", "count": "1", "more": "2"},
        {"name": "a", "status": "ok", "count": "one"},
        {"name": "a", "status": "fine", "count": "1"},
        {"name": "a", "status": "ok"},
        {"name": "a", "status": "ok", "count": None},
    ],
)
def test_a_line_of_another_kind(row: dict[str, str]) -> None:
    with pytest.raises((ValueError, TypeError)):
        typed(Line, row)


def test_a_line_without_an_end_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b\n1,2\n3,", encoding="utf-8")
    assert texts(tmp_path / "a.csv") == [{"a": "1", "b": "2"}]


def test_a_file_is_read_or_refused_in_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "lines.csv"
    file.write_text("name,status,count\na,ok,1\n")
    assert read(file, Line) == [Line("a", Status.OK, 1)]
    file.write_text("name,status,counts\na,ok,1\n")
    with pytest.raises(BadInput, match=r"lines\.csv is not a lines\.csv .* read: .*the column counts is not known\."):
        read(file, Line)
    with pytest.raises(BadInput, match=r"none\.csv is not a lines\.csv that"):
        read(tmp_path / "none.csv", Line, "lines.csv")


@pytest.mark.parametrize("length", [0, 2])
def test_a_header_cut_short_is_written_again(tmp_path: Path, length: int) -> None:
    (tmp_path / "a.csv").write_text("a,b"[:length])
    Table(tmp_path / "a.csv", "ab").append([(1, 2)])
    assert texts(tmp_path / "a.csv") == [{"a": "1", "b": "2"}]


@pytest.mark.parametrize("content", ["a,c\n1,2\n", "a,c", "a\n", "\n"])
def test_other_columns_are_refused_and_left_alone(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises(BadInput, match=r"--out: .*a\.csv has other columns"):
        Table(tmp_path / "a.csv", "ab")
    assert (tmp_path / "a.csv").read_text() == content
