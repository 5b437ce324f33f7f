"""What an implementation is, and how a command finds the ones it was asked for. No torch is imported here.

An implementation is data plus one function, `build(problem) -> Step`. Writing one:

    from swiglu_bench.registry import Step, implementation

    @implementation("mine", scopes=("glu",), description="my kernel", backend="triton")
    def mine(problem):
        from my_package import my_swiglu
        return Step(lambda x: my_swiglu(x, problem.weights["w_gate"], problem.weights["w_up"]))

Run it with `--impl path/to/file.py:mine`, or publish it from a package through the entry-point group
`swiglu_bench.implementations`.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from packaging.version import Version

from swiglu_bench.cases import ACTIVATIONS, BadInput, Case, Dtype, Scope, did_you_mean, tensors
from swiglu_bench.costs import Footprint

if TYPE_CHECKING:
    from torch import Tensor

    from swiglu_bench.problem import Problem

ENTRY_POINT_GROUP = "swiglu_bench.implementations"

WeightLayout = Literal["separate", "packed", "interleaved", "none"]
Backend = Literal["torch", "inductor", "triton", "cutlass"]
_MODULES = {"inductor": "torch._inductor.compile_fx", "triton": "triton"}
"""Of a backend, which take seconds to import."""
Trains = Literal["everything", "inputs", "nothing"]
Offer = Literal["bias", "limit", "packed"]


@dataclass
class Step:
    """An implementation made ready for one problem.

    `forward` takes the problem's activations (`x`, or `gate, up`) and returns the output; gradients come from autograd.
    An implementation with its own weight layout names its own leaf tensors in `parameters` and says in `to_canonical`
    how their gradients map to `w_gate`, `w_up` (and `w_down`); by default they are the problem's own weights.
    """

    forward: Callable[..., Tensor]
    parameters: Mapping[str, Tensor] | None = None
    to_canonical: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None


@dataclass(frozen=True)
class Implementation:
    """One contender: a name, what it can do, and how to build it."""

    name: str
    description: str
    scopes: frozenset[Scope]
    build: Callable[[Problem], Step] = field(repr=False)
    weight_layout: WeightLayout = "separate"
    backend: Backend = "torch"
    """What runs it: decides where it is available. `triton` needs a GPU, or Triton's interpreter for `verify`."""
    package: str = ""
    """The module that must be importable, where it needs more than torch."""
    imports: str = ""
    """What of the package its build imports: that is done before the first call is timed. Empty: the package."""
    trains: Trains = "everything"
    """Whose gradients it yields: inputs and weights, inputs only (frozen weights), or none (forward only)."""
    interpretable: str = "yes"
    """`yes`, or why Triton's CPU interpreter cannot run it."""
    gpus: tuple[int, ...] = ()
    """Major compute capabilities of the GPUs it is made for; empty: it runs wherever its backend does."""
    dtypes: frozenset[Dtype] = frozenset(Dtype)
    """The data types it takes."""
    multiple: int = 1
    """What hidden and intermediate sizes must be multiples of."""
    on_request: bool = False
    """Whether it takes part only where `--impl` names it: its build takes minutes for each case."""
    offers: frozenset[Offer] = frozenset()
    """Which of `problem.extras` its build honours; it is never asked for another."""
    overwrites: frozenset[str] = frozenset()
    """Activations that its backward overwrites by contract, where the scope hands them to it; any other is a fault."""
    footprints: Mapping[Scope, Footprint] = field(default_factory=dict, hash=False)
    """The memory it should take at each scope by arithmetic; a scope left out has no prediction."""
    usage: str = ""
    """A line of Python that has it in a model; shown by `recommend`."""
    source: str = "swiglu_bench"
    """The module of its build function."""
    file: str = field(default="", compare=False)
    """The file of its build function."""
    address: str = field(default="", compare=False)
    """What `load` finds it by in another process: empty for the suite's own, which are found by name."""

    @property
    def modules(self) -> tuple[str, ...]:
        """What has to be imported for it, other than its file and torch itself."""
        return tuple(filter(None, (_MODULES.get(self.backend), self.imports or self.package)))

    def declared(self) -> Implementation:
        """All but the code: what can be sent to a process that must not run it."""
        return dataclasses.replace(self, build=_elsewhere)

    def gradients(self, scope: Scope) -> tuple[str, ...]:
        """Names of the tensors whose gradients it yields at a scope."""
        match self.trains:
            case "everything":
                return tensors(scope)
            case "inputs":
                return ACTIVATIONS[scope]
            case _:
                return ()

    def refuses(self, case: Case) -> str | None:
        """Why it does not take a case on any machine (one sentence), or None if it does."""
        if case.scope not in self.scopes:
            return f"It has no {case.scope} scope; it has {', '.join(sorted(self.scopes))}."
        if case.dtype not in self.dtypes:
            return f"It does not take {case.dtype}; it takes {', '.join(sorted(self.dtypes))}."
        if case.shape.hidden % self.multiple or case.shape.intermediate % self.multiple:
            return f"It takes hidden and intermediate sizes that are multiples of {self.multiple}."
        return None

    def unavailable(self, device_type: str, interpreter: bool = False, capability: str = "") -> str | None:
        """Why it cannot run on this machine and device (one sentence), or None if it can.

        `capability` is the GPU's compute capability, as "9.0"; "" where it is not known.
        """
        if self.gpus and (device_type == "cpu" or capability.split(".")[0] not in ("", *map(str, self.gpus))):
            made_for = " or ".join(f"{major}.x" for major in self.gpus)
            here = f"this GPU has {capability}" if capability else "there is none here"
            return f"It needs a GPU of compute capability {made_for}; {here}."
        if self.backend == "triton":
            if not _installed("triton"):
                return f"Triton is not installed (it has no package for {platform.system()})."
            if device_type == "cpu" and not interpreter:
                return "Triton kernels need a GPU; `swiglu-bench verify` checks them here through the interpreter."
            if device_type == "cpu" and self.interpretable != "yes":
                return self.interpretable
            if device_type == "cpu" and (broken := _interpreter_breaks()):
                return broken
        if self.package and not _installed(self.package):
            return f"The package {self.package} is not installed."
        if self.backend == "inductor":
            if device_type == "cpu" and not _cpp_compiler():
                return "torch.compile on a CPU needs a C++ compiler; none was found (set CXX, or install g++ or clang)."
            if device_type == "cuda" and not _installed("triton"):
                return "torch.compile on a GPU needs Triton, which is not installed."
        return None


