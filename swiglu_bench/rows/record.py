"""One flat row per case and implementation: what was asked, what came out, how sure it is. No torch in here.

The CSV's columns are exactly these fields, in this order; results/README.md describes them to a reader of the file.
A change of meaning or of order raises SCHEMA_VERSION.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from swiglu_bench.rows.load import Load

SCHEMA_VERSION = 6


def _since(schema: int, default: Any = None) -> Any:
    """A column that files of older schemas do not have."""
    return field(default=default, metadata={"since": schema})


def _beside() -> Any:
    """A field that holds a list: it is kept beside the row, not in it."""
    return field(default=(), repr=False, metadata={"beside": True})


FAULTS = {
    "missing": "no gradient came back",
    "form": "wrong shape, dtype, device or layout",
    "plain tensor": "not an ordinary tensor with its own memory, such as one that is computed when it is accessed",
    "aliasing": "it shares memory with an input or a weight",
    "finite": "NaN or Inf, such as memory that was never written",
    "relative error": "||value - truth|| / ||truth|| beyond the budget",
    "largest element": "one element's error beyond the budget",
    "new inputs": "correct for the first inputs, wrong for new ones at the same addresses",
    "complete on return": "it still changed after the stream had reached the end of the call",
    "kept": "a later call changed the result of an earlier one",
    "inputs unchanged": "it changed its inputs, or weights",
    "bias": "the mean of its errors, away from zero, is more than rounding explains",
    "random state": "it drew from a global random number generator",
    "global state": "it changed a setting of torch or Python that is not its own",
    "use": "wrong in a model: shared graphs, accumulated gradients, changed weights, a second layer, other values",
    "own clock": "it replaced functions that the timing uses",
    "recipe": "codes or scales are not those of the recipe that its row names",
    "graph replay": "a CUDA graph of it computes something else when its inputs change",
    "timed loop": "correct before, wrong while it was timed",
    "wall clock": "calls back to back take longer, by the clock of another process, than its samples say",
    "slows others": "others are slower while its process lives, or it worked while others were timed",
}
"""The checks that every implementation has to pass before it gets a time, by name, and what fails each."""


CODES = "codes of "
"""Before an operand's name: the verdict on what it was quantised to."""


class Status(enum.StrEnum):
    """How a row ended. Only `ok` rows carry times."""

    OK = "ok"
    SKIPPED = "skipped"
    INCORRECT = "incorrect"
    ERROR = "error"
    UNSETTLED = "unsettled"
    """The machine was too busy for a check that rests on time."""


FAILED = frozenset({Status.INCORRECT, Status.ERROR, Status.UNSETTLED})
"""What makes a command fail."""


class Compared:
    """A row with a ratio to a baseline and the ends of its 95% interval; all are None where there is none."""

    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None

    @property
    def interval(self) -> tuple[float, float, float] | None:
        """The three."""
        if self.ratio is None or self.ratio_low is None or self.ratio_high is None:
            return None
        return self.ratio, self.ratio_low, self.ratio_high


class Outcome(Compared):
    """What the rows of all runs share: they are dataclasses whose columns are their fields."""

    status: Status
    reason: str
    error: float | None
    eager_error: float | None
    error_ratio: float | None

    @classmethod
    def columns(cls, schema: int = SCHEMA_VERSION) -> tuple[str, ...]:
        """The CSV's columns, in order, at a schema version: a field's metadata say since which one it is there."""
        fields = (one for one in dataclasses.fields(cls) if "beside" not in one.metadata)  # type: ignore[arg-type]
        return tuple(one.name for one in fields if one.metadata.get("since", 1) <= schema)

    def row(self) -> dict[str, Any]:
        """The CSV row: every column, in order."""
        return {name: getattr(self, name) for name in self.columns()}

    def end(self, status: Status, reason: str) -> Self:
        """Close a row that carries no figures, and why."""
        self.status, self.reason = status, reason
        return self

    def note_checks(self, checks: Sequence[TensorCheck], when: str = "") -> None:
        """Enter the verdict; a tensor that fails makes the row incorrect and names itself."""
        judged = [check for check in checks if check.tensor != "conduct"]
        if judged:
            worst = max(judged, key=lambda check: check.used)
            self.error, self.eager_error, self.error_ratio = worst.error, worst.eager_error, worst.used
        failed = [f"{check.tensor}: {check.reason}" for check in checks if not check.ok]
        if failed:
            self.end(Status.INCORRECT, "; ".join(failed) + when + ".")

    @property
    def failed(self) -> bool:
        """Whether the row makes the command fail."""
        return self.status in FAILED


