"""From options to what a command works on: device, cases, implementations, GPUs; bad input is found first."""

from __future__ import annotations

import dataclasses
import fnmatch
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import typer

from swiglu_bench.cases.cases import (
    DENSE,
    FOR_EXPERTS,
    Case,
    Dtype,
    Mode,
    Precision,
    RoutingKind,
    Scope,
    Shape,
    expand,
    parse_dtypes,
    parse_precisions,
    parse_tokens,
)
from swiglu_bench.cases.errors import BadInput, did_you_mean, matching, one_of
from swiglu_bench.options import AuditOptions, SweepOptions, TimingOptions, VerifyOptions, WandbOptions
from swiglu_bench.rows import run_folder

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from swiglu_bench.cases.files import Workload
    from swiglu_bench.cases.implementation import Implementation
    from swiglu_bench.worker.places import Places
    from swiglu_bench.worker.policy import Settings

INTERRUPTED = 130
"""The exit status after Ctrl-C."""
REGIMES = {"steady": 0.0, "rested": 0.05}
"""Seconds before each sample; `rested` is some twenty times a large kernel, so that power and clocks recover."""
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
"""The tools of NVIDIA's compute-sanitizer."""
VERIFY_TOKENS = {"cpu": (33,), "cuda": (1, 127, 1024)}
"""Token counts of `verify` unless told otherwise: an odd number, and on a GPU one token and whole tiles too."""

QUANTISED = (Scope.GLU, Scope.MLP, Scope.EXPERTS)
"""The scopes that --precision is for."""

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
    places: Places
    """Where the cases are run."""
    workload: Workload = field(default_factory=dict)
    """How often each token count was seen, where --workload says it."""


@contextmanager
def requested(
    command: str, options: SweepOptions, console: Console, line: str, checked: Callable[[], object] = lambda: None
) -> Iterator[Request]:
    """The request of the command `line`, until the command ends. Raises BadInput.

    `checked` is called once nothing is wrong that can be known without torch, whose import takes seconds.
    """
    timing, workload = _check_request(command, options)
    checked()
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    with closing(_places_of(options, command == "verify", say)) as places:
        device = places.device
        cases = _cases_of(command, options, device.type, list(workload) or None)
        settings = _settings_of(command, options, device, line)
        beside = {settings.baseline_of(case) for case in cases} if timing else ()
        chosen = implementations_of(options, {case.scope for case in cases}, beside)
        if not options.impl:
            precisions = {case.precision for case in cases} | ({Precision.UNQUANTISED} if timing else set())
            chosen = [known for known in chosen if precisions & known.precisions]
        for path in dict.fromkeys(known.file for known in chosen if ".py:" in known.address):
            say(f"Note: --impl runs the code of {path}.")
        with _locked(timing, device):
            yield Request(command, options, settings, cases, chosen, places, workload)


def _check_request(command: str, options: SweepOptions) -> tuple[TimingOptions | None, Workload]:
    """The options of a command that times, and its workload. Raises BadInput; imports torch only where NVML is lost."""
    from swiglu_bench.machine import system

    check_names(vars(options))
    if options.detail and command == "memory":
        raise BadInput("--detail shows the errors of tensors, which memory does not check; give it to verify.")
    check_wandb(options)
    timing = options if isinstance(options, TimingOptions) else None
    if timing:
        one_of("--l2", timing.l2, "cold", "hot", "both")
        one_of("--regime", timing.regime, *REGIMES)
    if isinstance(options, VerifyOptions) and options.sanitize is not None:
        one_of("--sanitize", options.sanitize, *SANITIZERS)
    if options.save_baseline is not None:
        run_folder.baseline_place(options.save_baseline, command)
        if not options.csv:
            raise BadInput("--save-baseline keeps the files of a run, and none are written; give --out, not --no-csv.")
    workload: Workload = {}
    if timing and timing.workload is not None:
        from swiglu_bench.cases.files import load_workload

        if timing.tokens is not None:
            raise BadInput("--workload and --tokens were given together; give one of them.")
        workload = load_workload(timing.workload)
    for name, given in (("--ray", options.ray), ("--device", options.device)):
        if options.gpus is not None and given is not None:
            raise BadInput(f"--gpus and {name} were given together; give one of them.")
    if options.in_process and (options.gpus or options.ray) is not None:
        given = "--ray" if options.gpus is None else "--gpus"
        raise BadInput(f"{given} needs child processes; leave --in-process out.")
    if options.gpus is not None:
        known = system.visible_gpus()
        system.gpu_indices(options.gpus, None if known is None else len(known))
    if options.ray is not None:
        system.check_address(options.ray)
    else:
        kind = device_type("cuda" if options.gpus else options.device)
        _cases_of(command, options, kind, list(workload) or None)
    return timing, workload


