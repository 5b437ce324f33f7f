"""One row per case, way of splitting and implementation. No torch in here.

tp.csv's columns are exactly these fields but the lists; results/README.md describes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from swiglu_bench.rows.record import Outcome, Status


@dataclass
class Row(Outcome):
    """None means: not measured, or does not apply."""

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


COLUMNS = Row.columns()
KEY = ("run_id", "shape", "tokens", "dtype", "mode", "ranks", "sequence_parallel", "implementation")
SAMPLE_FIELDS = ("time_ms", "twin_ms", "compute_ms", "comm_ms", "single_ms")
