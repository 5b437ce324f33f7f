"""Cases run as a sweep runs them, without its files and tables."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from swiglu_bench import loop
from swiglu_bench.cases.cases import Case
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.loop import Progress
from swiglu_bench.machine.machine import Machine
from swiglu_bench.rows.record import Record
from swiglu_bench.tasks.sweep import task_of
from swiglu_bench.worker.places import OneDevice, Place, Work
from swiglu_bench.worker.policy import Settings


def one_device(settings: Settings, this: Machine, in_process: bool = True) -> OneDevice:
    found = OneDevice(settings.device, pytest.fail, in_process)
    found.places = {0: Place(0, this)}
    return found


def run_here(
    cases: Sequence[Case], implementations: Sequence[Implementation], settings: Settings, this: Machine,
    show: Callable[[Progress], object] = lambda progress: None, logs: Path | None = None, timeout_s: float = 60.0,
) -> Iterator[Record]:  # fmt: skip
    """The rows of cases in this process, or with `logs` in child processes."""
    work = Work(task_of(settings), implementations, settings, timeout_s, logs or Path())
    return loop.rows(one_device(settings, this, logs is None), cases, work, show, pytest.fail)
