"""What runs on a place of a Ray cluster: an actor that has one GPU, and the court whose processes use it.

It says first what it is, in plain values, before anything of another version could confuse it. Nothing heavy is
imported before the actor has put its environment in order.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swiglu_bench.cases.implementation import Implementation
    from swiglu_bench.rows.record import Record
    from swiglu_bench.worker.places import Work


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
        self._failed = False

    def hello(self) -> dict[str, Any]:
        """The suite's version and the digest of its code, the machine, and this process's id."""
        import torch

        from swiglu_bench.machine import sources
        from swiglu_bench.version import __version__
        from swiglu_bench.worker.places import OneDevice

        self._place = OneDevice(torch.device(self._device), lambda text: None)
        this = self._place.assemble().as_dict()
        return {"version": __version__, "code": sources.code(), "machine": this, "pid": os.getpid()}

    def start(self, work: Work, files: Mapping[str, bytes]) -> str:
        """Hold the GPU and be ready for cases; why not, or empty. `files` are those of implementations, by address."""
        from swiglu_bench.cases.errors import BadInput

        implementations = [self._at_home(implementation, files) for implementation in work.implementations]
        own = dataclasses.replace(work, implementations=implementations, logs=self._folder)
        try:
            self._place.start(own, lambda: None)
        except BadInput as error:
            return str(error)
        return ""

    def run_case(self, case: Any, only: Sequence[str]) -> list[Record]:
        """All rows of a case. Logs that they name are on this host."""
        from swiglu_bench.rows.record import Status

        self._place.begin(0, case, only)
        rows = [record for part in self._place.wait(0.0) for record in part.records]
        self._failed |= any(row.status is Status.ERROR for row in rows)
        return rows

    def close(self) -> None:
        """End all child processes; the logs stay where rows name them."""
        self._place.close()
        if not self._failed:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _at_home(self, known: Implementation, files: Mapping[str, bytes]) -> Implementation:
        if known.address not in files:
            return known
        path, _, name = known.address.rpartition(":")
        home = self._folder / f"file-{list(files).index(known.address)}" / Path(path).name
        home.parent.mkdir(exist_ok=True)
        home.write_bytes(files[known.address])
        return dataclasses.replace(known, address=f"{home}:{name}", file=str(home))
