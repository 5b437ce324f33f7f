"""What `tp` measures, the collectives that it needs, and its figures. No torch in here.

                       forward                            and in a step
    all tokens         all-reduce out                     all-reduce dX
    split sequence     all-gather x, reduce-scatter out   all-gather dOut, reduce-scatter dX
    experts            two all-to-alls                    two more

Every contender needs exactly these, each of tokens x hidden elements, of experts of tokens x top_k x hidden. Bandwidth
is nccl-tests' bus bandwidth: bytes of the whole tensor x 2 (n - 1) / n for an all-reduce, x (n - 1) / n for all-gather
and reduce-scatter, and x (n - 1) / n^2 for an all-to-all, of which a rank has an n-th, over time. It does not depend on
the number of ranks where the wires are the limit, and so compares with what a link can carry.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from swiglu_bench.cases import costs
from swiglu_bench.cases.cases import Case, Dtype, Mode, Scope, Shape, expand, tensors
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.measure.statistics import median_interval, noise_interval, percentile, verdict
from swiglu_bench.rows.record import Record
from swiglu_bench.rows.run_folder import PARTS

if TYPE_CHECKING:
    from swiglu_bench.measure.rounds import Rounds

ASYNC = "compile-async-tp"
ALONE = {ASYNC: "compile"}
"""Without collectives, this one is that one."""
Splitting = bool | str
"""How an implementation is run: split, False with all tokens on every rank, True with its part of them; else:"""
LOCAL, SINGLE = "local", "single"
"""Without collectives, on a rank's part of the weights; whole, on each GPU by itself."""
TWIN, COLLECTIVES = "eager's twin", "collectives"
WAYS = {"no": (False,), "yes": (True,), "both": (False, True)}
"""Values of --sequence-parallel, and whether tokens are split between the collectives."""


@dataclass(frozen=True)
class SplitPlan:
    """What a command is to measure with each number of ranks."""

    run_id: str
    cases: tuple[Case, ...]
    implementations: tuple[Implementation, ...]
    """Without their code."""
    ways: tuple[bool, ...]
    budget_s: float
    timeout_s: float
    beside: tuple[Implementation, ...] = ()
    """What some of these are timed as without collectives, and takes no part itself."""
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)
    """Implementations that take no part, and why."""
    asked: frozenset[str] = frozenset()
    """The implementations that --impl names."""
    command: str = "swiglu-bench tp"

    @property
    def everybody(self) -> tuple[Implementation, ...]:
        """Whose code a rank has to have."""
        return (*self.implementations, *self.beside)

    @property
    def names(self) -> list[str]:
        """Of all implementations, in the catalogue's order."""
        return [implementation.name for implementation in self.implementations]


def cases_of(
    shapes: Sequence[Shape], modes: Sequence[Mode], dtypes: Sequence[Dtype], tokens: Sequence[int] | None, seed: int,
    sizes: Sequence[int], by_sequence: bool,
) -> tuple[Case, ...]:  # fmt: skip
    """The cases, all of which divide by every number of ranks; raises BadInput for what does not.

    Shapes are dense ones, or all of them mixtures of experts.

    Of the shapes' own token counts those are left out that do not divide; of those asked for none may be.
    """
    for size in sizes:
        for shape in shapes:
            what, number = "intermediate size", shape.intermediate
            if shape.experts:
                what, number = "number of experts", shape.experts.count
            if number % size:
                raise BadInput(
                    f"--gpus: {shape.name}'s {what} {number} is not divisible by {size}; give one of "
                    f"{_listed(_divisors(number))}."
                )
        wrong = [count for count in tokens or () if by_sequence and count % size]
        if wrong:
            raise BadInput(
                f"--tokens: {wrong[0]} tokens are not divisible by {size} ranks, which sequence parallelism needs; "
                f"give multiples of {size}, or --sequence-parallel no."
            )
    cases = expand(shapes, scopes=[Scope.MLP, Scope.EXPERTS], modes=modes, dtypes=dtypes, tokens=tokens, seed=seed)
    kept = tuple(case for case in cases if not by_sequence or all(case.tokens % size == 0 for size in sizes))
    if not kept:
        raise BadInput(f"--tokens: none of the shapes' own token counts is divisible by {_listed(sizes)}; give some.")
    return tuple(sorted(kept, key=lambda case: (shapes.index(case.shape), case.mode != Mode.FORWARD, case.mode)))


def local(case: Case, size: int) -> Case:
    """The case as one rank of a group computes it: with its part of the intermediate dimension, or of the experts."""
    if case.shape.experts:
        mine = dataclasses.replace(case.shape.experts, count=case.shape.experts.count // size)
        return dataclasses.replace(case, shape=dataclasses.replace(case.shape, experts=mine))
    return dataclasses.replace(
        case, shape=dataclasses.replace(case.shape, intermediate=case.shape.intermediate // size)
    )


def parse_gpus(text: str) -> list[int]:
    """Numbers of ranks from '1,2,4', each once. Raises BadInput for anything else."""
    counts = []
    for part in (piece.strip() for piece in text.split(",")):
        if not part.isascii() or not part.isdecimal() or not 1 <= int(part) <= 4096:
            raise BadInput(f"--gpus: {part!r} is not a number of GPUs; give positive integers such as 2 or 1,2,4.")
        counts.append(int(part))
    return list(dict.fromkeys(counts))


def _divisors(number: int) -> list[int]:
    return [size for size in (2, 4, 8, 16, 32, 64) if number % size == 0] or [1]


def _listed(values: Iterable[int]) -> str:
    return ", ".join(map(str, values))


class Collective(StrEnum):
    """A collective."""

    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_TO_ALL = "all-to-all"

    def bus_factor(self, ranks: int) -> float:
        """Bytes over each rank's wires, as a multiple of the whole tensor's."""
        return {Collective.ALL_REDUCE: 2.0, Collective.ALL_TO_ALL: 1 / ranks}.get(self, 1.0) * (ranks - 1) / ranks


def kinds(mode: Mode, by_sequence: bool, scope: Scope = Scope.MLP) -> tuple[Collective, ...]:
    """The collectives of one call, in order."""
    once: tuple[Collective, ...]
    if scope is Scope.EXPERTS:
        once = (Collective.ALL_TO_ALL, Collective.ALL_TO_ALL)
    else:
        once = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER) if by_sequence else (Collective.ALL_REDUCE,)
    return once if mode is Mode.FORWARD else once * 2


def tensor_bytes(case: Case) -> int:
    """Of each of them: the whole tensor."""
    return case.pairs * case.shape.hidden * case.dtype.bytes


def bus_bytes(these: tuple[Collective, ...], size_bytes: int, ranks: int) -> float:
    """What they put on each rank's wires, for tensors of `size_bytes`."""
    return sum(kind.bus_factor(ranks) for kind in these) * size_bytes


def key(name: str, kind: Splitting) -> str:
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
        field: rounds.timings[timed].ms
        for field, timed in others.items()
        if timed in rounds.timings and not rounds.timings[timed].failure
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
