"""From options to what a command works on: device, cases, implementations, GPUs; bad input is found first."""

from __future__ import annotations

import dataclasses
import fnmatch
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import typer

from swiglu_bench.rows import text
from swiglu_bench.spec.cases import Case, Dtype, Mode, Scope, expand, parse_dtypes, parse_tokens
from swiglu_bench.spec.errors import BadInput, did_you_mean
from swiglu_bench.sweep.options import AuditOptions, SweepOptions, TimingOptions, WandbOptions

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from swiglu_bench.machine.machine import Machine
    from swiglu_bench.processes.pool.team import Team
    from swiglu_bench.session.settings import Settings
    from swiglu_bench.spec.implementation import Implementation

INTERRUPTED = 130
"""The exit status after Ctrl-C."""
REGIMES = {"steady": 0.0, "rested": 0.05}
"""Seconds before each sample; `rested` is some twenty times a large kernel, so that power and clocks recover."""
VERIFY_TOKENS = {"cpu": (33,), "cuda": (1, 127, 1024)}
"""Token counts of `verify` unless told otherwise: an odd number, and on a GPU one token and whole tiles too."""

REASONABLE_S = 1800.0

Load = Callable[[str], "Implementation"]
Say = Callable[[str], object]


@dataclass(frozen=True)
class Request:
    """What a measuring command was asked for, checked and complete."""

    command: str
    options: SweepOptions
    settings: Settings
    cases: Sequence[Case]
    implementations: Sequence[Implementation]
    team: Team | None = None
    """The places that share the cases; None: one device."""

    @property
    def asked(self) -> frozenset[str]:
        """The implementations that --impl names: a baseline that is measured along with them is none."""
        return asked(self.options.impl, self.implementations)


@contextmanager
def requested(command: str, options: SweepOptions, console: Console, line: str) -> Iterator[Request]:
    """The request of the command `line`, until the command ends. Raises BadInput."""
    if options.detail and command == "memory":
        raise BadInput("--detail shows the errors of tensors, which memory does not check; give it to verify.")
    check_wandb(options)
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    timing = options if isinstance(options, TimingOptions) else None
    with _team_of(options, command == "verify", say) as team:
        device = team.device if team else find_device(options.device, interpret=command == "verify")
        cases = _cases_of(command, options, device.type)
        if timing:
            text.check("--l2", timing.l2, "cold", "hot")
            text.check("--regime", timing.regime, *REGIMES)
        chosen = implementations_of(options, timing.baseline if timing else None)
        for path in dict.fromkeys(one.file for one in chosen if ".py:" in one.address):
            say(f"Note: --impl runs the code of {path}.")
        yield Request(command, options, _settings_of(command, options, device, line), cases, chosen, team)


def _settings_of(command: str, options: SweepOptions, device: torch.device, line: str) -> Settings:
    from swiglu_bench.machine import machine
    from swiglu_bench.measure.rounds import Rule
    from swiglu_bench.session.settings import Settings, Task

    timing = options if isinstance(options, TimingOptions) else None
    return Settings(
        task=Task.TIME if timing else Task(command),
        device=device,
        command=line,
        run_id=machine.run_id(machine.now()),
        baseline=timing.baseline if timing else "",
        rule=Rule(budget_s=timing.budget, rest_s=REGIMES[timing.regime]) if timing else Rule(budget_s=0.0),
        cold_l2=not timing or timing.l2 == "cold",
        energy=timing is not None and timing.energy,
        detail=options.detail,
        interpreter=command == "verify" and device.type == "cpu",
    )


def find_device(name: str | None, interpret: bool) -> torch.device:
    """The device to use; where Triton's interpreter will be needed, it is switched on before Triton is imported."""
    from swiglu_bench.machine import machine

    device = machine.find_device(name)
    if interpret and device.type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    return device


@contextmanager
def _team_of(options: SweepOptions, interpret: bool, say: Say) -> Iterator[Team | None]:
    """The places that `--gpus` or `--ray` names, until the command ends; None for one device."""
    gpus, address = options.gpus, options.ray
    if gpus is None and address is None:
        yield None
        return
    if gpus is not None and address is not None:
        raise BadInput("--gpus and --ray were given together; give one of them.")
    if options.in_process:
        raise BadInput(f"{'--ray' if gpus is None else '--gpus'} needs child processes; leave --in-process out.")
    team: Team
    if gpus is not None:
        if options.device is not None:
            raise BadInput("--gpus and --device were given together; give one of them.")
        from swiglu_bench.processes.pool import place
        from swiglu_bench.processes.pool.local import LocalTeam

        team = LocalTeam(place.gpus(gpus), options.timeout, say)
    else:
        from swiglu_bench.processes.pool.ray_team import RayTeam

        environment = {"TRITON_INTERPRET": "1"} if interpret else {}
        team = RayTeam(str(address), options.device, options.timeout, say, environment)
    with closing(team):
        yield team


