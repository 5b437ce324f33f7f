"""One flat row per case and implementation, of every command: what was asked, what came out, how sure it is.

A field that is declared as a figure is a column; LAYOUTS says of which files, and in which order. A change of meaning
or order raises SCHEMA_VERSION; `make readme` describes the columns in results/README.md. No torch in here.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from swiglu_bench.rows.figures import HIGHER, LOWER, Count, Number, figure, figures, key, text

SCHEMA_VERSION = 10
Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)
About = Mapping[str, Any]
BASELINE = "eager"
"""Of `tp` and `train`."""

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
    "wall clock": "calls in a row take longer, by the clock of another process, than its samples say",
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


class AuditVerdict(enum.StrEnum):
    """How a check of the contract ended."""

    PASS = "pass"
    FAIL = "fail"
    """It ran, and what came out is wrong or not what was promised."""
    UNSUPPORTED = "unsupported"
    """It does not offer this, or refuses it with an error."""
    NOT_RUN = "not run"
    """This machine cannot check it."""


FAILED = frozenset({Status.INCORRECT, Status.ERROR, Status.UNSETTLED})
"""What makes a command fail."""
MOST_SHARE = 0.1
"""Of the CPUs, that others may use while a CPU is timed, which itself uses all of them."""
HOST_CPUS = 2
"""That have to be free while a GPU is timed."""
MOST_STEAL = 0.02


@dataclass(frozen=True)
class Load:
    """How busy others kept the CPUs that this process may use."""

    cpus: int
    others: float
    """CPUs that other programs used, on average."""
    steal: float
    """Share of the time in which a virtual machine's host gave the CPUs to others."""

    def reason(self, device_type: str) -> str:
        """Why times of a device are not to be relied on, in one sentence, or ""."""
        most = MOST_SHARE * self.cpus if device_type == "cpu" else max(0.5 * self.cpus, self.cpus - HOST_CPUS)
        if self.others > most:
            return f"Other programs used {self.others:.1f} of {self.cpus} CPUs."
        if self.steal > MOST_STEAL:
            return f"The host of this virtual machine took its CPUs away for {self.steal:.0%} of the time."
        return ""


