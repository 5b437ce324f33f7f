import importlib.util

import pytest

from swiglu_bench.cases import registry
from swiglu_bench.cases.cases import Precision, Scope, differentiable, tensors
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.contenders import CATALOGUE

UNPREDICTED = {"fused-mlp-chunked", "quack", "quack-tuned", "flash-swiglu-mlp", "tile-kernels"}
"""The peak of a chunked one is no fixed number of whole tensors, and the peers' kernels allocate as they like."""


@pytest.mark.parametrize("one", CATALOGUE, ids=lambda one: one.name)
def test_entries_are_complete(one: Implementation) -> None:
    assert [other.name for other in CATALOGUE].count(one.name) == 1
    assert registry.find(one.declared()).build == one.build, "in its process"
    assert one.description
    assert one.scopes
    unpredicted = one.name in UNPREDICTED or Precision.UNQUANTISED not in one.precisions
    assert set(one.footprints) == (set() if unpredicted else one.scopes - {Scope.EXPERTS})
    assert "," not in one.name, "a comma separates names on the command line"
    assert one.imports.partition(".")[0] in ("", one.package, "swiglu_kernels"), "which is installed with the suite"
    frozen = one.name in {"fused", "fused-preact"}
    forward = one.name in {"triton-kernels", "deep-gemm", "tileops", "transformers-deepgemm"}
    forward |= one.package == "flashinfer"
    assert {one.gradients(scope) for scope in one.scopes} == {
        () if forward else differentiable(scope) if frozen else tensors(scope) for scope in one.scopes
    }


@pytest.mark.parametrize("one", CATALOGUE, ids=lambda one: one.name)
def test_a_gpu_with_all_packages_runs_everything(one: Implementation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert one.unavailable("cuda") == (one.absent or None)
