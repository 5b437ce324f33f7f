"""A child process from its parent's side: started, given jobs, timed out and ended."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from swiglu_bench.processes import forkserver, worker
from swiglu_bench.spec.errors import BadInput

POLL_S = 0.2
END_TIMEOUT_S = 60.0
TAIL_LINES, TAIL_CHARACTERS = 3, 300

Tell = Callable[[str, float], None]


class Stopped(Exception):
    """The owner of a child was told to stop while the child worked; the child lives until its owner ends it."""


class Died(Exception):
    """A child ended, or was ended; the message says how, in a part of a sentence, and what its log ends with."""

    def __init__(self, what: str, culprit: int, beforehand: bool = False) -> None:
        super().__init__(what)
        self.culprit = culprit
        """The place, in the job, of the implementation whose code ran; worker.NOBODY where none did."""
        self.beforehand = beforehand
        """Whether it ended over a job that it had been given by `post`, of which nobody is the culprit."""


class DoesNotEnd(RuntimeError):
    """A killed process is still there, as a driver that hangs keeps it; what it holds cannot be measured on."""


class Child:
    """One process that does jobs; what it prints is added to `log`. Raises Died where it cannot be started."""

    def __init__(
        self, log: Path, environment: Mapping[str, str] | None = None, stop: Callable[[], bool] = lambda: False
    ) -> None:
        """`environment`: variables that differ from this process's; `stop` is asked now and then while it works."""
        self.log = log
        self._stop = stop
        try:
            with log.open("ab") as file:
                self._begin_of_log = file.tell()
        except OSError as error:
            raise Died(f"its log {log} cannot be written: {error.strerror}", worker.NOBODY) from None
        self._owed = 0
        self._pipe, theirs = forkserver.CONTEXT.Pipe()
        self._mark: Any = forkserver.CONTEXT.RawArray("q", [worker.NOBODY, 0])
        setting = worker.Setting.of_this_process(log, environment or {})
        try:
            self._process = forkserver.fork(worker.serve, theirs, self._mark, setting)
        except (OSError, EOFError) as error:
            raise Died(f"its process could not be started ({error})", worker.NOBODY) from None
        theirs.close()

    @property
    def ended(self) -> bool:
        """Whether `end` was called, by the owner or over a death."""
        return self._pipe.closed

    @property
    def printed(self) -> bool:
        """Whether there is anything in the log."""
        with contextlib.suppress(OSError):
            return self.log.stat().st_size > self._begin_of_log
        return False

    def post(self, job: worker.Begin | worker.Import) -> None:
        """Give it a job that has no answer, without waiting; what goes wrong is told by the next `settle` or `ask`."""
        self._send(job)
        self._owed += 1

    def settle(self, limit_s: float) -> None:
        """Wait until all posted jobs are done; raises as `ask` does."""
        while self._owed:
            for _ in self._answers(limit_s):
                pass
            self._owed -= 1

    def ask(self, job: worker.Job, limit_s: float, tell: Tell = lambda doing, fraction: None) -> Iterator[Any]:
        """Yield the answers to a job as they come.

        Raises Stopped where `stop` says so, BadInput where the child refuses the job, and Died where it ends over it,
        or where one turn of an implementation takes longer than `limit_s`. What the suite itself does has no limit.
        """
        self._send(job)
        self.settle(limit_s)
        yield from self._answers(limit_s, tell)

    def _send(self, job: worker.Job) -> None:
        with contextlib.suppress(BrokenPipeError):  # it died while idle: told where its answers are awaited
            self._pipe.send(job)

    def _answers(self, limit_s: float, tell: Tell = lambda doing, fraction: None) -> Iterator[Any]:
        turn, began = -1, 0.0
        while True:
            if self._stop():
                raise Stopped
            ready = wait([self._pipe, self._process.sentinel], timeout=POLL_S)
            if self._pipe in ready:
                try:
                    kind, value = self._pipe.recv()
                except (EOFError, OSError):
                    raise self._died() from None
                match kind:
                    case "answer":
                        yield value
                    case "tell":
                        tell(*value)
                    case "done":
                        return
                    case "refused":
                        raise BadInput(value)
                    case "lost":
                        raise self._died(f"it broke the GPU for its process ({value})")
            elif self._process.sentinel in ready:
                raise self._died()
            now, number = time.monotonic(), self._mark[1]
            if number != turn:
                turn, began = number, now
            elif self._mark[0] != worker.NOBODY and now - began > limit_s:
                raise self._died(f"it took longer than {limit_s:g} s (--timeout)")

    def end(self) -> None:
        """Kill the process with all that it started, and wait until its memory is free; twice is harmless."""
        if self.ended:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if hasattr(os, "killpg"):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._pipe.close()
        if not forkserver.ended(self._process, END_TIMEOUT_S):
            raise DoesNotEnd(f"Process {self._process.pid} was killed and does not end; what it holds is not free.")
        self._process.close()

    def _died(self, how: str = "") -> Died:
        culprit = self._mark[0]
        if not how:
            forkserver.ended(self._process, END_TIMEOUT_S)
            how = manner_of_death(self._process.exitcode)
        self.end()
        beforehand = self._owed > 0
        words = last_words(self.log, self._begin_of_log)
        return Died(f"{how}; {words}", worker.NOBODY if beforehand else culprit, beforehand)


def last_words(log: Path, begin_of_log: int) -> str:
    """What a process that ended had printed last, as part of a sentence."""
    try:
        with log.open("rb") as file:
            file.seek(begin_of_log)
            text = file.read().decode("utf-8", errors="replace")
    except OSError as error:
        return f"its log {log} cannot be read ({error.strerror})"
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    if not lines:
        return "it printed nothing"
    fatal = [number for number, line in enumerate(lines) if line.startswith("Fatal Python error")]
    if fatal:  # the stack follows, the innermost call first
        return f"its log {log} says: {' | '.join(lines[fatal[-1] :][:TAIL_LINES])[:TAIL_CHARACTERS]}"
    return f"its log {log} ends: {' | '.join(lines[-TAIL_LINES:])[-TAIL_CHARACTERS:]}"


def manner_of_death(exit_code: int | None) -> str:
    """How a process ended, as part of a sentence."""
    if exit_code is None:
        return "its process closed its pipe and did not end"
    if exit_code >= 0:
        return f"its process ended with exit status {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    note = ", as a system does when its memory runs out" if name == "SIGKILL" else ""
    return f"its process was killed by {name}{note}"
