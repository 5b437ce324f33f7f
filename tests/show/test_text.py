import json
from pathlib import Path

import pytest

from swiglu_bench.cases.errors import BadInput
from swiglu_bench.show import text

ROWS = [{"a": 1.5, "b": None, "c": True}, {"a": float("nan"), "b": "two\nlines", "c": False}]


def test_rows_are_what_every_parser_takes() -> None:
    told = json.loads(text.as_text("json", ROWS, {"kind": "test"}, "abc"), parse_constant=pytest.fail)
    assert told == {"kind": "test", "rows": [ROWS[0], {"a": None, "b": "two\nlines", "c": False}]}
    assert [json.loads(line)["a"] for line in text.as_text("jsonl", ROWS, {}, "abc").splitlines()] == [1.5, None]
    assert text.as_text("csv", ROWS, {}, "acb") == "a,c,b\n1.5,true,\nnan,false,two lines\n"


def test_a_value_that_is_none_of_those() -> None:
    text.check("--format", "csv", "json", "csv")
    with pytest.raises(BadInput, match="--format: 'cvs' is not one of json, csv; did you mean csv"):
        text.check("--format", "cvs", "json", "csv")
    with pytest.raises(BadInput, match=r"'x' is not one of json, csv\."):
        text.check("--format", "x", "json", "csv")


def test_a_file_is_never_overwritten(tmp_path: Path) -> None:
    text.put("one", tmp_path / "file")
    with pytest.raises(BadInput, match="is already there"):
        text.put("two", tmp_path / "file")
    assert (tmp_path / "file").read_text() == "one"
    with pytest.raises(BadInput, match="cannot be written"):
        text.put("two", tmp_path / "no" / "file")
