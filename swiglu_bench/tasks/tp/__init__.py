"""`swiglu-bench tp`: an MLP, or experts, split over ranks. Here: cases, the collectives they need, their figures.

judge.py has what is judged on a rank, court.py all ranks as one court, run.py the task, and the groups of ranks as
places of the loop. Ranks are started and meet in worker/ranks.py; contenders/split.py puts collectives around
implementations. No torch in here.

                       forward                            and in a step
    all tokens         all-reduce out                     all-reduce dX
    split sequence     all-gather x, reduce-scatter out   all-gather dOut, reduce-scatter dX
    experts            two all-to-alls                    two more

A dense block needs exactly these, each of tokens x hidden elements. A mixture's tokens travel once to each rank that
has any of their experts: at most tokens x min(top_k, ranks) x hidden elements, of which contenders may send more, as
those do that send a row for each expert, but none less where the routing is even. Bandwidth
is nccl-tests' bus bandwidth: bytes of the whole tensor x 2 (n - 1) / n for an all-reduce, x (n - 1) / n for all-gather
and reduce-scatter, and x (n - 1) / n^2 for an all-to-all, of which a rank has an n-th, over time. It does not depend on
the number of ranks where the wires are the limit, and so compares with what a link can carry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from swiglu_bench.cases import costs
from swiglu_bench.cases.cases import Case, Dtype, Mode, Scope, Shape, expand, tensors
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.contenders import ALLTOALL, ASYNC, DEEPEP
from swiglu_bench.measure.statistics import median_interval, noise_interval, percentile, verdict
from swiglu_bench.rows.record import Record
from swiglu_bench.rows.run_folder import PARTS

if TYPE_CHECKING:
    from swiglu_bench.measure.rounds import Rounds

ALONE = {ASYNC: "compile", ALLTOALL: "grouped-compile", DEEPEP: "grouped-compile"}
"""Without collectives, this one is that one."""
Splitting = bool | str
"""How an implementation is run: split, False with all tokens on every rank, True with its part of them; else:"""
LOCAL, SINGLE = "local", "single"
"""Without collectives, on a rank's part of the weights; whole, on each GPU by itself."""
TWIN, COLLECTIVES = "the baseline's twin", "collectives"
"""Values of --sequence-parallel, and whether tokens are split between the collectives."""


