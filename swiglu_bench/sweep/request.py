"""From option strings to what a command works on: device, cases, implementations; bad input is found first."""

from __future__ import annotations

import fnmatch
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from swiglu_bench.spec.cases import Case, Mode, Scope, expand, parse_dtypes, parse_tokens
from swiglu_bench.spec.errors import BadInput, did_you_mean

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch
    from rich.console import Console

    from swiglu_bench.processes.pool.team import Team
    from swiglu_bench.spec.implementation import Implementation


def find_device(text: str | None, interpret: bool) -> torch.device:
    """The device to use; where Triton's interpreter will be needed, it is switched on before Triton is imported."""
    from swiglu_bench.machine import machine

    device = machine.find_device(text)
    if interpret and device.type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    return device


@contextmanager
def team_of(options: dict[str, Any], interpret: bool, console: Console) -> Iterator[Team | None]:
    """The places that `--gpus` or `--ray` names, until the command ends; None for one device."""
    gpus, address = options["gpus"], options["ray"]
    if gpus is None and address is None:
        yield None
        return
    option = "--gpus" if address is None else "--ray"
    together = "were given together; give one of them"
    for given, reason in (
        (gpus is not None and address is not None, f"--gpus and --ray {together}"),
        (options["in_process"], f"{option} needs child processes; leave --in-process out"),
        (gpus is not None and options["device"] is not None, f"--gpus and --device {together}"),
        (address is not None and options["dry_run"], "--dry-run looks at this host only, and --ray at others"),
    ):
        if given:
            raise BadInput(f"{reason}.")
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    team: Team
    if address is None:
        from swiglu_bench.processes.pool.local import LocalTeam
        from swiglu_bench.processes.pool.place import gpus as places

        team = LocalTeam(places(gpus), options["timeout"], say)
    else:
        from swiglu_bench.processes.pool.ray_team import RayTeam

        environment = {"TRITON_INTERPRET": "1"} if interpret else {}
        team = RayTeam(address, options["device"], options["timeout"], say, environment)
    with closing(team):
        yield team


VERIFY_TOKENS = {"cpu": (33,), "cuda": (1, 127, 1024)}
"""Token counts of `verify` unless told otherwise: an odd number, and on a GPU one token and whole tiles too."""


def cases_of(command: str, device: torch.device, mode: Mode, options: dict[str, Any]) -> list[Case]:
    """The cases that a command visits, with what it takes where an option was not given."""
    from swiglu_bench.spec.shapes import load_shapes

    on_gpu, verifying = device.type == "cuda", command == "verify"
    default_shapes = "smoke,odd" + (",llama7b" if on_gpu else "") if verifying else "llama7b" if on_gpu else "smoke"
    default_dtype = "fp32,fp16,bf16" if verifying else "bf16" if on_gpu else "fp32"
    default_scopes = "activation,glu,mlp" if verifying else "glu"
    default_tokens = VERIFY_TOKENS[device.type] if verifying else None
    return expand(
        load_shapes(options["shapes"] if options["shapes"] is not None else default_shapes),
        scopes=scopes_of(options["scope"] if options["scope"] is not None else default_scopes),
        modes=[mode],
        dtypes=parse_dtypes(options["dtype"] if options["dtype"] is not None else default_dtype),
        tokens=parse_tokens(options["tokens"]) if options["tokens"] is not None else default_tokens,
        seed=options["seed"],
    )


def scopes_of(text: str) -> list[Scope]:
    """Scopes from 'glu,mlp'. Raises BadInput for anything else."""
    return [Scope(choice("--scope", part.strip(), [scope.value for scope in Scope])) for part in text.split(",")]


T = TypeVar("T", bound=str)


def choice(option: str, value: T, known: Sequence[str]) -> T:
    """The value, one of those known; raises BadInput for another."""
    if value not in known:
        raise BadInput(f"{option}: {value!r} is not one of {', '.join(known)}; {did_you_mean(value, known)}")
    return value


Load = Callable[[str], "Implementation"]


def loader(timeout_s: float | None) -> Load:
    """What brings implementations that are not the suite's own, by their address: without their code, unless None."""
    if timeout_s is None:
        from swiglu_bench.spec.registry import load

        return load

    def declare(address: str) -> Implementation:
        from swiglu_bench.processes import parent  # takes a while; most commands name no such implementation

        return parent.declare(address, timeout_s)

    return declare


def catalogue(load: Load) -> list[Implementation]:
    """The suite\'s own implementations, and those that packages publish."""
    from swiglu_bench.implementations import CATALOGUE
    from swiglu_bench.spec.registry import entry_point_addresses

    return [*CATALOGUE, *map(load, entry_point_addresses())]


def implementations_of(options: dict[str, Any]) -> list[Implementation]:
    """The chosen implementations; a baseline that was not chosen is measured along with them."""
    from swiglu_bench.spec.registry import select

    wanted, unwanted = split(options["impl"]), split(options["skip_impl"])
    load = loader(None if options["in_process"] else options["timeout"])
    known = catalogue(load)
    chosen = select(known, wanted, unwanted, load)
    baseline = options.get("baseline")
    if baseline is None or baseline in {implementation.name for implementation in chosen}:
        return chosen
    names = [implementation.name for implementation in known]
    if baseline not in names:
        raise BadInput(f"--baseline: no implementation is called {baseline!r}; {did_you_mean(baseline, names)}")
    if any(fnmatch.fnmatch(baseline, pattern) for pattern in unwanted):
        return chosen
    return select(known, [baseline]) + chosen


def split(values: Sequence[str] | None) -> list[str]:
    """The parts of options that may be repeated and hold commas."""
    return [part for value in values or [] for part in re.split(r"\s*,\s*", value.strip()) if part]


def command_line() -> str:
    """How this program was called."""
    return shlex.join(["swiglu-bench", *sys.argv[1:]])


def held(device: torch.device, wait: bool, console: Console) -> AbstractContextManager[None]:
    """A GPU for this command alone."""
    from swiglu_bench.machine import locks

    return locks.device(
        device, command_line(), wait, partial(console.print, markup=False, highlight=False, soft_wrap=True)
    )
