import re

import pytest

from swiglu_bench.cases.errors import did_you_mean, one_line


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("lama7b", r"did you mean llama7b"),
        ("llama3", r"did you mean .*llama3-8b.*\?"),
        ("fuse", r"did you mean fused"),
        ("xyzzy", r"^known: llama7b, llama3-8b, smoke, fused\.$"),
        ("", r"^known: llama7b, llama3-8b, smoke, fused\.$"),
    ],
)
def test_near_matches(word: str, expected: str) -> None:
    assert re.search(expected, did_you_mean(word, ["llama7b", "llama3-8b", "smoke", "fused"]))


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("two\n  lines. "), "ValueError: two lines"),
        (RuntimeError(), "RuntimeError"),
        (KeyError("x" * 999), "KeyError: '" + "x" * 299),
    ],
)
def test_an_exception_in_one_line(error: Exception, line: str) -> None:
    assert one_line(error) == line
