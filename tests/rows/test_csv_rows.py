import dataclasses
from pathlib import Path

import pytest

from swiglu_bench.rows.csv_table import texts, typed
from swiglu_bench.rows.record import Status


@dataclasses.dataclass
class Line:
    name: str
    status: Status
    count: int | None
    share: float | None = None
    right: bool | None = None
    sure: bool = False


def test_a_line_is_what_it_was() -> None:
    row = {"name": "", "status": "ok", "count": "3", "share": "", "right": "true", "sure": "false"}
    assert typed(Line, row) == Line("", Status.OK, 3, None, True, False)
    row = {"name": "a", "status": "error", "count": "", "share": "nan", "right": "", "sure": "true"}
    found = typed(Line, row)
    assert found.share != found.share
    assert (found.count, found.right, found.sure) == (None, None, True)


def test_columns_of_an_older_version_have_their_defaults() -> None:
    assert typed(Line, {"name": "a", "status": "ok", "count": "1"}) == Line("a", Status.OK, 1)


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
