"""Launches that are worked out once for all arguments of a kind.

To describe a launch, bind its arguments and find its compiled kernel takes longer than a small kernel runs. Everything
but the addresses follows from sizes, strides, types, devices and alignment of the tensors: under these `run` remembers
the compiled kernel and its arguments. The next launch of that kind only fills in addresses. What a whole call does is
recorded by `series.py`.

Triton's own handling of arguments, which encodes each TMA descriptor anew, takes some 10 us of a launch. Triton 3.7 to
3.9 hand a kernel's arguments to one function in C, descriptors encoded. What they hand over is taken here once (class
`Direct`); a later launch fills in addresses, and what was encoded for an address before, since an encoding follows from
the address and what a kind of launch has in common. All of this is private to Triton: where anything is not as known,
`direct` returns None, and launches go through Triton.
"""

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from swiglu_kernels.runtime.backend import TRITON_AVAILABLE
from swiglu_kernels.runtime.launch import Launch, bind, on_device
from swiglu_kernels.runtime.precision import float32_dot_precision
from swiglu_kernels.runtime.shortcuts import door
from swiglu_kernels.runtime.shortcuts.door import keep

MOST_ADDRESSES = 256
"""Of one argument of one kind of launch, 200 bytes each. Beyond, all are encoded anew."""
Launcher = Callable[[list[torch.Tensor]], None]
Places = list[tuple[int, int]]
"""(position among a kernel's arguments, number of the tensor)"""

try:
    if not TRITON_AVAILABLE:
        raise ImportError("no Triton")
    from triton import knobs
    from triton.backends.nvidia.driver import CudaLauncher, wrap_handle_tensordesc
    from triton.runtime import driver
except ImportError:
    CudaLauncher = None


class Direct:
    """Launches a compiled kernel on other tensors of the same kind; a series does what it does, from its parts."""

    def __init__(
        self, compiled: Any, grid: tuple[int, ...], device: int, expand: Callable[[list[torch.Tensor]], list[Any]],
        handed: list[Any], pointers: Places, descriptors: Places, again: Launcher,
    ) -> None:  # fmt: skip
        launcher = compiled.run
        self.grid, self._device, self._again = grid, device, again
        self.stream_of, self.launch = driver.active.get_current_stream, driver.active.utils.launch
        # Neither hooks nor scratch.
        self.what = (
            compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl, compiled.packed_metadata,
            None, None, None, None, None, launcher.arg_annotations, launcher.kernel_signature,
        )  # fmt: skip
        self._compiled = compiled  # keeps what `function` names loaded
        self._expand, self.handed, self.pointers = expand, handed, pointers
        self.descriptors: list[tuple[int, int, dict[int, Any]]] = [(*place, {}) for place in descriptors]

    def __call__(self, tensors: list[torch.Tensor]) -> None:
        """Launch."""
        if hooked():
            self._again(tensors)
            return
        handed = self.handed.copy()
        for position, number in self.pointers:
            handed[position] = tensors[number].data_ptr()
        for position, number, known in self.descriptors:
            address = tensors[number].data_ptr()
            handed[position] = known[address] if address in known else self.encoded(position, tensors, known, address)
        self.launch(*self.grid, self.stream_of(self._device), *self.what, handed)

    def encoded(self, position: int, tensors: list[torch.Tensor], known: dict[int, Any], address: int) -> Any:
        """Encode the descriptor at a position, and keep it among those that are known, by the tensor's address."""
        if len(known) >= MOST_ADDRESSES:
            known.clear()
        encoded = known[address] = self._expand(tensors)[position]
        return encoded


