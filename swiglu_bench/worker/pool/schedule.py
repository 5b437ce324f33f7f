"""Which case goes to which place next: the longest first; one whose place was lost again, elsewhere if it can."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from swiglu_bench.cases import costs
from swiglu_bench.cases.cases import WEIGHTS, Case
from swiglu_bench.worker.pool.place import Place

OPERATIONS_PER_BYTE = 200
"""From here on a case is bound by products: 989 TFLOP/s over 4800 GB/s of an H200. Only the order hangs on it."""
ATTEMPTS = 2


def expected_cost(case: Case) -> int:
    """A figure that grows with the time a case takes: its operations, or as many as its bytes keep the GPU from."""
    names = (*WEIGHTS[case.scope], "x")
    return max(costs.flops(case, names), costs.min_bytes(case, names) * OPERATIONS_PER_BYTE)


class Schedule:
    """The cases that wait, by their number."""

    def __init__(self, cases: Sequence[Case]) -> None:
        # Started last, a long case would keep one place busy while all others are done.
        self._waiting = sorted(range(len(cases)), key=lambda number: -expected_cost(cases[number]))
        self._lost: dict[int, list[tuple[Place, str]]] = {}

    def take(self, place: Place, others: Collection[Place]) -> int | None:
        """The case that a free place is to run; None: none now. `others` can work, too, and may be busy."""
        for number in self._waiting:
            died_at = {lost.seat for lost, _ in self._lost.get(number, [])}
            if place.seat not in died_at or not any(other.seat not in died_at for other in others):
                self._waiting.remove(number)
                return number
        return None

    def give_back(self, number: int, place: Place, reason: str) -> str | None:
        """Take note that a place was lost over a case; why it is not tried again, or None where it is."""
        losses = self._lost.setdefault(number, [])
        losses.append((place, reason))
        if len(losses) < ATTEMPTS:
            self._waiting.insert(0, number)
            return None
        told = "; then ".join(f"{where.name} was lost: {why}" for where, why in losses)
        return f"Its process ended {len(losses)} times: {told}."