@dataclass(frozen=True, slots=True)
class SplitCase(Case):
    """A case that is split over so many ranks, in one way or in both, which are timed in the same rounds."""

    ranks: int = 1
    ways: tuple[bool, ...] = (False, True)

    @property
    def local(self) -> SplitCase:
        """As one rank computes it: with its part of the intermediate dimension, or of the experts."""
        if experts := self.shape.experts:
            return replace(self, shape=replace(self.shape, experts=replace(experts, count=experts.count // self.ranks)))
        return replace(self, shape=replace(self.shape, intermediate=self.shape.intermediate // self.ranks))

    def collectives(self, by_sequence: bool) -> tuple[Collective, ...]:
        """Those of one call, in order."""
        once: tuple[Collective, ...] = (Collective.ALL_REDUCE,)
        if self.scope is Scope.EXPERTS:
            once = (Collective.ALL_TO_ALL, Collective.ALL_TO_ALL)
        elif by_sequence:
            once = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
        return once if self.mode is Mode.FORWARD else once * 2

    @property
    def tensor_bytes(self) -> int:
        """Of each collective: the whole tensor."""
        experts = self.shape.experts
        rows = self.tokens * min(experts.top_k, self.ranks) if experts else self.tokens
        return rows * self.shape.hidden * self.dtype.bytes


def cases_of(
    shapes: Sequence[Shape], modes: Sequence[Mode], dtypes: Sequence[Dtype], tokens: Sequence[int] | None, seed: int,
    sizes: Sequence[int], ways: tuple[bool, ...],
) -> list[SplitCase]:  # fmt: skip
    """The cases for each number of ranks, by which they divide; raises BadInput for what does not.

    Shapes are dense ones, or all of them mixtures of experts. Of the shapes' own token counts those are left out that
    do not divide by every number of ranks; of those asked for none may be.
    """
    by_sequence = True in ways
    for size in sizes:
        for shape in shapes:
            what, number = "intermediate size", shape.intermediate
            if shape.experts:
                what, number = "number of experts", shape.experts.count
            if number % size:
                divisors = [divisor for divisor in (2, 4, 8, 16, 32, 64) if number % divisor == 0] or [1]
                odd = f"{shape.name}'s {what} {number} is not divisible by {size}"
                raise BadInput(f"--gpus: {odd}; give one of {', '.join(map(str, divisors))}.")
        if wrong := [count for count in tokens or () if by_sequence and count % size]:
            odd = f"{wrong[0]} tokens are not divisible by {size} ranks, which sequence parallelism needs"
            raise BadInput(f"--tokens: {odd}; give multiples of {size}, or --sequence-parallel no.")
    cases = expand(shapes, scopes=[Scope.MLP, Scope.EXPERTS], modes=modes, dtypes=dtypes, tokens=tokens, seed=seed)
    kept = [case for case in cases if not by_sequence or all(case.tokens % size == 0 for size in sizes)]
    if not kept:
        listed = ", ".join(map(str, sizes))
        raise BadInput(f"--tokens: none of the shapes' own token counts is divisible by {listed}; give some.")
    kept.sort(key=lambda case: (shapes.index(case.shape), case.mode != Mode.FORWARD, case.mode))
    values = [{field.name: getattr(case, field.name) for field in fields(Case)} for case in kept]
    return [SplitCase(**of_case, ranks=size, ways=ways) for size in sizes for of_case in values]


class Collective(StrEnum):
    """A collective."""

    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_TO_ALL = "all-to-all"


def bus_bytes(these: tuple[Collective, ...], size_bytes: int, ranks: int) -> float:
    """What they put on each rank's wires, for tensors of `size_bytes`."""
    factors = {Collective.ALL_REDUCE: 2.0, Collective.ALL_TO_ALL: 1 / ranks}
    return sum(factors.get(kind, 1.0) * (ranks - 1) / ranks for kind in these) * size_bytes


def key(name: str, kind: Splitting) -> str:
    """What a contender is called among those that are timed; `kind` is a way of splitting, LOCAL or SINGLE."""
    return f"{name} {kind}"


def fill(row: Record, rounds: Rounds, case: SplitCase, ceiling_gbps: float | None) -> None:
    """Enter what the rounds say of one row that was right."""
    name, way = row.implementation, row.sequence_parallel
    own, alone = key(name, way), ALONE.get(name, name)
    eager, twin = key(row.baseline, way), key(TWIN, way)
    timed = {
        "time_ms": own, "twin_ms": twin if name == row.baseline else "", "compute_ms": key(alone, LOCAL),
        "comm_ms": key(COLLECTIVES, way), "single_ms": key(alone, SINGLE),
    }  # fmt: skip
    sound = {name: timing.ms for name, timing in rounds.timings.items() if not timing.failure}
    ms = {field: sound[of] for field, of in timed.items() if of in sound}
    row.samples_ms, row.twin_ms = tuple(ms["time_ms"]), tuple(ms.get("twin_ms", ()))
    row.series = {name: ms[name] for name in PARTS if name in ms}
    time_ms, compute_ms, comm_ms, single_ms = (np.asarray(ms.get(name, ())) for name in ("time_ms", *PARTS))
    rounds.note(own, row)
    assert row.time_ms is not None
    row.tflops = costs.flops(case, tensors(case.scope)) / row.ranks / row.time_ms / 1e9
    noise = noise_interval([rounds.ratio(twin, eager)]) if {eager, twin} <= rounds.timings.keys() else None
    ratio = rounds.ratio(own, eager) if noise else None
    if noise and ratio:
        row.aa_ratio, row.aa_low, row.aa_high = noise.median, noise.low, noise.high
        row.ratio, row.ratio_low, row.ratio_high = ratio.median, ratio.low, ratio.high
        row.verdict = "baseline" if own == eager else verdict(ratio, noise.noise).value
    for part, times in row.series.items():
        setattr(row, part, percentile(times, 50))
    if row.comm_ms is not None:
        these = case.collectives(way)
        row.comm_bytes = len(these) * case.tensor_bytes
        row.bus_gbps = bus_bytes(these, case.tensor_bytes, row.ranks) / row.comm_ms / 1e6
        row.bus_ceiling_gbps = ceiling_gbps
        if "compute_ms" in ms:  # of the communication, the share that the whole does not show
            share = median_interval(1 - (time_ms - compute_ms) / comm_ms)
            row.hidden_share, row.hidden_low, row.hidden_high = share.median, share.low, share.high
    if "single_ms" in ms:
        gain = median_interval(single_ms / time_ms / row.ranks)
        row.efficiency, row.efficiency_low, row.efficiency_high = gain.median, gain.low, gain.high
