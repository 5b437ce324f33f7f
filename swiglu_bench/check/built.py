"""One implementation built for one problem: where its weights lie, and the calls that checks and timing make of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from swiglu_bench.cases.cases import ACTIVATIONS, Mode, Scope
from swiglu_bench.cases.implementation import Implementation, Step, taken_apart
from swiglu_bench.cases.problem import Problem
from swiglu_bench.check.inputs import Desk, Draw, leaf
from swiglu_bench.measure.resources import MemoryUse, measure_memory

Produced = dict[str, Any]
"""What a call yields: `output` and, after a backward, the gradient of each input by its name; None: none came."""
Pause = Callable[[], AbstractContextManager[object]]
"""Takes what happens in its context out of the time."""

_backward, _no_grad = torch.autograd.backward, torch.no_grad
TURN = 128
"""Rows by which each micro-batch of a step is turned against the next: a multiple of the groups of all quantisers."""
NEGATED = {Scope.GLU: ("w_up", "bias_up"), **dict.fromkeys((Scope.MLP, Scope.EXPERTS), ("w_down", "bias_down"))}
"""What changes its sign between steps of several micro-batches: so do all results but the gradients of these."""


@dataclass(frozen=True)
class View:
    """Where one weight lies in a parameter: a strided part or, with `order`, rows or columns in their own order."""

    parameter: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    order: Tensor | None = None
    """The numbers of the parameter's rows (of all matrices of a stack, counted through), as the weight has them, shaped
    as all but the last dimension of the weight; with `columns`, of columns, the same in all matrices [columns]."""
    columns: bool = False
    flipped: bool = False
    """Whether the weight is the transpose of what is in order then."""

    @classmethod
    def whole(cls, parameter: str, size: tuple[int, ...]) -> View:
        """All of a parameter."""
        return cls(parameter, size, torch.empty(size, device="meta").stride(), 0)

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the weight."""
        found = self.size
        if self.order is not None and not self.columns:
            found = (*self.order.shape, self.size[-1])
        return (*found[:-2], found[-1], found[-2]) if self.flipped else found

    def read(self, value: Tensor) -> Tensor:
        """The weight out of a contiguous tensor that has the parameter's shape: a view, with `order` a copy."""
        found = self._part(value)
        if self.order is not None and self.columns:
            found = found.index_select(-1, self.order)
        elif self.order is not None:
            found = found.flatten(0, -2).index_select(0, self.order.flatten()).view(*self.order.shape, -1)
        return found.mT if self.flipped else found

    def write(self, value: Tensor, weight: Tensor) -> None:
        """Put a weight into a contiguous tensor that has the parameter's shape."""
        part, weight = self._part(value), weight.mT if self.flipped else weight
        if self.order is None:
            part.copy_(weight)
        elif self.columns:
            part.index_copy_(-1, self.order, weight)
        else:
            part.flatten(0, -2).index_copy_(0, self.order.flatten(), weight.flatten(0, -2))

    def _part(self, value: Tensor) -> Tensor:
        return value.as_strided(self.size, self.stride, value.storage_offset() + self.offset)


Views = Mapping[str, View]
"""Which part of an implementation's own parameters is which weight."""
OWN = "own "
"""Before the name of a parameter of its own, where its gradient is handed over as it lies."""


