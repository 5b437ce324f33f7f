import json
from pathlib import Path

import pytest

from swiglu_bench.rows import text as formats
from swiglu_bench.spec.errors import BadInput

ROWS = [{"a": 1.5, "b": None, "c": True}, {"a": float("nan"), "b": "two\nlines", "c": False}]


def test_json_is_what_every_parser_takes() -> None:
    text = formats.as_text("json", ROWS, {"kind": "test"}, "abc")
    told = json.loads(text, parse_constant=lambda word: pytest.fail(word))
    assert told == {"kind": "test", "rows": [ROWS[0], {"a": None, "b": "two\nlines", "c": False}]}


def test_json_lines_are_lines() -> None:
    lines = formats.as_text("jsonl", ROWS, {}, "abc").splitlines()
    assert [json.loads(line)["a"] for line in lines] == [1.5, None]


def test_csv_is_as_records_csv_has_it() -> None:
    assert formats.as_text("csv", ROWS, {}, "acb") == "a,c,b\n1.5,true,\nnan,false,two lines\n"


def test_a_value_that_is_none_of_those() -> None:
    formats.check("--format", "csv", "json", "csv")
    with pytest.raises(BadInput, match="--format: 'cvs' is not one of json, csv; did you mean csv"):
        formats.check("--format", "cvs", "json", "csv")
    with pytest.raises(BadInput, match=r"'x' is not one of json, csv\."):
        formats.check("--format", "x", "json", "csv")


def test_a_file_is_never_overwritten(tmp_path: Path) -> None:
    formats.put("one", tmp_path / "file")
    with pytest.raises(BadInput, match="is already there"):
        formats.put("two", tmp_path / "file")
    assert (tmp_path / "file").read_text() == "one"
    with pytest.raises(BadInput, match="cannot be written"):
        formats.put("two", tmp_path / "no" / "file")


def test_people_are_told_where_programs_do_not_read() -> None:
    assert not formats.screen().stderr
    assert formats.screen("json").stderr
