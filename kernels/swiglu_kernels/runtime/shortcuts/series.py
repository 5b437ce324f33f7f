"""A whole call as a series of what it does: allocations, launches and products by PyTorch, recorded once.

The record is written as one Python function, which the next calls of the kind call in place of what was recorded.
"""

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from swiglu_kernels.runtime import internals
from swiglu_kernels.runtime.launch import on_device
from swiglu_kernels.runtime.shortcuts import plan
from swiglu_kernels.runtime.shortcuts.door import Kinds
from swiglu_kernels.runtime.shortcuts.plan import Direct, Plan, hooked

_LITERALS = frozenset({type(None), bool, int, str})
_ALLOCATE = {torch.ops.aten.new_empty.default, torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default}
_VIEW = {
    torch.ops.aten.detach.default, torch.ops.aten.t.default, torch.ops.aten.slice.Tensor, torch.ops.aten.view.default,
    torch.ops.aten.select.int, torch.ops.aten.transpose.int, torch.ops.aten.alias.default,
    torch.ops.aten.as_strided.default, torch.ops.aten.view.dtype,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a step finds a tensor: what was given or allocated or, with a dtype, a view of it."""

    number: int
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    offset: int = 0
    """Elements behind the tensor's first; the tensor may lie anywhere in its memory."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype != self.dtype:
            tensor = tensor.view(self.dtype)  # type: ignore[arg-type]
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

    @property
    def layout(self) -> tuple[Any, ...]:
        """What is equal where `empty_like` of the one makes the other."""
        return self.shape, self.strides, self.dtype


@dataclasses.dataclass
class _Step:
    """A launch, or a function that works on tensors."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    """With places where there were tensors."""
    places: list[_Place]
    """Those among the arguments, in order."""
    launch: Plan | None
    """What launches again, where it is a launch."""
    returning: Callable[..., Any] | None
    """What returns, for the arguments but the last, a new tensor of what is written to the last."""
    allocates: list[_Allocation] = dataclasses.field(default_factory=list)
    """What is used here for the first time."""
    releases: list[int] = dataclasses.field(default_factory=list)
    """Numbers of those that are used here for the last time."""

    @property
    def numbers(self) -> list[int]:
        """Of all that it uses."""
        return [place.number for place in self.places]


class _Source:
    """Writes a series as one Python function of its tensors t0, t1 and so on; p0 and p1 are their addresses.

    It does what a loop over the steps would do, in less time: nothing is looked up but what may differ. `plain` says
    whether all tensors so far are aligned as they were, and nobody watches launches; where not, launches are looked up
    by their arguments.
    """

    def __init__(self, given: list[bool], recorder: "_Recorder") -> None:
        self._names: dict[str, Any] = {"run": plan.run, "empty_like": torch.empty_like}
        self._given, self._device, self._alignments = given, recorder.device, recorder.alignments
        self._launched = {number for step in recorder.steps if step.launch for number in step.numbers}
        self._stream_of: Any = None
        self._lines: list[str] = []

    def add(self, step: _Step) -> None:
        places = [_Place(allocation.number) for allocation in step.allocates]
        if step.returning is not None and [step.arguments[-1]] == places:
            self._make(step.allocates[0].number, f"{self._bound(step.returning)}({self._list(step.arguments[:-1])})")
        else:
            self.allocate(step.allocates)
            if step.launch is None:
                self._lines.append(f"{self._bound(step.function)}({self._list(step.arguments)})")
            else:
                looked_up = f"run({self._list((step.function, *step.arguments))})"
                self._lines += [f"if plain: {self._launch(step.launch, step.places)}", f"else: {looked_up}"]
        self._lines += [f"t{number} = None" for number in step.releases]

    def allocate(self, made: list[_Allocation]) -> None:
        """Write allocations: contiguous ones, on the device of those that were given."""
        for allocation in made:
            # A dtype that is named takes half a microsecond.
            dtype = "" if allocation.like_first else f", dtype={self._bound(allocation.dtype)}"
            new = f"t0.new_empty({allocation.shape}{dtype})"
            self._make(allocation.number, new if allocation.model is None else f"empty_like(t{allocation.model})")

    def function(self, results: _Place | tuple[_Place | None, ...]) -> Callable[..., Any]:
        positions = [position for position, is_tensor in enumerate(self._given) if is_tensor]
        names = {position: f"t{number}" for number, position in enumerate(positions)}
        parameters = ", ".join(names.get(position, f"none{position}") for position in range(len(self._given)))
        lines = []
        if self._device.type == "cuda":
            elsewhere = f"{self._bound(torch.cuda.device)}({self._device.index})"
            lines.append(f"if {self._bound(internals.current_device)}() != {self._device.index}:")
            lines.append(f"    with {elsewhere}: return replay({parameters})")
        others = []
        for number in sorted(self._launched & set(range(len(positions)))):
            lines.append(f"p{number} = t{number}.data_ptr()")
            others.append(f"p{number} % 16 != {self._alignments[number]}")
        if self._stream_of is not None:
            lines.append(f"stream = {self._bound(self._stream_of)}({self._device.index})")
            others.append(f"{self._bound(hooked)}()")
        lines += [f"plain = not ({' or '.join(others)})" if others else "plain = True", *self._lines]
        lines.append(f"return {self._expression(results)}")
        source = "\n    ".join([f"def replay({parameters}):", *lines])
        exec(compile(source, "<a series of launches>", "exec"), self._names)
        replay: Callable[..., Any] = self._names["replay"]
        return replay

    def _make(self, number: int, value: str) -> None:
        self._lines.append(f"t{number} = {value}")
        if number in self._launched:
            self._lines += [f"p{number} = t{number}.data_ptr()", f"if p{number} % 16: plain = False"]

    def _launch(self, made: Plan, places: list[_Place]) -> str:
        launch, tensors = made.shortest, f"[{self._list(places)}]"
        if not isinstance(launch, Direct):
            return f"{self._bound(launch)}({tensors})"
        self._stream_of = launch.stream_of
        handed = list(map(self._expression, launch.handed))
        for position, number in launch.pointers:
            handed[position] = self._address(places[number])
        for position, number, known in launch.descriptors:
            address = self._address(places[number])
            memory = self._bound(known)
            anew = f"{self._bound(launch.encoded)}({position}, {tensors}, {memory}, {address})"
            handed[position] = f"{memory}[{address}] if {address} in {memory} else {anew}"
        arguments = f"{self._list(launch.grid)}, stream, {self._list(launch.what)}, [{', '.join(handed)}]"
        return f"{self._bound(launch.launch)}({arguments})"

    def _address(self, place: _Place) -> str:
        offset = 0 if place.dtype is None else place.offset * place.dtype.itemsize
        return f"p{place.number} + {offset}" if offset else f"p{place.number}"

    def _list(self, arguments: Sequence[Any]) -> str:
        return ", ".join(map(self._expression, arguments))

    def _expression(self, argument: Any) -> str:
        if isinstance(argument, _Place):
            tensor = f"t{argument.number}"
            return tensor if argument.dtype is None else f"{self._bound(argument.of)}({tensor})"
        if type(argument) is tuple:
            return f"({''.join(f'{self._expression(part)}, ' for part in argument)})"
        return self._bound(argument)

    def _bound(self, value: Any) -> str:
        if type(value) in _LITERALS:
            return repr(value)
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
        """Find a tensor among those that are still there."""
        there = [(number, kept) for number, found in enumerate(self.pool) if (kept := found()) is not None]
        same = [number for number, other in there if other is tensor]
        if same:
            return _Place(same[0])
        around = [(number, other) for number, other in there if _holds(other, tensor)]
        same = [number for number, other in around if _layout(other) == _layout(tensor)]
        if len(same) == 1:
            return _Place(same[0])
        if len(around) != 1:
            self.sound = False
            return _Place(0)
        number, kept = around[0]
        offset = (tensor.data_ptr() - kept.data_ptr()) // tensor.element_size()
        return _Place(number, tensor.dtype, tuple(tensor.shape), tensor.stride(), offset)

    def note(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], *, launched: bool = False,
        launch: Plan | None = None, returning: Callable[..., Any] | None = None,
    ) -> None:  # fmt: skip
        """Write down a step; a launch without a plan cannot be repeated yet."""
        self.complete &= launch is not None or not launched
        places: list[_Place] = []
        self.steps.append(_Step(function, self._with_places(arguments, places), places, launch, returning))

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
        for allocation in made:
            allocation.model = next((other.number for other in known if other.layout == allocation.layout), None)
            known.append(allocation)


class Series:
    """What calls of a kind do: recorded in one of them, then done without it."""

    def __init__(self) -> None:
        self._sound = internals.can_record
        self._replay: Callable[..., Any] | None = None
        self.followers: Kinds[Series] = Kinds()
        """The calls that follow one of these, backwards, by what else they depend on."""

    def call(self, function: Callable[..., Any], tensors: tuple[Any, ...], others: Sequence[Any] = ()) -> Any:
        """Call a function, or do what it did.

        It returns a tensor, or tensors or None in a tuple. Besides allocations and views, all that it does to tensors
        is done by `run` and `apply`; if not, it is called every time.

        Args:
            function: of tensors and others.
            tensors: its first arguments, of the same kind in every call; the first is a tensor, the others may be None.
            others: values, the same in every call.
        """
        replay = self._replay
        if replay is not None:
            return replay(*tensors)
        if not (self._sound and plan.recordable()):
            return function(*tensors, *others)
        with on_device(tensors[0].device):
            return self._record(function, tensors, others)

    def again(self, function: Callable[..., Any], others: Sequence[Any]) -> Callable[..., Any]:
        """Return what does `call` for the tensors that it is given."""
        return lambda *tensors: self.call(function, tensors, others)

    def _record(self, function: Callable[..., Any], tensors: tuple[Any, ...], others: Sequence[Any]) -> Any:
        given: list[torch.Tensor] = []
        apart = [plan.apart(argument, given) for argument in tensors]
        plan.current.recorder = recorder = _Recorder(given)
        try:
            with recorder:
                results = function(*apart, *others)
        finally:
            plan.current.recorder = None
        is_tensor = isinstance(results, torch.Tensor)
        made = (results,) if is_tensor else results
        places = [None if result is None else recorder.place_of(result) for result in made]
        self._sound = recorder.sound
        if recorder.sound and recorder.complete:
            unused = recorder.share_out(len(given), {place.number for place in places if place})
            source = _Source([argument is not None for argument in tensors], recorder)
            for step in recorder.steps:
                source.add(step)
            source.allocate(unused)
            self._replay = source.function(places[0] if is_tensor and places[0] else tuple(places))
        return results


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
