"""One row per case, way of splitting and implementation. No torch in here.

tp.csv's columns are exactly these fields but the lists; results/README.md describes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from swiglu_bench.rows.record import COLUMNS as RECORD
from swiglu_bench.rows.record import Outcome, Record, Status

ROWS, SAMPLES = "tp.csv", "tp_samples.csv"
BASELINE = "eager"


@dataclass
class Row(Outcome):
    """None means: not measured, or does not apply."""

    KIND: ClassVar = "tp"
    """What a run of these is called in JSON."""

    run_id: str
    shape: str
    hidden: int
    intermediate: int
    tokens: int
    dtype: str
    mode: str
    seed: int
    ranks: int
    sequence_parallel: bool
    implementation: str
    status: Status = Status.OK
    reason: str = ""
    experts: int | None = None

    # time, of the slowest rank in each round
    time_ms: float | None = None
    time_p10_ms: float | None = None
    time_p90_ms: float | None = None
    rounds: int | None = None
    stopped_by: str = ""
    queue_filled: float | None = None
    host_us: float | None = None
    first_call_ms: float | None = None

    # against eager, split the same way
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    verdict: str = ""
    aa_ratio: float | None = None
    aa_low: float | None = None
    aa_high: float | None = None

    # where the time goes
    compute_ms: float | None = None
    comm_ms: float | None = None
    comm_bytes: int | None = None
    hidden_share: float | None = None
    hidden_low: float | None = None
    hidden_high: float | None = None
    bus_gbps: float | None = None
    bus_ceiling_gbps: float | None = None

    # against one GPU
    single_ms: float | None = None
    single_reason: str = ""
    efficiency: float | None = None
    efficiency_low: float | None = None
    efficiency_high: float | None = None
    tflops: float | None = None

    peak_bytes: int | None = None
    error: float | None = None
    eager_error: float | None = None
    error_ratio: float | None = None

    # machine
    hosts: int | None = None
    host: str = ""
    device: str = ""
    driver: str = ""
    cuda: str = ""
    torch: str = ""
    triton: str = ""
    version: str = ""
    timestamp: str = ""

    samples: tuple[dict[str, float | None], ...] = field(default=(), repr=False, metadata={"beside": True})
    """Of each round: time_ms, compute_ms, comm_ms, single_ms, and on eager's row twin_ms; in tp_samples.csv."""

    def record(self, command: str) -> Record:
        """The row in the form of all runs; its scope says how it is split, as `mlp-tp4-sp` or `experts-ep4`."""
        split = f"mlp-tp{self.ranks}{'-sp' if self.sequence_parallel else ''}"
        if self.experts:
            split = f"experts-ep{self.ranks}"
        times, twins = ([one.get(name) for one in self.samples] for name in ("time_ms", "twin_ms"))
        return Record(
            **{name: getattr(self, name) for name in COLUMNS if name in RECORD},
            command=command, scope=split, weight_layout="", gradients="", baseline=BASELINE,
            samples_ms=tuple(one for one in times if one is not None),
            twin_ms=tuple(one for one in twins if one is not None), source=self,
        )  # fmt: skip


COLUMNS = Row.columns()
KEY = ("run_id", "shape", "tokens", "dtype", "mode", "ranks", "sequence_parallel", "implementation")
SAMPLE_FIELDS = ("time_ms", "twin_ms", "compute_ms", "comm_ms", "single_ms")