@contextmanager
def _locked(timing: TimingOptions | None, device: torch.device) -> Iterator[None]:
    """The GPU's clock held at what --lock-clocks says."""
    from swiglu_bench.machine.system import Gpu, NoAnswer

    with ExitStack() as held:
        if timing and timing.lock_clocks is not None:
            said = f"--lock-clocks {timing.lock_clocks}"
            if device.type != "cuda" or timing.gpus or timing.ray:
                raise BadInput(f"{said} holds the clock of one GPU; leave --gpus and --ray out, or --lock-clocks.")
            try:
                held.enter_context(Gpu(device).locked(timing.lock_clocks))
            except NoAnswer as error:
                raise BadInput(f"{said}: the driver refuses it ({error}); run as root, or leave it out.") from None
        yield


def check_names(values: Mapping[str, Any]) -> None:
    """Tell a typo in the options of a command before torch is imported, which takes seconds. Raises BadInput."""
    from swiglu_bench.cases.registry import NOBODY, check_file, entry_point_addresses, is_file
    from swiglu_bench.cases.shapes import environments_of, load_shapes, split_over
    from swiglu_bench.contenders import CATALOGUE, OF_RANKS
    from swiglu_bench.machine.system import gpu_index

    checks: dict[str, Callable[[str], object]] = {
        "shapes": lambda names: split_over(load_shapes(names, values.get("seed", 0)), values.get("tp", 1)),
        "tokens": parse_tokens, "dtype": parse_dtypes, "scope": scopes_of, "precision": parse_precisions,
        "routing": routings_of,
        "device": device_type if values.get("ray") is None else lambda name: gpu_index(name, None),
    }  # fmt: skip
    for name, check in checks.items():
        if isinstance(given := values.get(name), str):
            check(given)
    names = [*(known.name for known in CATALOGUE), *OF_RANKS]
    wanted = split(values.get("impl"), "--impl")
    files = [spec for spec in wanted if is_file(spec)]
    for spec in files:
        check_file(spec)
    packages, named = values.get("packages") or (), values.get("pythons") or ()
    if packages or named:
        from swiglu_bench.worker.environments import pythons, tagged

        pythons(named)
        for text in packages:
            tagged(text)
    if not entry_point_addresses():
        matching(names, [spec for spec in wanted if spec not in files], NOBODY.format("--impl"))
        if not files:
            matching(names, split(values.get("skip_impl"), "--skip-impl"), NOBODY.format("--skip-impl"))
            shapes = values.get("shapes")
            swept = environments_of(shapes) if isinstance(shapes, str) else ()
            if not any((packages, named, *swept)):
                check_baseline(values.get("baseline"), names)


def check_baseline(name: str | None, names: Sequence[str]) -> None:
    """Raise BadInput for a --baseline that is none of the `names`."""
    if name is not None and name not in names:
        raise BadInput(f"--baseline: no implementation is called {name!r}; {did_you_mean(name, names)}")


def _settings_of(command: str, options: SweepOptions, device: torch.device, line: str) -> Settings:
    from swiglu_bench.machine import machine
    from swiglu_bench.measure.rounds import Rule
    from swiglu_bench.worker.policy import Settings, Task

    timed = isinstance(options, TimingOptions)
    timing = options if isinstance(options, TimingOptions) else TimingOptions(baseline="", budget=0.0, energy=False)
    rule = Rule(warmup_rounds=timing.warmup, budget_s=timing.budget, rest_s=REGIMES[timing.regime])
    if timing.rounds is not None:
        rule = dataclasses.replace(rule, min_rounds=timing.rounds, max_rounds=timing.rounds, min_s=0.0)
    if sanitizer := isinstance(options, VerifyOptions) and options.sanitize:
        from swiglu_bench.worker import one_call

        for name in ("gpus", "ray", "in_process", "detail"):
            if getattr(options, name):
                raise BadInput(f"--sanitize does not use --{name.replace('_', '-')}; leave one of them out.")
        one_call.check(sanitizer, device)
    return Settings(
        Task.TIME if timed else Task(command), device, line, machine.run_id(machine.now()), timing.baseline, rule,
        cold_l2=timing.l2 != "hot", hot_beside=timing.l2 == "both", layers=timing.layers, energy=timing.energy,
        detail=options.detail, new_tokens=timing.new_tokens,
        interpreter=command == "verify" and device.type == "cpu", trace=timing.trace, ncu=timing.ncu,
        sanitizer=sanitizer or "",
    )  # fmt: skip