def _elsewhere(problem: Problem) -> Step:
    raise AssertionError(f"This process only knows what was declared, and builds nothing: {problem.case.label}.")


def _interpreter_breaks() -> str | None:
    """Why Triton's interpreter cannot work with what is installed, in one sentence, or None."""
    triton, numpy = (Version(importlib.metadata.version(name)) for name in ("triton", "numpy"))
    if triton < Version("3.7") and numpy >= Version("2.4"):
        return (
            f"The interpreter of Triton {triton} needs a NumPy older than 2.4, and {numpy} is installed; install "
            "'numpy<2.4', or Triton 3.7 or newer."
        )
    return None


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # the parent of a dotted name is missing, or no proper module
        return False


def _cpp_compiler() -> str | None:
    candidates = [os.environ.get("CXX", ""), "g++", "clang++", "c++", "cl"]
    return next((path for name in candidates if name and (path := shutil.which(name))), None)


def implementation(
    name: str,
    *,
    scopes: Iterable[str | Scope],
    description: str,
    weight_layout: WeightLayout = "separate",
    backend: Backend = "torch",
    package: str = "",
    imports: str = "",
    trains: Trains = "everything",
    interpretable: str = "yes",
    gpus: Iterable[int] = (),
    dtypes: Iterable[str | Dtype] = Dtype,
    multiple: int = 1,
    on_request: bool = False,
    offers: Iterable[Offer] = (),
    overwrites: Iterable[str] = (),
    footprints: Mapping[Scope, Footprint] | None = None,
    usage: str = "",
) -> Callable[[Callable[[Problem], Step]], Implementation]:
    """Turn a build function into an Implementation; the arguments are the fields of that class."""

    def wrap(build: Callable[[Problem], Step]) -> Implementation:
        function = build
        while isinstance(function, functools.partial):
            function = function.func
        return Implementation(
            name=name,
            description=description,
            scopes=frozenset(Scope(scope) for scope in scopes),
            build=build,
            weight_layout=weight_layout,
            backend=backend,
            package=package,
            imports=imports,
            trains=trains,
            interpretable=interpretable,
            gpus=tuple(gpus),
            dtypes=frozenset(Dtype(dtype) for dtype in dtypes),
            multiple=multiple,
            on_request=on_request,
            offers=frozenset(offers),
            overwrites=frozenset(overwrites),
            footprints=footprints or {},
            usage=usage,
            source=getattr(function, "__module__", "swiglu_bench"),
            file=function.__code__.co_filename if isinstance(function, types.FunctionType) else "",
        )

    return wrap


