"""Launches past Triton's own handling of arguments, which encodes each TMA descriptor anew: some 10 us of a launch.

Triton 3.7 to 3.9 hand a kernel's arguments to one function in C, descriptors encoded. What they hand over is taken here
once; a later launch fills in addresses, and what was encoded for an address before, since an encoding follows from the
address and what a kind of launch has in common. All of this is private to Triton: where anything is not as known,
`direct` returns None, and launches go Triton's way.
"""

from collections.abc import Callable
from typing import Any

import torch

from swiglu_kernels.runtime.backend import TRITON_AVAILABLE

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

    Args:
        compiled: what Triton returned for the first launch.
        grid: programs along each axis.
        tensors: those of the first launch.
        pointers: where their addresses go.
        descriptors: where TMA descriptors of them go.
        arguments: tensors -> all arguments for Triton.
        again: launches Triton's way, for hooks.
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
