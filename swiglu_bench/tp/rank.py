"""One rank: as a process that the command started, or under torchrun."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Iterable, MutableSequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from swiglu_bench.implementations import CATALOGUE
from swiglu_bench.processes.worker import NOBODY, Setting, settle
from swiglu_bench.rows.ranks import Row
from swiglu_bench.spec import registry
from swiglu_bench.spec.implementation import Implementation
from swiglu_bench.tp import contenders
from swiglu_bench.tp.case import Sink
from swiglu_bench.tp.group import Group
from swiglu_bench.tp.plan import RankTask
from swiglu_bench.tp.session import Session


@dataclass(frozen=True)
class Spot:
    """Where a rank stands, and where it meets the others."""

    rank: int
    size: int
    device_type: str
    port: int


def serve(pipe: Connection, mark: MutableSequence[int], setting: Setting, spot: Spot, plan: RankTask) -> None:
    """Be a rank; rank 0 sends `about`, `tell`, `rows` of each case, then `done`. Exceptions end it."""
    settle(setting)
    store = TCPStore(
        "127.0.0.1", spot.port, None, is_master=False, timeout=timedelta(seconds=plan.timeout_s), wait_for_workers=False
    )
    device = torch.device("cuda", spot.rank) if spot.device_type == "cuda" else torch.device("cpu")
    group = Group.join(device, plan.timeout_s, store=store, rank=spot.rank, world_size=spot.size)
    first = spot.rank == 0
    session = Session(group, plan, catalogue(plan.implementations), _Pipe(pipe, mark, plan) if first else Silent())
    about = session.about()
    if first:
        pipe.send(("about", about))
    session.run()
    if first:
        pipe.send(("done", None))
    group.close()


def catalogue(declared: Iterable[Implementation]) -> dict[str, Implementation]:
    """Implementations with their code, by name; those that others are timed as without collectives among them."""
    quiet()
    own = {one.name: one for one in (*CATALOGUE, contenders.async_tp)}
    return own | {one.name: registry.load(one.address) for one in declared if one.name not in own}


def quiet() -> None:
    """Keep what torch says of its own interfaces from every rank's screen."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.*")
    warnings.filterwarnings("ignore", message=".*To construct DTensor from torch.Tensor.*")
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)


class Silent(Sink):
    """Of all ranks but the first."""

    def mark(self, name: str) -> None:
        """Nothing."""

    def tell(self, doing: str, fraction: float) -> None:
        """Nothing."""

    def rows(self, rows: list[Row]) -> None:
        """Nothing."""


class _Pipe(Sink):
    """Tells the parent: marks through shared memory, for it must not wake up at every sample."""

    TELL_EVERY_S = 0.1

    def __init__(self, pipe: Connection, mark: MutableSequence[int], plan: RankTask) -> None:
        self._pipe, self._mark, self._names = pipe, mark, plan.names
        self._told_at = 0.0

    def mark(self, name: str) -> None:
        """Note it, and that there is life."""
        self._mark[0] = self._names.index(name) if name in self._names else NOBODY
        self._mark[1] += 1

    def tell(self, doing: str, fraction: float) -> None:
        """Send it, now and then."""
        self._mark[1] += 1
        if time.monotonic() - self._told_at > self.TELL_EVERY_S:
            self._told_at = time.monotonic()
            self._pipe.send(("tell", (doing, fraction)))

    def rows(self, rows: list[Row]) -> None:
        """Send them."""
        self._pipe.send(("rows", rows))


def under_torchrun() -> tuple[int, int] | None:
    """This process's rank and the number of ranks where a launcher has set them; raises nothing."""
    found = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE")]
    return (int(found[0]), int(found[1])) if all(one.isdecimal() for one in found) else None
