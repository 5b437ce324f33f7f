"""The processes of this machine, as /proc tells, and whether those of a contender work when they must not.

A contender's process stands still while others are timed, and its group with it. A process that has left the group goes
on; it is still a descendant, for a contender's process adopts what loses its parent. Linux only; elsewhere nothing is
known.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

TICK_S = 1 / os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0.01


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
        children = [one for one in known.values() if one.parent in parents]
        found += children
        parents = {one.pid for one in children}
    return found


def idle_share(pid: int, seconds: float) -> float:
    """The CPU time that a process and its descendants use while they have nothing to do, over the time that passes."""

    def used() -> float:
        known = census()
        return sum(one.cpu_s for one in (known.get(pid), *descendants(pid, known)) if one)

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
            name: sum(one.cpu_s for one in descendants(pid, known) if one.group != pid)
            for name, pid in self._pids.items()
        }
