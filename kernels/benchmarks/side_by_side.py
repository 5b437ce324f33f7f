"""What the benchmarks that time calls in common rounds have in common."""

import csv
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from os import PathLike
from typing import Any

import torch

from swiglu_bench.check.built import Produced
from swiglu_bench.check.inputs import Draw
from swiglu_bench.check.judge import Judge
from swiglu_bench.measure.clock import Clock, make_clock
from swiglu_bench.measure.graph import capture
from swiglu_bench.measure.rounds import Rounds, Rule, on_clock, run_rounds

Calls = dict[str, Callable[[], object]]
Row = dict[str, Any]
COPY_BUDGET_S = 0.1
"""Of rounds that find the faster way to copy."""
ALLOWED_ERROR = 4e-3
"""Relative to the output, in bf16; the suite's own checks are stricter."""


def gpu_and_clock() -> tuple[torch.device, Clock]:
    """Return the GPU and what times calls on it, with a fixed seed; without a GPU it ends the program."""
    if not torch.cuda.is_available():
        raise SystemExit("This benchmark needs an NVIDIA GPU.")
    device = torch.device("cuda:0")
    torch.manual_seed(0)
    return device, make_clock(device)


def require_right(name: str, result: torch.Tensor, exact: torch.Tensor) -> None:
    """End the program where a result is further from the exact one than ALLOWED_ERROR."""
    error = ((result.double() - exact).norm() / exact.norm()).item()
    if not error < ALLOWED_ERROR:
        raise SystemExit(f"{name} is wrong: its relative error is {error:.2g}")


def require_sound(name: str, judge: Judge, produced: Produced, draw: Draw) -> None:
    """End the program where the suite's judge finds a result of a draw wrong."""
    wrong = [check for check in judge.judge(produced, draw) if not check.ok]
    if wrong:
        raise SystemExit(f"{name} is wrong: {wrong[0].tensor}: {wrong[0].reason}")


def time_calls(calls: Mapping[str, Callable[[], object]], clock: Clock, budget_s: float, baseline: str) -> Rounds:
    """Time calls in the same rounds, for as long as their ratios to the baseline need."""
    timed = [on_clock(name, clock, lambda number, call=call: call) for name, call in calls.items()]  # type: ignore[misc]
    return run_rounds(timed, Rule(budget_s=budget_s), baseline=baseline)


def timed_rows(
    calls: Mapping[str, Callable[[], object]], clock: Clock, budget_s: float, baseline: str, each: int = 1
) -> Iterator[Row]:
    """Time calls in the same rounds, each of which does a contender's work `each` times; yield a row for each.

    Ends the program where one failed.
    """
    rounds = time_calls(calls, clock, budget_s, baseline)
    for name in calls:
        ratio, ms = rounds.ratio(name, baseline), rounds.timings[name].ms
        if ratio is None:
            raise SystemExit(f"{name}: {rounds.timings[name].failure}")
        yield {
            "contender": name, "time_ms": round(statistics.median(ms) / each, 5), "rounds": len(ms),
            "baseline": baseline, "ratio": round(ratio.median, 4), "low": round(ratio.low, 4),
            "high": round(ratio.high, 4),
        }  # fmt: skip


def copy_of(nbytes: int, device: torch.device) -> Callable[[], object]:
    """Return the fastest that reads and writes together so many bytes, of random data, in a graph.

    A copy that a graph records is the driver's, which moves some sizes, from 0.65 GB on, at two thirds of the rate (on
    an H200 1.25 GiB at 2.74 TB/s, 1.125 GiB at 4.2); a kernel that writes what it reads is beside it.
    """
    source = torch.randn(nbytes // 8, device=device)
    target = torch.empty_like(source)
    ways: Calls = {"copy": lambda: target.copy_(source), "kernel": lambda: torch.neg(source, out=target)}
    timed = timed_rows(graphs([ways], device), make_clock(device), COPY_BUDGET_S, "copy")
    return ways[min(timed, key=itemgetter("time_ms"))["contender"]]


def graphs(layers: Sequence[Calls], device: torch.device) -> Calls:
    """Return what could be recorded, as replays that go through all layers."""
    recorded: Calls = {}
    for name in layers[0]:

        def go_round(name: str = name) -> None:
            for calls in layers:
                calls[name]()

        try:
            recorded[name] = capture(go_round, device).replay
        except Exception as error:
            torch.cuda.synchronize()
            print(f"{name} cannot be recorded as a CUDA graph: {error}", file=sys.stderr)
    return recorded


def write_rows(path: str | PathLike[str], rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows of the same columns to a CSV file."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
