"""Which collectives a tensor-parallel MLP needs, their bytes, and what of these crosses the wires. No torch in here.

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

from enum import StrEnum

from swiglu_bench.cases.cases import Case, Mode, Scope


class Kind(StrEnum):
    """A collective."""

    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_TO_ALL = "all-to-all"

    def bus_factor(self, ranks: int) -> float:
        """Bytes over each rank's wires, as a multiple of the whole tensor's."""
        return {Kind.ALL_REDUCE: 2.0, Kind.ALL_TO_ALL: 1 / ranks}.get(self, 1.0) * (ranks - 1) / ranks


def kinds(mode: Mode, by_sequence: bool, scope: Scope = Scope.MLP) -> tuple[Kind, ...]:
    """The collectives of one call, in order."""
    once: tuple[Kind, ...]
    if scope is Scope.EXPERTS:
        once = (Kind.ALL_TO_ALL, Kind.ALL_TO_ALL)
    else:
        once = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER) if by_sequence else (Kind.ALL_REDUCE,)
    return once if mode is Mode.FORWARD else once * 2


def tensor_bytes(case: Case) -> int:
    """Of each of them: the whole tensor."""
    return case.pairs * case.shape.hidden * case.dtype.bytes


def bus_bytes(these: tuple[Kind, ...], size_bytes: int, ranks: int) -> float:
    """What they put on each rank's wires, for tensors of `size_bytes`."""
    return sum(kind.bus_factor(ranks) for kind in these) * size_bytes
