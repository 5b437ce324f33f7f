"""What an implementation is. torch is imported for its types only.

An implementation is data plus one function, `build(problem) -> Step`. Writing one:

    from swiglu_bench import Step, implementation

    @implementation("mine", scopes=("glu",), description="my kernel", backend="triton")
    def mine(problem):
        from my_package import my_swiglu
        return Step(lambda x: my_swiglu(x, problem.weights["w_gate"], problem.weights["w_up"]))

Run it with `--impl path/to/file.py:mine`, or publish it from a package through the entry-point group
`swiglu_bench.implementations`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any, Literal

from packaging.version import Version

from swiglu_bench.cases.cases import Case, Dtype, Mode, Precision, Scope, differentiable, tensors
from swiglu_bench.cases.costs import Footprint
from swiglu_bench.cases.errors import BadInput

if TYPE_CHECKING:
    from torch import Tensor

    from swiglu_bench.cases.problem import Problem

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+@-]{0,63}")
"""Of an implementation: the suite calls further processes of one `name (alias)`."""
_LAYOUT = re.compile(r"separate|packed|interleaved(:[1-9]\d*)?")
Backend = Literal["torch", "inductor", "triton", "cutlass"]
_MODULES = {"inductor": "torch._inductor.compile_fx", "triton": "triton"}
"""The module behind a backend, where importing it takes seconds."""
_UNTOLD: dict[str, Any] = {"original": "", "layer": "", "python": "", "path": ()}
"""Fields that this process sets, whatever another says."""
BEFORE = "before the call"
"""When weights are quantised that a call finds in fp8."""
Trains = Literal["everything", "inputs", "nothing"]
Offer = Literal["bias", "limit", "packed", "other_ranks"]
HandOver = Callable[["dict[str, tuple[Tensor, Tensor]] | None"], None]


@dataclass
class Step:
    """An implementation made ready for one problem.

    `forward` takes the problem's activations (`x`; `gate, up`; or `x, top_k_index, top_k_weights`) and returns the
    output; gradients come from autograd.
    An implementation with its own weight layout names its own leaf tensors in `parameters`; by default they are the
    problem's own weights. A `w_gate_up` (and `bias_gate_up`) among them lies as the declared `weight_layout` says; for
    any other layout `to_canonical` maps parameters to `w_gate`, `w_up` (and `w_down`): it is read once, on tensors on
    the CPU, and may return views and rows in another order, transposed or not.
    """

    forward: Callable[..., Tensor]
    parameters: Mapping[str, Tensor] | None = None
    to_canonical: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None
    hand_over: HandOver | None = None
    """Of one that quantises: given a dictionary, every call from now on enters the codes and scales of its operands
    there, by the names and in the form of `cases.fp8`; given None, no longer. Without it, results alone are judged."""


@dataclass(frozen=True)
class Implementation:
    """One contender: a name, what it can do, and how to build it."""

    name: str
    description: str
    scopes: frozenset[Scope]
    build: Callable[[Problem], Step] = field(repr=False)
    weight_layout: str = "separate"
    """`separate`, `packed` (the gate's rows first, then up's), `interleaved` (by turns) or `interleaved:8` (by turns of
    8 rows, or of any other number)."""
    backend: Backend = "torch"
    """What executes it, which decides where it is available. `triton` needs a GPU; `verify` can use the interpreter."""
    package: str = ""
    """The module that must be importable, where it needs more than torch."""
    imports: str = ""
    """The module that its build imports; it is imported before the first call is timed. Empty: `package`."""
    trains: Trains = "everything"
    """Whose gradients it yields: inputs and weights, inputs only (frozen weights), or none (forward only)."""
    interpretable: str = "yes"
    """`yes`, or the reason why Triton's CPU interpreter cannot run it."""
    gpus: tuple[int, ...] = ()
    """Major compute capabilities of the GPUs that it is made for; empty: all that its backend supports."""
    dtypes: frozenset[Dtype] = frozenset(Dtype)
    """The data types that it takes."""
    tf32: bool = False
    """Whether its products take fp32 as TF32, which no judge of fp32 lets pass: it is not asked for fp32 then."""
    precisions: frozenset[Precision] = frozenset({Precision.UNQUANTISED})
    """What it can quantise the operands of its products to."""
    quantises_weights_before: bool = True
    """Of one that quantises: whether an inference forward has its weights quantised before the call. In a training step
    they are quantised in the call."""
    multiple: int = 1
    """Hidden and intermediate sizes must be multiples of this."""
    most_tokens: int | None = None
    """The most tokens that it is made for; None: any number."""
    keeps_between_batches: bool = False
    """Whether it keeps what follows from the weights from one micro-batch of a step to the next, and is for steps of
    several alone."""
    on_request: bool = False
    """Whether it takes part only where `--impl` names it, because its build takes minutes for each case."""
    variant: frozenset[Scope] = frozenset()
    """The scopes at which another one stands for it: checked there, compared only where `--impl` names it."""
    offers: frozenset[Offer] = frozenset()
    """Which of `problem.extras` its build supports; of experts also `other_ranks`: that where the routing is `local` it
    skips a top_k_index outside of 0 to experts - 1, whatever its weight. It is never asked for another."""
    overwrites: frozenset[str] = frozenset()
    """Activations that its backward overwrites by contract; overwriting any other input is a fault."""
    footprints: Mapping[Scope, Footprint] = field(default_factory=dict, hash=False)
    """The memory that it should take at each scope by arithmetic; a scope left out has no prediction."""
    quantises_dx: bool = True
    """Of one that quantises: whether products that make gradients of h and x have quantised operands, too."""
    quantises_dw: bool = True
    """The same of products that make gradients of weights; of experts these never have."""
    absent: str = ""
    """Why it never takes part, with the version that was looked at, in one sentence."""
    usage: str = ""
    """A line of Python that puts it into a model; shown by `recommend`."""
    source: str = "swiglu_bench"
    """The module of its build function."""
    file: str = field(default="", compare=False)
    """The file of its build function."""
    original: str = ""
    """The name by which its code is found, where `--with` gave it another."""
    layer: str = field(default="", compare=False)
    """The folder of packages that its processes find before those of this environment."""
    python: str = field(default="", compare=False)
    """The interpreter that its processes run under; empty: this one."""
    path: tuple[str, ...] = field(default=(), compare=False)
    """Where that finds packages."""
    address: str = field(default="", compare=False)
    """What `registry.load` finds it by in another process; empty for the suite's own, which are found by name."""

    def __post_init__(self) -> None:
        """Accept any iterable of names for a set of them. Raises BadInput for a name that the suite may give itself."""
        if not NAME.fullmatch(self.name):
            rule = "a name has up to 64 letters, digits and _ . + @ -"
            raise BadInput(f"An implementation is called {self.name!r}; {rule}.")
        if not _LAYOUT.fullmatch(self.weight_layout):
            there = "separate, packed, interleaved and, by turns of 8 rows, interleaved:8"
            raise BadInput(f"{self.name} declares the weight layout {self.weight_layout!r}; there are {there}.")
        sets = {
            "scopes": Scope, "variant": Scope, "dtypes": Dtype, "precisions": Precision, "offers": str,
            "overwrites": str,
        }  # fmt: skip
        for name, kind in sets.items():
            object.__setattr__(self, name, frozenset(map(kind, getattr(self, name))))
        object.__setattr__(self, "gpus", tuple(self.gpus))

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules to import for it, other than its file and torch itself."""
        return tuple(filter(None, (_MODULES.get(self.backend), self.imports or self.package)))

    def declared(self) -> Implementation:
        """A copy without the build function, to send to a process that must not run it."""
        return dataclasses.replace(self, build=_not_here)

    def as_data(self) -> dict[str, Any]:
        """All but the code, as plain data that a process which is not trusted may send."""
        fields = dataclasses.asdict(dataclasses.replace(self, build=_not_here))
        del fields["build"]
        return fields | {name: sorted(value) for name, value in fields.items() if isinstance(value, frozenset)}

    @classmethod
    def from_data(cls, data: Any) -> Implementation:
        """What `as_data` returned; raises ValueError or TypeError for anything else."""
        footprints = {
            Scope(scope): Footprint(int(kept["saved"]), tuple(tuple(map(int, phase)) for phase in kept["phases"]))  # type: ignore[misc]
            for scope, kept in data["footprints"].items()
        }
        return cls(**(data | {"footprints": footprints, "build": _not_here, **_UNTOLD}))

    def gradients(self, scope: Scope) -> tuple[str, ...]:
        """Names of the tensors whose gradients it yields at a scope."""
        return {"everything": tensors(scope), "inputs": differentiable(scope), "nothing": ()}[self.trains]

    def precision_of(self, case: Case) -> Precision:
        """What it quantises to at a case: nothing where it lacks the case's precision, to be compared with."""
        return case.precision if case.precision in self.precisions else Precision.UNQUANTISED

    def way_of(self, case: Case) -> tuple[bool, bool, bool]:
        """How it quantises: gate and up as one matrix, operands of products for dX, and of those for dW."""
        quantises_dw = self.quantises_dw and case.scope is not Scope.EXPERTS
        return self.weight_layout != "separate", self.quantises_dx, quantises_dw

    def weights_quantised(self, case: Case) -> str:
        """When, in words; "" where it quantises nothing."""
        if not self.precision_of(case):
            return ""
        return BEFORE if case.mode is Mode.FORWARD and self.quantises_weights_before else "in the call"

    def refuses(self, case: Case) -> str | None:
        """Why it does not take a case on any machine (one sentence), or None if it does."""
        if case.scope not in self.scopes:
            return f"It has no {case.scope} scope; it has {', '.join(sorted(self.scopes))}."
        if case.dtype not in self.dtypes:
            return f"It does not support {case.dtype}; it supports {', '.join(sorted(self.dtypes))}."
        if self.tf32 and case.dtype is Dtype.FLOAT32:
            return "It multiplies fp32 as TF32, which has 10 of its 23 bits; it is compared in bf16 and fp16."
        if self.precision_of(case) not in self.precisions:
            return f"It quantises to {', '.join(sorted(self.precisions))} only; ask for it with --precision."
        if case.shape.hidden % self.multiple or case.shape.intermediate % self.multiple:
            return f"It needs hidden and intermediate sizes that are multiples of {self.multiple}."
        if self.keeps_between_batches and case.accumulate == 1:
            return "It keeps codes of weights between the micro-batches of a step; ask for several with --accumulate."
        if self.most_tokens is not None and case.tokens > self.most_tokens:
            return f"It supports at most {self.most_tokens} tokens."
        needs = case.shape.extras.offers + case.shape.is_local * ("other_ranks",)
        lacks = [name for name in needs if name not in self.offers]
        return f"It does not support what {case.shape.name} needs: {', '.join(lacks)}." if lacks else None

    def _has(self, module: str) -> bool:
        """Whether its processes find a module."""
        own = [self.layer] if self.layer else list(self.path)
        if own and PathFinder.find_spec(module.partition(".")[0], own) is not None:
            return True
        return not self.python and _installed(module)

    def unavailable(self, device_type: str, interpreter: bool = False, capability: str = "") -> str | None:
        """Why it cannot run on this machine and device (one sentence), or None if it can.

        `capability` is the GPU's compute capability, as "9.0"; "" where it is not known.
        """
        if self.absent:
            return self.absent
        on_cpu = device_type == "cpu"
        if self.gpus and (on_cpu or capability.split(".")[0] not in ("", *map(str, self.gpus))):
            made_for = " or ".join(f"{major}.x" for major in self.gpus)
            here = f"this GPU has {capability}" if capability else "there is none here"
            return f"It needs a GPU of compute capability {made_for}; {here}."
        if self.backend == "triton":
            if not self._has("triton"):
                return f"Triton is not installed (it has no package for {platform.system()})."
            if on_cpu and not interpreter:
                return "Triton kernels need a GPU; `swiglu-bench verify` checks them here through the interpreter."
            if on_cpu and self.interpretable != "yes":
                return self.interpretable
            if on_cpu and (broken := _broken_interpreter(self.path)):
                return broken
        if self.package and not self._has(self.package):
            return f"The package {self.package} is not installed."
        if self.backend == "inductor":
            if on_cpu and not _cpp_compiler():
                return "torch.compile on a CPU needs a C++ compiler; none was found (set CXX, or install g++ or clang)."
            if not on_cpu and not self._has("triton"):
                return "torch.compile on a GPU needs Triton, which is not installed."
        return None