def find_device(name: str | None, interpret: bool) -> torch.device:
    """The device to use; where Triton's interpreter will be needed, it is switched on before Triton is imported."""
    from swiglu_bench.machine import machine

    device = machine.find_device(name)
    if interpret and device.type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    return device


def device_type(name: str | None) -> str:
    """`cpu` or `cuda`: what --device comes to, without torch where NVML knows the GPUs. Raises BadInput."""
    from swiglu_bench.machine.machine import find_device
    from swiglu_bench.machine.system import gpu_index, visible_gpus

    gpus = visible_gpus() if name != "cpu" else []
    if gpus is None:
        return find_device(name).type
    return "cpu" if gpu_index(name, len(gpus)) is None else "cuda"


def _places_of(options: SweepOptions, interpret: bool, say: Say) -> Places:
    if options.gpus is not None:
        from swiglu_bench.worker import places as where

        return where.SeveralGpus(where.gpus(options.gpus), say)
    if options.ray is not None:
        from swiglu_bench.worker.ray_cluster import RayCluster

        return RayCluster(options.ray, options.device, say, {"TRITON_INTERPRET": "1"} if interpret else {})
    device = find_device(options.device, interpret)
    from swiglu_bench.worker.places import OneDevice  # which imports Triton

    return OneDevice(device, say, options.in_process)


def _cases_of(command: str, options: SweepOptions, device_type: str, tokens: Sequence[int] | None) -> list[Case]:
    from swiglu_bench.cases.shapes import load_shapes, split_over, with_tokens

    on_gpu = device_type == "cuda"
    names, scopes, dtypes = ("llama7b", "glu,experts", "bf16") if on_gpu else ("smoke", "glu,experts", "fp32")
    if command == "verify":
        whole = on_gpu and not (isinstance(options, VerifyOptions) and options.sanitize)  # whose tools take minutes
        names, scopes, dtypes = "smoke,odd,smoke-experts" + ",llama7b" * whole, ",".join(Scope), "fp32,fp16,bf16"
    precisions = [Precision.UNQUANTISED]
    if options.precision is not None:
        precisions, dtypes = parse_precisions(options.precision), "bf16"
        _check_precision(options)
        scopes = ",".join(scope for scope in scopes.split(",") if scope in QUANTISED)
    if options.scope is not None and command != "verify":
        names += ",qwen3-30b-a3b" if on_gpu else ",smoke-experts"
    shapes = load_shapes(options.shapes if options.shapes is not None else names, options.seed)
    if command == "verify":
        shapes = with_tokens(shapes, VERIFY_TOKENS[device_type])
    if options.scope is not None:
        scopes = options.scope
        if options.shapes is None:  # of the command's own, those that the scopes are for
            shapes = [shape for shape in shapes if _fitting(scopes_of(scopes), shape)]
        _check_scopes(scopes_of(scopes), shapes)
    if options.routing is not None:
        shapes = routed(shapes, options.routing)
    cases = expand(
        split_over(shapes, options.tp),
        scopes=scopes_of(scopes),
        modes=[Mode(command) if isinstance(options, TimingOptions) else Mode.STEP],
        dtypes=parse_dtypes(options.dtype if options.dtype is not None else dtypes),
        tokens=parse_tokens(options.tokens) if options.tokens is not None else tokens,
        seed=options.seed,
        precisions=precisions,
        accumulate=options.accumulate if isinstance(options, TimingOptions) else 1,
    )
    unfit = [case for case in cases if case.shape.experts and case.precision not in FOR_EXPERTS]
    if unfit and (options.shapes is not None or options.scope is not None):
        fitting = ", ".join(precision.value or "bf16" for precision in FOR_EXPERTS)
        told = f"for the experts of {unfit[0].shape.name} give one of {fitting}"
        raise BadInput(f"--precision {unfit[0].precision} is for dense blocks; {told}.")
    if isinstance(options, TimingOptions):
        _check_timing(options, command, device_type)
    return [case for case in cases if case not in unfit]


