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


def after_a_few_calls(name, action):
    """Right but for later calls, whose result is `action` of all answers."""

    @implementation(name, scopes=["glu"], description="wrong after a few calls")
    def build(problem):
        answers = []

        def forward(x):
            answers.append(glu(x, problem))
            right = len(answers) <= RIGHT_CALLS or used_as_a_model_does(problem)
            return answers[-1] if right else action(answers)

        return Step(forward)

    return build


def break_down(answers):
    raise FloatingPointError("worn out")


def make(name, build, **fields):
    return implementation(name, scopes=["glu"], description="deserves to be caught", **fields)(build)


def raise_error(error):
    raise error


def without_gradients(problem):
    weights = {name: value.detach() for name, value in problem.weights.items()}
    return Step(lambda x: torch.nn.functional.silu(x @ weights["w_gate"].T) * (x @ weights["w_up"].T))


stale = after_a_few_calls("stale", lambda answers: answers[RIGHT_CALLS - 1])
late = after_a_few_calls("late", lambda answers: answers[-2])
fragile = after_a_few_calls("fragile", break_down)
unbuilt = make("unbuilt", lambda problem: raise_error(RuntimeError("no such\ntile")))
foreign = make("foreign", lambda problem: raise_error(AssertionError("built")), package="surely_not_installed.part")
frozen = make("frozen", mine.build, trains="inputs")
forgetful = make("forgetful", without_gradients)
inference = make("inference", lambda problem: Step(lambda x: glu(x, problem).detach()), trains="nothing")
not_an_implementation = 3
