"""Checks of the backward: run twice, differentiated, recomputed, repeated, and what it does to its inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from swiglu_bench.audit.subject import PASSED, Outcome, Subject, failed, unsupported, verdict
from swiglu_bench.check.built import Built
from swiglu_bench.check.inputs import torch_dtype
from swiglu_bench.check.judge import REFERENCE, make_judge
from swiglu_bench.check.tolerance import check, fingerprint, same_bits, tensor_error
from swiglu_bench.spec.cases import ACTIVATIONS
from swiglu_bench.spec.costs import longest_sum
from swiglu_bench.spec.implementation import Step
from swiglu_bench.spec.problem import Problem

REPEATS = 5
NO_BACKWARD = "it has no backward"


def second_backward(subject: Subject) -> Outcome:
    """A second backward through a retained graph: the same again, an error, or in silence something else."""
    if not subject.implementation.gradients(subject.scope):
        return unsupported(NO_BACKWARD)
    problem = subject.problem()
    judge, built = make_judge(problem, 0), subject.built(problem)
    built.train(0)  # what the first backward alone cannot do is no matter of the second
    try:
        produced = built.train_twice(0)
    except Exception as error:
        return unsupported(f"the second backward raises {type(error).__name__}: {_sentence(error)}")
    outcome = verdict(judge.judge(produced))
    return outcome if outcome is PASSED else failed(f"the second backward silently differs: {outcome.reason}")


def double_backward(subject: Subject) -> Outcome:
    """The gradient of the gradient of the first activation, against fp64."""
    if not subject.implementation.gradients(subject.scope):
        return unsupported(NO_BACKWARD)
    problem = subject.problem()
    generator = torch.Generator(device=problem.device).manual_seed(1)
    direction = torch.randn(problem.activations[0][0].shape, generator=generator, device=problem.device)
    eager = _differentiated_twice(Built(REFERENCE, problem).step, problem, direction, torch_dtype(problem.case))
    truth = _differentiated_twice(Step(_in_fp64(problem)), problem, direction, torch.float64)
    try:
        mine = _differentiated_twice(subject.built(problem).step, problem, direction, torch_dtype(problem.case))
    except _Disconnected:
        return failed("the gradient is silently cut off from the graph: create_graph=True has no effect")
    except RuntimeError as error:
        return unsupported(_sentence(error))
    assert truth is not None
    assert eager is not None
    budget, terms = tensor_error(eager, truth), 4 * longest_sum(problem.case)
    name = f"second derivative by {ACTIVATIONS[subject.scope][0]}"
    return verdict([check(name, mine, truth, budget, torch_dtype(problem.case), terms)])


class _Disconnected(Exception):
    pass


def _differentiated_twice(step: Step, problem: Problem, direction: Tensor, dtype: torch.dtype) -> Tensor | None:
    leaves = [value.to(dtype, copy=True).requires_grad_() for value in problem.activations[0]]
    output = step.forward(*leaves)
    (gradient,) = torch.autograd.grad(output, leaves[0], problem.upstream[0].to(dtype), create_graph=True)
    if not gradient.requires_grad:
        raise _Disconnected
    return torch.autograd.grad(gradient, leaves[0], direction.to(dtype))[0]


def _in_fp64(problem: Problem) -> Callable[..., Tensor]:
    """The definition on fp64 weights."""
    parameters = {name: value.double() for name, value in problem.parameters.items()}
    weights = {name: parameters[name] for name in problem.weights}
    biases = {name: parameters[name] for name in problem.biases}
    return REFERENCE.build(dataclasses.replace(problem, weights=weights, biases=biases)).forward


def checkpointing(subject: Subject) -> Outcome:
    """Under torch.utils.checkpoint, which runs the forward again in the backward."""
    if not subject.implementation.gradients(subject.scope):
        return unsupported(NO_BACKWARD)

    def around(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *activations: checkpoint(forward, *activations, use_reentrant=False)

    return subject.wrapped(around).values()


def determinism(subject: Subject) -> Outcome:
    """Five runs, bit for bit."""
    problem = subject.problem()
    built = subject.built(problem)
    first: dict[str, Tensor] = {}
    for number in range(REPEATS):
        for name, value in built.train(0).items():
            if value is None:
                return failed(f"{name}: no gradient came back")
            mark = fingerprint(value)
            if not torch.equal(first.setdefault(name, mark), mark):
                return failed(f"{name} of run {number + 1} of {REPEATS} differs from that of run 1")
    return PASSED


def mutated_inputs(subject: Subject) -> Outcome:
    """Which of its inputs, weights and the upstream gradient are other than before."""
    problem = subject.problem()
    built = subject.built(problem)
    constants = {name: value.detach().clone() for name, value in built.parameters.items()}
    names = (*ACTIVATIONS[subject.scope], "the upstream gradient")
    for run, after in ((built.infer, "inference"), (built.train, "its backward")):
        run(0)
        given = (*problem.activations[0], problem.upstream[0])
        changed = {
            name for name, there, value in zip(names, problem.desk, given, strict=True) if not same_bits(there, value)
        }
        changed |= {name for name, value in built.parameters.items() if not same_bits(value.detach(), constants[name])}
        text = f"{after} overwrites {', '.join(sorted(changed))}"
        if changed and run == built.train and changed <= subject.implementation.overwrites:
            return unsupported(f"{text}, as it declares")
        if changed:
            return failed(text)
    return PASSED


def saved_tensors(subject: Subject) -> Outcome:
    """What a hook on saved tensors keeps is left as it was by the backward."""
    if not subject.implementation.gradients(subject.scope):
        return unsupported(NO_BACKWARD)
    held: list[tuple[Tensor, Tensor]] = []

    def keep(saved: Tensor) -> Tensor:
        held.append((saved, saved.detach().clone()))
        return saved

    built = subject.built(subject.problem())
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        built.train(0)
    changed = sorted({tuple(now.shape) for now, was in held if not same_bits(now.detach(), was)})
    if not changed:
        return PASSED
    text = f"the backward overwrites saved tensors of {', '.join(map(str, changed))} that somebody holds"
    return unsupported(f"{text}, as it declares") if subject.implementation.overwrites else failed(text)


def _sentence(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else text[:197] + "..."
