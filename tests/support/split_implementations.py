"""Implementations of the MLP that fail where several ranks run them: wrong, failing or dying on one rank, hanging."""

import os
import time
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.nn.functional import silu

from swiglu_bench.cases.implementation import Step, implementation
from swiglu_bench.check.judge import REFERENCE
from swiglu_bench.contenders import experts


def mlp(problem, x, factor=1.0):
    weights = problem.weights
    hidden = silu(x @ weights["w_gate"].T) * (x @ weights["w_up"].T)
    return factor * (hidden @ weights["w_down"].T)


def on_rank_1(action):
    def call():
        if dist.get_rank() == 1:
            action()

    return call


def contender(name, action=lambda: None, after=0, factor=lambda calls: 1.0):
    @implementation(name, scopes=["mlp"], description="fails")
    def build(problem):
        calls = []

        def forward(x):
            calls.append(1)
            if len(calls) > after:
                action()
            return mlp(problem, x, factor(len(calls)))

        return Step(forward)

    return build


def fail():
    raise ValueError("no such luck")


def hang():
    while True:
        time.sleep(0.01)


def wrong_on_rank_1(calls):
    return 1.0 + 0.01 * dist.get_rank()


def wrong_later(calls):
    return 1.01 if calls > 8 and dist.get_rank() == 1 else 1.0


wrong = contender("wrong", factor=wrong_on_rank_1)
later = contender("later", factor=wrong_later)
fails = contender("fails", fail)
fails_alone = contender("fails-alone", on_rank_1(fail))
dies = contender("dies", on_rank_1(lambda: os._exit(3)))
hangs = contender("hangs", on_rank_1(hang))


@implementation("spoils", scopes=["mlp"], description="changes its weights in its first call")
def spoils(problem):
    def forward(x):
        with torch.no_grad():
            problem.weights["w_up"].mul_(1.5)
        return mlp(problem, x)

    return Step(forward)


@implementation(
    "misrouted", scopes=["experts"], description="on the second rank an expert's number is off by one",
    offers=("bias", "limit"),
)  # fmt: skip
def misrouted(problem):
    forward, count = REFERENCE.build(problem).forward, len(problem.weights["w_gate"])
    return Step(lambda x, index, weights: forward(x, (index + dist.get_rank()) % count, weights))


@implementation("fused-experts", scopes=["experts"], description="the product, without its kernels",
                offers=("bias", "limit"))  # fmt: skip
def product(problem):
    return experts.fused(problem)


@implementation("unbiased", scopes=["experts"], description="the second rank forgets a bias", offers=("bias", "limit"))
def unbiased(problem):
    def forward(x, index, weights):
        biases = problem.biases | {"bias_down": problem.biases["bias_down"] * (1 - dist.get_rank())}
        return REFERENCE.build(replace(problem, biases=biases)).forward(x, index, weights)

    return Step(forward)


@implementation("no-weights", scopes=["mlp"], description="frozen", trains="inputs")
def no_weights(problem):
    return Step(lambda x: mlp(problem, x))


@implementation("forgets", scopes=["mlp"], description="gives no gradient of gate's weights")
def forgets(problem):
    frozen = {name: value.detach() if name == "w_gate" else value for name, value in problem.weights.items()}
    return Step(lambda x: torch.nn.functional.linear(
        silu(x @ frozen["w_gate"].T) * (x @ frozen["w_up"].T), frozen["w_down"]
    ))  # fmt: skip
