"""How a row ends: its status and the reason, and the errors that it is judged by."""

from __future__ import annotations

from swiglu_bench.record import Record, Status, TensorCheck


def end(record: Record, status: Status, reason: str) -> Record:
    """Close a row that carries no figures, and why."""
    record.status, record.reason = status, reason
    return record


def note_checks(record: Record, checks: tuple[TensorCheck, ...], when: str = "") -> None:
    """Enter the verdict; a tensor that fails makes the row incorrect and names itself."""
    record.tensor_checks = checks
    judged = [c for c in checks if c.tensor != "conduct"]
    record.errors = " ".join(f"{c.tensor.replace(' ', '_')}={c.error:.3e}/{c.eager_error:.3e}" for c in judged)
    worst = max(judged, key=lambda c: c.used)
    record.error, record.eager_error, record.error_ratio = worst.error, worst.eager_error, worst.used
    failed = [f"{c.tensor}: {c.reason}" for c in checks if not c.ok]
    if failed:
        end(record, Status.INCORRECT, "; ".join(failed) + when + ".")


def one_line(error: BaseException) -> str:
    """An exception as part of a sentence."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