def entry_point_addresses() -> list[str]:
    """Addresses of the implementations that installed packages publish under `swiglu_bench.implementations`."""
    return [f"{entry.name} = {entry.value}" for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)]


def load(address: str) -> Implementation:
    """The Implementation at `path/to/file.py:name` or of an entry point. This runs its file or imports its package."""
    entries = [
        entry
        for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
        if f"{entry.name} = {entry.value}" == address
    ]
    found = from_entry_point(entries[0]) if entries else from_file(address)
    return dataclasses.replace(found, address=address)


def from_entry_point(entry: importlib.metadata.EntryPoint) -> Implementation:
    """The Implementation that an installed package publishes."""
    try:
        thing = entry.load()
    except Exception as error:
        raise BadInput(
            f"The entry point {entry.name} = {entry.value} failed to import: {_one_line(error)}; "
            "repair or uninstall its package."
        ) from error
    if not isinstance(thing, Implementation):
        raise BadInput(
            f"The entry point {entry.name} = {entry.value} is a {type(thing).__name__}, not an Implementation; "
            "decorate its build function with swiglu_bench.registry.implementation."
        )
    return thing


def check_file(spec: str) -> None:
    """Raise BadInput unless `path/to/file.py:name` names a file."""
    path = spec.rpartition(":")[0]
    if not os.path.isfile(path):
        raise BadInput(f"--impl {spec}: there is no file {path!r}; give path/to/file.py:name.")


def from_file(spec: str) -> Implementation:
    """The Implementation that `path/to/file.py:name` names. This runs the file's code."""
    check_file(spec)
    path_text, _, name = spec.rpartition(":")
    path = Path(path_text)
    module_spec = importlib.util.spec_from_file_location(f"swiglu_bench_user_{path.stem}", path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise BadInput(f"--impl {spec}: {path} failed to import: {_one_line(error)}.") from error
    offered = {thing.name: thing for thing in vars(module).values() if isinstance(thing, Implementation)}
    chosen = offered.get(name) or getattr(module, name, None)
    if not isinstance(chosen, Implementation):
        names = ", ".join(offered) or "none (decorate a build function with swiglu_bench.registry.implementation)"
        raise BadInput(f"--impl {spec}: {path} has no implementation {name!r}; it offers: {names}.")
    return chosen


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(".: ")


def select(
    catalogue: Sequence[Implementation],
    wanted: Sequence[str] = (),
    unwanted: Sequence[str] = (),
    load_file: Callable[[str], Implementation] = load,
) -> list[Implementation]:
    """The implementations that names and globs choose, in the catalogue's order, files after them.

    `wanted` empty means all but those `on_request`; `load_file` gets one from `path/to/file.py:name`. Raises BadInput
    for a pattern that matches nothing, offering near matches.
    """
    names = [candidate.name for candidate in catalogue]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        sources = " and ".join(candidate.source for candidate in catalogue if candidate.name == twice)
        raise BadInput(f"Two implementations are called {twice!r}, from {sources}; rename or uninstall one of them.")

    def matches(patterns: Sequence[str], option: str) -> list[str]:
        chosen: list[str] = []
        for pattern in patterns:
            hits = fnmatch.filter(names, pattern)
            if not hits:
                raise BadInput(f"{option}: no implementation is called {pattern!r}; {did_you_mean(pattern, names)}")
            chosen += hits
        return chosen

    files = [spec for spec in wanted if ".py:" in spec]
    patterns = [spec for spec in wanted if spec not in files]
    usual = {candidate.name for candidate in catalogue if not candidate.on_request}
    keep = set(matches(patterns, "--impl")) if wanted else usual
    drop = set(matches(unwanted, "--skip-impl"))
    chosen = [candidate for candidate in catalogue if candidate.name in keep - drop]
    for spec in files:
        check_file(spec)
        extra = load_file(spec)
        if extra.name in names:
            raise BadInput(f"--impl: the name {extra.name!r} is taken by another implementation; choose another.")
        names.append(extra.name)
        chosen.append(extra)
    if not chosen:
        raise BadInput("--skip-impl left no implementation to run; skip fewer.")
    return chosen
