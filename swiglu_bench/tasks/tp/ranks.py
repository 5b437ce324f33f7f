"""All ranks of a group, asked the same at once: processes that this one starts, or those that torchrun started."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from swiglu_bench.cases.errors import BadInput
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.tasks.tp.bench import RANK, RankBench
from swiglu_bench.worker import worker
from swiglu_bench.worker.child import CannotGoOn, Child, ContenderFailed, Died, Stopped
from swiglu_bench.worker.reports import Malformed
from swiglu_bench.worker.settings import Settings

OWN_S = 120.0
"""The least that a rank may take for what the suite itself does."""
FALL_S = 0.5
"""The first rank to fall takes others with it; in this time."""
DEFAULTS = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
"""Of the ranks' environment, where it says nothing else: without NVLink's multicast, which not every machine grants."""
OF_CONTENDERS = ("ask", "build", "meet")
"""The questions that a contender's code runs for, and the one that follows where it failed."""
OF_COLLECTIVES = ("gloo", "NCCL", "SIGABRT")
"""What the failure of a rank says that waited in vain for one that failed by itself."""


def default_environment() -> None:
    """Enter what the environment lacks, before anything of NCCL is loaded."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)


class GroupLost(CannotGoOn):
    """The ranks no longer answer together; the message says why, as part of a sentence."""


class Ranks(Protocol):
    """The ranks of one group."""

    size: int

    def outcomes(self, method: str, arguments: tuple[Any, ...]) -> dict[int, Any]:
        """Ask all; by rank the answer, or the exception. Ranks are left out that never answered because others died."""
        ...


def ask(ranks: Ranks, method: str, *arguments: Any) -> list[Any]:
    """All ranks' answers to a question.

    Raises ContenderFailed where it failed and the ranks are still together, and GroupLost where they are not.
    """
    found = ranks.outcomes(method, arguments)
    failed = {rank: one for rank, one in found.items() if isinstance(one, Exception)}
    if not failed and len(found) == ranks.size:
        return list(found.values())
    reason = _reason(failed, ranks.size)
    dead = any(isinstance(one, Died) for one in failed.values())
    if dead or any(isinstance(one, Exception) for one in ranks.outcomes("meet", ()).values()):
        raise GroupLost(reason)
    raise ContenderFailed(reason)


def _reason(failed: dict[int, Exception], size: int) -> str:
    """What the ranks say, where all say the same; else what the one says that failed by itself."""
    texts = {rank: str(one) for rank, one in failed.items()}
    if len(texts) == size and len(set(texts.values())) == 1:
        return texts.popitem()[1]
    rank = min(texts, key=lambda one: any(word in texts[one] for word in OF_COLLECTIVES))
    return f"rank {rank}: {texts[rank]}"


def under_torchrun() -> tuple[int, int] | None:
    """This process's rank and the number of ranks where a launcher has set them; raises nothing."""
    found = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE")]
    return (int(found[0]), int(found[1])) if all(one.isdecimal() for one in found) else None


class Spawned:
    """`size` processes on this machine, started as torchrun starts them; what they print goes into logs."""

    def __init__(
        self, size: int, settings: Settings, implementations: Sequence[Implementation], timeout_s: float, logs: Path
    ) -> None:
        """Raises GroupLost where they do not come together."""
        self.size, self._timeout_s = size, timeout_s
        self._watching = True
        # A collective fails before its rank is late, so that the rank that is late is the one that hangs.
        patience_s = max(0.8 * timeout_s, timeout_s - 20.0)
        self._store = TCPStore(
            "127.0.0.1", 0, None, is_master=True, timeout=timedelta(seconds=patience_s), wait_for_workers=False
        )
        common = {
            "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }  # fmt: skip
        if sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in os.environ:
            common["GLOO_SOCKET_IFNAME"] = "lo"  # or gloo asks a name server for this host
        self._children: list[Child] = []
        try:
            for rank in range(size):
                environment = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                log = logs / f"{size}-ranks-{rank}.log"
                self._children.append(Child(RANK, log, environment, stop=self._one_has_died))
            ask(self, "join", settings, patience_s, implementations, size)
        except BaseException as error:
            self.end()
            if isinstance(error, Died):
                raise GroupLost(str(error)) from None
            raise

    def outcomes(self, method: str, arguments: tuple[Any, ...]) -> dict[int, Any]:
        """As Ranks has it."""
        for child in self._children:
            child.post(method, *arguments)
        return self._collect(self._timeout_s if method in OF_CONTENDERS else max(self._timeout_s, OWN_S))

    def end(self) -> None:
        """Kill them."""
        for child in self._children:
            child.end()

    def _collect(self, limit_s: float) -> dict[int, Any]:
        found: dict[int, Any] = {}
        try:
            for rank, child in enumerate(self._children):
                found[rank] = self._outcome(partial(child.settle, limit_s))
        except Stopped:
            time.sleep(FALL_S)
            self._watching = False
            found |= {
                rank: self._outcome(partial(child.ask, limit_s, "meet"))
                for rank, child in enumerate(self._children)
                if rank not in found and not child.alive
            }
        return found

    def _outcome(self, answer: Callable[[], Any]) -> Any:
        try:
            return answer()
        except (Died, ContenderFailed, Malformed, BadInput) as error:
            return error

    def _one_has_died(self) -> bool:
        return self._watching and not all(child.alive for child in self._children)


class Launched:
    """The processes that torchrun started, as rank 0 among them asks; the others `follow`."""

    def __init__(self, bench: RankBench) -> None:
        self._bench, self.size = bench, bench.group.size

    def outcomes(self, method: str, arguments: tuple[Any, ...]) -> dict[int, Any]:
        """As Ranks has it; a rank that is gone costs the group."""
        try:
            self._bench.group.first((method, arguments))
            answers = _answer_together(self._bench, method, arguments)
        except RuntimeError as error:
            raise GroupLost(f"a rank does not answer ({' '.join(str(error).split())[:300]})") from error
        return {
            rank: value if kind == "answer" else ContenderFailed(str(value))
            for rank, (kind, value) in enumerate(answers)
        }

    def end(self, status: int) -> None:
        """Let the others go, with an exit status."""
        self._bench.group.first(("", (status,)))


def follow(bench: RankBench) -> int:
    """Answer with the others what rank 0 asks, until it lets them go; the exit status."""
    nothing: tuple[str, tuple[Any, ...]] = ("", ())
    while True:
        method, arguments = bench.group.first(nothing)
        if not method:
            return int(arguments[0])
        _answer_together(bench, method, arguments)


def _answer_together(bench: RankBench, method: str, arguments: tuple[Any, ...]) -> list[tuple[str, Any]]:
    return bench.group.gather(worker.answer(bench, method, arguments))
