"""What other programs do with this machine's CPUs while something is measured, as /proc tells; Linux only."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from swiglu_bench.machine.census import TICK_S, census, descendants
from swiglu_bench.rows.record import Load


@dataclass(frozen=True)
class _Ticks:
    at: float
    busy: float
    steal: float
    own: float


class LoadWatch:
    """The load from now on."""

    def __init__(self) -> None:
        self._cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        self._before = self._read()

    @property
    def known(self) -> bool:
        """Whether this system tells it."""
        return self._before is not None

    def load(self) -> Load | None:
        """So far; None where it cannot be known."""
        before, now = self._before, self._read()
        if before is None or now is None or now.at - before.at < TICK_S:
            return None
        seconds = now.at - before.at
        others = max(0.0, now.busy - before.busy - (now.own - before.own)) / seconds
        steal = max(0.0, now.steal - before.steal) / seconds / len(self._cpus)
        return Load(len(self._cpus), others, steal)

    def _read(self) -> _Ticks | None:
        try:
            lines = Path("/proc/stat").read_text().splitlines()
            rows = {line.split()[0]: line.split()[1:9] for line in lines if line.startswith("cpu")}
            mine = [[int(one) * TICK_S for one in rows[f"cpu{number}"]] for number in self._cpus]
        except (OSError, ValueError, KeyError):
            return None
        if not mine or any(len(row) < 8 for row in mine):
            return None
        known, pid = census(), os.getpid()
        own = sum(one.tree_s for one in (known.get(pid), *descendants(pid, known)) if one)
        busy = sum(sum(row[:3]) + sum(row[5:7]) for row in mine)
        return _Ticks(time.monotonic(), busy, sum(row[7] for row in mine), own)


def look(seconds: float = 0.3) -> Load | None:
    """The load of the moment, while this process waits."""
    watch = LoadWatch()
    if watch.known:
        time.sleep(seconds)
    return watch.load()
