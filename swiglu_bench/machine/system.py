"""What the operating system says of this machine: its files, its processes, and the load of its CPUs.

A contender's process stands still while others are timed, and its group with it. A process that has left the group goes
on; it is still a descendant, for a contender's process adopts what loses its parent. Linux only; elsewhere nothing is
known of processes and load.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from swiglu_bench.rows.record import Load

TICK_S = 1 / os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0.01


def file_value(path: Path, pattern: str = r"^(\S+)") -> str | None:
    """The group of a pattern's first match in a file, by default the first word; None without the file or a match."""
    try:
        found = re.search(pattern, path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return found[1] if found else None


@dataclass(frozen=True)
class Process:
    """One line of the census."""

    pid: int
    parent: int
    group: int
    cpu_s: float
    tree_s: float
    """With that of its children that have ended and were waited for."""


def census() -> dict[int, Process]:
    """All processes of this machine."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            fields = entry.read_text().rpartition(")")[2].split()
            own, ended = ((int(fields[at]) + int(fields[at + 1])) * TICK_S for at in (11, 13))
            pid = int(entry.parent.name)
            found[pid] = Process(pid, int(fields[1]), int(fields[2]), own, own + ended)
    return found


def descendants(pid: int, known: Mapping[int, Process] | None = None) -> list[Process]:
    """What a process has started, and what that has."""
    known = census() if known is None else known
    found: list[Process] = []
    parents = {pid}
    while parents:
        children = [process for process in known.values() if process.parent in parents]
        found += children
        parents = {process.pid for process in children}
    return found


def idle_share(pid: int, seconds: float) -> float:
    """The CPU time that a process and its descendants use while they have nothing to do, over the time that passes."""

    def used() -> float:
        known = census()
        return sum(process.cpu_s for process in (known.get(pid), *descendants(pid, known)) if process)

    before, began = used(), time.monotonic()
    time.sleep(seconds)
    return (used() - before) / (time.monotonic() - began)


class CpuUse:
    """Of contenders' processes that go on while the contender itself stands still."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        """Begin with these contenders' processes."""
        self._pids = dict(pids)
        self._began = time.monotonic()
        self._before = self._escaped()

    def while_suspended(self) -> dict[str, float]:
        """By contender, the CPU time since the beginning over the time that has passed; those that used any."""
        passed = max(time.monotonic() - self._began, TICK_S)
        now = self._escaped()
        used = {name: now[name] - self._before.get(name, 0.0) for name in now}
        return {name: cpu_s / passed for name, cpu_s in used.items() if cpu_s > 0}

    def _escaped(self) -> dict[str, float]:
        known = census()
        return {
            name: sum(process.cpu_s for process in descendants(pid, known) if process.group != pid)
            for name, pid in self._pids.items()
        }


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
            mine = [[int(ticks) * TICK_S for ticks in rows[f"cpu{number}"]] for number in self._cpus]
        except (OSError, ValueError, KeyError):
            return None
        if not mine or any(len(row) < 8 for row in mine):
            return None
        known, pid = census(), os.getpid()
        own = sum(process.tree_s for process in (known.get(pid), *descendants(pid, known)) if process)
        busy = sum(sum(row[:3]) + sum(row[5:7]) for row in mine)
        return _Ticks(time.monotonic(), busy, sum(row[7] for row in mine), own)


def look(seconds: float = 0.3) -> Load | None:
    """The load of the moment, while this process waits."""
    watch = LoadWatch()
    if watch.known:
        time.sleep(seconds)
    return watch.load()