def hooked() -> bool:
    """Tell whether anybody watches Triton's launches."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def direct(
    compiled: Any, grid: tuple[int, ...], tensors: list[torch.Tensor], pointers: Places, descriptors: Places,
    arguments: Callable[[list[torch.Tensor]], list[Any]], again: Launcher,
) -> Launcher | None:  # fmt: skip
    """Return what launches a compiled kernel directly, or None where this Triton is not as known.

    pointers, descriptors: where the addresses of the tensors of the first launch go, and TMA descriptors of them.
    arguments: makes all arguments for Triton from tensors. again: launches through Triton, for hooks.
    """
    launcher = getattr(compiled, "run", None)
    if CudaLauncher is None or not isinstance(launcher, CudaLauncher) or not hasattr(launcher, "kernel_signature"):
        return None
    if launcher.global_scratch_size or launcher.profile_scratch_size or getattr(launcher, "gsan_enabled", False):
        return None
    meta = getattr(compiled.metadata, "tensordesc_meta", None)
    wrapped = wrap_handle_tensordesc(lambda handed: handed, dict(compiled.src.signature), meta)

    def expand(tensors: list[torch.Tensor]) -> list[Any]:
        return list(wrapped(arguments(tensors)))

    # Where an argument begins among those that are handed over, of which a descriptor is several.
    begins, described = [0], dict(descriptors)
    for position, value in enumerate(arguments(tensors)):
        begins.append(begins[-1] + (1 + 2 * len(value.shape) if position in described else 1))
    handed = expand(tensors)
    if begins[-1] != len(handed):
        return None

    def moved(places: Places) -> Places:
        return [(begins[position], number) for position, number in places]

    device = tensors[0].device.index
    return Direct(compiled, grid, device, expand, handed, moved(pointers), moved(descriptors), again)


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
        self.pointers: Places = []
        self.descriptors: Places = []
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
        if self.descriptors:
            bind(tensors[0].device)
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

    known = vars(descriptor).keys() <= DESCRIBES and not any("__slots__" in vars(base) for base in of_type.__mro__)
    return copied if known else constructed


_VALUES = frozenset({type(None), bool, float, int, str})


class _Current(threading.local):
    recorder: Any = None


current = _Current()
"""Of a thread: what writes down, for a series, what `run` and `apply` do."""
_plans: dict[tuple[Any, ...], Plan] = {}


def apply(function: Callable[..., Any], *arguments: Any, returning: Callable[..., torch.Tensor] | None = None) -> None:
    """Call a function that works on tensors by PyTorch, and returns nothing; a series calls it again.

    Args:
        function: what it does follows from the kind of its arguments.
        arguments: tensors, tuples of tensors, and values.
        returning: returns, for the arguments but the last, what `function` writes to the last, in a new contiguous
            tensor. A series calls it where the last is allocated for that, which takes less time.
    """
    recorder = current.recorder
    if survey is not None:
        return
    if recorder is None:
        function(*arguments)
        return
    recorder.note(function, arguments, returning=returning)
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
    if survey is not None:
        _describe_all(describe, arguments)
        return
    if not door.is_open():
        describe(*arguments).run()
        return
    key, tensors = key_of((describe, *arguments))
    found, recorder = _plans.get(key), current.recorder
    with contextlib.nullcontext() if recorder is None else recorder.ignoring():
        if found is None:
            _run_first(key, describe, arguments)
        else:
            with on_device(tensors[0].device):
                found.run(tensors)
    if recorder is not None:
        recorder.note(describe, arguments, launch=_plans.get(key), launched=True)


survey: Callable[[Launch], object] | None = None
"""Is handed each launch while launches are surveyed, in all threads: a backward has one of its own."""


@contextlib.contextmanager
def surveyed(by: Callable[[Launch], object]) -> Iterator[None]:
    """Describe what would run and run nothing, neither launches nor PyTorch's products; outputs stay unwritten."""
    global survey
    assert survey is None, "one survey at a time"
    survey = by
    try:
        with door.closed():
            yield
    finally:
        survey = None


def _describe_all(describe: Callable[..., Launch], arguments: tuple[Any, ...]) -> None:
    launch: Launch | None = describe(*arguments)
    while launch is not None and survey is not None:
        if 0 not in launch.grid:
            survey(launch)
        launch = launch.then


def recordable() -> bool:
    """Tell whether a series may record what this thread does: shortcuts are taken, and no other series records it."""
    return door.is_open() and current.recorder is None


def forget() -> None:
    """Forget all plans and calls, so that every launch is described anew."""
    _plans.clear()
    door.calls.clear()


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


def _run_first(key: tuple[Any, ...], describe: Callable[..., Launch], arguments: tuple[Any, ...]) -> None:
    tensors: list[torch.Tensor] = []
    launch = describe(*(apart(argument, tensors) for argument in arguments))
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


def apart(argument: Any, tensors: list[torch.Tensor]) -> Any:
    """Return an argument with every tensor in it as a new object: one that is passed twice takes two places."""
    if isinstance(argument, torch.Tensor):
        tensors.append(argument.detach())
        return tensors[-1]
    return tuple(apart(part, tensors) for part in argument) if isinstance(argument, tuple) else argument


def _nothing(*_: Any) -> None:
    """Launch an empty grid."""
