"""How much of its time a contender can hide: the table of "What cannot be detected" in methodology.md.

`make hiding` runs specimens that take 5, 10, 20 and 40% off their samples, beside eager, on the first GPU or on the
CPU, at sizes at which eager takes about 20 us, 200 us and 2 ms. ARGS="TIMES" repeats each case so often. It prints the
table: for each share how many were found, how many passed, and how many got no time because the machine was too busy.
"""

import sys
from collections import Counter

import torch

from swiglu_bench.cases.cases import Case, Dtype, Mode, Scope, Shape
from swiglu_bench.check.built import Built
from swiglu_bench.check.inputs import make_problem, new_draw
from swiglu_bench.contenders import pytorch
from swiglu_bench.machine.machine import describe
from swiglu_bench.measure.clock import make_clock
from swiglu_bench.measure.rounds import Rule
from swiglu_bench.measure.statistics import percentile
from swiglu_bench.rows.record import Status
from swiglu_bench.tasks.case import court_of
from swiglu_bench.tasks.selftest.cheats import HIDDEN, HIDING
from swiglu_bench.tasks.sweep import task_of
from swiglu_bench.worker.policy import Settings, Task

WANTED_US = (20, 200, 2000)
SIZES = [2**power * part // 2 for power in range(5, 14) for part in (2, 3)]
RULE = Rule(budget_s=5.0)


def case_of(size: int, device: torch.device) -> Case:
    """As many tokens as the hidden size has."""
    shape = Shape(f"{size}", size, 3 * size // 2, "how much can be hidden", (size,))
    return Case(shape, size, Dtype.BFLOAT16 if device.type == "cuda" else Dtype.FLOAT32, Scope.GLU, Mode.FORWARD)


def took_us(case: Case, device: torch.device) -> float:
    """What eager takes, median of 15."""
    built, clock = Built(pytorch.eager, make_problem(case, device)), make_clock(device)
    calls = [built.call(Mode.FORWARD, new_draw()) for _ in range(20)]
    samples = [clock.sample(lambda call=call: call.run(lambda: None), 200.0, call.prepare) for call in calls]  # type: ignore
    return percentile([sample.ms for sample in samples[5:]], 50) * 1e3


def found(case: Case, device: torch.device) -> dict[int, str]:
    """What became of those that hide so much."""
    settings = Settings(Task.TIME, device, "hiding", "hiding", rule=RULE, baseline=pytorch.eager.name, energy=False)
    contenders = [pytorch.eager, *(specimen.implementation for specimen in HIDING.values())]
    with court_of(settings, describe(device), 120.0) as court:
        rows = {row.implementation: row for row in court.run(task_of(settings), case, contenders)}
    outcome = {Status.OK: "passed", Status.UNSETTLED: "no time"}
    return {percent: outcome.get(rows[specimen.name].status, "found") for percent, specimen in HIDING.items()}


def main(times: int) -> None:
    """Print the table."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    print(f"| {describe(device).device} | " + " | ".join(f"{percent}%" for percent in HIDDEN) + " |")
    print("| --- " * (len(HIDDEN) + 1) + "|")
    left = iter(SIZES)
    for wanted_us in WANTED_US:
        case, us = next((case, us) for case in (case_of(size, device) for size in left)
                        if (us := took_us(case, device)) >= 0.8 * wanted_us)  # fmt: skip
        counts = {percent: Counter[str]() for percent in HIDDEN}
        for _ in range(times):
            for percent, outcome in found(case, device).items():
                counts[percent][outcome] += 1
        cells = (", ".join(f"{count} {outcome}" for outcome, count in sorted(each.items())) for each in counts.values())
        print(f"| {us:,.0f} us | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
