import dataclasses
import re
import typing

from places import ROOT

from swiglu_bench.rows.audit_cell import CELL_COLUMNS
from swiglu_bench.rows.record import BESIDE, COLUMNS, Record, Status, TensorCheck
from swiglu_bench.rows.run_folder import SAMPLE_COLUMNS
from swiglu_bench.rows.training import RUN_COLUMNS, STEP_COLUMNS, SUMMARY_COLUMNS
from swiglu_bench.writers.csv_file import CHECK_COLUMNS

README = ROOT / "results" / "README.md"


def table(title: str) -> list[list[str]]:
    """Cells of all table rows of one chapter of results/README.md, without the tables' heads."""
    chapter = re.split(r"^## ", README.read_text(encoding="utf-8"), flags=re.M)
    (text,) = (part for part in chapter if part.startswith(title + "\n"))
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| `")
    ]


def test_every_column_of_records_csv_is_described_in_order():
    rows = table("records.csv")
    assert tuple(name.strip("`") for name, _, _ in rows) == COLUMNS
    assert all(meaning for _, _, meaning in rows)


def test_every_column_of_samples_csv_is_described_in_order():
    assert tuple(name.strip("`") for name, _, _ in table("samples.csv")) == SAMPLE_COLUMNS


def test_every_column_of_checks_csv_and_audit_csv_is_described_in_order():
    assert tuple(name.strip("`") for name, _, _ in table("checks.csv")) == CHECK_COLUMNS
    assert tuple(name.strip("`") for name, _, _ in table("audit.csv")) == CELL_COLUMNS


def test_every_column_of_a_training_run_is_described_in_order():
    for title, columns in (("train.csv", STEP_COLUMNS), ("runs.csv", RUN_COLUMNS), ("summary.csv", SUMMARY_COLUMNS)):
        assert tuple(name.strip("`") for name, _, _ in table(title)) == columns


def test_what_was_used_of_the_budget():
    check = TensorCheck("output", True, 1.0, 1.0, 2.0, 3.0, 1.0, 4.0)
    assert check.used == 0.75
    assert dataclasses.replace(check, max_error=0.0, max_allowed=0.0).used == 0.5
    assert dataclasses.replace(check, error=float("inf")).used == float("inf")


def test_the_described_unit_is_the_one_in_the_name():
    units = {"ms": "ms", "us": "µs", "bytes": "B", "gbps": "GB/s", "tflops": "TFLOP/s", "pct": "%", "tokens": "tokens"}
    described = {name.strip("`"): unit for name, unit, _ in table("records.csv")}
    for name, unit in described.items():
        suffix = name.rpartition("_")[2]
        assert suffix not in units or unit == units[suffix], name


def test_a_row_is_every_column_in_order():
    record = Record(
        "r", "forward", "llama7b", 4096, 11008, 8, "float32", "glu", "forward", 0, "eager", "packed", "", Status.OK
    )
    assert tuple(record.row()) == COLUMNS
    assert record.row()["tokens"] == 8
    assert record.row()["status"] is Status.OK


def test_the_row_is_flat_and_only_the_lists_are_left_out():
    hints = typing.get_type_hints(Record)
    assert {hints[name] for name in COLUMNS} <= {str, int, int | None, float | None, bool, Status}
    assert {f.name for f in dataclasses.fields(Record)} - set(COLUMNS) == BESIDE
