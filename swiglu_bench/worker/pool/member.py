"""What runs on a place of a Ray cluster: an actor that has one GPU, and the crew of child processes that use it.

It says first what it is, in plain values, before anything of another version could confuse it. Nothing heavy is
imported before the actor has put its environment in order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swiglu_bench.cases.cases import Case
    from swiglu_bench.cases.implementation import Implementation
    from swiglu_bench.rows.record import Record
    from swiglu_bench.worker.crew import Crew
    from swiglu_bench.worker.settings import Settings


class Member:
    """One place, from the inside."""

    def __init__(self, device: str, environment: Mapping[str, str]) -> None:
        """`device` is cpu or cuda:0: Ray shows each actor its own GPU only."""
        if device != "cpu":
            # Ray sets this to 1 for actors that ask for no CPU; a sweep without Ray has all threads, and so this one.
            os.environ.pop("OMP_NUM_THREADS", None)
        os.environ.update(environment)
        from swiglu_bench.worker import forkserver

        forkserver.start()
        self._device = device
        self._folder = Path(tempfile.mkdtemp(prefix="swiglu-bench-"))
        self._held = contextlib.ExitStack()
        self._crew: Crew | None = None
        self._implementations: list[Implementation] = []
        self._failed = False

    def hello(self) -> dict[str, Any]:
        """Who this is: the suite's version and the digest of its code, the machine, and this process."""
        import torch

        from swiglu_bench.machine import machine, sources
        from swiglu_bench.version import __version__

        return {
            "version": __version__,
            "code": sources.code(),
            "machine": machine.describe(torch.device(self._device)).as_dict(),
            "pid": os.getpid(),
        }

    def start(
        self,
        implementations: Sequence[Implementation],
        files: Mapping[str, bytes],
        settings: Settings,
        timeout_s: float,
        wait: bool,
    ) -> str:
        """Hold the GPU and be ready for cases; why not, or empty. `files` are those of implementations, by address."""
        import torch

        from swiglu_bench.cases.errors import BadInput
        from swiglu_bench.machine import locks, machine
        from swiglu_bench.worker.crew import Crew

        this = machine.describe(torch.device(self._device))
        if this.gpu_uuid:
            try:
                self._held.enter_context(locks.gpu(this.gpu_uuid, settings.command, wait, lambda text: None))
            except BadInput as error:
                return str(error)
        self._implementations = [self._at_home(one, files) for one in implementations]
        self._crew = Crew(settings, this, timeout_s, self._folder)
        return ""

    def run_case(self, case: Case) -> list[Record]:
        """All rows of a case. Logs that they name are on this host."""
        from swiglu_bench.rows.record import Status

        assert self._crew is not None
        rows = list(self._crew.run_case(case, self._implementations, lambda doing, fraction: None))
        self._failed |= any(row.status is Status.ERROR for row in rows)
        return rows

    def close(self) -> None:
        """End all child processes; the logs stay where rows name them."""
        if self._crew:
            self._crew.end()
        self._held.close()
        if not self._failed:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _at_home(self, one: Implementation, files: Mapping[str, bytes]) -> Implementation:
        """An implementation whose file came along, at its address on this host."""
        if one.address not in files:
            return one
        path, _, name = one.address.rpartition(":")
        home = self._folder / f"file-{list(files).index(one.address)}" / Path(path).name
        home.parent.mkdir(exist_ok=True)
        home.write_bytes(files[one.address])
        return dataclasses.replace(one, address=f"{home}:{name}", file=str(home))
