from pathlib import Path

import pytest

from swiglu_bench.cases.errors import BadInput
from swiglu_bench.cases.files import MOST_COUNTS, load_workload


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.csv", "tokens,weight\n128,3\n1,0.5\n128,1\n", {1: 0.5, 128: 4}),
        ("a.csv", "tokens\n7\n7\n2\n", {2: 1, 7: 2}),
        ("a.json", '{"1024": 2, "1": 900}', {1: 900, 1024: 2}),
        ("a.json", "[5, 5, 6]", {5: 2, 6: 1}),
        ("a.json", '[{"tokens": 5}, {"tokens": 5, "weight": 9}]', {5: 10}),
    ],
)
def test_files(tmp_path: Path, name: str, text: str, expected: dict[int, float]) -> None:
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    found = load_workload(file)
    assert found == expected
    assert list(found) == sorted(found)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", ""),
        ("a.csv", "tokens\n"), ("a.csv", "count\n5\n"), ("a.csv", "tokens\n0\n"),
        ("a.csv", "tokens\nx\n"),
        ("a.csv", "tokens,weight\n5,-1\n"), ("a.csv", "tokens,weight\n5,nan\n"), ("a.csv", "tokens\n5,6\n"),
        ("a.json", "{"), ("a.json", "5"), ("a.json", "[[5]]"), ("a.json", '{"5": "many"}'), ("a.json", "[]"),
        ("a.json", "[5.5]"),
    ],
)  # fmt: skip
def test_bad_files(tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    with pytest.raises(BadInput, match=r"^--workload: [^\n]*tokens and weight"):
        load_workload(file)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be read"):
        load_workload(tmp_path / "absent.csv")


def test_many_token_counts_are_represented_by_those_seen_most(tmp_path: Path) -> None:
    file = tmp_path / "log.csv"
    file.write_text("tokens\n" + "".join(f"{tokens}\n" for tokens in (*range(1, 3000), *[512] * 9)), encoding="utf-8")
    found = load_workload(file)
    assert len(found) <= MOST_COUNTS
    assert sum(found.values()) == 2999 + 9, "every call counts"
    assert 512 in found
    assert set(found) <= set(range(1, 3000))