@dataclass
class Record:
    """One implementation at one case. None means: not measured, or does not apply."""

    # fmt: off
    run_id: str = text("one run of the command; the rows of several runs may share a file")
    command: str = text("`forward`, `backward`, `step`, `memory` or `verify`")
    shape: str = text("name of the block, such as `llama7b`")
    hidden: int = figure("length of the vectors that enter the block", "elements", default=0)
    intermediate: int = figure("length of gate and up", "elements", default=0)
    tokens: int = figure("rows of the input, batch × sequence", "tokens", default=0)
    dtype: str = text("of inputs, weights and output")
    scope: str = text("`activation` (gate, up → h), `glu` (x → h, both projections included), `mlp` (x → out) or "
        "`experts` (x and its routing → out, see [docs/experts.md](../docs/experts.md))")
    mode: str = text("`forward`, `backward`, or `step` (both together)")
    accumulate: Count = figure("micro-batches of a step, each of `tokens`, if they are several; `shape` contains it "
        "after an `@` then, and all times and amounts are of the whole step", since=10)
    seed: int = figure("seed of the order within each round; up to schema 3 also of the inputs and weights", default=0)
    implementation: str = text("name in `swiglu-bench list`")
    weight_layout: str = text("how the implementation stores the gate and up weights: `separate`, `packed` or "
        "`interleaved`")
    gradients: str = text("tensors whose gradients it computes, separated by spaces")
    status: Status = figure("`ok`, `skipped`, `incorrect`, `error`, or `unsettled`: the machine was too busy for a "
        "check that depends on time", default=Status.OK)
    reason: str = text("why the row is skipped, incorrect, an error or unsettled")

    # experts, and how a call of this case loads them
    experts: Count = figure("number of experts", since=5)
    top_k: Count = figure("number of experts per token", since=5)
    routing: str = text("how they are drawn: `balanced`, `uniform`, `zipf`, `single` or `local`; unless it is "
        "`uniform`, `shape` contains it after an `@`", since=5)
    expert_tokens_min: Count = figure("tokens of the expert with the fewest", "tokens", since=5)
    expert_tokens_median: Number = figure("median over experts", "tokens", since=5)
    expert_tokens_max: Count = figure("tokens of the expert with the most", "tokens", since=5)
    idle_experts: Count = figure("number of experts without a token; `min_bytes` does not count their weights as "
        "read", since=5)
    padding_share: Number = figure("share of padding rows if every expert's rows are padded to tiles of 128 "
        "rows", "share", since=5)

    # fp8: what the row quantised, and its distance from the result of the unquantised operands, beside bf16 eager's
    precision: str = text("how the operands of the products are quantised: `fp8-tensorwise`, `fp8-rowwise` or "
        "`fp8-blockwise`", since=6)
    weights_quantised: str = text("`in the call` (part of the time) or `before the call` (not part of it)", since=6)
    operands: str = text("operands whose codes and scales were handed over and checked; empty if only results are "
        "judged", since=6)
    loss: Number = figure("‖value − truth‖ ÷ ‖truth‖ of the worst tensor, with the fp64 truth of the unquantised "
        "operands", better=LOWER, since=6)
    eager_loss: Number = figure("the same for eager, which quantises nothing, on the same inputs", since=6)
    losses: str = text("`tensor=loss/eager_loss` for every tensor", since=6)

    # time
    unconfirmed_ms: Number = figure("of an `unsettled` row, whose results are right: the median that its samples say, "
        "which no other clock could confirm; it is no time, and enters no ratio, rank or comparison", "ms",
        since=7, head="unconfirmed", form=".4g")
    time_ms: Number = figure("median over rounds of the time between two GPU events around the work (CPU: wall "
        "clock)", "ms", LOWER, form=".4g", head="time", curve=True)
    time_p10_ms: Number = figure("10th percentile of the same samples", "ms", LOWER)
    time_p90_ms: Number = figure("90th percentile of the same samples", "ms", LOWER)
    rounds: Count = figure("number of samples")
    stopped_by: str = text("what ended the measurement: `precision` (the ratio is known precisely enough), `budget` "
        "(time is spent) or `rounds` (the maximum is reached); of a skipped row what its case had too little of, "
        "`budget` or `memory`, empty where the implementation takes no part")
    host_us: Number = figure("median time until the call returned to the host", "µs", LOWER, head="host")
    queue_filled: Number = figure("samples in which the GPU started only after the host had queued everything; it "
        "should be 1, and less means that `time_ms` may include waiting for the host", "share", HIGHER)
    first_call_ms: Number = figure("building, compiling and the first call together, once; in no other column. "
        "Packages that the implementation declares are imported beforehand; the measuring process may still import "
        "them in this time. If two or more implementations compile, other processes compiled their kernels "
        "beforehand, side by side, and they come from Triton's cache on disk", "ms", LOWER)
    worst_new_ms: Number = figure("with `--new-tokens N`: the longest of N calls, each the first with its token count "
        "(half to twice `tokens`), by the host's clock", "ms", LOWER, since=9)
    l2: str = text("state of the cache before each sample: `cold`, `hot` or `cpu` (not controlled)")
    regime: str = text("`steady`: samples follow each other without a pause, as in training; `rested`: a pause before "
        "each", since=2)
    latency_us: Number = figure("median time that a caller waits: GPU idle, call, GPU idle again, by the host's "
        "clock; GPU only", "µs", LOWER, since=2, head="latency", curve=True)
    graph_us: Number = figure("median time of the same work replayed as a CUDA graph; `forward` and `step` on a GPU; "
        "with `--layers N`, of one of N layers that the graph goes through", "µs", LOWER, since=2,
        head="graph", curve=True)
    graph_ratio: Number = figure("the ratio of the replays to the baseline's, as `ratio`", better=LOWER, since=9)
    graph_verdict: str = text("of that ratio, as `verdict`", since=9)
    graph_reason: str = text("why a row from a GPU has no `graph_us`", since=2)
    hot_us: Number = figure("with `--l2 both`: median time with the L2 as the call before has left it", "µs", LOWER,
        since=9, head="hot")
    hot_ratio: Number = figure("the ratio of these times to the baseline's, as `ratio`", better=LOWER, since=9)
    hot_verdict: str = text("of that ratio, as `verdict`", since=9)
    cycles: Number = figure("`time_ms` × `sm_mhz`", "cycles", LOWER, since=2)

    # comparison
    baseline: str = text("the implementation that the ratios refer to")
    ratio: Number = figure("median over rounds of time ÷ the baseline's time in the same round; below 1 is faster",
        better=LOWER, head="ratio", curve=True)
    ratio_low: Number = figure("lower end of the ratio's 95% interval", better=LOWER)
    ratio_high: Number = figure("upper end of the ratio's 95% interval", better=LOWER)
    verdict: str = text("`faster` or `slower` than the baseline, or `tie`: the interval contains 1, or the ratio is "
        "no further from 1 than the A/A interval reaches", since=2)
    cycles_ratio: Number = figure("the ratio in cycles of the GPU's clock, which a spin behind each call tells; a "
        "remark says where the verdict is another in cycles, also of `graph_ratio` and `hot_ratio`; empty: no ratio of "
        "the row is confirmed in cycles", better=LOWER, since=10)
    aa_ratio: Number = figure("the ratio of the baseline to itself, from additional baseline processes (A/A) in the "
        "same rounds; without noise it would be 1", since=2)
    aa_low: Number = figure("lower end of the 95% interval for one more such process", since=2)
    aa_high: Number = figure("upper end of the 95% interval for one more such process", since=2)
    comparable: bool = figure("`false` if the gradients differ from the baseline's, so that a ratio would compare "
        "different work", default=True)

    # work and limit
    flops: Count = figure("floating-point operations that the case needs, without recomputation", "operations")
    min_bytes: Count = figure("fewest bytes to move: every input read once, every output written once", "B")
    tflops: Number = figure("`flops` ÷ `time_ms`", "TFLOP/s", HIGHER, curve=True)
    gbps: Number = figure("`min_bytes` ÷ `time_ms`", "GB/s", HIGHER, curve=True)
    limit_ms: Number = figure("the larger of the case's bare matrix products, timed in the same rounds, and "
        "`min_bytes` at `copy_gbps`", "ms")
    limit_kind: str = text("which of the two is the larger: `matmul` or `bandwidth`")
    limit_pct: Number = figure("`limit_ms` ÷ `time_ms`", "%", HIGHER, head="limit", curve=True)
    copy_gbps: Number = figure("this machine's bandwidth, measured (bytes read plus bytes written by a large "
        "copy)", "GB/s")
    matmul_tflops: Number = figure("this machine's rate for a large matrix product, measured", "TFLOP/s")
    grouped_ms: Number = figure("for experts: median time of the bare products by torch's grouped product, on sorted "
        "rows with the loads of one call, in the same rounds, and in bf16: empty for rows that quantise", "ms", since=5)
    ceilings_at: str = text("when the older of `copy_gbps` and `matmul_tflops` was measured, at most a day before the "
        "row", "UTC", since=2)
    datasheet_gbps: Number = figure("the vendor's figure for the memory", "GB/s", since=2)
    datasheet_tflops: Number = figure("the vendor's figure for dense products of the dtype", "TFLOP/s", since=2)

    # state of the GPU, read once a round
    sm_mhz: Number = figure("clock of the multiprocessors, median over rounds", "MHz", since=2)
    power_w: Number = figure("power draw of the board, median over rounds", "W", since=2)
    temperature_c: Number = figure("after the last round", "°C", since=2)
    throttle: str = text("what limited the clocks in any round: `software-power-cap`, `software-thermal`, "
        "`hardware-thermal`, `hardware-slowdown`, `power-brake`", since=2)
    throttled_share: Number = figure("rounds in which anything limited the clocks", "share", since=2)
    other_processes: Count = figure("processes on the GPU before or after the rounds that do not belong to this "
        "run", since=2)
    cpus: Count = figure("CPUs that the run could use", since=4)
    other_cpus: Number = figure("how many of these CPUs other programs used during the rounds, on average; Linux "
        "only", "CPUs", since=4)
    steal: Number = figure("share of CPU time during the rounds that the host of a virtual machine gave to others; "
        "Linux only", "share", since=4)
    gpu_note: str = text("why figures of this section are missing", since=2)
    energy_j: Number = figure("energy of the whole GPU per call, from calls back to back for 0.4 s; `forward` and "
        "`step`", "J", LOWER, since=2)
    uj_per_token: Number = figure("`energy_j` ÷ `tokens`", "µJ", LOWER, since=2, curve=True)

    # memory
    saved_bytes: Count = figure("held between forward and backward beyond inputs, weights and output", "B", LOWER,
        head="saved", curve=True)
    peak_bytes: Count = figure("highest use during the work, above inputs and weights", "B", LOWER,
        head="peak", curve=True)
    workspace_bytes: Count = figure("what the implementation keeps allocated between calls", "B", LOWER,
        head="workspace", curve=True)
    predicted_saved_bytes: Count = figure("arithmetic prediction of `saved_bytes`", "B")
    predicted_peak_bytes: Count = figure("arithmetic prediction of `peak_bytes`", "B")
    predicted_workspace_bytes: Count = figure("arithmetic prediction of `workspace_bytes`", "B")

    # a profile, taken after the rounds
    trace: str = text("with `--trace`: the file with a trace of a few calls, in this folder", since=5)
    tensor_pct: Number = figure("with `--ncu`: cycles in which the tensor cores were active, as a share of all cycles "
        "of all SMs; mean over the call's kernels, weighted by their times", "%", since=5, head="tensor")
    dram_bytes: Count = figure("with `--ncu`: bytes that one call reads from and writes to device memory; each kernel "
        "starts with cold caches", "B", since=5, head="DRAM")
    l2_bytes: Count = figure("with `--ncu`: bytes that one call moves through the L2 cache", "B", since=5, head="L2")
    registers_per_thread: Count = figure("with `--ncu`: registers per thread of the call's longest kernel", since=5,
        head="regs")
    profile_note: str = text("why there is no trace, or why there are no counters", since=5)

    # correctness: relative error ||out - truth|| / ||truth|| of the worst tensor, and every tensor in detail
    error: Number = figure("error of the worst tensor: the output or a gradient", better=LOWER)
    eager_error: Number = figure("error of eager PyTorch in the same dtype for that tensor; for a row that quantises, "
        "the error of plain PyTorch on the same codes, relative to their fp64 truth")
    error_ratio: Number = figure("error ÷ allowed error, the largest over all tensors; above 1 is incorrect",
        better=LOWER, curve=True)
    errors: str = text("`tensor=error/eager's error` for the output and every gradient, separated by spaces")
    drawn: str = text("seeds of the weights and of both sets of checked inputs, separated by spaces; new in every run",
        since=4)
    used_at: str = text("sizes at which it was used as a model uses a layer, separated by `; `: hidden x intermediate, "
        "experts and tokens; empty if that was not checked", since=7)
    remarks: str = text("anything unusual about how the row was measured, such as a check that could not be "
        "made", since=4)
    interpreted: bool = figure("`true` if Triton's interpreter ran the kernel on a CPU: the result is valid, and "
        "there is no time", default=False)

    # machine
    host: str = text("name of the host", since=3)
    gpu_index: Count = figure("number of the GPU on that host, as `nvidia-smi` counts", since=3)
    gpu_uuid: str = text("UUID of the GPU; all rows of a case are from one GPU, other cases of the run may be from "
        "another", since=3)
    device: str = text("name of the GPU or CPU")
    driver: str = text("version of the GPU's driver")
    cuda: str = text("CUDA version that PyTorch was built for")
    torch: str = text("version of PyTorch")
    triton: str = text("version of Triton")
    version: str = text("version of swiglu-bench and, from a checkout, its commit")
    files: str = text("`path=digest` of the modules, packages and files beside them that its process had loaded from "
        "outside the installed packages; paths as seen from the implementation's file", since=7)
    packages: str = text("`name==version` of the packages that `--with` put in front of this environment's for it, "
        "separated by spaces", since=8)
    timestamp: str = text("when the row was started, ISO 8601", "UTC")
    fingerprint: str = text("hash of everything that determines the row: sources, versions, machine, settings and "
        "case; `--resume` compares it", since=2)
    schema: int = figure("version of these columns; it rises when a meaning or the order "
        "changes", default=SCHEMA_VERSION)

    # several GPUs: how the block is split, and where the time goes; of the slowest rank in each round
    ranks: int = figure("GPUs, or processes on a CPU", default=1)
    sequence_parallel: bool = figure("whether a rank has only its part of the tokens before and after the block, "
        "rather than all of them", default=False)
    compute_ms: Number = figure("median of the same work without the collectives", "ms", LOWER, head="compute")
    comm_ms: Number = figure("median of the collectives alone", "ms", LOWER, head="comm")
    comm_bytes: Count = figure("bytes of all tensors of the collectives, each counted whole", "B")
    hidden_share: Number = figure("median over rounds of 1 - (time - compute) / comm; below 0 the whole takes longer "
        "than both", "share", HIGHER, head="hidden", curve=True)
    hidden_low: Number = figure("lower end of its 95% interval", "share")
    hidden_high: Number = figure("upper end of its 95% interval", "share")
    bus_gbps: Number = figure("bytes on a rank's links ÷ `comm_ms`, as nccl-tests counts them", "GB/s", HIGHER,
        head="bus", curve=True)
    bus_ceiling_gbps: Number = figure("the same for a large tensor, once per run", "GB/s")
    single_ms: Number = figure("median time of the whole block on one GPU; all GPUs run it separately at the same "
        "time, and the slowest counts", "ms", LOWER, head="1 GPU")
    single_reason: str = text("why `single_ms` or `compute_ms` is missing")
    efficiency: Number = figure("median over rounds of single / (ranks × time)", "share", HIGHER,
        head="eff.", curve=True)
    efficiency_low: Number = figure("lower end of its 95% interval", "share")
    efficiency_high: Number = figure("upper end of its 95% interval", "share")
    hosts: Count = figure("hosts that the ranks are on; `host` names them, separated by spaces")

    # training: does the model learn the same, is its step faster, and where does its time go
    task: str = text("`digits`, `mnist` or `llama`")
    model: str = text("the task, or the value of `--model`")
    trains: str = text("`everything`, or `inputs`: the weights of its blocks keep their initial values")
    seeds: int = figure("number of seeds from which it was trained to the end", default=0)
    steps: Count = figure("steps of each run")
    parameters: Count = figure("number of trained weights")
    final_loss: Number = figure("mean over seeds of the mean loss over the last fifth of the steps", "nats", LOWER)
    final_loss_spread: Number = figure("standard deviation over seeds", "nats")
    difference: Number = figure("mean over seeds of its final loss minus eager's", "nats", LOWER)
    rounding: Number = figure("the largest difference that another summation order makes to eager's final "
        "loss", "nats")
    eager_spread: Number = figure("standard deviation over seeds of eager's final loss", "nats")
    curve: str = text("`same`, `within seeds`, `differs` or `unknown`")
    held_out_loss: Number = figure("loss after the last step, over data that was never trained on; mean over seeds",
        "nats", LOWER)
    metric: str = text("`accuracy` or `perplexity`, of held-out data")
    metric_mean: Number = figure("accuracy, or perplexity, on the same data; mean over seeds")
    metric_spread: Number = figure("standard deviation over seeds")
    step_ms: Number = figure("median time of a training step in interleaved rounds", "ms", LOWER, form=".4g",
        head="step")
    rate: Number = figure("samples or tokens per second, from `step_ms`", "1/s", HIGHER, form=",.0f")
    unit: str = text("`samples` or `tokens`")
    block_share: Number = figure("share of all SwiGLU blocks, forward and backward, in the step", "share", head="MLP")
    block_forward_ms: Number = figure("forward of all blocks of a step", "ms", LOWER, head="fwd")
    block_backward_ms: Number = figure("backward of all blocks of a step", "ms", LOWER, head="bwd")
    optimizer_ms: Number = figure("AdamW's update", "ms", head="AdamW")
    difference_low: Number = figure("lower end of the 95% interval of `difference` over seeds (Student's t)", "nats",
        since=6)
    difference_high: Number = figure("upper end", "nats", since=6)
    seconds: Number = figure("duration of the training from this seed", "s", LOWER)

    # noise: one of many pairs of equal contenders
    pair: Count = figure("number of the pair", since=8)
    floor: Number = figure("how far from 1 the 95% interval for one more equal process reaches, from the baseline's "
        "additional processes", since=8)
    detectable: Number = figure("the least true difference, faster or slower, that the pair would have shown", since=8)

    # audit: `verdict` is one of AuditVerdict
    check: str = text("name of the check")
    # fmt: on

    samples_ms: tuple[float, ...] = field(default=(), repr=False)
    """Every timed sample in order of rounds; kept in samples.csv beside the rows, not in the row itself."""
    twin_ms: tuple[float, ...] = field(default=(), repr=False)
    """On the baseline's row: the samples of its twin, the other half of the A/A pair."""
    states: tuple[GpuState, ...] = field(default=(), repr=False)
    """The GPU after each round, in order; empty without a GPU."""
    tensor_checks: tuple[TensorCheck, ...] = field(default=(), repr=False)
    """The verdict per tensor; what `verify` shows."""
    series: Mapping[str, Sequence[float]] = field(default_factory=dict, repr=False)
    """What else the file of samples has, by column: of `tp` for each round, of a trained seed for each step."""
    kind: str = "run"
    """The layout of the file that the row belongs to, by name."""
    source: Record | None = field(default=None, repr=False)
    """The row as its own file has it, where it was changed to be read like those of all runs."""

    def row(self) -> dict[str, Any]:
        """The row as its file has it: every column, in order."""
        layout = LAYOUTS[self.kind]
        return {column: getattr(self, name) for column, name in zip(layout.header(), layout.columns(), strict=True)}

    def end(self, status: Status, reason: str, lacking: str = "") -> Self:
        """Set the status and the reason; unless the row is ok, its figures are deleted.

        `lacking` is what a skipped row's case has too little of, `budget` or `memory`.
        """
        if status is not Status.OK:
            for column in dataclasses.fields(self):
                if column.name in OF_OK:
                    setattr(self, column.name, column.default)
        if status is not Status.UNSETTLED:
            self.unconfirmed_ms = None
        self.status, self.reason, self.stopped_by = status, reason, lacking or self.stopped_by
        return self

    def shown(self, name: str) -> str:
        """A figure of the row in a table."""
        return FIGURES[name].shown(getattr(self, name))

    def remark(self, text: str) -> None:
        """Add a sentence about how the row came about, once."""
        self.remarks = self.remarks if text in self.remarks else f"{self.remarks} {text}".strip()

    def note_checks(self, checks: Sequence[TensorCheck], when: str = "") -> None:
        """Enter the verdicts; a tensor that fails makes the row incorrect and names itself."""
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
        if judged:
            worst = max(judged, key=lambda check: check.used)
            self.error, self.eager_error, self.error_ratio = worst.error, worst.eager_error, worst.used
        if failed := [f"{check.tensor}: {check.reason}" for check in checks if not check.ok]:
            self.end(Status.INCORRECT, "; ".join(failed) + when + ".")

    @property
    def interval(self) -> tuple[float, float, float] | None:
        """The ratio and the ends of its 95% interval; None where there is none."""
        if self.ratio is None or self.ratio_low is None or self.ratio_high is None:
            return None
        return self.ratio, self.ratio_low, self.ratio_high

    @property
    def half_width(self) -> float:
        """Half the width of the ratio's interval; 0 where there is none."""
        return ((self.ratio_high or 0.0) - (self.ratio_low or 0.0)) / 2

    @property
    def sizes(self) -> str:
        """The sizes of the block, as text."""
        text = f"hidden {self.hidden}, intermediate {self.intermediate}"
        return f"{text}, {self.experts} experts, top {self.top_k}, {self.routing} routing" if self.experts else text

    @property
    def own(self) -> Record:
        """The row as its command wrote it."""
        return self.source or self

    @property
    def code(self) -> str:
        """8 hexadecimal digits for the code of its own that its process had loaded; empty where it had none."""
        return hashlib.sha256(self.files.encode()).hexdigest()[:8] if self.files else ""

    @property
    def frozen(self) -> bool:
        """Whether the weights of its blocks are not trained: a step does less work, and another curve is no failure."""
        return self.trains == "inputs"

    @property
    def failed(self) -> bool:
        """Whether it makes the command fail; so does a curve that differs, unless it is frozen or quantises."""
        return self.status in FAILED or (self.curve == "differs" and not self.frozen and not self.precision)

    @property
    def unknown(self) -> bool:
        """Whether nothing is wrong, and for want of quiet, time or memory it is not known what was asked for."""
        short = self.status is Status.SKIPPED and self.stopped_by in ("budget", "memory")
        return short or self.status is Status.UNSETTLED

    @property
    def load(self) -> Load | None:
        """What other programs did during the rounds; None where it is not known."""
        known = self.cpus and self.other_cpus is not None and self.steal is not None
        return Load(self.cpus or 0, self.other_cpus or 0.0, self.steal or 0.0) if known else None

    @property
    def noise(self) -> float | None:
        """How far from 1 the interval of the A/A pair of these rounds reaches; None where there was no pair."""
        ends = [abs(end - 1) for end in (self.aa_low, self.aa_high) if end is not None]
        return max(ends) if len(ends) == 2 else None


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """The items by key; keys and items in the order in which they first appear."""
    found: dict[Key, list[Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def unique(values: Iterable[Key]) -> list[Key]:
    """Each value once, in the order in which they first appear."""
    return list(dict.fromkeys(values))


@dataclass(frozen=True)
class FileLayout:
    """A file of rows: its name, and its columns in order."""

    file: str
    names: tuple[str, ...]
    key: tuple[str, ...] = ()
    """What names a row in the files beside it."""
    samples: str = ""
    """The file with the samples of the rows; empty: there is none."""
    called: Mapping[str, str] = field(default_factory=dict)
    """The figure of each column that is named otherwise in this file; "" for a column that only old files have."""

    def columns(self, schema: int = SCHEMA_VERSION) -> tuple[str, ...]:
        """The figures that the file has at a schema version."""
        return tuple(name for name in self.names if FIGURES[name].since <= schema)

    def header(self) -> tuple[str, ...]:
        """The first line of the file, as it is written now."""
        heads = {figure: column for column, figure in self.called.items()}
        return tuple(heads.get(name, name) for name in self.columns())

    def figures(self, header: Sequence[str]) -> tuple[str, ...]:
        """The figures that a file with this first line has."""
        return tuple(name for column in header if (name := self.called.get(column, column)))


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

    tensor: str = key("`output`, the input whose gradient it is, or `conduct` for a failure that belongs to no tensor")
    ok: bool = key("whether it passed")
    error: float = key("‖value − truth‖ ÷ ‖truth‖; the worse of the two sets of inputs")
    eager_error: float = key("the same for eager PyTorch")
    allowed: float = key("the budget for `error`")
    max_error: float = key("largest error of an element")
    eager_max_error: float = key("the same for eager PyTorch")
    max_allowed: float = key("the budget for `max_error`")
    reason: str = text("why it failed, in a phrase")
    check: str = text("the check that failed it, such as `finite`, `new inputs` or `aliasing`")
    """One of `FAULTS`, or "sanitizer"."""
    median_error: Number = figure("median error of the elements; like the next two columns only in `verify`")
    p999_error: Number = figure("99.9th percentile of the elements' errors")
    worst_index: tuple[int, ...] = figure("index of the element with the largest error", default=())
    loss: Number = figure("with quantised operands: the tensor's relative error from the truth of the unquantised ones")
    eager_loss: Number = figure("the same for eager PyTorch, which quantises nothing")

    @property
    def used(self) -> float:
        """The share of what is allowed that was used, of both errors the larger; above 1 fails."""
        pairs = ((self.error, self.allowed), (self.max_error, self.max_allowed))
        return max(error / allowed if error else 0.0 for error, allowed in pairs if allowed or not error)


FIGURES = figures(Record)
_names = tuple(FIGURES)
LAYOUTS = {
    "run": FileLayout("records.csv", _names[: _names.index("schema") + 1],
        ("run_id", "shape", "tokens", "dtype", "scope", "mode", "implementation"), "samples.csv"),
    "tp": FileLayout("tp.csv", (
        "run_id", "shape", "hidden", "intermediate", "tokens", "dtype", "mode", "seed", "ranks", "sequence_parallel",
        "implementation", "status", "reason", "experts", "time_ms", "time_p10_ms", "time_p90_ms", "rounds",
        "stopped_by", "queue_filled", "host_us", "first_call_ms", "ratio", "ratio_low", "ratio_high", "verdict",
        "aa_ratio", "aa_low", "aa_high", *_names[_names.index("compute_ms") : _names.index("hosts")], "tflops",
        "peak_bytes", "error", "eager_error", "error_ratio", "hosts", "host", "device", "driver", "cuda", "torch",
        "triton", "version", "timestamp",
    ), ("run_id", "shape", "tokens", "dtype", "mode", "ranks", "sequence_parallel", "implementation"),
        "tp_samples.csv"),
    "training": FileLayout("summary.csv", (
        "run_id", "task", "model", "implementation", "trains", "status", "reason",
        *_names[_names.index("seeds") : _names.index("block_share")], "ratio", "ratio_low", "ratio_high", "verdict",
        "aa_low", "aa_high", "rounds", "stopped_by",
        *_names[_names.index("block_share") : _names.index("difference_low")], "saved_bytes", "peak_bytes", "device",
        "torch", "triton", "version", "timestamp", "precision", "difference_low", "difference_high",
    ), ("run_id", "implementation"), called=dict.fromkeys(("block_ratio", "expected_ratio", "as_expected"), "")),
    "seeds": FileLayout("runs.csv",
        ("implementation", "seed", "steps", "parameters", "held_out_loss", "metric_mean", "seconds"),
        ("implementation", "seed"), "train.csv", {"metric": "metric_mean"}),
    "workload": FileLayout("workload.csv", (
        "shape", "scope", "mode", "dtype", "implementation", "baseline", "time_ms", "ratio", "ratio_low", "ratio_high",
        "verdict", "reason")),
    "noise": FileLayout("noise.csv", ("pair", "time_ms", "ratio", "ratio_low", "ratio_high", "floor", "verdict",
        "detectable", "rounds", "stopped_by"), called={"noise": "floor"}),
    "audit": FileLayout("audit.csv", ("implementation", "scope", "check", "verdict", "reason", "dtype", "device")),
}  # fmt: skip
"""By kind of row, as JSON calls it."""
COLUMNS = LAYOUTS["run"].columns()
OF_OK = {*_names[_names.index("time_ms") : _names.index("error")], "samples_ms", "twin_ms", "states"}
OF_OK -= {"first_call_ms", "baseline", "comparable"}
"""What only a row has that is ok: its columns from the time to the profile, and the samples beside them."""


def row_of(kind: str, about: About, **columns: Any) -> Record:
    """A row of this kind from the columns of its file; `about` is run.json. Raises ValueError for unknown columns."""
    return Record(**columns | (MORE[kind](about, columns) if kind in MORE else {}), kind=kind)


def _of_tp(about: About, columns: About) -> dict[str, Any]:
    """The scope says how the block is split, as `mlp-tp4-sp` or `experts-ep4`."""
    run = {run.get("run_id"): run for run in (*about.get("earlier", ()), about)}.get(columns["run_id"], {})
    ranks, split = columns["ranks"], "-sp" * columns["sequence_parallel"]
    return {
        "command": str(run.get("command", "swiglu-bench tp")),
        "baseline": str(run.get("settings", {}).get("baseline", BASELINE)),
        "scope": f"experts-ep{ranks}" if columns.get("experts") else f"mlp-tp{ranks}{split}",
    }  # fmt: skip


def _of_training(about: About, columns: About) -> dict[str, Any]:
    """The case is a step of the whole model, which has the model's name as its shape."""
    settings, machine = about.get("settings", {}), about.get("machine", {})
    sizes = settings.get("workload", {})
    return {
        "command": str(about.get("command", "swiglu-bench train")), "shape": columns["model"], "scope": "model",
        "mode": "train", "hidden": sizes.get("hidden", 0), "intermediate": sizes.get("intermediate", 0),
        "tokens": sizes.get("batch", 0) * sizes.get("sequence", 1), "dtype": settings.get("dtype", ""),
        "seed": settings.get("seed", 0), "baseline": BASELINE, "comparable": columns["trains"] != "inputs",
        **{name: machine.get(name, "") for name in ("host", "driver", "cuda")},
    }  # fmt: skip


MORE: dict[str, Callable[[About, About], dict[str, Any]]] = {
    "tp": _of_tp, "training": _of_training, "audit": lambda _, columns: {"verdict": AuditVerdict(columns["verdict"])},
}  # fmt: skip
