"""The self-test: every specimen through the code of a sweep or an audit, and right implementations at random cases.

It tells which check caught which specimen, and which right implementations were refused: such a failure is a false
alarm, or a bug of the implementation.
"""

import dataclasses
import random
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from swiglu_bench.cases import cases
from swiglu_bench.cases.errors import one_line
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.check.inputs import make_problem
from swiglu_bench.contenders import pytorch
from swiglu_bench.loop import Ending
from swiglu_bench.machine.machine import Machine, describe
from swiglu_bench.measure.rounds import Rule
from swiglu_bench.rows.record import FAULTS, AuditVerdict, Status, TensorCheck
from swiglu_bench.show.console import Bar, Screen
from swiglu_bench.show.table import Grid
from swiglu_bench.tasks.case import court_of
from swiglu_bench.tasks.contract.inputs import GPT_OSS_ALPHA, clear_limit, inputs_of, verdict
from swiglu_bench.tasks.contract.matrix import cannot_run, ignore_warnings_of_values
from swiglu_bench.tasks.selftest import cheats, reused, wrong
from swiglu_bench.tasks.selftest.specimen import HONEST, HONEST_ON_A_GPU, Specimen, slow
from swiglu_bench.tasks.sweep import task_of
from swiglu_bench.tasks.untimed import Asked, audit_here
from swiglu_bench.worker.admission import Admitting, Drawn
from swiglu_bench.worker.ahead import first_candidates
from swiglu_bench.worker.court import Court
from swiglu_bench.worker.policy import Settings, Task, Tell

SPECIMENS = {**wrong.SPECIMENS, **reused.SPECIMENS, **cheats.SPECIMENS}
OWN_CACHES = "own caches"
CHECKS = FAULTS | {
    "> 2^31 elements": "wrong beyond 2^31 elements, as `audit` checks",
    OWN_CACHES: "what it changes on disk is nothing that other processes read",
    "crowded expert": "wrong where one expert has all tokens, as `audit` checks",
    "far experts": "wrong for experts whose weights lie beyond 2^31 elements, as `audit` checks",
    "second GPU": "wrong on a GPU that is not the current one, as `audit` checks",
}
SHAPES = {"cpu": cases.Shape("zoo", 128, 192, "sizes of the self-test", (129,)),
          "cuda": cases.Shape("zoo", 512, 1024, "sizes of the self-test", (1000,))}  # fmt: skip
EXPERTS = cases.Experts(8, 2)
SEVERAL_BLOCKS = {"hidden": 512, "intermediate": 384}
"""Sizes of those that quantise."""
RULE = Rule(warmup_rounds=2, min_rounds=30, max_rounds=32, min_s=0.0, budget_s=60.0)
"""More rounds than calls after which a specimen takes the check to be over."""
NEEDS = {"cuda": "needs a GPU", "cpu": "what it does is wrong on a CPU only"}
TOO_BUSY = "the machine is too busy"
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


# Specimens through the suite


def case_of(specimen: Specimen, device_type: str) -> cases.Case:
    """The case at which a specimen is sent through the suite."""
    shape = SHAPES[device_type]
    if specimen.scope is cases.Scope.EXPERTS:
        shape = dataclasses.replace(shape, experts=EXPERTS)
    if specimen.precision:
        shape = dataclasses.replace(shape, **SEVERAL_BLOCKS)  # type: ignore[arg-type]
    tokens = specimen.tokens or shape.tokens[0]
    return cases.Case(shape, tokens, specimen.dtype, specimen.scope, specimen.mode, precision=specimen.precision)


def run_specimens(device: torch.device, this: Machine, tell: Tell, specimens: Sequence[Specimen]) -> Iterator[Catch]:
    """Send every specimen through a sweep or an audit, beside eager, whose answer it could take; `tell` counts them."""

    def place(specimen: Specimen) -> tuple[str, str]:
        return specimen.task, str(case_of(specimen, device.type))

    here = [specimen for specimen in specimens if specimen.needs in {None, device.type}]
    swept = sorted((specimen for specimen in here if specimen.task != "audit"), key=place)
    for task, of_task in groupby(swept, key=lambda specimen: specimen.task):
        settings = _settings(device, Task(task), baseline=pytorch.eager.name, rule=RULE)
        with court_of(settings, this, TIMEOUT_S) as court:
            for case, group in groupby(of_task, key=lambda specimen: case_of(specimen, device.type)):
                yield from _swept(court, case, {specimen.name: specimen for specimen in group}, tell)
    for specimen in here:
        if specimen.task == "audit":
            tell(specimen.name, 0.0)
            yield _audited(specimen, device)
    for specimen in specimens:
        if specimen not in here:
            yield Catch(specimen, reason=NEEDS[specimen.needs or device.type], ran=False)