def taken_apart(layout: str, experts: bool) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """The `to_canonical` of a declared layout: takes `w_gate_up` and `bias_gate_up` apart, where there are such.

    These are [2 * intermediate, ...], with `experts` [experts, 2 * intermediate, ...].
    """
    dim = int(experts)

    def to_canonical(given: dict[str, Tensor]) -> dict[str, Tensor]:
        for kind in ("w", "bias"):
            both = given.pop(f"{kind}_gate_up", None)
            if both is not None:
                block = both.shape[dim] // 2 if layout == "packed" else int(layout.partition(":")[2] or 1)
                pair = both.unflatten(dim, (-1, 2, block)).unbind(dim + 1)
                given[f"{kind}_gate"], given[f"{kind}_up"] = (value.flatten(dim, dim + 1) for value in pair)
        return given

    return to_canonical


def _not_here(problem: Problem) -> Step:
    raise AssertionError(f"This process has declarations only and cannot build: {problem.case.label}.")


def _broken_interpreter(path: Sequence[str] = ()) -> str | None:
    """Why Triton's interpreter cannot work with the versions on a path, or here; in one sentence, or None."""
    places = list(path) or sys.path
    found = (next(iter(importlib.metadata.distributions(name=name, path=places))) for name in ("triton", "numpy"))
    triton, numpy = (Version(each.version) for each in found)
    if triton >= Version("3.7") or numpy < Version("2.4"):
        return None
    unfit = f"The interpreter of Triton {triton} needs a NumPy older than 2.4, and {numpy} is installed"
    return f"{unfit}; install 'numpy<2.4', or Triton 3.7 or newer."


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # the parent of a dotted name is missing, or is not a proper module
        return False


def _cpp_compiler() -> str | None:
    candidates = [os.environ.get("CXX", ""), "g++", "clang++", "c++", "cl"]
    return next((path for name in candidates if name and (path := shutil.which(name))), None)


def implementation(
    name: str, *, scopes: Iterable[str | Scope], description: str, **fields: Any
) -> Callable[[Callable[[Problem], Step]], Implementation]:
    """Turn a build function into an Implementation; `fields` are those of that class, sets given as any iterable."""

    def wrap(build: Callable[[Problem], Step]) -> Implementation:
        function = build
        while isinstance(function, functools.partial):
            function = function.func
        source = getattr(function, "__module__", "swiglu_bench")
        file = function.__code__.co_filename if isinstance(function, types.FunctionType) else ""
        own = frozenset(map(Scope, scopes))
        return Implementation(name, description, own, build, source=source, file=file, **fields)

    return wrap
