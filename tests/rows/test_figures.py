import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from swiglu_bench.rows import figures
from swiglu_bench.rows.figures import cell, mebibytes, milliseconds, plus_minus, texts, together, token_text, typed
from swiglu_bench.rows.record import Status


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (milliseconds(0.0123456), "12.35 us"), (milliseconds(0.9994), "999.4 us"), (milliseconds(12345.6), "12.35 s"),
        (mebibytes(1024), "0.001"), (token_text(1024), "1k"),
        (figures.tokens_text([1024, 1, 16, 16]), "1, 16 and 1k tokens"), (together(["a", "b", "c"], "or"), "a, b or c"),
        (plus_minus(0.8, 0.79, 0.81), "0.800 ± 0.010"), (plus_minus(0.499, 0.48, 7.132), "0.499 (0.480 to 7.132)"),
        (plus_minus(1.0, 0.9, 12345.6), "1.000 (0.9 to 1.23e+04)"),
    ],
)  # fmt: skip
def test_figures_as_text(text: str, expected: str) -> None:
    assert text == expected


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
        ("two\r\n lines", "two lines"), (Status.OK, "ok"), (["a", 1.5], "a 1.5"), ({"a": "why", "b": "why"}, "a b"),
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


@pytest.mark.parametrize("change", [{"more": "2"}, {"count": "one"}, {"status": "fine"}, {"count": None}])
def test_a_line_of_another_kind(change: dict[str, str]) -> None:
    with pytest.raises((ValueError, TypeError)):
        typed(Line, {"name": "a", "status": "ok", "count": "1", **change})


def test_a_line_without_an_end_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b\n1,2\n3,", encoding="utf-8")
    assert texts(tmp_path / "a.csv") == [{"a": "1", "b": "2"}]
