"""A trace and hardware counters of each contender, where they are asked for: after all that is timed."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Sequence

from swiglu_bench.cases.cases import Case
from swiglu_bench.cases.errors import one_line
from swiglu_bench.check.inputs import Draw, new_seed
from swiglu_bench.measure import profilers
from swiglu_bench.rows.record import Record
from swiglu_bench.worker.places import Place
from swiglu_bench.worker.profiled_call import program
from swiglu_bench.worker.settings import Tell
from swiglu_bench.worker.timing import Entry

CALLS = 3
log = logging.getLogger(__name__)


def profile(place: Place, case: Case, entries: Sequence[Entry], tell: Tell) -> None:
    """Fill the columns of a profile in the rows of sound contenders.

    A contender's process ends afterwards: what a profiler leaves behind in it would be in later times.
    """
    for entry in entries if place.settings.trace or place.settings.ncu else ():
        record = entry.record
        tell(f"profiling {record.implementation}", 0.98)
        with place.held():
            if place.settings.trace:
                _trace(place, entry)
            entry.contender.end()
            if place.settings.ncu:
                _count(place, case, entry)


def _trace(place: Place, entry: Entry) -> None:
    folder, record = place.settings.folder, entry.record
    assert folder
    file = folder / "traces" / f"{_name(record)}.json"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        entry.contender.tell("trace", [Draw(new_seed()) for _ in range(CALLS)], str(file.absolute()))
        record.trace = file.relative_to(folder).as_posix()
    except Exception as error:  # whatever the contender, the profiler or the disk has against it
        log.info("the trace of %s:", record.implementation, exc_info=error)
        record.profile_note = f"There is no trace: {one_line(error)}."


def _name(record: Record) -> str:
    """A file name for a row."""
    parts = (record.shape, record.scope, record.mode, record.dtype, record.tokens, record.implementation)
    return re.sub(r"[^\w.-]+", "-", "-".join(map(str, parts)))


def _count(place: Place, case: Case, entry: Entry) -> None:
    record, path = entry.record, shutil.which("ncu")
    try:
        if path is None:
            raise profilers.NoCounters("ncu is not on the PATH")
        found = profilers.counters(path, program(place.settings, entry.contender.implementation, case))
    except profilers.NoCounters as reason:
        record.profile_note = f"{record.profile_note} There are no counters: {reason}.".strip()
        return
    record.tensor_pct, record.registers_per_thread = found.tensor_pct, found.registers_per_thread
    record.dram_bytes, record.l2_bytes = found.dram_bytes, found.l2_bytes
