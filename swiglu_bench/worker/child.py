"""A child process from its parent's side, and the contender in it: started, asked, suspended, timed out and ended."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeVar

from swiglu_bench.cases.errors import BadInput
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.machine.system import Offspring, descendants
from swiglu_bench.worker import forkserver, worker
from swiglu_bench.worker.environments import Interpreter
from swiglu_bench.worker.worker import Malformed, Report

R = TypeVar("R", bound=Report)
POLL_S = 0.2
END_TIMEOUT_S = 60.0
NOTED_S = 0.2
"""Questions whose answers take so long are each in the debug log, with their time."""
CREDENTIALS = struct.Struct("3i")
"""Of the sender of a message, as Linux tells them: its process, user and group."""
TAIL_LINES, TAIL_CHARACTERS = 3, 300
CAN_SUSPEND = sys.platform == "linux"
"""Elsewhere a child that stands still would outlive a parent that is killed."""
log = logging.getLogger(__name__)


class CannotGoOn(BaseException):
    """Ends more than one contender's row; not an Exception, so that no handler of a row's failure takes it for one."""


class ContenderFailed(RuntimeError):
    """What a contender's code raised, in one line."""


class Stopped(CannotGoOn):
    """The owner of a child was told to stop while the child worked; the child lives until its owner ends it."""


class Died(Exception):
    """A child ended, or was ended; the message says how, as part of a sentence, and what its log ends with."""


class DoesNotEnd(CannotGoOn):
    """A killed process is still there, as a driver that hangs keeps it; what it holds cannot be measured on."""


