"""A wrong or cheating implementation as data: what is wrong with it, where it shows, and which checks must catch it.

Before the class are the parts that specimens are made of: a correct forward and backward, and what changes them.
"""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from swiglu_bench.cases.cases import Dtype, Mode, Precision, Scope
from swiglu_bench.cases.implementation import Implementation, Offer, Step, Trains, implementation
from swiglu_bench.cases.problem import Problem
from swiglu_bench.contenders import pytorch

CHECKED_CALLS = 24
"""More calls than come before the first that is timed."""
LARGE = 96
"""More tokens than a call of the suite's small layers has."""

Build = Callable[[Problem], Step]
Gradients = tuple[Tensor, Tensor, Tensor]
"""dx, dw_gate and dw_up."""
Forward = Callable[..., Tensor]
Backward = Callable[..., Any]
"""x, w_gate and w_up to the output; the upstream gradient and the same three to the gradients."""


def right_forward(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
    """SwiGLU."""
    return torch.nn.functional.silu(x @ w_gate.T) * (x @ w_up.T)


def gate_gradients(dz: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """d_gate and d_up, by the operations of eager's own backward."""
    return torch.ops.aten.silu_backward(dz * up, gate), dz * torch.nn.functional.silu(gate)


def right_backward(dz: Tensor, x: Tensor, w_gate: Tensor, w_up: Tensor) -> Gradients:
    """dx, dw_gate and dw_up; x and dz are [..., features]."""
    flat, d_hidden = x.flatten(0, -2), dz.flatten(0, -2)
    d_gate, d_up = gate_gradients(d_hidden, flat @ w_gate.T, flat @ w_up.T)
    return (d_gate @ w_gate + d_up @ w_up).view_as(x), d_gate.T @ flat, d_up.T @ flat


class Differentiable(torch.autograd.Function):
    """A forward with a backward of its own: `backward(dz, *inputs)` returns a gradient for each input."""

    @staticmethod
    def forward(ctx: Any, forward: Callable[..., Tensor], backward: Callable[..., Any], *inputs: Tensor) -> Tensor:
        """The output, as `forward` has it."""
        ctx.save_for_backward(*inputs)
        ctx.differentiate = backward
        return forward(*inputs)

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients, as `backward` has them."""
        return (None, None, *ctx.differentiate(dz, *ctx.saved_tensors))


def glu(problem: Problem, forward: Forward = right_forward, backward: Backward = right_backward) -> Step:
    """The Step of a forward and a backward; each is correct unless given."""
    return Step(lambda x: Differentiable.apply(forward, backward, x, *problem.weights.values()))


def with_inputs(problem: Problem, change: Callable[..., Iterable[Tensor]]) -> Step:
    """The correct forward and backward of other values than they were given: what `change` makes of x and weights."""
    return glu(
        problem, lambda *given: right_forward(*change(*given)), lambda dz, *saved: right_backward(dz, *change(*saved))
    )


def right_at_first(forward: Forward, calls: int = CHECKED_CALLS) -> Forward:
    """The correct forward in the first calls, for as long as it is checked, and `forward` from then on."""
    number = itertools.count(1)
    return lambda *given: (right_forward if next(number) <= calls else forward)(*given)


def when_large(wrong: Callable[..., Any], right: Callable[..., Any] = right_forward) -> Callable[..., Any]:
    """What is right for few tokens, as a kernel is that takes another way for many."""
    return lambda *given: (wrong if given[0][..., 0].numel() > LARGE else right)(*given)


def with_memory(forward: Forward, backward: Backward | None = None) -> Build:
    """A forward and backward that get, before their other arguments, a dictionary that both find again."""

    def build(problem: Problem) -> Step:
        memory: dict[Any, Any] = {}
        return glu(problem, partial(forward, memory), partial(backward, memory) if backward else right_backward)

    return build


@dataclass(frozen=True)
class Specimen:
    """A wrong implementation, the case that it is sent through, and the checks that must catch it."""

    name: str
    fault: str
    """What is wrong with it."""
    caught_by: tuple[str, ...]
    """At least one of these checks must catch it: of `record.FAULTS`, or of the audit for the task "audit"."""
    build: Build | None = None
    """Builds it, unless the next fields say what is wrong with it."""
    forward: Forward = right_forward
    """Right for the first `right_calls` calls."""
    right_calls: int = 0
    backward: Backward = right_backward
    gradients: Callable[[Tensor, Tensor, Tensor], Gradients] | None = None
    """What the backward makes of the correct dx, dw_gate and dw_up."""
    inputs: Callable[..., Iterable[Tensor]] | None = None
    """What both compute with in the place of x, w_gate and w_up."""
    change: Callable[[], object] | None = None
    """What the build changes that is not its own."""
    _: KW_ONLY
    scope: Scope = Scope.GLU
    dtype: Dtype = Dtype.FLOAT32
    mode: Mode = Mode.STEP
    task: str = "time"
    """The part of the suite that has to catch it: time, verify or audit."""
    needs: Literal["cpu", "cuda"] | None = None
    """The one kind of device on which there is something wrong with it; None: any."""
    tokens: int | None = None
    """The tokens of its case, where the usual number would not show the fault."""
    precision: Precision = Precision.UNQUANTISED
    spares: Callable[[], Path] | None = None
    """A file of another's that it would change, were it where it looks for one: it must stay as it is."""
    trains: Trains = "everything"
    offers: tuple[Offer, ...] = ()
    source: str = ""
    """The module whose table holds it; its process finds it there."""

    @property
    def implementation(self) -> Implementation:
        """The contender that is sent through the suite."""
        return Implementation(
            self.name, self.fault, frozenset({self.scope}), self.build or self._by_fields, source=self.source,
            precisions=frozenset({self.precision}), trains=self.trains, offers=frozenset(self.offers),
        )  # fmt: skip

    def _by_fields(self, problem: Problem) -> Step:
        gradients = self.gradients
        if self.change:
            self.change()
        if self.inputs:
            return with_inputs(problem, self.inputs)
        if gradients:
            return glu(problem, backward=lambda *given: gradients(*right_backward(*given)))
        return glu(problem, right_at_first(self.forward, self.right_calls), self.backward)


def table(source: str, *specimens: Specimen) -> dict[str, Specimen]:
    """The specimens of the module `source`, by name."""
    return {specimen.name: replace(specimen, source=source) for specimen in specimens}


# Right ones that look like a cheat

SLOW_TIMES = 4
TRIED_CALLS = 4
RIGHT = partial(implementation, scopes=[Scope.GLU])
"""Of a GPU's streams, graphs and memory: declares a right implementation that uses them."""


@implementation(
    "slow", scopes=Scope, description=f"eager, whose forward runs {SLOW_TIMES} times in each call",
    offers=("bias", "limit"),
)  # fmt: skip
def slow(problem: Problem) -> Step:
    """A correct implementation that looks like a cheat: its turns take much longer than eager's."""
    step = pytorch.eager.build(problem)
    return replace(step, forward=lambda *given: [step.forward(*given) for _ in range(SLOW_TIMES)][-1])


def _on_plain_tensors(problem: Problem, forward: Forward) -> Step:
    """`forward` of inference; with gradients, or while a graph is recorded, the correct one."""
    weights = tuple(problem.weights.values())

    def call(x: Tensor) -> Tensor:
        plain = torch.is_grad_enabled() or torch.cuda.is_current_stream_capturing()
        return (right_forward if plain else forward)(x, *weights)

    return Step(call)


@RIGHT("joins-its-stream", description="computes up on a stream that it forks and joins")
def joins_its_stream(problem: Problem) -> Step:
    """A stream of its own, used as PyTorch's notes on CUDA semantics ask."""
    stream, (w_gate, w_up) = torch.cuda.Stream(problem.device), problem.weights.values()

    def forward(x: Tensor) -> Tensor:
        here = torch.cuda.current_stream()
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            up = x @ w_up.T
        gate = torch.nn.functional.silu(x @ w_gate.T)
        here.wait_stream(stream)
        up.record_stream(here)
        return gate * up

    return Step(forward)


@RIGHT("waits-for-the-gpu", description="returns when the GPU has done its work")
def waits_for_the_gpu(problem: Problem) -> Step:
    """A call that synchronises, as a routing that is read on the host does."""

    def forward(x: Tensor, *weights: Tensor) -> Tensor:
        output = right_forward(x, *weights)
        torch.cuda.current_stream().synchronize()
        return output

    return _on_plain_tensors(problem, forward)


@RIGHT("replays-its-graph", description="replays a CUDA graph of its own in inference")
def replays_its_graph(problem: Problem) -> Step:
    """A graph for each size that is asked for."""
    graphs: dict[Any, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}

    def forward(x: Tensor, *weights: Tensor) -> Tensor:
        if x.shape not in graphs:
            given = x.contiguous().clone()
            right_forward(given, *weights)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                output = right_forward(given, *weights)
            graphs[x.shape] = graph, given, output
        graph, given, output = graphs[x.shape]
        given.copy_(x)
        graph.replay()
        return output.clone()

    return _on_plain_tensors(problem, forward)


@RIGHT("has-a-pool", description="takes memory from a pool of its own in inference")
def has_a_pool(problem: Problem) -> Step:
    """A torch.cuda.MemPool."""
    pool = torch.cuda.MemPool()

    def forward(*given: Tensor) -> Tensor:
        with torch.cuda.use_mem_pool(pool):
            return right_forward(*given)

    return _on_plain_tensors(problem, forward)


@RIGHT("tunes-itself", description="times two ways in its first calls and takes the faster")
def tunes_itself(problem: Problem) -> Step:
    """As autotuners do, on the tensors of the first calls."""
    linear, number = torch.nn.functional.linear, itertools.count()
    ways: list[Forward] = [
        right_forward, lambda x, gate, up: torch.nn.functional.silu(linear(x, gate)).mul_(linear(x, up))
    ]  # fmt: skip
    took = [0.0, 0.0]

    def forward(*given: Tensor) -> Tensor:
        call = next(number)
        if call >= TRIED_CALLS:
            return ways[took.index(min(took))](*given)
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        output = ways[call % 2](*given)
        last.record()
        last.synchronize()
        took[call % 2] += first.elapsed_time(last)
        return output

    return _on_plain_tensors(problem, forward)


@RIGHT("rows-by-turns", description="gate and up by turns of 8 rows", weight_layout="interleaved:8")
def by_turns(problem: Problem) -> Step:
    """The layout of kernels whose tiles have both (CUTLASS, FlashInfer)."""
    pair = [value.detach().unflatten(0, (-1, 8)) for value in problem.weights.values()]
    both = torch.stack(pair, 1).flatten(0, 2).requires_grad_()

    def forward(x: Tensor) -> Tensor:
        gate, up = (x @ both.mT).unflatten(-1, (-1, 2, 8)).unbind(-2)
        return (torch.nn.functional.silu(gate) * up).flatten(-2)

    return Step(forward, {"w_gate_up": both})


@RIGHT("transposed", description="weights as [hidden, intermediate]")
def transposed(problem: Problem) -> Step:
    """The layout of most mixtures' checkpoints."""
    own = {name: value.detach().mT.contiguous().requires_grad_() for name, value in problem.weights.items()}
    return Step(
        lambda x: torch.nn.functional.silu(x @ own["w_gate"]) * (x @ own["w_up"]), own,
        lambda given: {name: value.mT for name, value in given.items()},
    )  # fmt: skip


HONEST = (by_turns, transposed)
"""Whatever they are timed on."""
HONEST_ON_A_GPU = (joins_its_stream, waits_for_the_gpu, replays_its_graph, has_a_pool, tunes_itself)