@dataclass
class Record(Outcome):
    """One implementation at one case. None means: not measured, or does not apply."""

    run_id: str
    command: str
    shape: str
    hidden: int
    intermediate: int
    tokens: int
    dtype: str
    scope: str
    mode: str
    seed: int
    implementation: str
    weight_layout: str
    gradients: str
    status: Status
    reason: str = ""

    # experts, and how a call of this case loads them
    experts: int | None = _since(5)
    top_k: int | None = _since(5)
    routing: str = _since(5, "")
    expert_tokens_min: int | None = _since(5)
    expert_tokens_median: float | None = _since(5)
    expert_tokens_max: int | None = _since(5)
    idle_experts: int | None = _since(5)
    padding_share: float | None = _since(5)

    # fp8: what the row quantised, and its distance from the result of the unquantised operands, beside bf16 eager's
    precision: str = _since(6, "")
    weights_quantised: str = _since(6, "")
    operands: str = _since(6, "")
    loss: float | None = _since(6)
    eager_loss: float | None = _since(6)
    losses: str = _since(6, "")

    # time
    time_ms: float | None = None
    time_p10_ms: float | None = None
    time_p90_ms: float | None = None
    rounds: int | None = None
    stopped_by: str = ""
    host_us: float | None = None
    queue_filled: float | None = None
    first_call_ms: float | None = None
    l2: str = ""
    regime: str = _since(2, "")
    latency_us: float | None = _since(2)
    graph_us: float | None = _since(2)
    graph_reason: str = _since(2, "")
    cycles: float | None = _since(2)

    # comparison
    baseline: str = ""
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    verdict: str = _since(2, "")
    aa_ratio: float | None = _since(2)
    aa_low: float | None = _since(2)
    aa_high: float | None = _since(2)
    comparable: bool = True

    # work and limit
    flops: int | None = None
    min_bytes: int | None = None
    tflops: float | None = None
    gbps: float | None = None
    limit_ms: float | None = None
    limit_kind: str = ""
    limit_pct: float | None = None
    copy_gbps: float | None = None
    matmul_tflops: float | None = None
    grouped_ms: float | None = _since(5)
    ceilings_at: str = _since(2, "")
    datasheet_gbps: float | None = _since(2)
    datasheet_tflops: float | None = _since(2)

    # state of the GPU, read once a round
    sm_mhz: float | None = _since(2)
    power_w: float | None = _since(2)
    temperature_c: float | None = _since(2)
    throttle: str = _since(2, "")
    throttled_share: float | None = _since(2)
    other_processes: int | None = _since(2)
    cpus: int | None = _since(4)
    other_cpus: float | None = _since(4)
    steal: float | None = _since(4)
    gpu_note: str = _since(2, "")
    energy_j: float | None = _since(2)
    uj_per_token: float | None = _since(2)

    # memory
    saved_bytes: int | None = None
    peak_bytes: int | None = None
    workspace_bytes: int | None = None
    predicted_saved_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    predicted_workspace_bytes: int | None = None

    # a profile, taken after the rounds
    trace: str = _since(5, "")
    tensor_pct: float | None = _since(5)
    dram_bytes: int | None = _since(5)
    l2_bytes: int | None = _since(5)
    registers_per_thread: int | None = _since(5)
    profile_note: str = _since(5, "")

    # correctness: relative error ||out - truth|| / ||truth|| of the worst tensor, and every tensor in detail
    error: float | None = None
    eager_error: float | None = None
    error_ratio: float | None = None
    errors: str = ""
    drawn: str = _since(4, "")
    remarks: str = _since(4, "")
    interpreted: bool = False

    # machine
    host: str = _since(3, "")
    gpu_index: int | None = _since(3)
    gpu_uuid: str = _since(3, "")
    device: str = ""
    driver: str = ""
    cuda: str = ""
    torch: str = ""
    triton: str = ""
    version: str = ""
    timestamp: str = ""
    fingerprint: str = _since(2, "")
    schema: int = SCHEMA_VERSION

    samples_ms: tuple[float, ...] = _beside()
    """Every timed sample in order of rounds; kept in samples.csv beside the rows, not in the row itself."""
    twin_ms: tuple[float, ...] = _beside()
    """On the baseline's row: the samples of its twin, the other half of the A/A pair."""
    states: tuple[GpuState, ...] = _beside()
    """The GPU after each round, in order; empty without a GPU."""
    tensor_checks: tuple[TensorCheck, ...] = _beside()
    """The verdict per tensor; what `verify` shows."""
    source: Any = field(default=None, repr=False, metadata={"beside": True})
    """The row of a training (training.Summary) or of several GPUs (ranks.Row) that this is the common form of."""

    def end(self, status: Status, reason: str) -> Self:
        """The same; figures that the row has are gone, unless it is ok."""
        if status is not Status.OK:
            for one in dataclasses.fields(self):
                if one.name in FIGURES:
                    setattr(self, one.name, one.default)
        return super().end(status, reason)

    def remark(self, text: str) -> None:
        """Add a sentence about how the row came about."""
        self.remarks = f"{self.remarks} {text}".strip()

    def note_checks(self, checks: Sequence[TensorCheck], when: str = "") -> None:
        """The same, and every verdict."""
        self.tensor_checks = tuple(checks)
        judged = [c for c in checks if c.tensor != "conduct"]
        valued = [c for c in judged if c.allowed]
        self.errors = " ".join(f"{c.tensor.replace(' ', '_')}={c.error:.3e}/{c.eager_error:.3e}" for c in valued)
        lossy = [(c.loss, c.eager_loss, c.tensor.replace(" ", "_")) for c in judged if c.loss is not None]
        codes = (c.tensor.removeprefix(CODES) for c in judged if c.tensor.startswith(CODES))
        self.operands = " ".join(name for name in codes if "(" not in name)
        if lossy:
            self.loss, self.eager_loss, _ = max(lossy)
            self.losses = " ".join(f"{name}={loss:.3e}/{eager:.3e}" for loss, eager, name in lossy)
        super().note_checks(checks, when)

    @property
    def sizes(self) -> str:
        """Of the block, in words."""
        text = f"hidden {self.hidden}, intermediate {self.intermediate}"
        return f"{text}, {self.experts} experts, top {self.top_k}, {self.routing} routing" if self.experts else text

    @property
    def own(self) -> Any:
        """The row as its command wrote it."""
        return self if self.source is None else self.source

    def figure(self, name: str) -> Any:
        """A value of the row, or of the one that its command wrote; None where neither has it."""
        return getattr(self, name, getattr(self.source, name, None))

    @property
    def load(self) -> Load | None:
        """What other programs did meanwhile, where it is known."""
        known = self.cpus and self.other_cpus is not None and self.steal is not None
        return Load(self.cpus or 0, self.other_cpus or 0.0, self.steal or 0.0) if known else None

    @property
    def noise(self) -> float | None:
        """How far from 1 the interval of the A/A pair of these rounds reaches; None where there was no pair."""
        if self.aa_low is None or self.aa_high is None:
            return None
        return max(abs(self.aa_low - 1), abs(self.aa_high - 1))


