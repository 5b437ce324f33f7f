from specimens import a_check, a_record

from swiglu_bench.rows.record import COLUMNS, Status


def test_the_row_is_every_column_in_order_and_flat() -> None:
    row = a_record(tokens=8).row()
    assert tuple(row) == COLUMNS
    assert (row["tokens"], row["status"]) == (8, Status.OK)


def test_the_worst_tensor_is_the_row_s_error_and_all_that_fail_are_named() -> None:
    record = a_record()
    record.note_checks((a_check(error=1e-7), a_check(tensor="w gate", error=1.5e-7)))
    assert (record.status, record.error, record.error_ratio) == (Status.OK, 1.5e-7, 1.5e-7 / 2e-7)
    assert record.errors == "output=1.000e-07/1.000e-07 w_gate=1.500e-07/1.000e-07"
    record.note_checks(tuple(a_check(tensor=name, ok=False, reason="bad") for name in "xy"), when=" in the timed loop")
    assert (record.status, record.reason) == (Status.INCORRECT, "x: bad; y: bad in the timed loop.")
    record.remark("One.")
    record.remark("Two.")
    assert record.remarks == "One. Two."


def test_a_row_that_ends_badly_after_it_was_timed_has_no_figures() -> None:
    record = a_record(time_ms=2.0, ratio=0.5, tflops=3.0, energy_j=1.0, samples_ms=(2.0, 2.1), first_call_ms=9.0)
    assert record.end(Status.OK, "").time_ms == 2.0
    record.end(Status.INCORRECT, "what was right before the rounds is wrong after them")
    assert (record.time_ms, record.ratio, record.tflops, record.energy_j, record.samples_ms) == (None,) * 4 + ((),)
    assert record.first_call_ms == 9.0
