"""Ranks: n processes that run the same code together, started on this machine by torch's elastic launcher, or torchrun.

What ranks tell each other goes through a group of its own, on CPUs with gloo: it neither queues work on a GPU nor waits
for any. Every rank sees the outcomes of all ranks, so that all take the same way from there.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, start_processes

from swiglu_bench.cases.errors import one_line
from swiglu_bench.measure.clock import Clock, CpuClock, CudaClock
from swiglu_bench.worker import child, forkserver, worker

T = TypeVar("T")
Send = Callable[[str, Any], object]
"""Takes a kind of message, and its content as plain data."""
OWN_S = 120.0
"""The least that a rank may take for what the suite itself does."""
FALL_S, POLL_S = 2.0, 0.1
"""The first rank to fall takes others with it; in this time its own end is noticed."""
DEFAULTS = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
"""Of the ranks' environment, where it says nothing else: without NVLink's multicast, which not every machine grants."""
OF_COLLECTIVES = ("gloo", "NCCL", "SIGABRT")
"""What the failure of a rank says that waited in vain for one that failed by itself."""
SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT") if hasattr(signal, name))
LATE = "Timeout ("
"""How faulthandler begins the last words of a rank that took too long."""


class GroupLost(child.CannotGoOn):
    """The ranks no longer work together; the message says why, as part of a sentence."""


def default_environment() -> None:
    """Enter what the environment lacks, before anything of NCCL is loaded."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)


def under_torchrun() -> tuple[int, int] | None:
    """This process's rank and the number of ranks where a launcher has set them; raises nothing."""
    found = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE")]
    return (int(found[0]), int(found[1])) if all(text.isdecimal() for text in found) else None


@dataclass(frozen=True)
class Group:
    """This process as one of `size` ranks, which all have joined."""

    rank: int
    size: int
    device: torch.device
    control: Any
    """The gloo group for what ranks tell each other during an action."""
    mesh: DeviceMesh
    outcomes: Any = None
    """Another one for what came of it: a rank that fails alone tells there while others wait in a collective."""
    limit_s: float = OWN_S
    """How long a rank may take for what a contender does."""
    watched: bool = False
    """Whether the process of a rank that takes longer ends itself; torchrun would end all others before they tell."""

    @classmethod
    def join(cls, device: torch.device, limit_s: float, watched: bool = True) -> Group:
        """Meet the others where the environment says, as torchrun sets it."""
        # A collective fails before its rank is late, so that the rank that is late is the one that hangs.
        patience = timedelta(seconds=max(0.8 * limit_s, limit_s - 20.0))
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=patience)
        waits_s = max(limit_s, OWN_S) * (2 if watched else 1)
        control = dist.new_group(backend="gloo", timeout=patience)
        outcomes = dist.new_group(backend="gloo", timeout=timedelta(seconds=waits_s))
        rank, size = dist.get_rank(), dist.get_world_size()
        return cls(rank, size, device, control, init_device_mesh(device.type, (size,)), outcomes, limit_s, watched)

    def gather(self, value: T, group: Any = None) -> list[T]:
        """Every rank's value, by rank; part of an action unless another `group` is given."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=group or self.control)
        return found

    def first(self, value: T) -> T:
        """Rank 0's value, between actions; raises GroupLost."""
        box: list[Any] = [value]
        with _answering():
            dist.broadcast_object_list(box, src=0, group=self.outcomes)
        return box[0]

    def meet(self) -> None:
        """Wait for all; fails where a rank has left a collective that others wait in."""
        dist.all_reduce(torch.zeros(1, device=self.device))
        dist.barrier(group=self.control)

    def clock(self) -> Clock:
        """The device's clock, for calls that all ranks make together."""
        return AlignedCudaClock(self.device) if self.device.type == "cuda" else AlignedCpuClock(self.control)

    def together(self, action: Callable[[], T], limit_s: float = 0.0) -> list[T]:
        """What `action` returns on each rank, by rank.

        Raises ContenderFailed where it failed and the ranks are still together, and GroupLost where they are not.
        """
        outcomes = self._outcomes(action, limit_s or self.limit_s)
        failed = {rank: str(value) for rank, (ok, value) in enumerate(outcomes) if not ok}
        if not failed:
            return [value for _, value in outcomes]
        reason = _reason(failed, self.size)
        if not all(ok for ok, _ in self._outcomes(self.meet, self.limit_s)):
            raise GroupLost(reason)
        raise child.ContenderFailed(reason)

    def _outcomes(self, action: Callable[[], T], limit_s: float) -> list[tuple[bool, Any]]:
        if self.watched:
            faulthandler.dump_traceback_later(limit_s, exit=True)
        outcome: tuple[bool, Any]
        try:
            outcome = True, action()
        except Exception as error:  # a contender may raise anything
            logging.getLogger("swiglu_bench").info("An implementation raised:", exc_info=error)
            outcome = False, one_line(error)
        finally:
            faulthandler.cancel_dump_traceback_later()
        with _answering():
            return self.gather(outcome, self.outcomes)


@contextmanager
def _answering() -> Iterator[None]:
    """Raise GroupLost where a rank does not answer."""
    try:
        yield
    except RuntimeError as error:
        raise GroupLost(f"a rank does not answer ({one_line(error)[:300]})") from error