def _swept(court: Court, case: cases.Case, chosen: dict[str, Specimen], tell: Tell) -> Iterator[Catch]:
    """Some specimens at one case, each in its process; again where the machine was too busy to tell."""
    left, court.tell = dict(chosen), lambda doing, share: tell(f"{case.label}: {doing}", share * len(left))
    for _ in range(ATTEMPTS):
        contenders = [pytorch.eager, *(specimen.implementation for specimen in left.values())]
        decoys = {name: specimen.spares() for name, specimen in left.items() if specimen.spares}
        for file in decoys.values():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(file.name, encoding="utf-8")
        rows = {record.implementation: record for record in court.run(task_of(court.settings), case, contenders)}
        eager = rows.pop(pytorch.eager.name)
        if eager.status not in {Status.OK, Status.UNSETTLED}:
            raise AssertionError(f"eager itself is {eager.status} at {case.label}: {eager.reason}")
        for name, record in rows.items():
            failed = tuple(dict.fromkeys(check.check for check in record.tensor_checks if not check.ok))
            checks, decoy = failed or ("error",) * (record.status is Status.ERROR), decoys.get(name)
            if decoy and decoy.exists() and decoy.read_text(encoding="utf-8") == decoy.name:
                checks = (*checks, OWN_CACHES)
            if checks or Status.UNSETTLED not in {eager.status, record.status}:
                yield Catch(left.pop(name), checks, record.reason)
        if not left:
            return
    for specimen in left.values():
        yield Catch(specimen, reason=TOO_BUSY, ran=False)


def _audited(specimen: Specimen, device: torch.device) -> Catch:
    (cell,) = audit_here([specimen.implementation], Asked([specimen.scope], only=specimen.caught_by), device)
    if cell.verdict is AuditVerdict.NOT_RUN:
        return Catch(specimen, reason=cell.reason, ran=False)
    return Catch(specimen, (cell.check,) if cell.verdict is AuditVerdict.FAIL else (), cell.reason)


# Right implementations at random cases

LARGEST = {"cpu": (200, 300, 130), "cuda": (2048, 4096, 2048)}
"""Hidden, intermediate and tokens that are drawn at most."""
LARGE = {"cpu": cases.Shape("large", 256, 512, "sizes of the self-test", (256,)),
         "cuda": cases.Shape("large", 4096, 8192, "sizes of the self-test", (4096,))}  # fmt: skip
"""Where a call takes long beside all that a turn of it needs otherwise."""
MULTIPLES, MULTIPLES_IN_FP8 = (1, 1, 16, 128), (1, 16, 16, 128)
"""What hidden and intermediate sizes are drawn as multiples of: some rows take no others, most of all in fp8."""
QUANTISED = 0.3
"""The share of the cases that have products in fp8, of those that have products."""
MOST_EXPERTS = 12
OF_GPT_OSS = 0.3
"""Of mixtures, the share whose shape has gpt-oss's biases and gates, in every scenario and in what is timed."""
TIMED = 10
"""Of so many cases, one is timed as well, each contender in its process, and before them two large ones."""
TIMED_TOGETHER = 4
"""Contenders, drawn, of those that a timed case has beside its baseline."""
RULE_OF_ALARMS = Rule(warmup_rounds=2, min_rounds=10, max_rounds=12, min_s=0.0, budget_s=60.0)
TIMEOUT_OF_ALARMS_S = 300.0


@dataclass(frozen=True)
class Trial:
    """One implementation at one random case."""

    implementation: str
    case: cases.Case
    extras: cases.Extras
    alarm: str
    """Why it failed; empty where it passed, as it must."""


