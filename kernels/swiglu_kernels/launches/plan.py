"""Launches that are worked out once for all arguments of a kind.

To describe a launch, bind its arguments and find its compiled kernel takes longer than a small kernel runs. Everything
but the addresses follows from sizes, strides, types, devices and alignment of the tensors: under these `run` remembers
the compiled kernel and its arguments. The next launch of that kind only fills in addresses. A whole call of a kind is a
`Series`: what it allocates, launches and multiplies by PyTorch is recorded once, and then done without the call.
"""

import contextlib
import dataclasses
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from swiglu_kernels.launches import internals
from swiglu_kernels.launches.backend import INTERPRETING
from swiglu_kernels.launches.direct import Launcher, direct
from swiglu_kernels.launches.launch import Launch, on_device
from swiglu_kernels.launches.precision import float32_dot_precision

MOST_PLANS = 4096
"""About 2 KB each. Beyond, the oldest is forgotten: a new number of tokens in every call would fill any memory."""
DESCRIBES = {"base", "shape", "strides", "block_shape", "layout", "padding", "round_f32_to_tf32"}
"""What a TMA descriptor holds in Triton 3.6 to 3.9; one that holds more is made by its own constructor."""


class Plan:
    """Launches, one after the other: their kernels and all arguments but the tensors; it keeps none of them alive."""

    def __init__(self, launch: Launch, tensors: list[torch.Tensor]) -> None:
        """Take apart a launch that was described from `tensors`, no two of which are the same object."""
        self.launch: Launcher = _nothing
        self._runner: Callable[..., None] = _nothing
        self.scratch: tuple[torch.Size, torch.dtype] | None = None
        if launch.scratch is not None:
            self.scratch = launch.scratch.shape, launch.scratch.dtype
            tensors = [*tensors, launch.scratch]
        self.then = None if launch.then is None else Plan(launch.then, tensors)
        numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
        self.values: list[Any] = []
        # (position among the kernel's arguments, number of the tensor)
        self.pointers: list[tuple[int, int]] = []
        self.descriptors: list[tuple[int, int]] = []
        for position, name in enumerate(launch.kernel.arg_names):
            value = launch.arguments[name]
            tensor = getattr(value, "base", value)  # a TMA descriptor has a base
            if isinstance(value, torch.Tensor) or tensor is not value:
                assert id(tensor) in numbers, f"{name}: a launch holds the tensors that it was described from, no views"
                places = self.pointers if tensor is value else self.descriptors
                places.append((position, numbers[id(tensor)]))
                value = None if tensor is value else _maker(value)
            self.values.append(value)

    def keep(self, compiled: Any, grid: tuple[int, ...], tensors: list[torch.Tensor]) -> None:
        """Keep what launches the first kernel again, after a launch with these tensors."""
        self._runner, tensors = compiled[grid], self.with_scratch(tensors)
        places = self.pointers, self.descriptors
        self.launch = direct(compiled, grid, tensors, *places, self.arguments, self.by_triton) or self.by_triton

    def by_triton(self, tensors: list[torch.Tensor]) -> None:
        """Launch the first kernel by what Triton returned."""
        self._runner(*self.arguments(tensors))

    def with_scratch(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors and, where the launch has some, new scratch."""
        if self.scratch is None:
            return tensors
        shape, dtype = self.scratch
        return [*tensors, tensors[0].new_empty(shape, dtype=dtype)]

    def run(self, tensors: list[torch.Tensor]) -> None:
        """Launch with other tensors of the same kind, on their device."""
        tensors = self.with_scratch(tensors)
        self.launch(tensors)
        if self.then is not None:
            self.then.run(tensors)

    @property
    def shortest(self) -> Launcher:
        """What does the same as `run` with the least in between, once the kernels are kept."""
        return self.launch if self.scratch is None and self.then is None else self.run

    def arguments(self, tensors: list[torch.Tensor]) -> list[Any]:
        """Return the first kernel's arguments for other tensors of the same kind."""
        values = self.values.copy()
        for position, number in self.pointers:
            values[position] = tensors[number].data_ptr()
        for position, number in self.descriptors:
            values[position] = values[position](tensors[number])
        return values


def _maker(descriptor: Any) -> Callable[[torch.Tensor], Any]:
    """Return what makes another descriptor like this one, of the same fields for another tensor.

    What its constructor checks is the same for all tensors of a kind, and left out where nothing else can be in it; the
    fields are attributes of a class then, which takes less time than to copy them.
    """
    of_type = type(descriptor)
    fields = {name: value for name, value in vars(descriptor).items() if name != "base"}
    like_this = type(of_type.__name__, (of_type,), fields)

    def copied(base: torch.Tensor) -> Any:
        made: Any = object.__new__(like_this)
        made.base = base
        return made

    def constructed(base: torch.Tensor) -> Any:
        return of_type(**fields, base=base)

    known = vars(descriptor).keys() <= DESCRIBES and not any("__slots__" in vars(one) for one in of_type.__mro__)
    return copied if known else constructed


class _Current(threading.local):
    recorder: "_Recorder | None" = None


_current = _Current()
_VALUES = frozenset({type(None), bool, float, int, str})
_ALLOCATE = {
    torch.ops.aten.new_empty.default, torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default,
}  # fmt: skip
_VIEW = {
    torch.ops.aten.detach.default, torch.ops.aten.t.default, torch.ops.aten.slice.Tensor, torch.ops.aten.view.default,
    torch.ops.aten.select.int, torch.ops.aten.transpose.int, torch.ops.aten.alias.default,
    torch.ops.aten.as_strided.default, torch.ops.aten.view.dtype,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a step finds a tensor: what was given or allocated, or a view of it."""

    number: int
    view: "_View | None" = None


@dataclasses.dataclass(frozen=True)
class _View:
    """Where a view lies in a tensor; the tensor may lie anywhere in its memory."""

    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int
    """Elements behind the tensor's first."""

    @classmethod
    def between(cls, tensor: torch.Tensor, view: torch.Tensor) -> "_View":
        offset = (view.data_ptr() - tensor.data_ptr()) // view.element_size()
        return cls(view.dtype, view.shape, view.stride(), offset)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype != self.dtype:
            tensor = tensor.view(self.dtype)
        return tensor.as_strided(self.shape, self.strides, tensor.storage_offset() + self.offset)


@dataclasses.dataclass
class _Allocation:
    """A tensor that was given, or is allocated: a contiguous one then, on the device of those that were given."""

    number: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    like_first: bool = True
    """Whether the first tensor that was given has the same dtype."""
    model: int | None = None
    """Number of a tensor of the same layout that is there by then: `empty_like` takes half as long as `new_empty`."""

    def is_like(self, other: "_Allocation") -> bool:
        """Whether `empty_like` of the other one makes it."""
        return (self.shape, self.strides, self.dtype) == (other.shape, other.strides, other.dtype)


@dataclasses.dataclass
class _Step:
    """A launch, or a function that works on tensors."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    """With places where there were tensors."""
    places: list[_Place]
    """Those among the arguments, in order."""
    plan: Plan | None
    """Of a launch."""
    allocates: list[_Allocation] = dataclasses.field(default_factory=list)
    """What is used here for the first time."""
    releases: list[int] = dataclasses.field(default_factory=list)
    """Numbers of those that are used here for the last time."""

    @property
    def numbers(self) -> list[int]:
        """Of all that it uses."""
        return [one.number for one in self.places]


class _Source:
    """Writes a series as one Python function of a call's arguments, in which t0, t1 and so on are tensors.

    It does what a loop over the steps would do, in less time: nothing is looked up but what may differ. `aligned` says
    whether all tensors so far are aligned as they were; where not, launches are looked up by their arguments.
    """

    def __init__(self, positions: list[int], alignments: list[int]) -> None:
        """Begin with the tensors that are given: their positions among the arguments, and their alignments."""
        self._names: dict[str, Any] = {"run": run, "empty_like": torch.empty_like}
        self._lines = [f"t{number} = arguments[{position}]" for number, position in enumerate(positions)]
        others = (f"t{number}.data_ptr() % 16 != {rest}" for number, rest in enumerate(alignments))
        self._lines.append(f"aligned = not ({' or '.join(others)})")

    def add(self, step: _Step) -> None:
        """Write a step, with what it allocates before and releases after."""
        self.allocate(step.allocates)
        call = ", ".join(map(self._expression, step.arguments))
        function = self._bound(step.function)
        if step.plan is None:
            self._lines.append(f"{function}({call})")
        else:
            launch = self._bound(step.plan.shortest)
            tensors = ", ".join(map(self._expression, step.places))
            self._lines += [f"if aligned: {launch}([{tensors}])", f"else: run({function}, {call})"]
        self._lines += [f"t{number} = None" for number in step.releases]

    def allocate(self, made: list[_Allocation]) -> None:
        """Write allocations: contiguous ones, on the device of those that were given."""
        for one in made:
            if one.model is not None:
                value = f"empty_like(t{one.model})"
            else:
                # A dtype that is named takes half a microsecond.
                dtype = "" if one.like_first else f", dtype={self._bound(one.dtype)}"
                value = f"t0.new_empty({self._bound(one.shape)}{dtype})"
            self._lines += [f"t{one.number} = {value}", f"aligned = aligned and not t{one.number}.data_ptr() % 16"]

    def function(self, results: _Place | tuple[_Place | None, ...]) -> Callable[..., Any]:
        """Return the function."""
        lines = [*self._lines, f"return {self._expression(results)}"]
        source = "\n    ".join(["def replay(arguments):", *lines])
        exec(compile(source, "<a series of launches>", "exec"), self._names)
        replay: Callable[..., Any] = self._names["replay"]
        return replay

    def _expression(self, argument: Any) -> str:
        if isinstance(argument, _Place):
            tensor = f"t{argument.number}"
            return tensor if argument.view is None else f"{self._bound(argument.view.of)}({tensor})"
        if isinstance(argument, tuple):
            return f"({''.join(f'{self._expression(part)}, ' for part in argument)})"
        return self._bound(argument)

    def _bound(self, value: Any) -> str:
        name = f"c{len(self._names)}"
        self._names[name] = value
        return name


class _Recorder(internals.DispatchMode):
    """Writes down what a call does. What it does to tensors otherwise than by `run` and `apply` makes it unsound."""

    def __init__(self, given: list[torch.Tensor]) -> None:
        super().__init__()
        self.steps: list[_Step] = []
        self.pool: list[Callable[[], torch.Tensor | None]] = []
        self.allocations: list[_Allocation] = []
        self.sound, self.complete, self._within = True, True, 0
        self.device = given[0].device
        self.alignments = [tensor.data_ptr() % 16 for tensor in given]
        for tensor in given:
            self._add(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._within == 0 and func in _ALLOCATE:
            self.sound &= out.is_contiguous() and out.device == self.device and out.data_ptr() % 16 == 0
            self._add(out)
        elif self._within == 0 and func not in _VIEW:
            self.sound = False
        return out

    def _add(self, tensor: torch.Tensor) -> None:
        like_first = not self.allocations or tensor.dtype == self.allocations[0].dtype
        number, shape = len(self.pool), tuple(tensor.shape)
        self.allocations.append(_Allocation(number, shape, tensor.stride(), tensor.dtype, like_first))
        self.pool.append(weakref.ref(tensor))

    @contextlib.contextmanager
    def ignoring(self) -> Iterator[None]:
        """What is done meanwhile is a step, or no part of the call."""
        self._within += 1
        try:
            yield
        finally:
            self._within -= 1

    def place_of(self, tensor: torch.Tensor) -> _Place:
        """Find a tensor among those that were given and allocated, and are still there."""
        there = [(number, one) for number, found in enumerate(self.pool) if (one := found()) is not None]
        same = [number for number, one in there if one is tensor]
        if same:
            return _Place(same[0])
        around = [(number, one) for number, one in there if _holds(one, tensor)]
        same = [number for number, one in around if _layout(one) == _layout(tensor)]
        if len(same) == 1:
            return _Place(same[0])
        if len(around) != 1:
            self.sound = False
            return _Place(0)
        number, one = around[0]
        return _Place(number, _View.between(one, tensor))

    def note(self, function: Callable[..., Any], arguments: tuple[Any, ...], plan: Plan | None, launched: bool) -> None:
        """Write down a step; a launch without a plan cannot be repeated yet."""
        self.complete &= plan is not None or not launched
        places: list[_Place] = []
        self.steps.append(_Step(function, self._with_places(arguments, places), places, plan))

    def _with_places(self, arguments: tuple[Any, ...], places: list[_Place]) -> tuple[Any, ...]:
        found: list[Any] = []
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                places.append(self.place_of(argument))
                found.append(places[-1])
            else:
                found.append(self._with_places(argument, places) if isinstance(argument, tuple) else argument)
        return tuple(found)

    def share_out(self, given: int, results: set[int]) -> list[_Allocation]:
        """Let each step allocate what it uses first and release what it uses last; return what no step uses."""
        used, stays = set(range(given)), set(range(given)) | results
        for step in self.steps:
            new = dict.fromkeys(number for number in step.numbers if number not in used)
            step.allocates = [self.allocations[number] for number in new]
            self._find_models(step.allocates, used & stays)
            used |= new.keys()
        unused = [self.allocations[number] for number in sorted(results - used)]
        self._find_models(unused, used & stays)
        for step in reversed(self.steps):
            step.releases = list(set(step.numbers) - stays)
            stays.update(step.releases)
        return unused

    def _find_models(self, made: list[_Allocation], there: set[int]) -> None:
        """Let allocations that are made one after the other be like others that are there."""
        known = [self.allocations[number] for number in sorted(there)]
        for one in made:
            one.model = next((other.number for other in known if one.is_like(other)), None)
            known.append(one)


class Series:
    """What calls of a kind do: recorded in one of them, then done without it."""

    def __init__(self) -> None:
        self._sound = internals.can_record
        self._replay: Callable[..., Any] | None = None
        self.followers: dict[Any, Series] = {}
        """The calls that follow one of these, backwards, by what else they depend on."""

    def call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a function of tensors, the first argument among them, and of values that are the same in every call; or
        do what it did.

        It returns a tensor, or tensors or None in a tuple. Besides allocations and views, all that it does to tensors
        is done by `run` and `apply`; if not, it is called every time.
        """
        if INTERPRETING or not self._sound or _current.recorder is not None:
            return function(*arguments, **options)
        with on_device(arguments[0].device):
            return self._record(function, arguments, options) if self._replay is None else self._replay(arguments)

    def _record(self, function: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        given: list[torch.Tensor] = []
        apart = tuple(_apart(argument, given) for argument in arguments)
        _current.recorder = recorder = _Recorder(given)
        try:
            with recorder:
                results = function(*apart, **options)
        finally:
            _current.recorder = None
        one = isinstance(results, torch.Tensor)
        places = [None if result is None else recorder.place_of(result) for result in ((results,) if one else results)]
        self._sound = recorder.sound
        if recorder.sound and recorder.complete:
            unused = recorder.share_out(len(given), {place.number for place in places if place})
            positions = [number for number, one in enumerate(arguments) if isinstance(one, torch.Tensor)]
            source = _Source(positions, recorder.alignments)
            for step in recorder.steps:
                source.add(step)
            source.allocate(unused)
            self._replay = source.function(places[0] if one and places[0] else tuple(places))
        return results


_plans: dict[tuple[Any, ...], Plan] = {}
calls: dict[tuple[Any, ...], Any] = {}
"""What makes whole calls again, by what they were called with (`repeat.py`); forgotten together with the plans."""


def apply(function: Callable[..., Any], *arguments: Any) -> None:
    """Call a function that works on tensors by PyTorch, and returns nothing; a series calls it again.

    Args:
        function: what it does follows from the kind of its arguments.
        arguments: tensors, tuples of tensors, and values.
    """
    recorder = _current.recorder
    if recorder is None:
        function(*arguments)
        return
    recorder.note(function, arguments, None, launched=False)
    with recorder.ignoring():
        function(*arguments)


def run(describe: Callable[..., Launch], *arguments: Any) -> None:
    """Run the launch that `describe(*arguments)` returns, which is asked for once for arguments of a kind.

    Args:
        describe: may look at sizes, strides, dtype, device and 16-byte alignment of tensors, at the other arguments,
            at `float32_dot_precision()` and at tuned choices (`tuning.forget` calls `forget`), but at nothing else
            that can change. The launch holds the tensors as they came, and its own scratch; a view of one would have
            an address that a plan does not know.
        arguments: tensors, tuples of tensors, and hashable values.
    """
    if INTERPRETING:
        describe(*arguments).run()
        return
    key, tensors = key_of((describe, *arguments))
    found, recorder = _plans.get(key), _current.recorder
    with contextlib.nullcontext() if recorder is None else recorder.ignoring():
        if found is None:
            _run_first(key, describe, arguments)
        else:
            with on_device(tensors[0].device):
                found.run(tensors)
    if recorder is not None:
        recorder.note(describe, arguments, _plans.get(key), launched=True)


def known(describe: Callable[..., Launch], *arguments: Any) -> Plan | None:
    """Return what `run` has remembered of arguments of this kind."""
    return _plans.get(key_of((describe, *arguments))[0])


def forget() -> None:
    """Forget all plans, so that every launch is described anew."""
    _plans.clear()
    calls.clear()


def keep(memory: dict[tuple[Any, ...], Any], key: tuple[Any, ...], value: Any) -> None:
    """Remember a value; of at most MOST_PLANS, the newest."""
    while len(memory) >= MOST_PLANS:
        memory.pop(next(iter(memory), key), None)  # the oldest; another thread may be as quick
    memory[key] = value


def key_of(arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[torch.Tensor]]:
    """Return what arguments of a kind have in common, all that a launch may know of them, and the tensors in them."""
    parts: list[Any] = []
    tensors: list[torch.Tensor] = []
    _collect(arguments, parts, tensors)
    if tensors[0].dtype == torch.float32:
        parts.append(float32_dot_precision())
    return tuple(parts), tensors


def kind_of(tensors: list[torch.Tensor]) -> list[Any]:
    """Return what `key_of` has of tensors, but for their alignment."""
    kind: list[Any] = [(one.shape, one.stride(), one.dtype, one.device) for one in tensors]
    if tensors[0].dtype == torch.float32:
        kind.append(float32_dot_precision())
    return kind


def _collect(arguments: tuple[Any, ...], key: list[Any], tensors: list[torch.Tensor]) -> None:
    """Append all of that to `key`, and the tensors to `tensors`."""
    for argument in arguments:
        if type(argument) in _VALUES:  # most arguments, found out in less time than what they are not
            key.append(argument)
        elif isinstance(argument, torch.Tensor):
            tensors.append(argument)
            key += argument.shape, argument.stride(), argument.dtype, argument.device, argument.data_ptr() % 16
        elif isinstance(argument, tuple):
            key += tuple, len(argument)
            _collect(argument, key, tensors)
        else:
            key.append(argument)


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr()


def _holds(tensor: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether a tensor's memory, from its first element to its last, has all of a view's."""
    if 0 in (tensor.numel(), view.numel()) or tensor.device != view.device:
        return False
    (first, last), (begin, end) = _extent(tensor), _extent(view)
    return first <= begin and end <= last


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (steps + 1) * tensor.element_size()


def _run_first(key: tuple[Any, ...], describe: Callable[..., Launch], arguments: tuple[Any, ...]) -> None:
    tensors: list[torch.Tensor] = []
    launch = describe(*(_apart(argument, tensors) for argument in arguments))
    plan = Plan(launch, tensors)
    if _run_and_keep_launchers(launch, plan, tensors):
        keep(_plans, key, plan)


def _run_and_keep_launchers(launch: Launch, plan: Plan, tensors: list[torch.Tensor]) -> bool:
    """Run launches, and tell whether all can be launched again, as their plans then can."""
    compiled = launch.run_alone()
    again = 0 in launch.grid or hasattr(type(compiled), "__getitem__")
    if not again:
        warnings.warn(
            f"this Triton's kernels return {type(compiled).__name__} when launched, not a compiled kernel that can be "
            "launched again: every launch goes through Triton's argument binder, some 30 us longer",
            stacklevel=2,
        )
    elif compiled is not None:
        plan.keep(compiled, (*launch.grid, 1, 1)[:3], tensors)
    if launch.then is not None and plan.then is not None:
        again = _run_and_keep_launchers(launch.then, plan.then, plan.with_scratch(tensors)) and again
    return again


def _apart(argument: Any, tensors: list[torch.Tensor]) -> Any:
    """Return an argument with every tensor in it as a new object: one that is passed twice takes two places."""
    if isinstance(argument, torch.Tensor):
        tensors.append(argument.detach())
        return tensors[-1]
    return tuple(_apart(part, tensors) for part in argument) if isinstance(argument, tuple) else argument


def _nothing(*_: Any) -> None:
    """Launch an empty grid."""
