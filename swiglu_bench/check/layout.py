"""Which part of an implementation's own parameters is which weight, found once, before any call.

`Step.to_canonical` maps gradients in an implementation's own layout (packed, interleaved) to those of w_gate, w_up and
w_down. It is the implementation's code, so it is called once, at the build, on the parameters themselves: the views
that it returns say where each weight lies. From then on the suite itself takes gradients apart, and puts new weights
into parameters, by these views.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class View:
    """A strided part of one parameter."""

    parameter: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, value: Tensor) -> Tensor:
        """This part of a contiguous tensor of the parameter's shape."""
        return value.as_strided(self.size, self.stride, value.storage_offset() + self.offset)


class Layout:
    """Where the weights lie in an implementation's own parameters."""

    def __init__(self, views: Mapping[str, View]) -> None:
        self.views = dict(views)

    def take_apart(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gradients of the own parameters as gradients of the weights; a parameter without one yields none.

        A gradient that is not a plain tensor stands for the whole of its weights, for whoever judges it to refuse.
        """
        plain = {n: type(value) is Tensor and value.layout is torch.strided for n, value in gradients.items()}
        whole = {name: value.contiguous() if plain[name] else value for name, value in gradients.items()}
        return {
            name: view.of(whole[view.parameter]) if plain[view.parameter] else whole[view.parameter]
            for name, view in self.views.items()
            if view.parameter in whole
        }


def find_layout(
    parameters: Mapping[str, Tensor], to_canonical: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None
) -> Layout:
    """The layout of parameters; raises TypeError where `to_canonical` returns anything but views of what it got."""
    given = {  # on the CPU, where memory that nobody touches is none
        name: torch.empty_like(value, device="cpu", memory_format=torch.contiguous_format)
        for name, value in parameters.items()
    }
    homes = {value.untyped_storage().data_ptr(): name for name, value in given.items() if value.numel()}
    found = to_canonical(dict(given)) if to_canonical else given
    views = {}
    for name, value in found.items():
        home = homes.get(value.untyped_storage().data_ptr()) if type(value) is Tensor else None
        if home is None:
            raise TypeError(
                f"Step.to_canonical returned for {name!r} a {type(value).__name__} that is not a view of the "
                "gradients it was given; return views of them, as chunk, unbind and slices make them"
            )
        views[name] = View(home, tuple(value.shape), value.stride(), int(value.storage_offset()))
    return Layout(views)
