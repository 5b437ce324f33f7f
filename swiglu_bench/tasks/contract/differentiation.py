"""Checks of the backward: run twice, differentiated, recomputed, repeated, and what it does to its inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from swiglu_bench.cases.cases import ACTIVATIONS
from swiglu_bench.cases.errors import one_line
from swiglu_bench.cases.problem import Problem
from swiglu_bench.check.built import Built
from swiglu_bench.check.inputs import Draw, leaf, new_seed, torch_dtype
from swiglu_bench.check.judge import REFERENCE
from swiglu_bench.check.results import fingerprint
from swiglu_bench.check.tolerance import arithmetic_of, check, tensor_error
from swiglu_bench.tasks.contract.subject import (
    DRAW,
    PASSED,
    CheckOutcome,
    Inputs,
    Subject,
    failed,
    inputs_of,
    judge_on,
    unsupported,
    verdict,
)  # fmt: skip

REPEATS = 5


def second_backward(subject: Subject) -> CheckOutcome:
    """A second backward through a retained graph: the same again, an error, or in silence something else."""
    problem = subject.problem()
    built = subject.built(problem)
    built.train(DRAW)  # what the first backward alone cannot do is no matter of the second
    try:
        produced = built.train_twice(DRAW)
    except Exception as error:
        return unsupported(f"the second backward raises {one_line(error)}")
    outcome = judge_on(problem, inputs_of(problem, DRAW), produced)
    return outcome if outcome is PASSED else failed(f"the second backward silently differs: {outcome.reason}")


def double_backward(subject: Subject) -> CheckOutcome:
    """The gradient of the gradient of the first activation, against fp64."""
    problem = subject.problem()
    inputs, dtype = inputs_of(problem, DRAW), torch_dtype(problem.case)
    direction = inputs_of(problem, Draw(DRAW.seed + 10)).activations[0]
    eager = _differentiated_twice(Built(REFERENCE, problem).forward, inputs, direction, dtype)
    truth = _differentiated_twice(_in_fp64(problem), inputs, direction, torch.float64)
    try:
        mine = _differentiated_twice(subject.built(problem).forward, inputs, direction, dtype)
    except _Disconnected:
        return failed("the gradient is silently cut off from the graph: create_graph=True has no effect")
    except RuntimeError as error:
        return unsupported(one_line(error))
    arithmetic = arithmetic_of(problem.case, dtype, 4)
    name = f"second derivative by {ACTIVATIONS[subject.scope][0]}"
    return verdict([check(name, mine, truth, tensor_error(eager, truth), arithmetic)])


class _Disconnected(Exception):
    pass


def _differentiated_twice(
    forward: Callable[..., Tensor], inputs: Inputs, direction: Tensor, dtype: torch.dtype
) -> Tensor:
    leaves = [
        leaf(value.to(dtype if value.is_floating_point() else value.dtype, copy=True)) for value in inputs.activations
    ]
    output = forward(*leaves)
    (gradient,) = torch.autograd.grad(output, leaves[0], inputs.upstream.to(dtype), create_graph=True)
    if not gradient.requires_grad:
        raise _Disconnected
    return torch.autograd.grad(gradient, leaves[0], direction.to(dtype))[0]


def _in_fp64(problem: Problem) -> Callable[..., Tensor]:
    """The definition on fp64 weights."""
    weights = {name: value.double() for name, value in problem.weights.items()}
    biases = {name: value.double() for name, value in problem.biases.items()}
    return REFERENCE.build(dataclasses.replace(problem, weights=weights, biases=biases)).forward


def checkpointing(subject: Subject) -> CheckOutcome:
    """Under torch.utils.checkpoint, which runs the forward again in the backward."""

    def around(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *activations: checkpoint(forward, *activations, use_reentrant=False)

    return subject.wrapped(around).values()


def model_use(subject: Subject) -> CheckOutcome:
    """Calls that share a graph, gradients that add up, weights that change, a second layer, batches, frozen weights."""
    admitting, contender = subject.admitting()
    return verdict(admitting.use(contender))


def determinism(subject: Subject) -> CheckOutcome:
    """Five runs, bit for bit."""
    built = subject.built(subject.problem())
    draw = Draw(new_seed())
    first: dict[str, Tensor] = {}
    for number in range(REPEATS):
        for name, value in built.train(draw).items():
            if value is None:
                return failed(f"{name}: no gradient came back")
            mark = fingerprint(value)
            if not torch.equal(first.setdefault(name, mark), mark):
                return failed(f"{name} of run {number + 1} of {REPEATS} differs from that of run 1")
    return PASSED


def mutated_inputs(subject: Subject) -> CheckOutcome:
    """Which of its inputs, weights and the upstream gradient are other than before."""
    built = subject.built(subject.problem())
    desk = built.desk

    def marks() -> dict[str, Tensor]:
        found = {("the upstream gradient" if n == "upstream" else n): fingerprint(v) for n, v in desk.given.items()}
        return found | {name: fingerprint(value) for name, value in built.parameters.items()}

    desk.activations(DRAW)
    desk.upstream(DRAW)
    before = marks()
    for run, after in ((built.infer, "inference"), (built.train, "its backward")):
        run(DRAW)
        changed = {name for name, mark in marks().items() if not torch.equal(mark, before[name])}
        text = f"{after} overwrites {', '.join(sorted(changed))}"
        if changed and run == built.train and changed <= subject.implementation.overwrites:
            return unsupported(f"{text}, as it declares")
        if changed:
            return failed(text)
    return PASSED


def saved_tensors(subject: Subject) -> CheckOutcome:
    """What a hook on saved tensors keeps is left as it was by the backward."""
    held: list[tuple[Tensor, Tensor]] = []

    def keep(saved: Tensor) -> Tensor:
        held.append((saved, saved.detach().clone()))
        return saved

    built = subject.built(subject.problem())
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        built.train(DRAW)
    changed = sorted(
        {tuple(now.shape) for now, was in held if not torch.equal(fingerprint(now.detach()), fingerprint(was))}
    )
    if not changed:
        return PASSED
    text = f"the backward overwrites saved tensors of {', '.join(map(str, changed))} that somebody holds"
    return unsupported(f"{text}, as it declares") if subject.implementation.overwrites else failed(text)
