"""One implementation on one problem: built, then run the ways that validation and measuring need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swiglu_bench.check.inputs import lay_out
from swiglu_bench.measure.memory import MemoryUse, measure_memory
from swiglu_bench.spec.cases import ACTIVATIONS, Mode
from swiglu_bench.spec.implementation import Implementation
from swiglu_bench.spec.problem import Problem

Produced = dict[str, Tensor | None]
"""What a run yields: `output` and, after a backward, the gradient of each input by its name."""


@dataclass(frozen=True)
class Fixed:
    """A call on tensors that stay where they are."""

    load: Callable[[int], None]
    """Puts a variant of the inputs into them."""
    call: Callable[[], Callable[[], Produced]]


class Built:
    """An implementation built for a problem.

    Every run starts on the activations and the upstream gradient laid out anew at the same addresses, and a backward
    from a fresh forward: several implementations overwrite what they saved or were given, and replaying their graph
    computes on garbage.
    """

    def __init__(self, implementation: Implementation, problem: Problem) -> None:
        self.implementation = implementation
        trains_weights = implementation.trains == "everything"
        self.gradients = implementation.gradients(problem.case.scope)
        if trains_weights:
            self.gradients += tuple(problem.biases)
        self.problem = problem.with_leaves(requires_grad=trains_weights)
        self.step = implementation.build(self.problem.for_building())
        self.parameters = dict(self.problem.parameters if self.step.parameters is None else self.step.parameters)

    def infer(self, variant: int) -> Produced:
        """Forward without autograd."""
        return self._forward_call(variant)()()

    def train(self, variant: int) -> Produced:
        """Forward and backward; the output and every promised gradient in the canonical layout."""
        return self._backward_call(variant)()() if self.gradients else self._with_graph(variant)

    def run_on(self, activations: Sequence[Tensor], upstream: Tensor) -> Produced:
        """Forward and backward on tensors of one's own: other strides, sizes or values than the problem's."""
        self._drop_gradients()
        leaves = [value.detach().requires_grad_(bool(self.gradients)) for value in activations]
        output = self.step.forward(*leaves)
        if self.gradients:
            torch.autograd.backward(output, upstream)
        return {"output": output.detach(), **self._collect(leaves)}

    def train_twice(self, variant: int) -> Produced:
        """One forward and, with its graph retained, two backwards: the output and the gradients of the second."""
        leaves, upstream = self._fresh(variant)
        output = self.step.forward(*leaves)
        torch.autograd.backward(output, upstream, retain_graph=True)
        self._drop_gradients()
        for leaf in leaves:
            leaf.grad = None
        torch.autograd.backward(output, upstream)
        return {"output": output.detach(), **self._collect(leaves)}

    def prepare(self, mode: Mode, variant: int) -> Callable[[], Callable[[], Produced]]:
        """Do what stays outside the timed region; the returned call does the timed work and hands out its results.

        The results are only collected when asked for, so that collecting them costs the timed region nothing.
        """
        match mode:
            case Mode.FORWARD:
                return self._forward_call(variant)
            case Mode.BACKWARD:
                return self._backward_call(variant)
            case Mode.STEP:
                return self._step_call(variant)

    def fixed(self, mode: Mode) -> Fixed:
        """The same work on tensors that stay where they are, as a CUDA graph needs it; forward or step.

        Every call begins with a forward, so that what an implementation overwrites is made anew.
        """
        assert mode is not Mode.BACKWARD
        wants_grad = mode is Mode.STEP and bool(self.gradients)
        leaves = [value.clone().requires_grad_(wants_grad) for value in self.problem.activations[0]]
        upstream = self.problem.upstream[0].clone()

        def load(variant: int) -> None:
            with torch.no_grad():
                for leaf, value in zip(leaves, self.problem.activations[variant], strict=True):
                    leaf.copy_(value)
                upstream.copy_(self.problem.upstream[variant])

        def forward() -> Callable[[], Produced]:
            with torch.no_grad():
                output = self.step.forward(*leaves)
            return lambda: {"output": output}

        def step() -> Callable[[], Produced]:
            self._drop_gradients()
            for leaf in leaves:
                leaf.grad = None
            output = self.step.forward(*leaves)
            torch.autograd.backward(output, upstream)
            # Held here, because the parameters' own are dropped before anything else runs on them; without the graph of
            # autograd, whose nodes would bind the parameters to the stream of a recording.
            kept, found = output.detach(), self._found(leaves)
            return lambda: {"output": kept, **self._canonical(found)}

        return Fixed(load, forward if mode is Mode.FORWARD else step)

    def memory(self) -> MemoryUse:
        """Bytes of one forward and backward (forward alone where it yields no gradients)."""
        leaves, upstream = self._fresh(0)

        def backward(output: Tensor) -> Produced:
            torch.autograd.backward(output, upstream)
            taken = self._collect(leaves)
            self._drop_gradients()
            for leaf in leaves:
                leaf.grad = None
            return taken

        try:
            return measure_memory(
                self.problem.device, lambda: self.step.forward(*leaves), backward if self.gradients else None
            )
        finally:
            self._drop_gradients()

    def _forward_call(self, variant: int) -> Callable[[], Callable[[], Produced]]:
        activations, _ = lay_out(self.problem, variant)
        forward = self.step.forward

        def call() -> Callable[[], Produced]:
            with torch.no_grad():
                output = forward(*activations)
            return lambda: {"output": output}

        return call

    def _step_call(self, variant: int) -> Callable[[], Callable[[], Produced]]:
        leaves, upstream = self._fresh(variant)

        def call() -> Callable[[], Produced]:
            output = self.step.forward(*leaves)
            torch.autograd.backward(output, upstream)
            return lambda: {"output": output.detach(), **self._collect(leaves)}

        return call

    def _backward_call(self, variant: int) -> Callable[[], Callable[[], Produced]]:
        leaves, upstream = self._fresh(variant)
        output = self.step.forward(*leaves)
        kept = output.detach()

        def call() -> Callable[[], Produced]:
            torch.autograd.backward(output, upstream)
            return lambda: {"output": kept, **self._collect(leaves)}

        return call

    def _with_graph(self, variant: int) -> Produced:
        leaves, _ = self._fresh(variant)
        return {"output": self.step.forward(*leaves).detach()}

    def _fresh(self, variant: int) -> tuple[list[Tensor], Tensor]:
        self._drop_gradients()
        activations, upstream = lay_out(self.problem, variant)
        return [value.requires_grad_(bool(self.gradients)) for value in activations], upstream

    def _drop_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def _collect(self, leaves: list[Tensor]) -> Produced:
        return self._canonical(self._found(leaves))

    def _found(self, leaves: list[Tensor]) -> dict[str, Tensor]:
        names = ACTIVATIONS[self.problem.case.scope]
        return {
            name: value.grad
            for name, value in (*zip(names, leaves, strict=True), *self.parameters.items())
            if value.grad is not None
        }

    def _canonical(self, found: dict[str, Tensor]) -> Produced:
        if self.step.to_canonical is not None and all(name in found for name in self.parameters):
            found = self.step.to_canonical(found)
        return {name: found.get(name) for name in self.gradients}
