"""A group of ranks from its parent's side: started, heard, and ended, whatever becomes of it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from swiglu_bench.processes import forkserver
from swiglu_bench.processes.child import Died, last_words, manner_of_death
from swiglu_bench.processes.worker import NOBODY, Setting
from swiglu_bench.tp import rank
from swiglu_bench.tp.plan import RankTask
from swiglu_bench.tp.rank import Spot

POLL_S = 0.2
END_S = 20.0
"""How long ranks may take to part, and killed ones to be gone."""
GRACE_S = 10.0
"""The ranks' own timeouts come first: they know which collective it was."""

DEFAULTS = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
"""Of the ranks' environment, where it says nothing else: without NVLink's multicast, which not every machine grants."""


def default_environment() -> None:
    """Enter what the environment lacks, before anything of NCCL is loaded."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)


class Ranks:
    """`size` processes on this machine that work on a plan; what they print goes into logs."""

    def __init__(self, size: int, device_type: str, plan: RankTask, logs: Path) -> None:
        self._plan = plan
        self._limit_s = plan.timeout_s + GRACE_S
        patience = timedelta(seconds=plan.timeout_s)
        self._store = TCPStore("127.0.0.1", 0, None, is_master=True, timeout=patience, wait_for_workers=False)
        self._pipe, theirs = forkserver.CONTEXT.Pipe()
        self._mark: Any = forkserver.CONTEXT.RawArray("q", [NOBODY, 0])
        self._logs = [logs / f"{size}-ranks-{number}.log" for number in range(size)]
        self._begins = [log.stat().st_size if log.exists() else 0 for log in self._logs]
        self._processes: list[Any] = []
        for number, log in enumerate(self._logs):
            arguments = (theirs, self._mark, _setting(log, size, device_type),
                         Spot(number, size, device_type, self._store.port), plan)  # fmt: skip
            self._processes.append(forkserver.fork(rank.serve, *arguments))
        theirs.close()

    def events(self) -> Iterator[tuple[str, Any]]:
        """What rank 0 sends, until it is done.

        Raises Died where a process ends before, or where nothing moves for longer than the plan allows.
        """
        turn, began = -1, time.monotonic()
        while True:
            ready = wait([self._pipe, *(one.sentinel for one in self._processes)], timeout=POLL_S)
            if self._pipe in ready:
                try:
                    kind, value = self._pipe.recv()
                except (EOFError, OSError):
                    raise self._died() from None
                if kind == "done":
                    return
                yield kind, value
                began = time.monotonic()
            elif any(one.exitcode for one in self._processes):
                raise self._died()
            if self._mark[1] != turn:
                turn, began = self._mark[1], time.monotonic()
            elif time.monotonic() - began > self._limit_s:
                raise self._died(f"no rank got on for {self._plan.timeout_s:g} s (--timeout)")

    def end(self, patience_s: float = 0.0) -> None:
        """Wait for the processes as long as allowed, then kill them; twice is harmless."""
        until = time.monotonic() + patience_s
        for one in self._processes:
            one.join(max(0.0, until - time.monotonic()))
        for one in self._processes:
            if one.is_alive():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    if hasattr(os, "killpg"):
                        os.killpg(one.pid, signal.SIGKILL)
                one.kill()
        for one in self._processes:
            one.join(END_S)
        self._pipe.close()

    def _died(self, how: str = "") -> Died:
        time.sleep(0 if how else 1.0)  # the first to fall takes others with it: whose log says why?
        culprit = int(self._mark[0])
        codes = [one.exitcode for one in self._processes]
        dead = [number for number, code in enumerate(codes) if code]
        # one that lost the others to a death ends with an exception, which is exit status 1
        number = min(dead, key=lambda one: codes[one] == 1, default=0)
        self.end()
        words = last_words(self._logs[number], self._begins[number])
        return Died(f"rank {number}: {how or manner_of_death(codes[number])}; {words}", culprit)


def _setting(log: Path, size: int, device_type: str) -> Setting:
    """This process's settings and environment, with its CPU threads shared out."""
    other = {}
    if sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in os.environ:
        other = {"GLOO_SOCKET_IFNAME": "lo"}  # or gloo asks a name server for this host
    here = Setting.of_this_process(log, other)
    threads = max(1, here.threads // size) if device_type == "cpu" else here.threads
    return dataclasses.replace(here, threads=threads)