def draw_case(source: random.Random, device_type: str) -> tuple[cases.Case, cases.Extras]:
    """Draw sizes evenly over orders of magnitude, and everything else at random."""
    hidden, intermediate, tokens = (round(most ** source.random()) for most in LARGEST[device_type])
    scope, dtype = source.choice(list(cases.Scope)), source.choice(list(cases.Dtype))
    precision = cases.Precision.UNQUANTISED
    if scope is not cases.Scope.ACTIVATION and source.random() < QUANTISED:
        kinds = cases.FOR_EXPERTS if scope is cases.Scope.EXPERTS else cases.Precision
        dtype, precision = cases.Dtype.BFLOAT16, source.choice([kind for kind in kinds if kind])
    multiple = source.choice(MULTIPLES_IN_FP8 if precision else MULTIPLES)
    hidden, intermediate = (-(-size // multiple) * multiple for size in (hidden, intermediate))
    experts = None
    if scope is cases.Scope.EXPERTS:
        count = source.randint(1, MOST_EXPERTS)
        experts = cases.Experts(count, source.randint(1, count), source.choice(list(cases.RoutingKind)))
    shape = cases.Shape(f"{hidden}x{intermediate}", hidden, intermediate, "drawn", (tokens,), experts)
    case = cases.Case(shape, tokens, dtype, scope, source.choice(list(cases.Mode)), source.randrange(2**31), precision)
    kind = "plain" if precision else source.choice(("plain", "plain", "bias", "limit", "packed"))
    if (scope is cases.Scope.ACTIVATION and kind != "limit") or (scope is cases.Scope.EXPERTS and kind == "packed"):
        kind = "plain"
    if scope is cases.Scope.EXPERTS and not case.precision and source.random() < OF_GPT_OSS:
        gates = cases.Extras(bias=True, limit=7.0, alpha=GPT_OSS_ALPHA, interleaved=source.random() < 0.5)
        return dataclasses.replace(case, shape=dataclasses.replace(shape, extras=gates)), cases.PLAIN
    limit = cases.Extras(limit=1.0, alpha=GPT_OSS_ALPHA if scope is cases.Scope.EXPERTS else 1.0)
    known = {"bias": cases.Extras(bias=True), "limit": limit, "packed": cases.Extras(packed=True)}
    return case, known.get(kind, cases.PLAIN)


def takes(implementation: Implementation, case: cases.Case, extras: cases.Extras) -> bool:
    """Whether an implementation can be asked for a case with these extras."""
    return not implementation.refuses(case) and set(extras.offers) <= implementation.offers


def run_alarms(
    implementations: Sequence[Implementation], device: torch.device, seed: int, count: int,
    tell: Tell,
) -> Iterator[Trial]:  # fmt: skip
    """Verify every available implementation at `count` random cases; a few of these are timed as well."""
    source, this = random.Random(seed), describe(device)
    here = [entry for entry in implementations if not cannot_run(entry, device)]
    used: dict[tuple[str, ...], tuple[TensorCheck, ...]] = {}
    with court_of(_settings(device, Task.TIME, rule=RULE_OF_ALARMS), this, TIMEOUT_OF_ALARMS_S) as court:
        for mode in (cases.Mode.FORWARD, cases.Mode.STEP) if count else ():
            shape = LARGE[device.type]
            tell(f"a large {mode}", 0)
            more = HONEST_ON_A_GPU if device.type == "cuda" else ()
            large = cases.Case(shape, shape.tokens[0], cases.Dtype.BFLOAT16, cases.Scope.GLU, mode)
            yield from timed_trials(court, large, [pytorch.eager, *HONEST, *more])
        for number in range(count):
            case, extras = draw_case(source, device.type)
            tell(f"case {number + 1} of {count}: {case.label}", number)
            drawn = Drawn.new()
            extras = _with_clear_limit(case, device, extras, drawn)
            asked = [entry for entry in here if takes(entry, case, extras)]
            place = Court(_settings(device, Task.VERIFY), this, in_process=True)
            place.judge.begin_case(case, drawn.weights, extras)
            admitting = Admitting(place, case, drawn, thorough=True, extras=extras, used=used)
            with first_candidates():
                for entry in asked:
                    yield Trial(entry.name, case, extras, _alarm(admitting, place, entry))
            place.forget()
            if number % TIMED == 0 and extras == cases.PLAIN:
                yield from timed_trials(court, case, _few(asked, place.settings.baseline_of(case), source))


def _settings(device: torch.device, task: Task, **more: Any) -> Settings:
    return Settings(task, device, "selftest", "selftest", energy=False, **more)


def timed_trials(court: Court, case: cases.Case, implementations: Sequence[Implementation]) -> Iterator[Trial]:
    """Each implementation that has a time, or should have one, and one that is right and slow.

    They are timed in earnest, for a false alarm of the checks that are made only then.
    """
    contenders = [*implementations, *([] if slow.refuses(case) else [slow])]
    for record in court.run(task_of(court.settings), case, contenders):
        if record.status is not Status.SKIPPED:
            alarm = "" if record.status in {Status.OK, Status.UNSETTLED} else f"timed: {record.reason}"
            yield Trial(record.implementation, case, cases.PLAIN, alarm)


def _few(asked: Sequence[Implementation], baseline: str, source: random.Random) -> list[Implementation]:
    others = [entry for entry in asked if entry.name != baseline]
    drawn = source.sample(others, min(TIMED_TOGETHER, len(others)))
    return [entry for entry in asked if entry.name == baseline or entry in drawn]


def _with_clear_limit(case: cases.Case, device: torch.device, extras: cases.Extras, drawn: Drawn) -> cases.Extras:
    """Choose a limit that is near no value: at the bound the gradient jumps, and rounding decides."""
    if extras.limit is None:
        return extras
    plain = make_problem(case, device, seed=drawn.weights)
    limit = clear_limit(plain, [inputs_of(plain, draw) for draw in drawn.draws])
    return dataclasses.replace(extras, limit=limit) if limit is not None else cases.PLAIN


def _alarm(admitting: Admitting, place: Court, implementation: Implementation) -> str:
    try:
        return verdict(admitting.admit(place.contender(implementation)).checks).reason
    except Exception as error:
        return f"raises {one_line(error)}"


# The command


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


def run_selftest(
    implementations: Sequence[Implementation], device: torch.device, seed: int, false_alarms: int, zoo: bool,
    console: Console,
) -> SelftestResult:  # fmt: skip
    """Run the wrong implementations, then the right ones at random cases, and print what was found."""
    result, screen = SelftestResult(), Screen(console)
    ending = Ending(screen, {})
    catches, ended = list[Catch](), [0.0]

    def tell(doing: str, completed: float) -> None:
        ended[0] = completed
        bar.tell(doing, completed)

    with warnings.catch_warnings():
        ignore_warnings_of_values()
        if zoo:
            specimens = list(SPECIMENS.values())
            with ending, Bar(console, len(specimens)) as bar:
                told = lambda doing, share: bar.tell(doing, len(catches) + share)  # noqa: E731
                for catch in run_specimens(device, describe(device), told, specimens):
                    catches.append(catch)
            _show_catches(sorted(catches, key=lambda catch: specimens.index(catch.specimen)), screen, result)
        if false_alarms and not ending.interrupted:
            with ending, Bar(console, false_alarms) as bar:
                for trial in run_alarms(implementations, device, seed, false_alarms, tell):
                    where = {"case": trial.case.label, "seed": trial.case.seed, "extras": str(trial.extras)}
                    result.cases.append({"implementation": trial.implementation, **where, "alarm": trial.alarm})
                    if trial.alarm:
                        result.passed = False
                        at = f"{trial.case.label}, seed {trial.case.seed}, {trial.extras}"
                        screen.say(f"{trial.implementation} at {at}: {trial.alarm}", style="bold red")
            tried = f"{ended[0]:.0f} of {false_alarms}" if ending.interrupted else f"{false_alarms}"
            verified = Counter(row["implementation"] for row in result.cases)
            alarms = sum(bool(row["alarm"]) for row in result.cases)
            named = ", ".join(f"{name} {times}" for name, times in verified.items())
            what = f"{alarms} false alarms in {verified.total()} verifications of {len(verified)} implementations"
            screen.say(f"{what} at {tried} random cases (seed {seed}): {named}")
    if ending.interrupted:
        result.interrupted = True
        screen.say("Interrupted: above is what was found by then.", style="yellow")
    return result


def _show_catches(catches: Sequence[Catch], screen: Screen, result: SelftestResult) -> None:
    result.specimens = [
        {
            "name": catch.specimen.name, "ran": catch.ran, "caught": catch.caught, "checks": catch.checks,
            "expected": sorted(catch.specimen.caught_by), "reason": catch.reason,
        }
        for catch in catches
    ]  # fmt: skip
    columns = ("wrong implementation", "caught by")
    table = Grid(columns, (), text=columns, wrap=("caught by",)).terminal()
    for catch in catches:
        named = [check for check in catch.checks if check in catch.specimen.caught_by]
        others = [check for check in catch.checks if check not in named]
        told = Text(", ".join(named), "green") if named else Text("GOT THROUGH", "bold red")
        told = told.append(f" (also {', '.join(others)})" if others else "", "dim")
        told = told if catch.ran else Text(f"not run here: {catch.reason}", "dim")
        table.add_row(Text(catch.specimen.name, "bold"), told)
    screen.console.print(table)
    for check in (check for check in CHECKS if any(check in catch.checks for catch in catches)):
        screen.say(f"{check}: {CHECKS[check]}", style="dim")
    ran = [catch for catch in catches if catch.ran]
    through = [catch for catch in ran if not catch.caught]
    screen.say(f"{len(ran) - len(through)} of {len(ran)} wrong implementations that ran here were caught.")
    for reason, count in Counter(catch.reason for catch in catches if not catch.ran).items():
        screen.say(f"{count} of {len(catches)} not run here: {reason}.", style="yellow")
    for catch in through:
        by = f"caught by {', '.join(catch.checks)} only" if catch.checks else "not caught"
        expected = " or ".join(catch.specimen.caught_by)
        screen.say(f"{catch.specimen.name}: {by}, expected {expected}; {catch.reason}", style="bold red")
    result.passed &= not through
