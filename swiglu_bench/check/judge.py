"""The truth of a problem, and how far plain eager PyTorch is from it in the case's dtype: what others are judged by."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from swiglu_bench.check import tolerance
from swiglu_bench.check.built import Built, Produced
from swiglu_bench.check.inputs import torch_dtype
from swiglu_bench.check.truth import compute_truth
from swiglu_bench.rows.record import TensorCheck
from swiglu_bench.spec.cases import Mode, Scope
from swiglu_bench.spec.costs import longest_sum
from swiglu_bench.spec.implementation import Step, implementation
from swiglu_bench.spec.problem import Problem
from swiglu_kernels import reference


class Sealed:
    """An fp64 tensor that nobody can use who merely finds it: its bits lie under random ones until it is opened.

    A contender runs in the same process as its judge, and Python hides nothing: gc.get_objects() lists every tensor.
    """

    def __init__(self, value: Tensor) -> None:
        self.shape, self.device = value.shape, value.device
        self._seed = secrets.randbits(62)
        self._bits = value.contiguous().view(torch.int64).bitwise_xor_(self._pad())

    def _pad(self) -> Tensor:
        generator = torch.Generator(device=self.device).manual_seed(self._seed)
        limits = torch.iinfo(torch.int64)
        return torch.randint(limits.min, limits.max, self.shape, generator=generator, device=self.device)

    def open(self) -> Tensor:
        """A copy of the value."""
        return self._bits.bitwise_xor(self._pad()).view(torch.float64)


@dataclass(frozen=True)
class Judge:
    """The fp64 truth of one variant of a problem, and eager PyTorch's distance from it, per tensor."""

    truth: Mapping[str, Sealed]
    eager: Mapping[str, tolerance.TensorError]
    dtype: torch.dtype
    longest_sum: int

    def judge(
        self, produced: Produced, label: str = "{}", others: Iterable[Tensor] = (), distribution: bool = False
    ) -> tuple[TensorCheck, ...]:
        """One verdict for each produced tensor.

        `label` words its name, as in "{} (inference)"; `others` are tensors whose memory no result may share.
        """
        others = list(others)
        return tuple(
            tolerance.check(
                label.format(name), value, self.truth[name].open(), self.eager[name], self.dtype, self.longest_sum,
                others, distribution,
            )
            for name, value in produced.items()
        )  # fmt: skip

    def poison(self) -> None:
        """Poison the memory that the next contender will get for its results."""
        device = next(iter(self.truth.values())).device
        tolerance.poison([one.shape for one in self.truth.values()], self.dtype, device)


def make_judge(problem: Problem, variant: int) -> Judge:
    """Compute the truth and run the reference once; nothing of either is left in the open."""
    truth = compute_truth(problem, variant)
    built = Built(REFERENCE, problem)
    produced = built.infer(variant) if problem.case.mode is Mode.FORWARD else built.train(variant)
    errors = {name: tolerance.tensor_error(value, truth[name]) for name, value in produced.items() if value is not None}
    sealed = {name: Sealed(value) for name, value in truth.items()}
    return Judge(sealed, errors, torch_dtype(problem.case), longest_sum(problem.case))


@implementation(
    "reference",
    scopes=Scope,
    description="the definition of SwiGLU, in eager PyTorch",
    offers=("bias", "limit", "packed"),
)
def _reference(problem: Problem) -> Step:
    definitions: dict[Scope, Callable[..., Tensor]] = {
        Scope.ACTIVATION: reference.gate_mul,
        Scope.GLU: reference.swiglu_glu,
        Scope.MLP: reference.swiglu_mlp,
    }
    define, limit = definitions[problem.case.scope], problem.extras.limit
    return Step(lambda *activations: define(*activations, *problem.parameters.values(), limit=limit))


REFERENCE = _reference
"""The definition as an implementation: eager PyTorch in the dtype of the case."""
