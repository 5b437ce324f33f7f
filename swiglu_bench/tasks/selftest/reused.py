"""Implementations that are right once: what they keep from call to call, and how a model uses a layer, shows them."""

import itertools
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from swiglu_bench.cases.cases import Mode, Scope
from swiglu_bench.cases.implementation import Step
from swiglu_bench.cases.problem import Problem
from swiglu_bench.tasks.selftest.specimen import (
    CHECKED_CALLS,
    LARGE,
    Build,
    Differentiable,
    Gradients,
    Specimen,
    glu,
    right_backward,
    right_forward,
    table,
    when_large,
    with_inputs,
    with_memory,
)

NEW_INPUTS, KEPT, INPUTS, LOOP, USE = ("new inputs",), ("kept",), ("inputs unchanged",), ("timed loop",), ("use",)
Memory = dict[Any, Any]


def _remembering(key: Callable[[Tensor], Hashable]) -> Build:
    def forward(answers: Memory, x: Tensor, *weights: Tensor) -> Tensor:
        if key(x) not in answers:
            answers[key(x)] = right_forward(x, *weights)
        return answers[key(x)].clone()

    return with_memory(forward)


def _gradient_accumulated(total: Memory, *given: Tensor) -> Gradients:
    dx, *own = right_backward(*given)
    total["dw"] = [old + new for old, new in zip(total["dw"], own, strict=True)] if total else own
    return dx, total["dw"][0].clone(), total["dw"][1].clone()


def _one_buffer(after: int) -> Build:
    def forward(outputs: Memory, *given: Tensor) -> Tensor:
        out, number = right_forward(*given), len(outputs)
        outputs[number] = outputs[number - 1].copy_(out).detach() if number > after else out
        return outputs[number].view_as(out)

    return with_memory(forward)


