"""What a run is told before its first case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import torch

from swiglu_bench.cases.cases import Case, Scope
from swiglu_bench.measure.rounds import Rule

Tell = Callable[[str, float], object]
"""Hears what is being done, and which share of the case is done."""


class Task(StrEnum):
    """What a run wants of each contender."""

    TIME = "time"
    MEMORY = "memory"
    VERIFY = "verify"


@dataclass(frozen=True)
class Settings:
    """How a run goes about its cases."""

    task: Task
    device: torch.device
    command: str
    run_id: str
    baseline: str | None = None
    """The implementation that ratios are relative to, or "" for no ratios; None: as `baseline_of` says."""
    rule: Rule = field(default_factory=Rule)
    cold_l2: bool = True
    layers: int = 1
    """The number of layers that a CUDA graph goes through."""
    energy: bool = True
    """On a GPU, measure joules per call."""
    detail: bool = False
    """Show more: of times, what is measured beside the rounds at every token count, not only at few; of tensors, how
    the errors of their elements are distributed."""
    interpreter: bool = False
    trace: bool = False
    """After the rounds, write a trace of each contender's calls below `folder`."""
    ncu: bool = False
    """After the rounds, read hardware counters of one call of each contender by Nsight Compute."""
    folder: Path | None = None
    """Where the run's files go."""
    sanitizer: str = ""
    """The tool of compute-sanitizer under which `verify` calls each implementation once, in place of its checks."""

    def baseline_of(self, case: Case) -> str:
        """The implementation that ratios at a case are relative to; eager's loop over experts takes far longer."""
        if self.baseline is not None:
            return self.baseline
        return "grouped" if case.scope is Scope.EXPERTS else "eager"
