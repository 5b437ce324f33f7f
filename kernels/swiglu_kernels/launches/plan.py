"""Launches that are worked out once for all arguments of a kind.

To describe a launch, bind its arguments and find its compiled kernel takes longer than a small kernel runs. Everything
but the addresses follows from sizes, strides, types, devices and alignment of the tensors: under these `run` remembers
the compiled kernel and its arguments. The next launch of that kind only fills in addresses. What a whole call of a kind
launches and decides is a `Series`, which asks for the kind of no single launch.
"""

import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from swiglu_kernels.launches.backend import INTERPRETING
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
        self.launcher: Callable[..., None] = _nothing
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

    def run(self, tensors: list[torch.Tensor]) -> None:
        """Launch with other tensors of the same kind, on their device."""
        if self.scratch is not None:
            shape, dtype = self.scratch
            tensors = [*tensors, tensors[0].new_empty(shape, dtype=dtype)]
        self.launcher(*self.arguments(tensors))
        if self.then is not None:
            self.then.run(tensors)

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
        made = object.__new__(like_this)
        made.base = base
        return made

    def constructed(base: torch.Tensor) -> Any:
        return of_type(**fields, base=base)

    known = vars(descriptor).keys() <= DESCRIBES and not any("__slots__" in vars(one) for one in of_type.__mro__)
    return copied if known else constructed


class _Current(threading.local):
    recorded: list[Any] | None = None
    """What the running call has launched and decided so far."""
    replayed: Iterator[Any] | None = None
    """What it will launch and decide."""


_current = _Current()
_UNKNOWN = object()
_VALUES = frozenset({type(None), bool, float, int, str})


class Series:
    """The launches and decisions of a call, in order, which are those of every call of its kind."""

    def __init__(self) -> None:
        self._steps: list[Any] | None = None
        self._device = torch.device("cpu")

    def call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a function whose launches and decisions follow from the kind of its arguments.

        The tensors that it allocates have the same sizes, strides and alignment in every call (an allocation of another
        alignment is noticed). Nobody may watch the call (`internals.watched`): what he launches is not of the series.
        """
        if INTERPRETING:
            return function(*arguments, **options)
        if self._steps is None:
            _current.recorded = recorded = []
        else:
            _current.replayed = iter(self._steps)
        try:
            with on_device(self._device):
                result = function(*arguments, **options)
        finally:
            again, _current.recorded, _current.replayed = _current.replayed is not None, None, None
        if not again and _UNKNOWN not in recorded:
            self._steps = recorded
            self._device = next((one.device for one in arguments if isinstance(one, torch.Tensor)), self._device)
        return result


_plans: dict[tuple[Any, ...], Plan] = {}
_series: dict[tuple[Any, ...], Series] = {}
calls: dict[tuple[Any, ...], Any] = {}
"""What makes whole calls again, by what they were called with (`repeat.py`); forgotten together with the plans."""


def series_of(*arguments: Any) -> Series:
    """Return the series of calls with arguments of a kind: tensors, tuples, and hashable values."""
    key, _ = key_of(arguments)
    found = _series.get(key)
    if found is None:
        found = Series()
        keep(_series, key, found)
    return found


def decided(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function says, which follows from the kind of its arguments; within a series it is asked once."""
    if _current.replayed is not None:
        return next(_current.replayed)
    answer = function(*arguments)
    if _current.recorded is not None:
        _current.recorded.append(answer)
    return answer


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
    if _current.replayed is not None:
        found, alignments = next(_current.replayed)
        tensors = _tensors_in(arguments)
        if [tensor.data_ptr() % 16 for tensor in tensors] == alignments:
            found.run(tensors)
            return
    key, tensors = key_of((describe, *arguments))
    found = _plans.get(key)
    if found is None:
        _run_first(key, describe, arguments)
    else:
        with on_device(tensors[0].device):
            found.run(tensors)
    if _current.recorded is not None:
        alignments = [tensor.data_ptr() % 16 for tensor in tensors]
        _current.recorded.append((found, alignments) if found else _UNKNOWN)


def known(describe: Callable[..., Launch], *arguments: Any) -> Plan | None:
    """Return what `run` has remembered of arguments of this kind."""
    return _plans.get(key_of((describe, *arguments))[0])


def forget() -> None:
    """Forget all plans, so that every launch is described anew."""
    _plans.clear()
    _series.clear()
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


def _tensors_in(arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return the tensors as `key_of` does."""
    tensors: list[torch.Tensor] = []
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            tensors.append(argument)
        elif isinstance(argument, tuple):
            tensors += _tensors_in(argument)
    return tensors


def _run_first(key: tuple[Any, ...], describe: Callable[..., Launch], arguments: tuple[Any, ...]) -> None:
    tensors: list[torch.Tensor] = []
    launch = describe(*(_apart(argument, tensors) for argument in arguments))
    plan = Plan(launch, tensors)
    if _run_and_keep_launchers(launch, plan):
        keep(_plans, key, plan)


def _run_and_keep_launchers(launch: Launch, plan: Plan) -> bool:
    """Run launches, and tell whether all can be launched again, as their plans then can."""
    compiled = launch.run_alone()
    again = 0 in launch.grid or hasattr(type(compiled), "__getitem__")
    if not again:
        warnings.warn(
            f"this Triton's kernels return {type(compiled).__name__} when launched, not a compiled kernel that can be "
            "launched again: every launch takes the way through Triton's argument binder, some 30 us longer",
            stacklevel=2,
        )
    elif compiled is not None:
        plan.launcher = compiled[(*launch.grid, 1, 1)[:3]]
    if launch.then is not None and plan.then is not None:
        again = _run_and_keep_launchers(launch.then, plan.then) and again
    return again


def _apart(argument: Any, tensors: list[torch.Tensor]) -> Any:
    """Return an argument with every tensor in it as a new object: one that is passed twice takes two places."""
    if isinstance(argument, torch.Tensor):
        tensors.append(argument.detach())
        return tensors[-1]
    return tuple(_apart(part, tensors) for part in argument) if isinstance(argument, tuple) else argument


def _nothing(*_: Any) -> None:
    """Launch an empty grid."""
