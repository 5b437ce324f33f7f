"""What differs between two runs besides what was to be compared: machine, versions, method, state of the GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from swiglu_bench.finished.change import By, Change
from swiglu_bench.rows.finished_run import FinishedRun, case_of
from swiglu_bench.rows.record import Record

MACHINE = {"device": "device", "driver": "driver", "power_limit_w": "power limit", "cpu": "CPU", "sm_count": "SM count"}
VERSIONS = {"torch": "PyTorch", "triton": "Triton", "cuda": "CUDA", "liger_kernel": "liger-kernel", "python": "Python"}
METHOD = {"l2": "L2", "regime": "regime", "schema": "schema of the files", "baseline": "baseline"}
RULE = ("min_rounds", "max_rounds", "warmup_rounds", "min_s", "precision")
SUITE = {"version": "swiglu-bench"}
MUCH_DRIFT = 0.05
"""From here on the two runs saw the machine in clearly different states."""


def circumstances(before: FinishedRun, after: FinishedRun, by: By, changes: Sequence[Change]) -> Iterator[str]:
    """A sentence for each kind of thing that differs, worst first."""
    machines = [dict(run.about.get("machine", {})) for run in (before, after)]
    rules = [dict(run.about.get("settings", {})) for run in (before, after)]
    rows = [_uniform(run.records) for run in (before, after)]
    for label, names, sources in (
        ("Other machines", MACHINE, (machines, rows)),
        ("Other versions", VERSIONS, (machines, rows)),
        ("Other code of the suite", SUITE, (machines, rows)),
        ("Other methods", METHOD, (rows,)),
        ("Other methods", {name: name for name in RULE}, (rules,)),
    ):
        found = list(_differing(names, sources))
        if found and by != "status":
            yield f"{label}: {'; '.join(found)}."
    moved = _moved(before, after) if by in {"ratio", "time"} else 0
    if moved:
        many = "cases were" if moved > 1 else "case was"
        yield (
            f"{moved} {many} on another GPU in the second run: what sets two cards of a model apart is in quotients of "
            "times, and cancels in those of ratios."
        )
    if by == "ratio":
        yield from _baseline(changes, machines, rows)
    elif by == "time":
        yield "By time: what the machine did between the runs is in these quotients and not in their intervals."
    for which, run in (("first", before), ("second", after)):
        if any(record.other_processes for record in run.records):
            yield f"Another process used the GPU during the {which} run."
        if by in {"ratio", "time"} and any(r.time_ms is not None and not r.samples_ms for r in run.records):
            yield f"The {which} run has rows without samples; their intervals come from records.csv alone."


def _moved(before: FinishedRun, after: FinishedRun) -> int:
    """How many cases were timed on two GPUs, as far as the rows say."""
    earlier = {case_of(record): record.gpu_uuid for record in before.records if record.gpu_uuid}
    later = {case_of(record): record.gpu_uuid for record in after.records if record.gpu_uuid}
    return sum(earlier[case] != later[case] for case in earlier.keys() & later.keys())


def _uniform(records: Sequence[Record]) -> dict[str, Any]:
    """What the rows of a run say of a column: its value, or all of them."""
    names = (*MACHINE, *VERSIONS, *SUITE, *METHOD)
    timed = [record for record in records if record.time_ms is not None] or records
    found = {
        name: sorted({str(getattr(record, name)) for record in timed} - {""})
        for name in names
        if hasattr(timed[0], name)
    }
    return {name: ", ".join(values) for name, values in found.items() if values}


def _differing(names: dict[str, str], sources: Sequence[list[dict[str, Any]]]) -> Iterator[str]:
    """`PyTorch 2.11 and 2.12` for what both runs say and say differently."""
    for name, label in names.items():
        for one, other in sources:
            if one.get(name) and other.get(name):
                if str(one[name]) != str(other[name]):
                    yield f"{label} {one[name]} and {other[name]}"
                break


def _baseline(changes: Sequence[Change], machines: list[dict[str, Any]], rows: list[dict[str, Any]]) -> Iterator[str]:
    """What is to be said where the ground that ratios stand on may have moved."""
    drift = [change for change in changes if change.verdict == "drift" and change.quotient]
    far = [change for change in drift if change.quotient and abs(change.quotient.median - 1) > MUCH_DRIFT]
    if far:
        most = max((c.quotient.median for c in far if c.quotient), key=lambda value: abs(value - 1))
        yield (
            f"The baseline's own time changed by up to x{most:.3f}: the machine was in another state, or the baseline "
            "is another; if a contender hangs on the clock less or more than it does, its ratio moved, too."
        )
    both = [{**row, **machine} for row, machine in zip(rows, machines, strict=True)]
    if drift and any(both[0].get(name, "") != both[1].get(name, "") for name in ("torch", "cuda")):
        yield f"Ratios are to another build of {drift[0].implementation}: what it gained, the others lose."