class Child:
    """One process that answers questions; what it prints is added to `log`. Raises Died where it cannot be started."""

    def __init__(
        self, role: str, log: Path, environment: Mapping[str, str] | None = None,
        stop: Callable[[], bool] = lambda: False, interpreter: Interpreter | None = None,
    ) -> None:  # fmt: skip
        """Start one in a role; `environment` has variables to change, `stop` is asked now and then while it works."""
        self.log = log
        self._stop = stop
        self._trusted = role == worker.JUDGE
        try:
            with log.open("ab") as file:
                self._begin_of_log = file.tell()
        except OSError as error:
            raise Died(f"its log {log} cannot be written: {error.strerror}") from None
        self._owed = 0
        self._took: dict[str, list[float]] = {}
        self._suspended, self._stopped = False, list[int]()
        self._pipe, theirs = forkserver.CONTEXT.Pipe()
        self._senders = Senders(self._pipe)
        setting = worker.Setting.of_this_process(log, environment or {}, interpreter)
        try:
            self._process = forkserver.fork(worker.serve, theirs, role, setting)
        except (OSError, EOFError) as error:
            raise Died(f"its process could not be started ({error})") from None
        theirs.close()
        self._offspring = Offspring(self._process.pid)

    @property
    def pid(self) -> int:
        """The process's id."""
        return int(self._process.pid)

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

    def post(self, method: str, *arguments: Any) -> None:
        """Ask without waiting; what goes wrong is told by the next `settle` or `ask`."""
        with contextlib.suppress(BrokenPipeError):  # it died while idle: told where its answer is awaited
            self._pipe.send((method, arguments))
        self._owed += 1

    def settle(self, limit_s: float) -> Any:
        """Wait until all that was posted is done; the last answer. Raises as `ask` does."""
        answer = None
        while self._owed:
            answer = self._answer(limit_s, "what was posted")
        return answer

    def ask(self, limit_s: float, method: str, *arguments: Any) -> Any:
        """The answer to a question.

        Raises Stopped where `stop` says so, BadInput where the child refuses, ContenderFailed for what it raises,
        Malformed for an answer that is none or came before its question, and Died where it ends over it, or takes
        longer than `limit_s`.
        """
        if not (self._owed or self.ended) and self._pipe.poll() and self._unasked():
            self.end()
            raise Malformed("its process sent a message that was not asked for")
        self.resume()
        self.settle(limit_s)
        self.post(method, *arguments)
        return self._answer(limit_s, method)

    def suspend(self) -> None:
        """Let the process, all of its group and what has left it stand still until it is asked again."""
        if CAN_SUSPEND and not self.ended and not self._suspended and not self._owed:
            self._suspended = self._signal(signal.SIGSTOP)
            self._stopped = self._offspring.escaped()
            _signal_each(self._stopped, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        if self._suspended:
            self._suspended = False
            self._signal(signal.SIGCONT)
            _signal_each(self._stopped, signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process with all that it started; `end` then waits less."""
        others = [other.pid for other in descendants(self._process.pid)] if CAN_SUSPEND else []
        _signal_each(others, signal.SIGKILL)
        self._signal(signal.SIGKILL)
        self._process.kill()

    def end(self) -> None:
        """Kill it, and wait until its memory is free; twice is harmless."""
        if self.ended:
            return
        took = sorted(self._took.items(), key=lambda took: -sum(took[1]))
        log.debug("%s in all: %s", self.log.stem, ", ".join(f"{m} {len(s)} x {sum(s):.2f} s" for m, s in took))
        self.kill()
        self._pipe.close()
        self._owed = 0
        if not forkserver.ended(self._process, END_TIMEOUT_S):
            raise DoesNotEnd(f"Process {self._process.pid} was killed and does not end; what it holds is not free.")
        self._process.close()

    def _signal(self, number: signal.Signals) -> bool:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if hasattr(os, "killpg"):
                os.killpg(self._process.pid, number)
                return True
        return False

    def _answer(self, limit_s: float, method: str) -> Any:
        """The next answer; who is stopped leaves it owed, so that no later question is answered by it."""
        began = time.monotonic()
        while True:
            if self._stop():
                raise Stopped
            ready = wait([self._pipe, self._process.sentinel], timeout=POLL_S)
            seconds = time.monotonic() - began
            if self._pipe in ready:
                self._owed -= 1
                self._took.setdefault(method, []).append(seconds)
                if seconds >= NOTED_S:
                    log.debug("%s: %s took %.2f s", self.log.stem, method, seconds)
                return self._received(limit_s)
            if self._process.sentinel in ready:
                raise self._died()
            if seconds > limit_s:
                raise self._died(f"it took longer than {limit_s:g} s (--timeout)")

    def _unasked(self) -> bool:
        """Whether what has come is a message, and not the end of the process."""
        try:
            self._pipe.recv_bytes(worker.MOST_BYTES)
        except (EOFError, ConnectionError):
            return False
        except OSError:  # one that is too long
            pass
        return True

    def _received(self, limit_s: float) -> Any:
        """What came: from the judge as it is, from a contender's process as JSON and nothing that could run code.

        A process whose message is malformed or does not end in time is ended: what it says next could be anything.
        """
        watch, began = threading.Timer(limit_s, self._signal, (signal.SIGKILL,)), time.monotonic()
        try:
            if self._trusted:
                kind, value = self._pipe.recv()
            else:
                watch.start()
                kind, value = json.loads(self._pipe.recv_bytes(worker.MOST_BYTES))
        except (EOFError, OSError, ValueError, TypeError, RecursionError) as error:
            if time.monotonic() - began >= limit_s:
                raise self._died(f"it took longer than {limit_s:g} s (--timeout)") from None
            if isinstance(error, EOFError | ConnectionError):
                raise self._died() from None
            kind = value = None
        finally:
            watch.cancel()
        if not self._trusted and self._senders.others(self._process.pid):
            self.end()
            raise Malformed("another process answered in the place of its own")
        match kind:
            case "answer":
                return value
            case "refused":
                raise BadInput(str(value))
            case "failed":
                raise ContenderFailed(str(value))
            case "lost":
                raise self._died(f"it broke the GPU for its process ({value})")
        self.end()
        raise Malformed("its process sent a malformed message")

    def _died(self, how: str = "") -> Died:
        if not how:
            forkserver.ended(self._process, END_TIMEOUT_S)
            how = manner_of_death(self._process.exitcode)
        self.end()
        return Died(f"{how}; {last_words(self.log, self._begin_of_log)}")


def _signal_each(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


class Senders:
    """Whose messages come through a pipe, by the kernel's word (Linux; elsewhere nothing is known)."""

    def __init__(self, pipe: Any) -> None:
        """Have the kernel say for every part of a message who sent it; `pipe` is read as before."""
        self._pids: set[int] = set()
        if CAN_SUSPEND:
            with socket.socket(fileno=os.dup(pipe.fileno())) as end:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            pipe._recv = functools.partial(pipe._recv, read=self._read)

    def _read(self, handle: int, size: int) -> bytes:
        with socket.socket(fileno=os.dup(handle)) as end:
            data, notes, _, _ = end.recvmsg(size, socket.CMSG_SPACE(CREDENTIALS.size))
        for level, kind, note in notes:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                self._pids.add(CREDENTIALS.unpack(note)[0])
        return data

    def others(self, pid: int) -> set[int]:
        """The processes, but this one, that sent something since the last question."""
        found, self._pids = self._pids - {pid, 0}, set()
        return found


class Contender:
    """One implementation, under a name that is unique in its court, and the process in which it is built and called."""

    def __init__(self, name: str, implementation: Implementation, child: Child | InProcess, timeout_s: float) -> None:
        self.name, self.implementation, self.child = name, implementation, child
        self._timeout_s, self.answered = timeout_s, 0.0
        """When its last answer came, before its process and what that has started were suspended."""

    def ask(self, kind: type[R], method: str, *arguments: Any) -> R:
        """The report of a method of its Workbench.

        Raises ContenderFailed for what the contender's code raises, BadInput where its file has changed, Died where its
        process ends, and Malformed, which ends it, for a message that is not such a report.
        """
        try:
            return kind.checked(self._ask(method, *arguments))
        except Malformed:
            self.end()
            raise

    def tell(self, method: str, *arguments: Any) -> str:
        """The answer of a method that returns a text or nothing; raises as `ask` does."""
        answer = self._ask(method, *arguments)
        if answer is not None and not isinstance(answer, str):
            raise Malformed("its process sent a malformed answer")
        return answer or ""

    def end(self) -> None:
        """Kill its process."""
        self.child.end()

    def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            answer = self.child.ask(self._timeout_s, method, *arguments)
            self.answered = time.perf_counter()
            return answer
        finally:
            self.child.suspend()


class InProcess:
    """An object of this process that is asked as a Child is, for debugging. What it raises comes as it is."""

    pid, printed, log = 0, False, Path()

    def __init__(self, bench: Any) -> None:
        self._bench, self.ended = bench, False
        self.suspend = self.resume = lambda: None  # it runs only when asked

    def ask(self, limit_s: float, method: str, *arguments: Any) -> Any:
        """The answer of a method; there is no limit."""
        return getattr(self._bench, method)(*arguments)

    def end(self) -> None:
        """Let go of the case."""
        self._bench.forget()
        self.ended = True


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