def _reason(failed: dict[int, str], size: int) -> str:
    """What the ranks say, where all say the same; else what the one says that failed by itself."""
    if len(failed) == size and len(set(failed.values())) == 1:
        return failed[0]
    rank = min(failed, key=lambda rank: any(word in failed[rank] for word in OF_COLLECTIVES))
    return f"rank {rank}: {failed[rank]}"


class AlignedCudaClock(CudaClock):
    """The GPU's clock with a small collective right before the first event: no rank starts before the others."""

    def __init__(self, device: torch.device) -> None:
        self._token = torch.zeros(1, device=device)
        super().__init__(device)

    def align(self) -> None:
        """Queue it; behind the spin, so that the host is ahead on all ranks."""
        dist.all_reduce(self._token)


class AlignedCpuClock(CpuClock):
    """The wall clock with a barrier right before each call."""

    def __init__(self, control: Any) -> None:
        super().__init__()
        self._control = control

    def align(self) -> None:
        """Wait for all."""
        dist.barrier(group=self._control)


class LocalRanks:
    """`size` processes on this machine that run `function(send, *work)`; what they print goes into logs.

    What rank 0 sends arrives as `messages`, in JSON.
    """

    def __init__(
        self, size: int, function: Callable[..., object], work: tuple[Any, ...], limit_s: float, logs: Path
    ) -> None:
        self.size, self._limit_s = size, limit_s
        self._store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        common = {
            "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }  # fmt: skip
        if sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in os.environ:
            common["GLOO_SOCKET_IFNAME"] = "lo"  # or gloo asks a name server for this host
        self._messages, theirs = forkserver.CONTEXT.Pipe(duplex=False)
        self._logs = [logs / f"{size}-ranks-{rank}.log" for rank in range(size)]
        self._begins = [log.stat().st_size if log.exists() else 0 for log in self._logs]
        envs = {rank: common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)}
        settings = [worker.Setting.of_this_process(log, envs[rank]) for rank, log in enumerate(self._logs)]
        args = {rank: (function, work, theirs, setting) for rank, setting in enumerate(settings)}
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        main = threading.current_thread() is threading.main_thread()
        handlers = {number: signal.getsignal(number) for number in SIGNALS} if main else {}
        specs = DefaultLogsSpecs(os.devnull)
        try:
            with forkserver._alone():
                self._context = start_processes("tp", _serve, args, envs, specs, start_method=forkserver.METHOD)
        except SignalException as error:
            raise KeyboardInterrupt from error
        finally:
            for number, handler in handlers.items():  # the launcher's would turn Ctrl-C into an exception of its own
                signal.signal(number, handler)
        theirs.close()

    @property
    def pids(self) -> dict[int, int]:
        """Of the processes, by rank."""
        return dict(self._context.pids())

    def messages(self) -> Iterator[tuple[str, Any]]:
        """What rank 0 sends until it has ended its work; raises GroupLost where the group does not get that far."""
        while True:
            try:
                if not self._messages.poll(POLL_S):
                    if death := self._death():
                        raise GroupLost(death)
                    continue
                kind, value = json.loads(self._messages.recv_bytes(worker.MOST_BYTES))
            except (EOFError, OSError, ValueError):
                raise GroupLost(self._death(FALL_S) or "rank 0 sent a malformed message") from None
            if kind == "end":
                return
            if kind == "lost":
                raise GroupLost(self._death(FALL_S) or str(value))
            yield kind, value

    def _death(self, wait_s: float = 0.0) -> str:
        """Which rank's process has ended and how, as part of a sentence; "" where all live."""
        until = time.monotonic() + wait_s
        while (ended := self._context.wait(0)) is None:
            if time.monotonic() >= until:
                return ""
            time.sleep(POLL_S)
        rank = next(iter(ended.failures), 0)
        log, begin = self._logs[rank], self._begins[rank]
        with log.open("rb") as file:
            file.seek(begin)
            _, late, stack = file.read().decode(errors="replace").partition(LATE)
        if late and ended.failures:  # the stack has the innermost call first
            where = " | ".join(" ".join(line.split()) for line in stack.splitlines()[1:4])
            return f"rank {rank}: it took longer than {self._limit_s:g} s (--timeout); its log {log} says: {where}"
        code = ended.failures[rank].exitcode if ended.failures else 0
        return f"rank {rank}: {child.manner_of_death(code)}; {child.last_words(log, begin)}"

    def end(self) -> None:
        """Kill the processes with all that they started; raises DoesNotEnd where one is still there."""
        for pid in self.pids.values():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        self._context.close(signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM, int(child.END_TIMEOUT_S))
        self._messages.close()
        for pid in self.pids.values():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, 0)
                raise child.DoesNotEnd(f"Process {pid} was killed and does not end; what it holds is not free.")


def _serve(function: Callable[..., object], work: tuple[Any, ...], pipe: Connection, setting: worker.Setting) -> None:
    """Be a rank: do the work, and let rank 0 tell of it."""
    worker.settle(setting)
    rank_0 = os.environ["RANK"] == "0"

    def send(kind: str, value: Any) -> None:
        if rank_0:
            pipe.send_bytes(json.dumps((kind, value)).encode())

    try:
        function(send, *work)
        send("end", None)
    except GroupLost as loss:
        send("lost", str(loss))
        time.sleep(child.END_TIMEOUT_S)  # the rank that caused it is to be the first to end