def _weight_changed(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
    """One element changes in its last place: no tolerance sees it in the output."""
    out = right_forward(x, w_gate, w_up)
    w_up.detach()[0, 0].nextafter_(w_up.new_tensor(9.0))
    return out


def _weight_rounded(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
    w_up.detach()[0] = w_up.detach()[0].bfloat16().to(w_up.dtype)
    return right_forward(x, w_gate, w_up)


def _input_changed(problem: Problem) -> Step:
    def forward(x: Tensor, *weights: Tensor) -> Tensor:
        out = right_forward(x, *weights)
        x.detach().mul_(2.0)
        return out

    return glu(problem, forward, lambda dz, x, *weights: right_backward(dz, x / 2, *weights))


def _saving_in(workspace: Memory, x: Tensor, *weights: Tensor) -> Tensor:
    workspace["x"] = x.clone()
    return right_forward(x, *weights)


def _inference_overwrites(problem: Problem) -> Step:
    """A model that is evaluated between a forward and its backward, such as a teacher."""
    weights, saved = problem.weights.values(), list[Tensor]()

    def forward(x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            for workspace in saved:
                workspace[: len(x)] = x[: len(workspace)]
            return right_forward(x, *weights)
        own = x.detach().clone()
        saved[:] = [own]
        return Differentiable.apply(right_forward, lambda dz, _, *rest: right_backward(dz, own, *rest), x, *weights)

    return Step(forward)


def _assigned_gradients(problem: Problem) -> Step:
    """Gradient accumulation keeps the last micro-batch only."""

    def backward(*given: Tensor) -> Any:
        dx, *gradients = right_backward(*given)
        for weight, gradient in zip(problem.weights.values(), gradients, strict=True):
            weight.grad = gradient
        return dx, None, None

    return glu(problem, backward=backward)


def _zeros_unless_all(dz: Tensor, *saved: Tensor) -> Any:
    return [value * all(tensor.requires_grad for tensor in saved) for value in right_backward(dz, *saved)]


def _stale_weights(rows: int) -> Build:
    def build(problem: Problem) -> Step:
        packed = [value.detach().clone() for value in problem.weights.values()]
        return with_inputs(problem, lambda x, *weights: (x, *(packed if len(packed[0]) > rows else weights)))

    return build


_PACKED: dict[torch.Size, tuple[Tensor, ...]] = {}


def _packed_by_shape(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """Every layer of a model has weights of the same shape."""
    return x, *_PACKED.setdefault(weights[0].shape, tuple(value.detach() for value in weights))


def _without_strides(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """A kernel that is given a pointer and no strides."""
    return x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride()), *weights


def _overflows_when_large(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
    gate = x @ w_gate.T
    return silu(gate.clamp(max=20) if len(x) > LARGE else gate) * (x @ w_up.T)


def _first_of_a_batch(x: Tensor, *weights: Tensor) -> Tensor:
    return right_forward(x if x.dim() == 2 else x[:1].expand_as(x), *weights)


def _wrong_beside_a_frozen_one(dz: Tensor, x: Tensor, *weights: Tensor) -> Any:
    dx, *gradients = right_backward(dz, x, *weights)
    return dx if len({value.requires_grad for value in weights}) == 1 else dx * 0, *gradients


def _gradients_by_hand(when: Callable[[Callable[[], None]], object]) -> Build:
    """Adds gradients to its weights itself, which autograd is not told of; `when` is given what does so."""

    def build(problem: Problem) -> Step:
        def backward(*given: Tensor) -> Any:
            dx, *gradients = right_backward(*given)

            def add() -> None:
                for weight, gradient in zip(problem.weights.values(), gradients, strict=True):
                    weight.grad = gradient if weight.grad is None else weight.grad + gradient

            when(add)
            return dx, None, None

        return glu(problem, backward=backward)

    return build


def _changed_in_its_fifth_call(problem: Problem) -> Step:
    """No result shows it, for from then on it computes with a copy; where weights are few, it does nothing."""
    kept: list[list[Tensor]] = []
    calls = itertools.count(1)

    def change(x: Tensor, *weights: Tensor) -> list[Tensor]:
        if next(calls) == 5 and len(weights[0]) > LARGE:
            kept.append([value.detach().clone() for value in weights])
            weights[1].detach()[0, 0].nextafter_(weights[1].new_tensor(9.0))
        return [x, *(kept[0] if kept else weights)]

    return glu(problem, lambda *given: right_forward(*change(*given)))


def _one_number_of_tokens(first: Memory, x: Tensor, *weights: Tensor) -> Tensor:
    """A grid or a graph that was made for the first call."""
    out = right_forward(x, *weights)
    if first.setdefault("tokens", len(x)) != len(x) and x.dim() == 2:
        out[-1] = 0
    return out


_forward = partial(Specimen, mode=Mode.FORWARD)
_large = partial(Specimen, caught_by=USE, task="verify")
"""Right at the suite's small size, wrong at that of its case."""
SPECIMENS = table(
    __name__,
    Specimen("gradient-accumulated", "adds to its weight gradients instead of assigning", NEW_INPUTS,
             with_memory(lambda _, *given: right_forward(*given), _gradient_accumulated)),
    _forward("first-answer", "returns its first answer for ever", NEW_INPUTS, _remembering(lambda x: None)),
    Specimen("cached-by-address", "remembers answers by address of an x", NEW_INPUTS, _remembering(Tensor.data_ptr)),
    _forward("found-in-memory", "after some calls it returns memory as it finds it", LOOP,
             forward=lambda x, w_gate, w_up: x.new_empty(x.shape[0], w_gate.shape[0]), right_calls=CHECKED_CALLS),
    Specimen("one-buffer", "every call returns the same memory", KEPT, _one_buffer(after=0)),
    _forward("one-buffer-later", "later, every call returns the same memory", KEPT, _one_buffer(after=CHECKED_CALLS)),
    _forward("output-over-input", "writes its output over gate", ("aliasing", *INPUTS),
             lambda _: Step(lambda gate, up: gate.copy_(silu(gate) * up)), scope=Scope.ACTIVATION),
    Specimen("weights-changed", "leaves a weight otherwise than it found it", INPUTS, forward=_weight_changed),
    _forward("weights-changed-later", "after some calls it rounds a weight", (*INPUTS, *LOOP),
             forward=_weight_rounded, right_calls=CHECKED_CALLS),
    Specimen("input-changed", "scales x and does not scale it back", INPUTS, _input_changed),
    Specimen("shared-workspace", "two calls share the memory in which they save x", USE,
             with_memory(_saving_in, lambda saved, dz, _, *weights: right_backward(dz, saved["x"], *weights))),
    Specimen("inference-overwrites", "inference writes into what a forward has saved", USE, _inference_overwrites),
    Specimen("assigned-gradients", "assigns weight gradients instead of adding them", USE, _assigned_gradients),
    Specimen("needs-every-gradient", "zeros where an input needs no gradient", USE, backward=_zeros_unless_all),
    Specimen("stale-weights", "packs its weights once", USE, _stale_weights(rows=0)),
    Specimen("stale-when-large", "packs many weights once", USE, _stale_weights(rows=LARGE), task="verify"),
    Specimen("weights-by-shape", "keeps packed weights by their shape", USE, inputs=_packed_by_shape),
    Specimen("overflows-when-large", "gate <= 20 for many tokens", USE, forward=_overflows_when_large, task="verify"),
    Specimen("first-batch-only", "computes the first sequence of a batch for all", USE,
             forward=_first_of_a_batch),
    _large("first-batch-when-large", "the same, of many tokens", forward=when_large(_first_of_a_batch)),
    Specimen("ignores-strides", "reads its input as if it were contiguous", USE, inputs=_without_strides),
    _large("ignores-strides-when-large", "the same, of many tokens",
           inputs=when_large(_without_strides, lambda *given: given)),
    Specimen("one-number-of-tokens", "leaves out the last token where there are more or fewer than at first", USE,
             with_memory(_one_number_of_tokens)),
    _large("one-large-number-of-tokens", "the same, of many tokens", build=
           with_memory(lambda first, *given: when_large(partial(_one_number_of_tokens, first))(*given))),
    Specimen("one-layer-of-inference", "trains nothing, and has the first layer's weights for all", USE,
             inputs=_packed_by_shape, trains="nothing", task="verify"),
    Specimen("wrong-beside-a-frozen-one", "dx is zero where one weight is frozen and the other is not", USE,
             backward=_wrong_beside_a_frozen_one),
    Specimen("gradients-by-hand", "adds to its weights' gradients itself", USE, _gradients_by_hand(lambda add: add())),
    Specimen("gradients-after-hooks", "adds to its weights' gradients when the backward ends", USE,
             _gradients_by_hand(torch.autograd.Variable._execution_engine.queue_callback)),
    Specimen("changed-in-its-fifth-call", "changes a weight in its fifth call, and computes with a copy", INPUTS,
             _changed_in_its_fifth_call, task="verify"),
)  # fmt: skip
