"""The self-test from its specimens to its result: which check caught which, and the false alarms."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.machine import machine
from swiglu_bench.rows.record import FAULTS
from swiglu_bench.show.writers.console import Bar
from swiglu_bench.show.writers.tables import new_table
from swiglu_bench.tasks.contract.matrix import ignore_warnings_of_values
from swiglu_bench.tasks.selftest.alarms import run_alarms
from swiglu_bench.tasks.selftest.specimen import CROWDED_CHECK, INDEX_CHECK
from swiglu_bench.tasks.selftest.zoo import SPECIMENS, Catch, run_zoo

CHECKS = FAULTS | {
    INDEX_CHECK: "wrong beyond 2^31 elements, as `audit` checks",
    CROWDED_CHECK: "wrong where one expert has all tokens, as `audit` checks",
}
LETTERS = dict(zip(CHECKS, "abcdefghijklmnopqrstuvwxyz", strict=False))


@dataclass
class Found:
    """The result of a self-test."""

    passed: bool = True
    """Every wrong implementation that ran here was caught by a check that must catch it, and no right one by any."""
    specimens: list[dict[str, Any]] = field(default_factory=list)
    """Each wrong implementation: whether it ran, which checks caught it and which of them must have."""
    cases: list[dict[str, Any]] = field(default_factory=list)
    """Each right implementation at a random case, with its false alarm, if any."""
    interrupted: bool = False
    """Ctrl-C came: what was found by then is here."""


@contextmanager
def _until_interrupted(found: Found) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        found.interrupted = True


def run_selftest(
    implementations: Sequence[Implementation],
    device: torch.device,
    seed: int,
    false_alarms: int,
    zoo: bool,
    console: Console,
) -> Found:
    """Run the wrong implementations, then the right ones at random cases, and print what was found."""
    found = Found()
    with warnings.catch_warnings():
        ignore_warnings_of_values()
        if zoo:
            catches: list[Catch] = []
            with _until_interrupted(found), Bar(console, len(SPECIMENS)) as bar:
                for catch in run_zoo(device, machine.describe(device), lambda doing: bar.tell(doing, len(catches))):
                    catches.append(catch)
            _show_zoo(sorted(catches, key=lambda catch: SPECIMENS.index(catch.specimen)), console, found)
        if false_alarms and not found.interrupted:
            _show_alarms(implementations, device, seed, false_alarms, console, found)
    if found.interrupted:
        console.print("Interrupted: above is what was found by then.", style="yellow")
    return found


def _show_zoo(catches: Sequence[Catch], console: Console, found: Found) -> None:
    found.specimens = [
        {
            "name": catch.specimen.name, "ran": catch.ran, "caught": catch.caught, "checks": catch.checks,
            "expected": sorted(catch.specimen.caught_by), "reason": catch.reason,
        }
        for catch in catches
    ]  # fmt: skip
    columns = ("wrong implementation", *LETTERS.values(), "caught by")
    table = new_table(columns, text=columns, wrap=("caught by",), padding=(0, 0, 0, 1))
    for catch in catches:
        table.add_row(Text(catch.specimen.name, "bold"), *(_mark(catch, check) for check in CHECKS), _caught_by(catch))
    console.width = max(console.width, 100)
    console.print(table)
    console.print("● the check that must catch it   ○ another check that caught it as well")
    for check, letter in LETTERS.items():
        console.print(Text(f"{letter} {check}: {CHECKS[check]}", style="dim"), soft_wrap=True)
    ran = [catch for catch in catches if catch.ran]
    through = [catch for catch in ran if not catch.caught]
    console.print(f"{len(ran) - len(through)} of {len(ran)} wrong implementations that ran here were caught.")
    for reason, count in Counter(catch.reason for catch in catches if not catch.ran).items():
        console.print(f"{count} of {len(catches)} not run here: {reason}.", style="yellow")
    for catch in through:
        by = f"caught by {', '.join(catch.checks)} only" if catch.checks else "not caught"
        line = f"{catch.specimen.name}: {by}, expected {' or '.join(catch.specimen.caught_by)}; {catch.reason}"
        console.print(line, style="bold red", soft_wrap=True, markup=False)
    found.passed &= not through


def _mark(catch: Catch, check: str) -> Text:
    if check not in catch.checks:
        return Text("")
    return Text("●", "green") if check in catch.specimen.caught_by else Text("○", "dim")


def _caught_by(catch: Catch) -> Text:
    if not catch.ran:
        return Text(f"not run here: {catch.reason}", "dim")
    named = [check for check in catch.checks if check in catch.specimen.caught_by]
    return Text(", ".join(named), "green") if named else Text("GOT THROUGH", "bold red")


def _show_alarms(
    chosen: Sequence[Implementation], device: torch.device, seed: int, count: int, console: Console, found: Found
) -> None:
    ended = 0

    def tell(doing: str, completed: float) -> None:
        nonlocal ended
        ended = int(completed)
        bar.tell(doing, completed)

    with _until_interrupted(found), Bar(console, count) as bar:
        for one in run_alarms(chosen, device, seed, count, tell):
            row = {"implementation": one.implementation, "case": one.case.label, "seed": one.case.seed,
                   "extras": str(one.extras), "alarm": one.alarm}  # fmt: skip
            found.cases.append(row)
            if one.alarm:
                found.passed = False
                where = f"{one.case.label}, seed {one.case.seed}, {one.extras}"
                console.print(f"{one.implementation} at {where}: {one.alarm}", style="bold red", soft_wrap=True)
    verified = Counter(row["implementation"] for row in found.cases)
    cases = f"{ended} of {count}" if found.interrupted else f"{count}"
    console.print(
        f"{sum(bool(row['alarm']) for row in found.cases)} false alarms in {verified.total()} verifications of "
        f"{len(verified)} implementations at {cases} random cases (seed {seed}): "
        + ", ".join(f"{name} {times}" for name, times in verified.items()),
        soft_wrap=True,
    )
