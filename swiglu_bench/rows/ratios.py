"""Ratios of any two rows that were timed in the same rounds, from the samples that a finished run kept."""

from __future__ import annotations

from dataclasses import replace

from swiglu_bench.cases.cases import Mode
from swiglu_bench.cases.errors import BadInput, did_you_mean
from swiglu_bench.measure.statistics import CONFIDENCE, Interval, ratio_interval, verdict
from swiglu_bench.rows.finished_run import FinishedRun, case_of
from swiglu_bench.rows.record import Record


def ratio(record: Record, other: Record, confidence: float = CONFIDENCE) -> Interval | None:
    """A row's time over another's of its case, in their common rounds; None where they have none.

    Rows of two GPUs have none, whatever else they share.
    """
    if record.gpu_uuid != other.gpu_uuid or record.run_id != other.run_id:
        return None
    if not record.samples_ms or len(record.samples_ms) != len(other.samples_ms):
        return None
    return ratio_interval(record.samples_ms, other.samples_ms, confidence)


def kept_ratio(record: Record, baseline: Record | None, confidence: float) -> Interval | None:
    """The ratio to the baseline, from the rounds where they were kept, else as the row has it, which is of 95%."""
    found = ratio(record, baseline, confidence) if baseline else None
    return found or (Interval(*record.interval) if record.interval else None)


def rebased(run: FinishedRun, baseline: str) -> FinishedRun:
    """The run with every ratio, interval and verdict relative to `baseline`, where a case has it and its rounds.

    The noise floor stays that of the A/A pair of the rounds; a row of `tp` becomes one like all others. Where the
    baseline has no time, or yields other gradients than a row, the row has no ratio. Raises BadInput for a name that no
    timed row has.
    """
    timed = {(row.run_id, case_of(row), row.implementation): row for row in run.records if row.samples_ms}
    names = list(dict.fromkeys(name for *_, name in timed))
    if not names:
        raise BadInput(f"--baseline: {run.name} has no rounds to compute other ratios from; leave the option out.")
    if baseline not in names:
        raise BadInput(f"--baseline: no row of {run.name} has rounds of {baseline!r}; {did_you_mean(baseline, names)}")

    def relative(record: Record) -> Record:
        bare = replace(
            record, baseline=baseline, ratio=None, ratio_low=None, ratio_high=None, verdict="", kind="run", source=None
        )
        other = timed.get((record.run_id, case_of(record), baseline))
        if other is None:
            return bare
        bare.comparable = record.mode == Mode.FORWARD or record.gradients == other.gradients
        found = ratio(record, other) if bare.comparable else None
        if found is None:
            return bare
        judged = record.noise is not None and record is not other
        bare.verdict = verdict(found, record.noise or 0.0).value if judged else ""
        bare.ratio, bare.ratio_low, bare.ratio_high = found.median, found.low, found.high
        return bare

    return FinishedRun([relative(record) for record in run.records], run.about, run.place)
