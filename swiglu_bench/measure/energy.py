"""Joules per call, from a counter of the whole device that moves in steps of some ten milliseconds."""

from __future__ import annotations

import time
from collections.abc import Callable

LOOP_S = 0.4
BATCH_S = 0.004
STUCK_S = 2.0
"""A counter that does not move for this long while the device works is unusable."""


def joules_per_call(run: Callable[[int], object], read_j: Callable[[], float]) -> float:
    """Energy of the device during back-to-back calls, divided by their number; delays by the host are included.

    `run` makes that many calls and waits for them. The loop runs between two steps of the counter, at least 0.4 s
    apart, so that the width of a step does not matter; calls are counted in batches of about 4 ms, which bounds the
    error to about 1%. Raises RuntimeError if the counter does not move.
    """
    run(1)
    began = time.perf_counter()
    run(1)
    batch = max(1, int(BATCH_S / max(time.perf_counter() - began, 1e-6)))

    def run_to_step() -> tuple[int, float]:
        """Calls until the counter moves, and its value then."""
        before, since, calls = read_j(), time.perf_counter(), 0
        while True:
            run(batch)
            calls += batch
            now = read_j()
            if now != before:
                return calls, now
            if time.perf_counter() - since > STUCK_S:
                raise RuntimeError(f"The energy counter did not move in {STUCK_S:g} s.")

    _, first = run_to_step()
    start, calls, last = time.perf_counter(), 0, first
    while time.perf_counter() - start < LOOP_S:
        more, last = run_to_step()
        calls += more
    return (last - first) / calls
