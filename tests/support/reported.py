"""Runs for the tests of reports: real ones, and one in which everything happens that a page has to survive."""

import dataclasses
from contextlib import closing
from pathlib import Path

import pytest
from places import ROOT
from specimens import a_cell, a_record, a_seed, a_summary, without_time

from swiglu_bench.rows.finished_run import PERMUTED, FinishedRun
from swiglu_bench.rows.record import LAYOUTS, AuditVerdict, Record, Status
from swiglu_bench.rows.run_folder import write_run_file
from swiglu_bench.show.text import CsvFile, Table

COMMITTED = ROOT / "results" / "nvidia-h200"
IN_A_CHECKOUT = pytest.mark.skipif(not COMMITTED.exists(), reason="the committed runs are not here: no checkout")

EVIL = '<img src=x onerror="document.title=1">'
EVIL_SHAPE = "</script><script>document.title=2</script>"
REASON = "It broke: <b>out of memory</b> & more"


def timed(name: str, tokens: int, ratio: float, half: float = 0.005, **changes: object) -> Record:
    """A row of a run with the baseline `eager`, which takes 1 ms."""
    verdict = "tie" if abs(ratio - 1) <= half else "faster" if ratio < 1 else "slower"
    fields = {
        "implementation": name, "tokens": tokens, "time_ms": ratio, "ratio": ratio, "ratio_low": ratio - half,
        "ratio_high": ratio + half, "verdict": verdict, "limit_ms": 0.5, "limit_pct": 50 / ratio, "aa_ratio": 1.0,
        "aa_low": 0.999, "aa_high": 1.002,
    }  # fmt: skip
    if name == "eager":
        fields |= {"ratio": 1.0, "ratio_low": 1.0, "ratio_high": 1.0, "verdict": ""}
    return a_record(**(fields | changes))


def unranked(name: str, tokens: int, **changes: object) -> Record:
    """A fast row that yields fewer gradients than the baseline."""
    row = timed(name, tokens, 0.1, verdict="", comparable=False, **changes)
    return dataclasses.replace(row, ratio=None, ratio_low=None, ratio_high=None)


def a_memory(name: str, peak_mib: int, **changes: object) -> Record:
    """A row of a run that measured memory."""
    bare = {"time_ms": None, "baseline": "", "ratio": None, "ratio_low": None, "ratio_high": None, "mode": "step"}
    sizes = {"peak_bytes": peak_mib << 20, "saved_bytes": peak_mib << 19}
    return a_record(implementation=name, tokens=1024, **bare | sizes | changes)


def write(folder: Path, *records: Record, **about: object) -> Path:
    """A run's folder with these rows."""
    folder.mkdir(parents=True, exist_ok=True)
    with closing(CsvFile(folder)) as file:
        for record in records:
            file.write(record)
    if about:
        write_run_file(folder, about)
    return folder


def a_run(*records: Record, name: str = "run") -> FinishedRun:
    """A run with these rows as it is once it is loaded."""
    return FinishedRun(records, {}, Path(name))


def awkward_rows() -> list[Record]:
    """Ties, skips, a failure, a wrong result, an unranked row, two shapes, and names that are HTML."""
    rows = []
    for shape in ("small", EVIL_SHAPE):
        at = {"shape": shape}
        rows += [
            timed("eager", 1, 1.0, **at), timed("eager", 1024, 1.0, **at),
            timed(EVIL, 1, 0.8, **at), timed(EVIL, 1024, 0.802, **at),
            timed("level", 1, 1.003, **at), timed("level", 1024, 0.801, **at),
            timed("slow", 1, 1.4, **at), timed("slow", 1024, 1.5, stopped_by="budget", **at),
            unranked("frozen", 1, **at),
            without_time(Status.SKIPPED, "It has no glu scope.", implementation="absent", **at),
            without_time(Status.ERROR, REASON, implementation="broken", **at),
            without_time(Status.INCORRECT, "output: too far", implementation="wrong", error=0.5, **at),
        ]  # fmt: skip
    return rows


def awkward(folder: Path) -> Path:
    """The folder of a run with such rows."""
    machine = {"device": "A GPU & more", "memory_bytes": 3 << 30, "power_limit_w": 700.0, "version": "1"}
    command = f"swiglu-bench forward --impl '{EVIL}'"
    return write(folder, *awkward_rows(), command=command, machine=machine, settings={"l2": "cold"})


def trained(folder: Path) -> Path:
    """A training in which one is as eager, one is frozen, one was skipped and one, named in HTML, is faster."""
    machine = {"device": "A GPU & more", "torch": "2"}
    settings = {"dtype": "float32", "data": "digits", "workload": {"hidden": 8, "intermediate": 16}}
    folder.mkdir(parents=True)
    write_run_file(folder, {"command": "swiglu-bench train", "settings": settings, "machine": machine})
    rows, seeds = [], []
    curves = {"eager": 0.0, PERMUTED: 0.01, "level": 0.005, EVIL: 0.02, "frozen": 5.0}
    for name, above in curves.items():
        for seed in (0, 1):
            losses = [4.0 - step + seed + above for step in range(4)]
            seeds.append(a_seed(name, seed, losses))
        row = a_summary(name, seeds=2, steps=4, device="A GPU & more")
        row.timestamp = "2026-01-01T00:00:00Z"
        row.final_loss, row.final_loss_spread, row.metric_mean = 1.5, 0.7, 0.5
        row.metric, row.unit = "accuracy", "samples"
        if name != "eager":
            row.difference, row.rounding, row.eager_spread, row.curve = above, 0.01, 0.7, "same"
        if name != PERMUTED:
            row.step_ms, row.rate, row.aa_low, row.aa_high, row.rounds = 2.0, 1e3, 0.999, 1.002, 10
            row.verdict = "baseline" if name == "eager" else "faster"
        rows.append(row)
    by_name = {row.implementation: row for row in rows}
    for name, ratio in {"level": 0.99, EVIL: 0.9, "frozen": 0.5}.items():
        row = by_name[name]
        row.ratio, row.ratio_low, row.ratio_high = ratio, ratio - 0.002, ratio + 0.002
    by_name["frozen"].trains, by_name["frozen"].curve = "inputs", "differs"
    skipped = a_summary("absent", status=Status.SKIPPED, reason=REASON, device="A GPU & more")
    skipped.timestamp = rows[0].timestamp
    for kind, those in (("seeds", seeds), ("training", [*rows, skipped])):
        with closing(CsvFile(folder, kind=kind)) as file:
            for row in those:
                file.write(row)
    return folder


def audited(folder: Path) -> Path:
    """An audit with every verdict."""
    folder.mkdir(parents=True, exist_ok=True)
    file = Table(folder / "audit.csv", LAYOUTS["audit"].columns())
    for check, verdict in zip(("bias", "clamp", "0 tokens", "2^31"), AuditVerdict, strict=True):
        reason = "" if verdict is AuditVerdict.PASS else f"{verdict} for <i>reasons</i>"
        file.append([a_cell(EVIL, "glu", check, verdict, reason).row().values()])
    return folder
