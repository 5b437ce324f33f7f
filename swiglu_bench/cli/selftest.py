"""The self-test from its specimens to its exit status: the detection matrix, and the false alarms."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from swiglu_bench.machine import machine
from swiglu_bench.rows.record import FAULTS
from swiglu_bench.selftest.alarms import run_alarms
from swiglu_bench.selftest.specimen import INDEX_CHECK
from swiglu_bench.selftest.zoo import SPECIMENS, Catch, run_zoo
from swiglu_bench.spec.implementation import Implementation

CHECKS = FAULTS | {INDEX_CHECK: "wrong beyond 2^31 elements, as `audit` asks"}
LETTERS = dict(zip(CHECKS, "abcdefghijklmnopqrstuvwxyz", strict=False))


def run_selftest(
    implementations: Sequence[Implementation],
    device: torch.device,
    seed: int,
    false_alarms: int,
    zoo: bool,
    console: Console,
    found: Found | None = None,
) -> int:
    """0 where everything wrong that ran here was caught by a check that must, and nothing right was; else 1.

    `found` gets the rows behind that.
    """
    found = found or Found()
    passed = True
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton.runtime.interpreter")
        if zoo:
            passed &= _show_zoo(device, console, found)
        if false_alarms:
            passed &= _show_alarms(implementations, device, seed, false_alarms, console, found)
    return int(not passed)


@dataclass
class Found:
    """A self-test's rows, for a program."""

    specimens: list[dict[str, Any]] = field(default_factory=list)
    """Each wrong implementation: whether it ran, what caught it and what must have."""
    cases: list[dict[str, Any]] = field(default_factory=list)
    """Each right one at a random case, with its alarm, if any."""


def _show_zoo(device: torch.device, console: Console, found: Found) -> bool:
    with console.status("") as status:
        catches = list(run_zoo(device, machine.describe(device), lambda doing: status.update(doing)))
    catches.sort(key=lambda catch: SPECIMENS.index(catch.specimen))
    found.specimens = [
        {
            "name": catch.specimen.name, "ran": catch.ran, "caught": catch.caught, "checks": catch.checks,
            "expected": sorted(catch.specimen.caught_by), "reason": catch.reason,
        }
        for catch in catches
    ]  # fmt: skip
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1))
    table.add_column("wrong implementation", no_wrap=True)
    for letter in LETTERS.values():
        table.add_column(letter, no_wrap=True)
    table.add_column("caught by")
    for catch in catches:
        table.add_row(Text(catch.specimen.name, "bold"), *(_mark(catch, check) for check in CHECKS), _outcome(catch))
    console.width = max(console.width, 100)
    console.print(table)
    console.print("● the check that must catch it   ○ another that did as well")
    for check, letter in LETTERS.items():
        console.print(Text(f"{letter} {check}: {CHECKS[check]}", style="dim"), soft_wrap=True)
    ran = [catch for catch in catches if catch.ran]
    through = [catch for catch in ran if not catch.caught]
    idle = Counter(catch.reason for catch in catches if not catch.ran)
    console.print(f"{len(ran) - len(through)} of {len(ran)} wrong implementations that ran here were caught.")
    for reason, count in idle.items():
        console.print(f"{count} of {len(catches)} not run here: {reason}.", style="yellow")
    for catch in through:
        by = f"caught by {', '.join(catch.checks)} only" if catch.checks else "not caught"
        line = f"{catch.specimen.name}: {by}, expected {' or '.join(catch.specimen.caught_by)}; {catch.reason}"
        console.print(line, style="bold red", soft_wrap=True, markup=False)
    return not through


def _mark(catch: Catch, check: str) -> Text:
    if check not in catch.checks:
        return Text("")
    return Text("●", "green") if check in catch.specimen.caught_by else Text("○", "dim")


def _outcome(catch: Catch) -> Text:
    if not catch.ran:
        return Text(f"not run here: {catch.reason}", "dim")
    named = [check for check in catch.checks if check in catch.specimen.caught_by]
    return Text(", ".join(named), "green") if named else Text("GOT THROUGH", "bold red")


def _show_alarms(
    implementations: Sequence[Implementation],
    device: torch.device,
    seed: int,
    count: int,
    console: Console,
    found: Found,
) -> bool:
    trialled: Counter[str] = Counter()
    alarms = 0
    with console.status("") as status:
        for one in run_alarms(implementations, device, seed, count, lambda doing: status.update(doing)):
            trialled[one.implementation] += 1
            found.cases.append(
                {
                    "implementation": one.implementation, "case": one.case.label, "seed": one.case.seed,
                    "extras": str(one.extras), "alarm": one.alarm,
                }
            )  # fmt: skip
            if one.alarm:
                alarms += 1
                where = f"{one.case.label}, seed {one.case.seed}, {one.extras}"
                console.print(f"{one.implementation} at {where}: {one.alarm}", style="bold red", soft_wrap=True)
    console.print(
        f"{alarms} false alarms in {trialled.total()} verifications of {len(trialled)} implementations at {count} "
        f"random cases (seed {seed}): " + ", ".join(f"{name} {times}" for name, times in trialled.items()),
        soft_wrap=True,
    )
    return alarms == 0
