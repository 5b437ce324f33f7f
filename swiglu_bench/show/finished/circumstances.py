"""What differs between two runs besides what was to be compared: machine, versions, method, state of the GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from swiglu_bench.rows.finished_run import FinishedRun, case_of
from swiglu_bench.rows.record import COLUMNS, Record

DIFFERENCES = {
    "Other machines": {
        "device": "device", "driver": "driver", "power_limit_w": "power limit", "cpu": "CPU", "sm_count": "SM count",
    },
    "Other versions": {
        "torch": "PyTorch", "triton": "Triton", "cuda": "CUDA", "liger_kernel": "liger-kernel", "python": "Python",
    },
    "Other code of the suite": {"version": "swiglu-bench"},
    "Other methods": {
        "l2": "L2", "regime": "regime", "layers": "layers in a graph", "schema": "schema of the files",
        "baseline": "baseline",
        **{name: name for name in ("min_rounds", "max_rounds", "warmup_rounds", "min_s", "precision")},
    },
}  # fmt: skip
"""What two runs should have in common: by column or field of run.json, and how a sentence calls it."""
MUCH_DRIFT = 0.05
"""From here on the two runs saw the machine in clearly different states."""


def circumstances(before: FinishedRun, after: FinishedRun, by: str, drift: Sequence[float]) -> Iterator[str]:
    """A sentence for each kind of thing that differs, worst first; `drift` is how the baseline's own times changed."""
    runs = (before, after)
    one, other = (
        {**run.about.get("settings", {}), **_of_rows(run.records), **run.about.get("machine", {})} for run in runs
    )
    for label, names in DIFFERENCES.items():
        known = [name for name in names if one.get(name) and other.get(name)]
        found = [f"{names[n]} {one[n]} and {other[n]}" for n in known if str(one[n]) != str(other[n])]
        if found and by != "status":
            yield f"{label}: {'; '.join(found)}."
    if by in {"ratio", "time"}:
        earlier, later = ({case_of(row): row.gpu_uuid for row in run.records if row.gpu_uuid} for run in runs)
        moved = sum(earlier[case] != later[case] for case in earlier.keys() & later.keys())
        if moved:
            yield (
                f"{moved} {'cases were' if moved > 1 else 'case was'} on another GPU in the second run: differences "
                "between two cards of a model affect quotients of times, and cancel in quotients of ratios."
            )
    most = max(drift, key=lambda value: abs(value - 1), default=1.0)
    if by == "ratio" and abs(most - 1) > MUCH_DRIFT:
        yield (
            f"The baseline's own time changed by up to x{most:.3f}: the machine was in another state, or the baseline "
            "is different. If a contender depends on the clock less or more than the baseline does, its ratio "
            "changed, too."
        )
    if by == "ratio" and drift and any(one.get(name, "") != other.get(name, "") for name in ("torch", "cuda")):
        yield f"Ratios are relative to another build of {one['baseline']}: what it gained, the others lose."
    if by == "time":
        yield "By time: changes of the machine between the runs are in these quotients and not in their intervals."
    for which, run in zip(("first", "second"), runs, strict=True):
        if any(record.other_processes for record in run.records):
            yield f"Another process used the GPU during the {which} run."
        if by in {"ratio", "time"} and any(r.time_ms is not None and not r.samples_ms for r in run.records):
            yield f"The {which} run has rows without samples; their intervals come from the rows alone."


def _of_rows(records: Sequence[Record]) -> dict[str, Any]:
    """What the rows of a run say of each column: its value, or all of them."""
    timed = [record for record in records if record.time_ms is not None] or records
    names = [name for columns in DIFFERENCES.values() for name in columns if name in COLUMNS]
    found = {name: sorted({str(getattr(record, name)) for record in timed} - {""}) for name in names}
    return {name: ", ".join(values) for name, values in found.items() if values}
