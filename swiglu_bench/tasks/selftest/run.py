"""The self-test: every specimen through the code of a sweep or an audit, and right implementations at random cases.

It tells which check caught which specimen, and which right implementations were refused: false alarms.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from swiglu_bench.cases.cases import Case, Experts, Scope, Shape
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.contenders import pytorch
from swiglu_bench.machine import machine
from swiglu_bench.measure.rounds import Rule
from swiglu_bench.rows.record import FAULTS, AuditVerdict, Record, Status
from swiglu_bench.show.console import Bar
from swiglu_bench.show.table import Grid
from swiglu_bench.tasks.audit import Asked, audit_here
from swiglu_bench.tasks.contract.matrix import ignore_warnings_of_values
from swiglu_bench.tasks.selftest import cheats, reused, wrong
from swiglu_bench.tasks.selftest.alarms import Trial, court_of, run_alarms
from swiglu_bench.tasks.selftest.specimen import Specimen
from swiglu_bench.tasks.sweep import task_of
from swiglu_bench.worker.court import Court
from swiglu_bench.worker.settings import Settings, Task

SPECIMENS = {**wrong.SPECIMENS, **reused.SPECIMENS, **cheats.SPECIMENS}
CHECKS = FAULTS | {
    "> 2^31 elements": "wrong beyond 2^31 elements, as `audit` checks",
    "crowded expert": "wrong where one expert has all tokens, as `audit` checks",
}
LETTERS = dict(zip(CHECKS, "abcdefghijklmnopqrstuvwxyz", strict=False))
SHAPES = {"cpu": Shape("zoo", 128, 192, "sizes of the self-test", (129,)),
          "cuda": Shape("zoo", 512, 1024, "sizes of the self-test", (1000,))}  # fmt: skip
EXPERTS = Experts(8, 2)
SEVERAL_BLOCKS = {"hidden": 512, "intermediate": 384}
"""Sizes of those that quantise."""
RULE = Rule(warmup_rounds=2, min_rounds=30, max_rounds=32, min_s=0.0, budget_s=60.0)
"""More rounds than calls after which a specimen takes the check to be over."""
NEEDS_GPU, TOO_BUSY = "needs a GPU", "the machine is too busy"
ATTEMPTS = 3
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Catch:
    """What the suite made of a specimen."""

    specimen: Specimen
    checks: tuple[str, ...] = ()
    """The checks that caught it."""
    reason: str = ""
    """The suite's words, or why the specimen did not run here."""
    ran: bool = True

    @property
    def caught(self) -> bool:
        """Whether a check that must catch it did."""
        return bool(set(self.checks) & set(self.specimen.caught_by))


@dataclass
class SelftestResult:
    """What a self-test found."""

    passed: bool = True
    """Every wrong implementation that ran here was caught by a check that must catch it, and no right one by any."""
    specimens: list[dict[str, Any]] = field(default_factory=list)
    """Each wrong implementation: whether it ran, which checks caught it and which of them must have."""
    cases: list[dict[str, Any]] = field(default_factory=list)
    """Each right implementation at a random case, with its false alarm, if any."""
    interrupted: bool = False
    """Ctrl-C came: what was found by then is here."""


# Specimens through the suite


def case_of(specimen: Specimen, device_type: str) -> Case:
    """The case at which a specimen is sent through the suite."""
    shape = SHAPES[device_type]
    if specimen.scope is Scope.EXPERTS:
        shape = dataclasses.replace(shape, experts=EXPERTS)
    if specimen.precision:
        shape = dataclasses.replace(shape, **SEVERAL_BLOCKS)  # type: ignore[arg-type]
    tokens = specimen.tokens or shape.tokens[0]
    return Case(shape, tokens, specimen.dtype, specimen.scope, specimen.mode, precision=specimen.precision)


def run_specimens(
    device: torch.device, this: machine.Machine, tell: Callable[[str], None], specimens: Sequence[Specimen]
) -> Iterator[Catch]:
    """Send every specimen through the code of a sweep or an audit, beside eager, whose answer it could take."""

    def place(specimen: Specimen) -> tuple[str, str]:
        return specimen.task, str(case_of(specimen, device.type))

    here = [specimen for specimen in specimens if device.type == "cuda" or not specimen.needs_gpu]
    swept = sorted((specimen for specimen in here if specimen.task != "audit"), key=place)
    for task, of_task in groupby(swept, key=lambda specimen: specimen.task):
        settings = Settings(
            Task(task), device, "selftest", "selftest", baseline=pytorch.eager.name, rule=RULE, energy=False
        )
        with court_of(settings, this, TIMEOUT_S) as court:
            for case, group in groupby(of_task, key=lambda specimen: case_of(specimen, device.type)):
                yield from _swept(court, case, {specimen.name: specimen for specimen in group}, tell)
    for specimen in here:
        if specimen.task == "audit":
            tell(specimen.name)
            yield _audited(specimen, device)
    for specimen in specimens:
        if specimen not in here:
            yield Catch(specimen, reason=NEEDS_GPU, ran=False)


