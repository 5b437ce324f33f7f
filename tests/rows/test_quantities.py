import pytest

from swiglu_bench.rows.grouping import grouped, unique
from swiglu_bench.rows.quantities import mebibytes, microjoules, milliseconds, size, together, token_text, tokens_text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (milliseconds(0.0123456), "12.35 us"), (milliseconds(0.9994), "999.4 us"), (milliseconds(1.0), "1 ms"),
        (milliseconds(9999.0), "9999 ms"), (milliseconds(12345.6), "12.35 s"),
        (microjoules(999.0), "999 uJ"), (microjoules(12345.0), "12.3 mJ"),
        (mebibytes(None), "-"), (mebibytes(0), "0.000"), (mebibytes(1024), "0.001"), (mebibytes(3 * 2**19), "1.5"),
        (mebibytes(10**10), "9,536.7"), (size(2**20), "1.0 MiB"), (size(3 << 30), "3.0 GiB"),
        (token_text(127), "127"), (token_text(1024), "1k"), (token_text(1000), "1000"),
        (tokens_text([1]), "1 token"), (tokens_text([1024, 1, 16, 16]), "1, 16 and 1k tokens"),
        (together(["a"]), "a"), (together(["a", "b", "c"], "or"), "a, b or c"), (together([]), ""),
    ],
)  # fmt: skip
def test_figures_as_text(text: str, expected: str) -> None:
    assert text == expected


def test_groups_keep_their_order() -> None:
    assert list(grouped("banana", lambda letter: letter in "aeiou").items()) == [
        (False, ["b", "n", "n"]),
        (True, ["a"] * 3),
    ]
    assert unique("banana") == ["b", "a", "n"]
