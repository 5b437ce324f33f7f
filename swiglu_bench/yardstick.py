"""The truth of a problem, and how far plain eager PyTorch is from it in the case's dtype: what others are judged by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from swiglu_bench import validate
from swiglu_bench.cases import Mode, Scope
from swiglu_bench.costs import longest_sum
from swiglu_bench.problem import Problem, torch_dtype
from swiglu_bench.record import TensorCheck
from swiglu_bench.registry import Step, implementation
from swiglu_bench.trial import Produced, Trial
from swiglu_bench.truth import compute_truth
from swiglu_kernels import reference


@dataclass(frozen=True)
class Yardstick:
    """The fp64 truth of one variant of a problem, and eager PyTorch's distance from it, per tensor."""

    truth: Mapping[str, Tensor]
    eager: Mapping[str, validate.TensorError]
    dtype: torch.dtype
    longest_sum: int

    def judge(self, produced: Produced, label: str = "{}") -> tuple[TensorCheck, ...]:
        """One verdict for each produced tensor; `label` words its name, as in "{} (inference)"."""
        return tuple(
            validate.check(label.format(name), value, self.truth[name], self.eager[name], self.dtype, self.longest_sum)
            for name, value in produced.items()
        )

    def poison(self) -> None:
        """Poison the memory that the next contender will get for its results."""
        validate.poison(self.truth, self.dtype)


def make_yardstick(problem: Problem, variant: int) -> Yardstick:
    """Compute the truth and run the reference once."""
    truth = compute_truth(problem, variant)
    trial = Trial(_reference, problem)
    produced = trial.infer(variant) if problem.case.mode is Mode.FORWARD else trial.train(variant)
    errors = {name: validate.tensor_error(value, truth[name]) for name, value in produced.items() if value is not None}
    return Yardstick(truth, errors, torch_dtype(problem.case), longest_sum(problem.case))


@implementation("reference", scopes=Scope, description="the definition of SwiGLU, in eager PyTorch")
def _reference(problem: Problem) -> Step:
    definitions: dict[Scope, Callable[..., Tensor]] = {
        Scope.ACTIVATION: reference.silu_mul,
        Scope.GLU: reference.swiglu_glu,
        Scope.MLP: reference.swiglu_mlp,
    }
    define = definitions[problem.case.scope]
    return Step(lambda *activations: define(*activations, *problem.weights.values()))
