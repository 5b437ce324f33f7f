"""Calls made again as on a GPU: kernels run in Triton's interpreter, or are stand-ins that note their launch."""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from swiglu_kernels.runtime.launch import Launch
from swiglu_kernels.runtime.shortcuts import door, plan


class InterpretedPlan(plan.Plan):
    """A plan that asks for hooks, as a direct launch does, and runs its kernels in the interpreter, untraced."""

    shortest = None

    def __init__(self, launch: Launch, tensors: list[torch.Tensor]) -> None:
        assert launch.scratch is None
        self.launch, self.described_from = launch, tensors
        self.shortest = self.run

    def run(self, tensors: list[torch.Tensor]) -> None:
        plan.hooked()
        new = {id(before): now for before, now in zip(self.described_from, tensors, strict=True)}
        launch: Launch | None = self.launch
        tracer = sys.getprofile()
        sys.setprofile(None)
        while launch is not None:
            arguments = {name: new.get(id(value), value) for name, value in launch.arguments.items()}
            dataclasses.replace(launch, arguments=arguments).run_alone()
            launch = launch.then
        sys.setprofile(tracer)


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[pytest.MonkeyPatch]:
    """Kernels are interpreted on a CPU, and calls repeated as on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(door, "_shut", False)
        patch.setattr(door, "on_gpu", lambda _: True)
        patch.setattr(plan, "Plan", InterpretedPlan)
        patch.setattr(plan, "_run_and_keep_launchers", lambda launch, *_: launch.run() or True)
        plan.forget()
        yield patch
        plan.forget()


class StandIn:
    """A kernel that records what it is launched with: by name through Triton's binder, by position when compiled."""

    arg_names = ("left_ptr", "size", "right_ptr")

    def __init__(self) -> None:
        self.bound: list[dict] = []
        self.launched: list[tuple] = []

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def bind(**arguments: Any) -> Any:
            self.bound.append(arguments)
            return self.Compiled(self)

        return bind

    class Compiled:
        def __init__(self, kernel: "StandIn") -> None:
            self.kernel = kernel

        def __getitem__(self, grid: Any) -> Callable[..., None]:
            assert len(grid) == 3
            return lambda *arguments: self.kernel.launched.append(arguments)


def describing(kernel: StandIn, wrap: Callable[[torch.Tensor], Any] = lambda tensor: tensor) -> tuple[Any, list[Any]]:
    """What describes a launch of two tensors, and what it was asked for."""

    def describe(left: torch.Tensor, right: torch.Tensor, option: Any = None) -> Launch:
        described.append((left, right))
        arguments = {"left_ptr": wrap(left), "size": left.numel(), "right_ptr": right}
        return Launch(kernel, (left.shape[0],), arguments, num_warps=4, num_stages=2)

    described: list[Any] = []
    return describe, described
