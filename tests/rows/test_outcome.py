from specimens import a_check, a_record

from swiglu_bench.rows.record import Status
from swiglu_bench.spec.errors import one_line


def test_a_row_ends_with_a_reason() -> None:
    record = a_record()
    assert record.end(Status.SKIPPED, "No GPU.") is record
    assert (record.status, record.reason) == (Status.SKIPPED, "No GPU.")


def test_the_worst_tensor_is_the_row_s_error() -> None:
    record = a_record()
    record.note_checks((a_check(error=1e-7), a_check(tensor="w gate", error=1.5e-7)))
    assert (record.status, record.error) == (Status.OK, 1.5e-7)
    assert record.error_ratio == 1.5e-7 / 2e-7
    assert record.errors == "output=1.000e-07/1.000e-07 w_gate=1.500e-07/1.000e-07"


def test_every_tensor_that_fails_is_named() -> None:
    record = a_record()
    record.note_checks(tuple(a_check(tensor=name, ok=False, reason="bad") for name in "xy"), when=" in the timed loop")
    assert (record.status, record.reason) == (Status.INCORRECT, "x: bad; y: bad in the timed loop.")


def test_an_exception_is_one_line_of_some_length() -> None:
    assert one_line(ValueError("a\n  b")) == "ValueError: a b"
    assert one_line(KeyError()) == "KeyError"
    assert len(one_line(ValueError("x" * 1000))) < 330