def _swept(court: Court, case: Case, chosen: dict[str, Specimen], tell: Callable[[str], None]) -> Iterator[Catch]:
    """Some specimens at one case, each in its process; again where the machine was too busy to tell."""

    def listen(doing: str, _: float) -> None:
        tell(f"{case.label}: {doing}")

    left, court.tell = dict(chosen), listen
    for _ in range(ATTEMPTS):
        contenders = [pytorch.eager, *(specimen.implementation for specimen in left.values())]
        rows = {record.implementation: record for record in court.run(task_of(court.settings), case, contenders)}
        eager = rows.pop(pytorch.eager.name)
        if eager.status not in {Status.OK, Status.UNSETTLED}:
            raise AssertionError(f"eager itself is {eager.status} at {case.label}: {eager.reason}")
        for name, record in rows.items():
            checks = _failed(record)
            if checks or Status.UNSETTLED not in {eager.status, record.status}:
                yield Catch(left.pop(name), checks, record.reason)
        if not left:
            return
    for specimen in left.values():
        yield Catch(specimen, reason=TOO_BUSY, ran=False)


def _failed(record: Record) -> tuple[str, ...]:
    """Names of the checks that failed; a specimen that ends with an error is caught by that."""
    found = tuple(dict.fromkeys(verdict.check for verdict in record.tensor_checks if not verdict.ok))
    return found or (("error",) if record.status is Status.ERROR else ())


def _audited(specimen: Specimen, device: torch.device) -> Catch:
    (cell,) = audit_here([specimen.implementation], Asked([specimen.scope], only=specimen.caught_by), device)
    if cell.verdict is AuditVerdict.NOT_RUN:
        return Catch(specimen, reason=cell.reason, ran=False)
    return Catch(specimen, (cell.check,) if cell.verdict is AuditVerdict.FAIL else (), cell.reason)


# The command


def run_selftest(
    implementations: Sequence[Implementation], device: torch.device, seed: int, false_alarms: int, zoo: bool,
    console: Console,
) -> SelftestResult:  # fmt: skip
    """Run the wrong implementations, then the right ones at random cases, and print what was found."""
    result = SelftestResult()
    with warnings.catch_warnings():
        ignore_warnings_of_values()
        if zoo:
            catches: list[Catch] = []
            specimens, this = list(SPECIMENS.values()), machine.describe(device)
            with _until_interrupted(result), Bar(console, len(specimens)) as bar:
                for catch in run_specimens(device, this, lambda doing: bar.tell(doing, len(catches)), specimens):
                    catches.append(catch)
            _show_catches(sorted(catches, key=lambda catch: specimens.index(catch.specimen)), console, result)
        if false_alarms and not result.interrupted:
            ended = [0.0]

            def tell(doing: str, completed: float) -> None:
                ended[0] = completed
                bar.tell(doing, completed)

            with _until_interrupted(result), Bar(console, false_alarms) as bar:
                for trial in run_alarms(implementations, device, seed, false_alarms, tell):
                    _note_trial(trial, console, result)
            cases = f"{ended[0]:.0f} of {false_alarms}" if result.interrupted else f"{false_alarms}"
            verified = Counter(row["implementation"] for row in result.cases)
            alarms = sum(bool(row["alarm"]) for row in result.cases)
            console.print(
                f"{alarms} false alarms in {verified.total()} verifications of {len(verified)} implementations at "
                f"{cases} random cases (seed {seed}): "
                + ", ".join(f"{name} {times}" for name, times in verified.items()),
                soft_wrap=True,
            )
    if result.interrupted:
        console.print("Interrupted: above is what was found by then.", style="yellow")
    return result


@contextlib.contextmanager
def _until_interrupted(result: SelftestResult) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        result.interrupted = True


def _note_trial(trial: Trial, console: Console, result: SelftestResult) -> None:
    where = {"case": trial.case.label, "seed": trial.case.seed, "extras": str(trial.extras)}
    result.cases.append({"implementation": trial.implementation, **where, "alarm": trial.alarm})
    if trial.alarm:
        result.passed = False
        at = f"{trial.case.label}, seed {trial.case.seed}, {trial.extras}"
        console.print(f"{trial.implementation} at {at}: {trial.alarm}", style="bold red", soft_wrap=True)


def _show_catches(catches: Sequence[Catch], console: Console, result: SelftestResult) -> None:
    result.specimens = [
        {
            "name": catch.specimen.name, "ran": catch.ran, "caught": catch.caught, "checks": catch.checks,
            "expected": sorted(catch.specimen.caught_by), "reason": catch.reason,
        }
        for catch in catches
    ]  # fmt: skip
    columns = ("wrong implementation", *LETTERS.values(), "caught by")
    table = Grid(columns, (), text=columns, wrap=("caught by",), look={"padding": (0, 0, 0, 1)}).terminal()
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
    result.passed &= not through


def _mark(catch: Catch, check: str) -> Text:
    if check not in catch.checks:
        return Text("")
    return Text("●", "green") if check in catch.specimen.caught_by else Text("○", "dim")


def _caught_by(catch: Catch) -> Text:
    if not catch.ran:
        return Text(f"not run here: {catch.reason}", "dim")
    named = [check for check in catch.checks if check in catch.specimen.caught_by]
    return Text(", ".join(named), "green") if named else Text("GOT THROUGH", "bold red")
