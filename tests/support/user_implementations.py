"""Implementations as a user writes them in a file of their own: a right one, and some that deserve to be caught."""

import torch

from swiglu_bench import Step, implementation
from swiglu_bench.check.usage import SIZES


def glu(x, problem):
    gate, up = x @ problem.weights["w_gate"].T, x @ problem.weights["w_up"].T
    return torch.nn.functional.silu(gate) * up


@implementation("mine", scopes=["glu"], description="two products and a gate")
def mine(problem):
    return Step(lambda x: glu(x, problem))


@implementation("swapped", scopes=["glu"], description="takes gate for up")
def swapped(problem):
    gate, up = problem.weights["w_gate"], problem.weights["w_up"]
    return Step(lambda x: torch.nn.functional.silu(x @ up.T) * (x @ gate.T))


RIGHT_CALLS = 2  # those of the checks that come before the timed loop


def used_as_a_model_does(problem):
    """Whether the call is of the scenarios, which have sizes of their own: there, these are right."""
    return problem.case.shape.hidden == SIZES["cpu"][0]


@implementation("stale", scopes=["glu"], description="after a few calls it remembers its last answer")
def stale(problem):
    answers = []

    def forward(x):
        if len(answers) < RIGHT_CALLS or used_as_a_model_does(problem):
            answers.append(glu(x, problem))
        return answers[-1]

    return Step(forward)


@implementation("late", scopes=["glu"], description="after a few calls it answers what the call before was asked")
def late(problem):
    answers = []

    def forward(x):
        answers.append(glu(x, problem))
        return answers[-1 if len(answers) <= RIGHT_CALLS or used_as_a_model_does(problem) else -2]

    return Step(forward)


@implementation("unbuilt", scopes=["glu"], description="cannot be built")
def unbuilt(problem):
    raise RuntimeError("no such\ntile")


@implementation("fragile", scopes=["glu"], description="breaks after a few calls")
def fragile(problem):
    calls = []

    def forward(x):
        calls.append(1)
        if len(calls) > RIGHT_CALLS and not used_as_a_model_does(problem):
            raise FloatingPointError("worn out")
        return glu(x, problem)

    return Step(forward)


@implementation("frozen", scopes=["glu"], description="no weight gradients", trains="inputs")
def frozen(problem):
    return Step(lambda x: glu(x, problem))


@implementation("forgetful", scopes=["glu"], description="promises weight gradients and yields none")
def forgetful(problem):
    weights = {name: value.detach() for name, value in problem.weights.items()}
    return Step(lambda x: torch.nn.functional.silu(x @ weights["w_gate"].T) * (x @ weights["w_up"].T))


@implementation("inference", scopes=["glu"], description="has no backward", trains="nothing")
def inference(problem):
    return Step(lambda x: glu(x, problem).detach())


@implementation("foreign", scopes=["glu"], description="needs a package", package="surely_not_installed.part")
def foreign(problem):
    raise AssertionError("built although its package is missing")


not_an_implementation = 3