def _check_precision(options: SweepOptions) -> None:
    if options.dtype is not None and set(parse_dtypes(options.dtype)) != {Dtype.BFLOAT16}:
        raise BadInput(f"--precision quantises bf16 operands, and --dtype is {options.dtype}; leave --dtype out.")
    if others := [scope for scope in split([options.scope or ""]) if scope not in QUANTISED]:
        told = ", ".join(QUANTISED)
        raise BadInput(f"--precision is for the scopes {told}, and --scope names {others[0]}; leave it out.")


def _fitting(scopes: Sequence[Scope], shape: Shape) -> list[Scope]:
    return [scope for scope in scopes if (scope is Scope.EXPERTS) == (shape.experts is not None)]


def _check_scopes(scopes: Sequence[Scope], shapes: Sequence[Shape]) -> None:
    for shape in shapes:
        if not _fitting(scopes, shape):
            kind = "is a mixture of experts, whose scope is experts" if shape.experts else "has no experts"
            instead = "leave --scope out" if shape.experts else f"give one of {', '.join(DENSE)}"
            raise BadInput(f"--scope {', '.join(scopes)}: {shape.name} {kind}; {instead}.")
    if lost := [scope for scope in scopes if not any(_fitting([scope], shape) for shape in shapes)]:
        raise BadInput(f"--scope {lost[0]}: none of the shapes has it; give one that has, or leave {lost[0]} out.")


def routed(shapes: Sequence[Shape], names: str) -> list[Shape]:
    """The shapes with experts once for each routing, and the others as they are; raises BadInput where none has any."""
    routings = dict.fromkeys(routings_of(names))
    if not any(shape.experts for shape in shapes):
        raise BadInput(f"--routing is for mixtures of experts, and {shapes[0].name} has no experts; leave it out.")
    return [routed for shape in shapes for routed in (map(shape.routed, routings) if shape.experts else [shape])]


def routings_of(names: str) -> list[RoutingKind]:
    """Routings from 'uniform,zipf'. Raises BadInput for anything else."""
    return [RoutingKind(one_of("--routing", part.strip(), *RoutingKind)) for part in names.split(",")]


def scopes_of(names: str) -> list[Scope]:
    """Scopes from 'glu,mlp'. Raises BadInput for anything else."""
    return [Scope(one_of("--scope", part.strip(), *Scope)) for part in names.split(",")]


def loader(timeout_s: float | None) -> Load:
    """What loads implementations of others by their address: in a child process without their code, or here if None."""
    if timeout_s is None:
        from swiglu_bench.cases.registry import load

        return load

    def declare(address: str) -> Implementation:  # whose import is long, and most commands name no such implementation
        from swiglu_bench.worker import court

        return court.declare(address, timeout_s)

    return declare


def catalogue(load: Load) -> list[Implementation]:
    """The suite's own implementations, and those that installed packages publish."""
    from swiglu_bench.cases.registry import entry_point_addresses
    from swiglu_bench.contenders import CATALOGUE

    return [*CATALOGUE, *map(load, entry_point_addresses())]


def implementations_of(
    options: SweepOptions | AuditOptions, scopes: Collection[Scope] = tuple(Scope), baselines: Collection[str] = ()
) -> list[Implementation]:
    """The chosen implementations, without --impl those for `scopes`; and the baselines that were not chosen."""
    from swiglu_bench.cases.registry import select

    wanted, unwanted = split(options.impl, "--impl"), split(options.skip_impl, "--skip-impl")
    load = loader(None if options.in_process else options.timeout)
    known = catalogue(load)
    comparing = not isinstance(options, VerifyOptions | AuditOptions)
    unasked = {
        each.name for each in known
        if not each.on_request and {*scopes} & (each.scopes - (each.variant if comparing else set()))
    }  # fmt: skip
    if isinstance(options, SweepOptions) and any(elsewhere := _environments(options)):
        chosen = _elsewhere(options, *elsewhere, partial(select, known, wanted, unwanted, unasked=unasked))
    else:
        chosen = select(known, wanted, unwanted, load, unasked)
    names = [implementation.name for implementation in known]
    for baseline in sorted(set(baselines) - {implementation.name for implementation in chosen}):
        check_baseline(baseline, names)
        if not any(fnmatch.fnmatch(baseline, pattern) for pattern in unwanted):
            chosen = select(known, [baseline]) + chosen
    return chosen


