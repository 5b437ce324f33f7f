"""From the samples of a case's rounds to the figures of its rows. No torch in here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from swiglu_bench.cases import costs
from swiglu_bench.cases.cases import Case, tensors
from swiglu_bench.measure.statistics import median_interval, noise_interval, percentile, verdict
from swiglu_bench.rows.record import Record
from swiglu_bench.rows.samples import PARTS
from swiglu_bench.tasks.tp.plan import ALONE, LOCAL, SINGLE, Kind
from swiglu_bench.tasks.tp.traffic import bus_bytes, kinds, tensor_bytes

if TYPE_CHECKING:
    from swiglu_bench.measure.rounds import Rounds

TWIN, COLLECTIVES = "eager's twin", "collectives"


def key(name: str, kind: Kind) -> str:
    """What a contender is called among those that are timed; `kind` is a way of splitting, LOCAL or SINGLE."""
    return f"{name} {kind}"


def fill(row: Record, rounds: Rounds, case: Case, name: str, way: bool, ceiling_gbps: float | None) -> None:
    """Enter what the rounds say of one row that was right."""
    own, alone = key(name, way), ALONE.get(name, name)
    others = {
        "time_ms": own, "twin_ms": key(TWIN, way) if name == "eager" else "", "compute_ms": key(alone, LOCAL),
        "comm_ms": key(COLLECTIVES, way), "single_ms": key(alone, SINGLE),
    }  # fmt: skip
    ms = {
        field: rounds.timings[one].ms
        for field, one in others.items()
        if one in rounds.timings and not rounds.timings[one].failure
    }
    row.samples_ms, row.twin_ms = tuple(ms["time_ms"]), tuple(ms.get("twin_ms", ()))
    row.series = {name: ms[name] for name in PARTS if name in ms}
    rounds.note(own, row)
    assert row.time_ms is not None
    row.tflops = costs.flops(case, tensors(case.scope)) / row.ranks / row.time_ms / 1e9
    _compare(row, rounds, own, way)
    _take_apart(row, case, way, ms, ceiling_gbps)
    if "single_ms" in ms:
        row.single_ms = percentile(ms["single_ms"], 50)
        gain = median_interval(np.asarray(ms["single_ms"]) / np.asarray(ms["time_ms"]) / row.ranks)
        row.efficiency, row.efficiency_low, row.efficiency_high = gain.median, gain.low, gain.high


def _compare(row: Record, rounds: Rounds, own: str, way: bool) -> None:
    eager, twin = key("eager", way), key(TWIN, way)
    if eager not in rounds.timings or twin not in rounds.timings:
        return
    noise, ratio = noise_interval([rounds.ratio(twin, eager)]), rounds.ratio(own, eager)
    if noise is None or ratio is None:
        return
    row.aa_ratio, row.aa_low, row.aa_high = noise.median, noise.low, noise.high
    row.ratio, row.ratio_low, row.ratio_high = ratio.median, ratio.low, ratio.high
    row.verdict = "baseline" if own == eager else verdict(ratio, noise.noise).value


def _take_apart(row: Record, case: Case, way: bool, ms: dict[str, list[float]], ceiling_gbps: float | None) -> None:
    """Compute, communication, and the share of the second that the whole does not show."""
    if "compute_ms" in ms:
        row.compute_ms = percentile(ms["compute_ms"], 50)
    if "comm_ms" not in ms:
        return
    row.comm_ms = percentile(ms["comm_ms"], 50)
    these = kinds(case.mode, way, case.scope)
    row.comm_bytes = len(these) * tensor_bytes(case)
    row.bus_gbps = bus_bytes(these, tensor_bytes(case), row.ranks) / row.comm_ms / 1e6
    row.bus_ceiling_gbps = ceiling_gbps
    if "compute_ms" in ms:
        whole, compute, comm = (np.asarray(ms[name]) for name in ("time_ms", "compute_ms", "comm_ms"))
        share = median_interval(1 - (whole - compute) / comm)
        row.hidden_share, row.hidden_low, row.hidden_high = share.median, share.low, share.high