def _cases_of(command: str, options: SweepOptions, device_type: str) -> list[Case]:
    """The cases that a measuring command visits, with its defaults where an option was not given."""
    from swiglu_bench.spec.shapes import load_shapes

    on_gpu, tokens = device_type == "cuda", None
    shapes, scopes, dtypes = ("llama7b", "glu", "bf16") if on_gpu else ("smoke", "glu", "fp32")
    if command == "verify":
        shapes, scopes, dtypes = "smoke,odd" + ",llama7b" * on_gpu, "activation,glu,mlp", "fp32,fp16,bf16"
        tokens = VERIFY_TOKENS[device_type]
    return expand(
        load_shapes(options.shapes if options.shapes is not None else shapes),
        scopes=scopes_of(options.scope if options.scope is not None else scopes),
        modes=[Mode(command) if isinstance(options, TimingOptions) else Mode.STEP],
        dtypes=parse_dtypes(options.dtype if options.dtype is not None else dtypes),
        tokens=parse_tokens(options.tokens) if options.tokens is not None else tokens,
        seed=options.seed,
    )


def scopes_of(names: str) -> list[Scope]:
    """Scopes from 'glu,mlp'. Raises BadInput for anything else."""
    return [Scope(choice("--scope", part.strip(), list(Scope))) for part in names.split(",")]


def choice(option: str, value: str, known: Sequence[str]) -> str:
    """The value, which has to be one of those known. Raises BadInput for another."""
    text.check(option, value, *known)
    return value


def loader(timeout_s: float | None) -> Load:
    """What loads implementations of others by their address: in a child process without their code, or here if None."""
    if timeout_s is None:
        from swiglu_bench.spec.registry import load

        return load

    def declare(address: str) -> Implementation:
        from swiglu_bench.processes import crew  # a long import, and most commands name no such implementation

        return crew.declare(address, timeout_s)

    return declare


def catalogue(load: Load) -> list[Implementation]:
    """The suite's own implementations, and those that installed packages publish."""
    from swiglu_bench.implementations import CATALOGUE
    from swiglu_bench.spec.registry import entry_point_addresses

    return [*CATALOGUE, *map(load, entry_point_addresses())]


def implementations_of(options: SweepOptions | AuditOptions, baseline: str | None = None) -> list[Implementation]:
    """The chosen implementations, and the baseline if it was not chosen."""
    from swiglu_bench.spec.registry import select

    wanted, unwanted = split(options.impl, "--impl"), split(options.skip_impl, "--skip-impl")
    load = loader(None if options.in_process else options.timeout)
    known = catalogue(load)
    chosen = select(known, wanted, unwanted, load)
    if baseline is None or baseline in {one.name for one in chosen}:
        return chosen
    names = [one.name for one in known]
    if baseline not in names:
        raise BadInput(f"--baseline: no implementation is called {baseline!r}; {did_you_mean(baseline, names)}")
    if any(fnmatch.fnmatch(baseline, pattern) for pattern in unwanted):
        return chosen
    return select(known, [baseline]) + chosen


def asked(impl: Sequence[str] | None, chosen: Iterable[Implementation]) -> frozenset[str]:
    """Of the chosen implementations those that --impl names; all where it was not given."""
    patterns = split(impl)
    return frozenset(
        one.name
        for one in chosen
        if not patterns or one.address in patterns or any(fnmatch.fnmatch(one.name, part) for part in patterns)
    )


def split(values: Sequence[str] | None, option: str = "") -> list[str]:
    """The parts of options that may be repeated and hold commas.

    Raises BadInput for an `option` that was given and has none: it would choose as if it had not been given.
    """
    parts = [part for value in values or [] for part in re.split(r"\s*,\s*", value.strip()) if part]
    if option and values and not parts:
        raise BadInput(f"{option} was given without a name; give one, or leave the option out.")
    return parts


def check_wandb(options: WandbOptions) -> None:
    """Raise BadInput for an option about a W&B run where none was asked for."""
    for field in dataclasses.fields(options):
        if field.name.startswith("wandb_") and getattr(options, field.name) != field.default and not options.log_wandb:
            name = field.name.replace("_", "-")
            raise BadInput(f"--{name} was given without --log-wandb; add that, or leave --{name} out.")


def check_ends(
    this: Machine, device: torch.device, work: Mapping[Dtype, float], option: str, fewer: str, doing: str = "train"
) -> None:
    """On a CPU raise BadInput for `work`, in operations, that takes it more than half an hour at its measured rates."""
    if device.type != "cpu":
        return
    import torch

    from swiglu_bench.machine.ceilings_cache import Limits
    from swiglu_bench.measure.clock import make_clock

    limits = Limits(this, device, make_clock(device))
    seconds = sum(
        flops / limits.product(getattr(torch, dtype.value)).value / 1e12 for dtype, flops in work.items() if flops
    )
    if seconds > REASONABLE_S:
        raise BadInput(
            f"{option}: this would {doing} for about {seconds / 3600:,.1f} hours on this CPU; give a smaller one or "
            f"fewer {fewer}, or --budget to do it nevertheless."
        )


def command_line() -> str:
    """How this program was called."""
    return shlex.join(["swiglu-bench", *sys.argv[1:]])


def held(device: torch.device, wait: bool) -> AbstractContextManager[None]:
    """A GPU for this command alone; a message on stderr says when it has to be waited for."""
    from swiglu_bench.machine import locks

    return locks.device(device, command_line(), wait, partial(typer.echo, err=True))