@dataclass(frozen=True)
class OwnLayout:
    """Weights that lie in parameters of an implementation's own, which they fill."""

    sizes: Mapping[str, tuple[int, ...]]
    """Of the parameters."""
    views: Views

    @classmethod
    def of(cls, parameters: Mapping[str, Tensor], views: Views) -> OwnLayout | None:
        """The layout of parameters; None where every weight is one, or where they have room for more."""
        sizes = {name: tuple(value.shape) for name, value in parameters.items()}
        plain = all(view == View.whole(name, sizes.get(name, ())) for name, view in views.items())
        filled = sum(math.prod(view.shape) for view in views.values()) == sum(map(math.prod, sizes.values()))
        return None if plain or not filled else cls(sizes, views)

    def checked(self, weights: Mapping[str, tuple[int, ...]]) -> OwnLayout:
        """This layout, which another process has told; raises ValueError where it is none of weights of these sizes."""
        if self.views.keys() != weights.keys() or {view.parameter for view in self.views.values()} != set(self.sizes):
            raise ValueError("a layout of other weights")
        if sum(map(math.prod, self.sizes.values())) != sum(map(math.prod, weights.values())):
            raise ValueError("a layout of more or fewer elements")
        for name, view in self.views.items():
            reach = 0
            for stride, size in sorted(zip(view.stride, view.size, strict=True)):
                if size < 1 or (size > 1 and stride <= reach):
                    raise ValueError(f"a layout that has an element of {view.parameter!r} twice, or none")
                reach += (size - 1) * stride
            if view.offset + reach >= math.prod(self.sizes[view.parameter]):
                raise ValueError(f"a layout that leads out of {view.parameter!r}")
            if view.order is not None:
                last = (view.size[-1] if view.columns else math.prod(view.size[:-1])) - 1
                order = view.order.unique()
                if order.numel() != view.order.numel() or int(order.max()) > last or int(order.min()) < 0:
                    raise ValueError(f"a layout with numbers that {view.parameter!r} does not have")
            if view.shape != weights[name]:
                raise ValueError(f"a layout of another {name}")
        return self

    def to(self, device: torch.device) -> OwnLayout:
        """The same for parameters on a device."""
        orders = {name: view.order for name, view in self.views.items() if view.order is not None}
        moved = {name: replace(self.views[name], order=order.to(device)) for name, order in orders.items()}
        return replace(self, views={**self.views, **moved})

    def own(self, names: Sequence[str]) -> list[str]:
        """Names of results, with those of the parameters in the place of their weights."""
        return list(dict.fromkeys(OWN + self.views[n].parameter if n in self.views else n for n in names))

    def canonical(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Results by such names as results by the names of weights."""
        mine = {name.removeprefix(OWN): value for name, value in own.items() if name.startswith(OWN)}
        rest = {name: value for name, value in own.items() if not name.startswith(OWN)}
        return rest | take_apart(self.views, mine)

    def parts(self, own: str) -> list[str]:
        """The results that one such result stands for."""
        return [n for n, view in self.views.items() if OWN + view.parameter == own] or [own]

    def as_they_lie(self, produced: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Results by the names of weights as results of such names, in the order of `own`."""
        found: dict[str, Tensor] = {}
        for name, value in produced.items():
            view = self.views.get(name)
            if view is None:
                found[name] = value
            else:
                view.write(found.setdefault(OWN + view.parameter, value.new_zeros(self.sizes[view.parameter])), value)
        return found


def find_views(
    parameters: Mapping[str, Tensor], to_canonical: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None
) -> Views:
    """Find where each weight lies in the parameters, before any call.

    `Step.to_canonical` maps gradients in an implementation's own layout (packed, interleaved, in blocks) to those of
    the weights. It is the implementation's code, so it is read here and never runs on results: from then on the suite
    itself takes gradients apart, and puts new weights into parameters. Where it returns views, they say where a weight
    lies; where it returns copies, it is called a second time, on tensors whose elements are their numbers. Raises
    TypeError where a result is neither a view nor rows in another order, or where it writes into what it is given.
    """
    given = {  # on the CPU, where memory that nobody touches is none
        name: torch.empty_like(value, device="cpu", memory_format=torch.contiguous_format)
        for name, value in parameters.items()
    }
    homes = {value.untyped_storage().data_ptr(): name for name, value in given.items() if value.numel()}
    found = to_canonical(dict(given)) if to_canonical else given
    if changed := [name for name, value in given.items() if value._version]:
        raise TypeError(f"Step.to_canonical changes the gradient of {changed[0]!r} in place; {_DECLARE}")
    views, copies = {}, []
    for name, value in found.items():
        if type(value) is not Tensor:
            raise _not_a_layout(name, value)
        if home := homes.get(value.untyped_storage().data_ptr()):
            views[name] = View(home, tuple(value.shape), value.stride(), int(value.storage_offset()))
        else:
            copies.append(name)
    if copies and to_canonical:
        order = list(found)
        del found, value
        first, dtype = 0, torch.int32 if sum(value.numel() for value in given.values()) < 2**31 else torch.int64
        numbers = {name: torch.empty_like(value, dtype=dtype) for name, value in given.items()}
        used = {view.parameter for view in views.values() if math.prod(view.size) == given[view.parameter].numel()}
        free = [name for name in numbers if name not in used]
        for name in free:
            size = numbers[name].numel()
            torch.arange(first, first := first + size, out=numbers[name].view(-1))
        found = to_canonical(dict(numbers))
        for name in copies:
            views[name] = _rows(name, found.get(name), {home: numbers[home] for home in free}, parameters)
        return {name: views[name] for name in order}
    return views


_NUMBERS = (torch.int32, torch.int64)
_DECLARE = (
    "return the parameters' rows in the weight's order (chunk, unbind, slices, reshape, index_select, mT), no more, or "
    "declare a weight_layout, such as 'interleaved:8', and return no to_canonical"
)


def _not_a_layout(name: str, value: object) -> TypeError:
    what = f"a {type(value).__name__} that is not a part of one of the gradients it was given"
    return TypeError(f"Step.to_canonical returned for {name!r} {what}; {_DECLARE}")


def _rows(name: str, found: Any, numbers: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> View:
    """The layout of a weight, from what to_canonical made of numbered elements."""
    if type(found) is not Tensor or found.dtype not in _NUMBERS or not found.dim() or not found.numel():
        raise _not_a_layout(name, found)
    for home, number in numbers.items():
        if not number.numel() or found.min() < number.min() or found.max() > number.max():
            continue
        for flipped in (False, True) if found.dim() > 1 else (False,):
            for columns in (False, True) if number.dim() > 1 else (True,):
                order = _order(found.mT if flipped else found, number, columns)
                if order is not None:
                    order = order.to(parameters[home].device)
                    return View(home, tuple(number.shape), number.stride(), 0, order, columns, flipped)
    raise _not_a_layout(name, found)


def _order(wanted: Tensor, number: Tensor, columns: bool) -> Tensor | None:
    """The numbers of rows or columns that make `wanted` of a numbered parameter; None where it is something else."""
    wanted, number = torch.atleast_2d(wanted), torch.atleast_2d(number)
    alike = slice(None, -1) if columns else slice(-1, None)
    if wanted.shape[alike] != number.shape[alike]:
        return None
    if columns:
        order = (wanted[(0,) * (wanted.dim() - 1)] - number.flatten()[0]).long() % number.shape[-1]
    else:
        order = (wanted[..., 0] - number.flatten()[0]).long() // number.shape[-1]
    rows = number.flatten(0, -2)
    same = order.unique().numel() == order.numel() and all(  # part by part, without another copy of the whole
        torch.equal(number[k].index_select(-1, order) if columns else rows[order[k]], wanted[k])
        for k in range(len(wanted))
    )
    return order if same else None


def take_apart(views: Views, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of the own parameters as gradients of the weights; a parameter without one yields none.

    A gradient that is not a plain tensor stands for the whole of its weights, for whoever judges it to refuse.
    """
    plain = {n: type(value) is Tensor and value.layout is torch.strided for n, value in gradients.items()}
    whole = {name: value.contiguous() if plain[name] else value for name, value in gradients.items()}
    return {
        name: view.read(whole[view.parameter]) if plain[view.parameter] else whole[view.parameter]
        for name, view in views.items()
        if view.parameter in whole
    }


class Built:
    """An implementation built for a problem.

    Every call begins with a fresh forward: several implementations overwrite what they saved or were given, and
    replaying their graph would compute on garbage. Nothing of a Step is looked up after the build.
    """

    def __init__(self, implementation: Implementation, problem: Problem) -> None:
        self.implementation = implementation
        trains_weights = implementation.trains == "everything"
        self.gradients = implementation.gradients(problem.case.scope)
        if trains_weights:
            self.gradients += tuple(problem.biases)
        self.problem = problem.with_leaves(requires_grad=trains_weights)
        step = implementation.build(self.problem)
        if type(step) is not Step:
            raise TypeError(f"build returned a {type(step).__name__}; it has to return a swiglu_bench.Step")
        self.forward, self.hand_over = step.forward, step.hand_over
        self.parameters = dict(self.problem.parameters if step.parameters is None else step.parameters)
        for name, value in self.parameters.items():
            if not isinstance(value, Tensor) or not value.is_leaf:
                raise TypeError(f"the parameter {name!r} is not a leaf tensor, so it gets no gradient")
        self._plain = all(type(value) in (Tensor, torch.nn.Parameter) for value in self.parameters.values())
        if self._plain:
            layout, to_canonical = implementation.weight_layout, step.to_canonical
            if to_canonical is None and layout != "separate":
                to_canonical = taken_apart(layout, problem.case.scope is Scope.EXPERTS)
            self.views = find_views(self.parameters, to_canonical)
            self._take_apart: Callable[[dict[str, Tensor]], dict[str, Tensor]] = partial(take_apart, self.views)
            if trains_weights and (lost := sorted(set(self.problem.parameters) - set(self.views))):
                returned, where = ", ".join(map(repr, self.parameters)), f"where {' and '.join(lost)} lie in them"
                advice = "name one w_gate_up and declare its weight_layout, or return a to_canonical"
                raise TypeError(f"the parameters that it returns are {returned}, and nothing says {where}; {advice}")
            self.layout = OwnLayout.of(self.parameters, self.views) if set(self.views) <= set(self.gradients) else None
        else:  # DTensors: the layout of a split implementation is the suite's own (tp)
            self._take_apart, self.layout = step.to_canonical or dict, None
        self.as_they_lie = False
        """Whether gradients of parameters in a layout are handed out by its names, for whoever times reading them."""
        self.desk = Desk(self.problem)

    def infer(self, draw: Draw) -> Produced:
        """Forward without autograd."""
        return self.call(Mode.FORWARD, draw)()

    def train(self, draw: Draw) -> Produced:
        """Forward and backward; the output and every promised gradient. Forward alone where there are none."""
        if self.gradients:
            return self.call(Mode.BACKWARD, draw)()
        leaves = self.desk.activations(draw)
        return {"output": _detached(self.forward(*(leaf(value, False) for value in leaves)))}

    def call(self, mode: Mode, draw: Draw, upstream_first: bool = False) -> Call:
        """A call of a mode on the inputs of a draw, which are laid out when the call is prepared."""
        return Call(self, mode, draw, upstream_first)

    def recordable(self, mode: Mode) -> Callable[[], Callable[[], Produced]]:
        """The work of a forward or a step on tensors that stay where they are, as a CUDA graph needs it.

        Its inputs are whatever lies on the desk; every call begins with a forward, so that what an implementation
        overwrites is made anew.
        """
        assert mode is not Mode.BACKWARD
        leaves = [self.desk.given[name].detach() for name in self.desk.names]

        def forward() -> Callable[[], Produced]:
            with _no_grad():
                output = self.forward(*leaves)
            return lambda: {"output": output}

        def step() -> Callable[[], Produced]:
            self.drop_gradients()
            for value in leaves:
                leaf(value, bool(self.gradients)).grad = None
            output = self.forward(*leaves)
            _backward(output, self.desk.given["upstream"])
            # Held here, because the parameters' own are dropped before anything else runs on them; without the graph of
            # autograd, whose nodes would bind the parameters to the stream of a recording.
            kept, found = output.detach(), self._found(leaves)
            return lambda: {"output": kept, **self._canonical(found)}

        return forward if mode is Mode.FORWARD else step

    def ready_for_backward(self) -> Callable[[], Produced]:
        """Make a forward on a copy of what lies on the desk; what is returned makes its backward."""
        leaves = [leaf(self.desk.given[name].clone(), bool(self.gradients)) for name in self.desk.names]
        output = self.forward(*leaves)

        def backward() -> Produced:
            self.drop_gradients(leaves)
            _backward(output, self.desk.given["upstream"])
            return {"output": _detached(output), **self._collect(leaves)}

        return backward

    def run_on(self, activations: Sequence[Tensor], upstream: Tensor, twice: bool = False) -> Produced:
        """Run a forward and a backward on given tensors: other strides, sizes or values than those of a draw.

        `twice`: the backward runs again through the retained graph, and only its second gradients count.
        """
        self.drop_gradients()
        leaves = [leaf(value.detach(), bool(self.gradients)) for value in activations]
        output = self.forward(*leaves)
        if twice:
            _backward(output, upstream.clone(), retain_graph=True)
            self.drop_gradients(leaves)
        if self.gradients:
            _backward(output, upstream)
        return {"output": _detached(output), **self._collect(leaves)}

    def set_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Change the weights in place, as an optimiser does."""
        with _no_grad():
            for name, view in self.views.items():
                view.write(self.parameters[view.parameter].detach(), weights[name])

    def step_weights(self, negate: bool) -> None:
        """Write all weights in place, as an optimiser does; some with the other sign."""
        names = NEGATED[self.problem.case.scope] if negate else ()
        values = {n: view.read(self.parameters[view.parameter].detach()) for n, view in self.views.items()}
        self.set_weights({name: -value if name in names else value.clone() for name, value in values.items()})

    def memory(self, draw: Draw) -> MemoryUse:
        """Measure the bytes of one forward and backward (of the forward alone where it yields no gradients)."""
        self.drop_gradients()
        leaves = [leaf(value, bool(self.gradients)) for value in self.desk.activations(draw)]
        upstream = self.desk.upstream(draw)

        def backward(output: Tensor) -> Produced:
            _backward(output, upstream)
            taken = self._found(leaves)  # not taken apart, which is the suite's own memory
            self.drop_gradients(leaves)
            return taken

        wanted = backward if self.gradients else None
        try:
            return measure_memory(self.problem.device, lambda: self.forward(*leaves), wanted)
        finally:
            self.drop_gradients()

    def drop_gradients(self, leaves: Sequence[Tensor] = ()) -> None:
        """Set the gradients of the parameters, and of some activations, to None."""
        for value in (*self.parameters.values(), *leaves):
            value.grad = None

    def _collect(self, leaves: list[Tensor]) -> Produced:
        return self._canonical(self._found(leaves))

    def _found(self, leaves: list[Tensor]) -> dict[str, Tensor]:
        named = (*zip(ACTIVATIONS[self.problem.case.scope], leaves, strict=True), *self.parameters.items())
        return {name: value.grad for name, value in named if value.grad is not None}

    def _canonical(self, found: dict[str, Tensor]) -> Produced:
        if self.layout and self.as_they_lie:
            return {name: found.get(name.removeprefix(OWN)) for name in self.layout.own(self.gradients)}
        own = {name: value for name, value in found.items() if name in self.parameters}
        if self._plain or len(own) == len(self.parameters):
            found = found | self._take_apart(own)
        return {name: found.get(name) for name in self.gradients}


class Call:
    """One call of an implementation, split into what is timed and what is not.

    The upstream gradient is drawn after the forward has returned, so that no forward can know it; a step whose time
    cannot be paused for that has it drawn before (`upstream_first`).

    A step of several micro-batches is a forward and backward of each, on the same rows in another order. Before it the
    weights are written, by chance with another sign of some, and after it they are put back. It hands out the means of
    what its micro-batches yield, with the signs of the weights that were there before.
    """

    def __init__(self, built: Built, mode: Mode, draw: Draw, upstream_first: bool) -> None:
        self._built, self._mode, self._draw, self._upstream_first = built, mode, draw, upstream_first
        self._count = built.problem.case.accumulate if mode is Mode.STEP else 1
        self._batches: list[list[Tensor]] = []
        self._outputs: list[Any] = []
        self._negates = False

    def __call__(self) -> Produced:
        """Make the whole call, untimed."""
        self.begin()
        self.prepare()
        self.run(nullcontext)
        return self.results()

    def begin(self) -> None:
        """Of a backward: lay out the activations and run the forward, which are not timed."""
        if self._mode is Mode.BACKWARD:
            self._lay_out(self._draw)
            self._forward(self._batches[0])

    def prepare(self, given: Draw | None = None) -> None:
        """Lay out the other inputs, as a given draw has them, by default the call's own."""
        given = given or self._draw
        if self._mode is not Mode.BACKWARD:
            self._lay_out(given)
        if self._mode is Mode.BACKWARD or (self._mode is Mode.STEP and self._upstream_first):
            self._lay_out_upstream(given)

    def run(self, pause: Pause) -> None:
        """The timed work."""
        if self._mode is Mode.FORWARD:
            with _no_grad():
                self._forward(self._batches[0])
            return
        for number, leaves in enumerate(self._batches):
            if self._mode is Mode.STEP:
                self._forward(leaves)
                if not self._upstream_first and not number:
                    with pause():
                        self._lay_out_upstream(self._draw)
            _backward(self._outputs[number], self._upstreams[number])

    def results(self) -> Produced:
        """Hand out what it produced."""
        outputs, self._outputs = list(map(_detached, self._outputs)), []
        found = self._built._collect(self._batches[-1]) if self._mode is not Mode.FORWARD else {}
        if self._count > 1:
            self._built.step_weights(self._negates)
            return self._means(outputs, found)
        return {"output": outputs[0], **found}

    def _means(self, outputs: list[Any], found: Produced) -> Produced:
        built, layout = self._built, self._built.layout if self._built.as_they_lie else None
        rows = {"output": outputs}
        rows |= {n: [leaves[at].grad for leaves in self._batches] for at, n in enumerate(built.desk.names)}
        means: Produced = {name: None if value is None else value / self._count for name, value in found.items()}
        for name, values in rows.items():
            if not any(value is None for value in values):
                alike = [value.roll(-turn, 0) for value, turn in zip(values, self._turns, strict=True)]
                means[name] = torch.stack(alike).mean(0, dtype=torch.float32).to(values[0].dtype)
        if self._negates and not any(value is None for value in means.values()):
            means = layout.canonical(means) if layout else means
            means = {n: value if n in NEGATED[built.problem.case.scope] else -value for n, value in means.items()}
            means = layout.as_they_lie(means) if layout else means
        return means

    @property
    def _turns(self) -> Sequence[int]:
        """Of each micro-batch, in rows; of the last, none."""
        return range(TURN * (self._count - 1), -1, -TURN)

    def _turned(self, value: Tensor) -> list[Tensor]:
        return [value.roll(turn, 0) if turn else value for turn in self._turns]

    def _lay_out(self, draw: Draw) -> None:
        self._built.drop_gradients()
        wanted, given = self._mode is not Mode.FORWARD, self._built.desk.activations(draw)
        turned = zip(*map(self._turned, given), strict=True)
        self._batches = [[leaf(value, wanted) for value in values] for values in turned]
        if self._count > 1:
            self._negates = bool(draw.seed & 1)
            self._built.step_weights(self._negates)

    def _lay_out_upstream(self, draw: Draw) -> None:
        self._upstreams = self._turned(self._built.desk.upstream(draw))

    def _forward(self, leaves: Sequence[Tensor]) -> None:
        output = self._built.forward(*leaves)
        if not isinstance(output, Tensor):
            kind = "None" if output is None else f"a {type(output).__name__}"
            raise TypeError(f"forward returned {kind}; it has to return one tensor")
        self._outputs.append(output)


def _detached(output: Any) -> Any:
    return output.detach() if type(output) is Tensor else output
