"""What the audit asks of every implementation, asked of these kernels; who overwrites saved tensors is found out."""

import os

import pytest
import torch

from swiglu_bench.cases.cases import Scope
from swiglu_bench.cases.implementation import Implementation, Step, implementation
from swiglu_bench.cases.problem import Problem
from swiglu_bench.contenders import fused, pytorch
from swiglu_bench.rows.record import AuditVerdict, Record
from swiglu_bench.tasks.untimed import Asked, audit_here

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" and DEVICE.type == "cpu", reason="no GPU, and no interpreter"
)


def cell(one: Implementation, scope: Scope, check: str = "saved tensors") -> Record:
    (found,) = audit_here([one], Asked([scope], only=[check]), DEVICE)
    return found


@pytest.mark.parametrize("check", ["saved tensors", "autocast", "checkpointing", "mutated inputs"])
@pytest.mark.parametrize("name", ["silu-mul", "fused-auto", "fused-dw-torch-preact", "fused-mlp-auto"])
def test_ours_pass(name: str, check: str) -> None:
    one = fused.ROWS[name]
    for scope in one.scopes:
        assert cell(one, scope, check).verdict is AuditVerdict.PASS


def test_who_overwrites_it_is_found_out() -> None:
    class Doubles(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x + 1)
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            (saved,) = ctx.saved_tensors
            saved.data.mul_(2)  # in silence
            return gradient

    def spoils(problem: Problem) -> Step:
        step = pytorch.eager.build(problem)
        return Step(lambda x: Doubles.apply(step.forward(x)))

    found = cell(implementation("mine", scopes=["glu"], description="d")(spoils), Scope.GLU)
    assert found.verdict is AuditVerdict.FAIL
    assert "(19, 80)" in found.reason
    assert cell(pytorch.eager, Scope.GLU).verdict is AuditVerdict.PASS
    assert cell(fused.unsloth, Scope.ACTIVATION).verdict is AuditVerdict.UNSUPPORTED