def _environments(options: SweepOptions) -> tuple[list[str], list[str]]:
    """What --with and --python say, and the sweeps that are asked for."""
    from swiglu_bench.cases.shapes import environments_of

    packages, pythons = environments_of(options.shapes) if options.shapes else ([], [])
    return [*(options.packages or ()), *packages], [*(options.pythons or ()), *pythons]


def _elsewhere(
    options: SweepOptions, packages: Sequence[str], named: Sequence[str], choose: Callable[..., list[Implementation]]
) -> list[Implementation]:
    """The chosen implementations, some under another interpreter, and those that have other packages."""
    from swiglu_bench.worker import court
    from swiglu_bench.worker.environments import pythons, under, with_packages

    if options.in_process or options.ray is not None:
        option = "--with" if packages else "--python"
        raise BadInput(f"{option} needs processes of this host; leave --in-process and --ray out.")
    asked, limit_s = pythons(named), options.timeout

    def load_file(spec: str) -> Implementation:
        python = asked.get(spec.rpartition(":")[2], "")
        return dataclasses.replace(court.declare(spec, limit_s, python), python=python)

    chosen = under(choose(load_file=load_file), asked, lambda known: court.declare(known, limit_s, known.python))
    return [*chosen, *with_packages(chosen, packages, options.find_links)]


def asked(impl: Sequence[str] | None, chosen: Iterable[Implementation]) -> frozenset[str]:
    """The chosen implementations that --impl names, not a baseline beside them; all where it was not given."""
    patterns = split(impl)
    return frozenset(
        known.name
        for known in chosen
        if not patterns
        or {known.address, known.address.rpartition(":")[0]} & {*patterns}
        or any(fnmatch.fnmatch(known.original or known.name, part) for part in patterns)
    )


def split(values: Sequence[str] | None, option: str = "") -> list[str]:
    """The parts of options that may be repeated and hold commas; raises BadInput for an `option` given without one."""
    parts = [part for value in values or [] for part in re.split(r"\s*,\s*", value.strip()) if part]
    if option and values and not parts:
        raise BadInput(f"{option} was given without a name; give one, or leave the option out.")
    return parts


def check_wandb(options: WandbOptions) -> None:
    """Raise BadInput for an option about a W&B run where none was asked for."""
    for option in dataclasses.fields(options):
        is_given = option.name.startswith("wandb_") and getattr(options, option.name) != option.default
        if is_given and not options.log_wandb:
            name = option.name.replace("_", "-")
            raise BadInput(f"--{name} was given without --log-wandb; add that, or leave --{name} out.")


def _check_timing(options: TimingOptions, command: str, device_type: str) -> None:
    if options.accumulate > 1 and (command != "step" or options.layers > 1 or "activation" in (options.scope or "")):
        raise BadInput(
            "--accumulate adds up gradients of weights over several calls, for the command step and the scopes "
            "glu, mlp and experts; leave it out, or --layers and other scopes."
        )
    if options.trace and not options.csv:
        raise BadInput("--trace writes files, and none are written; give --out, not --no-csv.")
    if (options.trace or options.ncu) and options.ray is not None:
        raise BadInput("--trace and --ncu look at this host only, and --ray at others; leave one of them out.")
    if options.ncu and options.gpus is not None:
        raise BadInput("--ncu looks at one GPU; give --device instead of --gpus.")
    if options.ncu and device_type != "cuda":
        raise BadInput("--ncu reads the counters of an NVIDIA GPU, and this runs on a CPU; leave it out.")
    if options.ncu and not shutil.which("ncu"):
        raise BadInput("--ncu: there is no ncu on the PATH; install NVIDIA Nsight Compute, or leave it out.")
    if options.layers > 1 and (device_type != "cuda" or command == "backward"):
        where = "this runs on a CPU" if device_type != "cuda" else "a backward alone is not recorded"
        raise BadInput(f"--layers records CUDA graphs, and {where}; leave it out.")


say_on_stderr = partial(typer.echo, err=True)


def command_line() -> str:
    """How this program was called."""
    return shlex.join(["swiglu-bench", *sys.argv[1:]])


def held(device: torch.device, wait: bool) -> AbstractContextManager[None]:
    """A GPU for this command alone; a message on stderr says when it has to be waited for."""
    from swiglu_bench.machine import locks

    return locks.device(device, command_line(), wait, say_on_stderr)
