"""The ratios of a finished run to another of its contenders: all were timed in the same rounds."""

from __future__ import annotations

from dataclasses import replace

from swiglu_bench.cases import BadInput, Mode, did_you_mean
from swiglu_bench.measure.statistics import Interval, ratio_interval, verdict
from swiglu_bench.record import Record
from swiglu_bench.runs import Run, case_of


def rebased(run: Run, baseline: str) -> Run:
    """The run with every ratio, interval and verdict formed to `baseline`, where a case has it and its rounds.

    The noise floor stays that of the A/A pair of the rounds. Where the baseline has no time, or yields other gradients
    than a row, the row has no ratio. Raises BadInput for a name that no timed row has.
    """
    timed = {
        (record.run_id, case_of(record), record.implementation): record for record in run.records if record.samples_ms
    }
    names = list(dict.fromkeys(name for *_, name in timed))
    if baseline not in names:
        raise BadInput(f"--baseline: no row of {run.name} has rounds of {baseline!r}; {did_you_mean(baseline, names)}")
    noise = {
        (record.run_id, case_of(record)): Interval(record.aa_ratio, record.aa_low, record.aa_high).noise
        for record in run.records
        if record.aa_ratio is not None and record.aa_low is not None and record.aa_high is not None
    }

    def to(record: Record) -> Record:
        key = record.run_id, case_of(record)
        other, floor = timed.get((*key, baseline)), noise.get(key)
        bare = replace(record, baseline=baseline, ratio=None, ratio_low=None, ratio_high=None, verdict="")
        if other is not None:
            bare = replace(bare, comparable=record.mode == Mode.FORWARD or record.gradients == other.gradients)
        if other is None or len(record.samples_ms) != len(other.samples_ms) or not record.samples_ms:
            return bare
        found = ratio_interval(record.samples_ms, other.samples_ms)
        if not bare.comparable:
            return bare
        said = verdict(found, floor).value if floor is not None and record is not other else ""
        return replace(bare, ratio=found.median, ratio_low=found.low, ratio_high=found.high, verdict=said)

    return Run([to(record) for record in run.records], run.about, run.place)