_names = Record.columns()
FIGURES = {*_names[_names.index("time_ms") : _names.index("error")], "samples_ms", "twin_ms", "states"}
FIGURES -= {"first_call_ms", "baseline", "comparable"}
"""What only a row has that is ok: its columns from the time to the profile, and the samples beside them."""


@dataclass(frozen=True, slots=True)
class GpuState:
    """A GPU at one moment. None: its driver does not say."""

    sm_mhz: float | None
    power_w: float | None
    temperature_c: float | None
    throttle: str | None
    """What holds the clocks down, space-separated; empty: nothing."""


@dataclass(frozen=True, slots=True)
class TensorCheck:
    """The verdict on one tensor: `output` or the gradient of one input. Errors of elements are over the truth's rms."""

    tensor: str
    ok: bool
    error: float
    """||value - truth|| / ||truth||"""
    eager_error: float
    allowed: float
    max_error: float
    """Largest element error over the root mean square of the truth."""
    eager_max_error: float
    max_allowed: float
    reason: str = ""
    """Why it failed: one phrase; empty where it passed."""
    check: str = ""
    """Which check failed it: one of `FAULTS`, or "sanitizer"; empty where it passed."""
    median_error: float | None = None
    p999_error: float | None = None
    """99.9% of the elements have no larger error."""
    worst_index: tuple[int, ...] = ()
    """Where in the tensor the largest error is."""
    loss: float | None = None
    """Of quantised operands: ||value - truth|| / ||truth|| with the truth of the unquantised ones."""
    eager_loss: float | None = None
    """The same of eager, which quantises nothing."""

    @property
    def used(self) -> float:
        """The share of what is allowed that was used, of both errors the larger; above 1 fails."""
        pairs = ((self.error, self.allowed), (self.max_error, self.max_allowed))
        return max(error / allowed if error else 0.0 for error, allowed in pairs if allowed or not error)


COLUMNS = Record.columns()
