import pytest

from swiglu_bench.rows.figures import (
    mebibytes,
    microjoules,
    milliseconds,
    plus_minus,
    size,
    together,
    token_text,
    tokens_text,
)
from swiglu_bench.rows.record import grouped, unique


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


@pytest.mark.parametrize(
    ("interval", "text"),
    [
        ((0.8, 0.79, 0.81), "0.800 ± 0.010"),
        ((1.0, 0.999, 1.002), "1.000 ± 0.002"),
        ((0.499, 0.48, 7.132), "0.499 (0.480 to 7.132)"),
        ((0.5, 0.3, 0.7), "0.500 (0.300 to 0.700)"),
        ((1.0, 0.9, 12345.6), "1.000 (0.9 to 1.23e+04)"),
    ],
    ids=["symmetric", "narrow", "skewed", "wide", "without bound"],
)
def test_an_interval_that_is_skewed_or_wide_shows_both_ends(interval: tuple[float, float, float], text: str) -> None:
    assert plus_minus(*interval) == text
