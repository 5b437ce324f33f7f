"""The rows of other projects, on packages of the same names and signatures written in plain torch."""

import importlib
import importlib.util
import sys
import types
from typing import Any

import pytest
import torch
from judged import judge_here
from specimens import small_case
from torch import Tensor
from torch.nn.functional import silu

from swiglu_bench.cases.cases import Case, Dtype, Mode, Scope, Shape
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.check.built import Built
from swiglu_bench.check.inputs import Draw, make_problem, new_seed
from swiglu_bench.check.judge import Judge
from swiglu_bench.contenders import experts, peers
from swiglu_kernels import reference

ALL = (
    peers.quack, peers.quack_tuned, peers.flash_swiglu_mlp, peers.liger_mlp, experts.quack_experts,
    experts.liger_experts,
)  # fmt: skip
ROWS = [(one, scope) for one in ALL for scope in sorted(one.scopes)]


def gated(product: Tensor) -> Tensor:
    return silu(product[..., ::2]) * product[..., 1::2]


class Quack:
    """QuACK's functions as far as the rows call them; the weights are interleaved."""

    def __init__(self) -> None:
        self.tuned: list[bool] = []

    def product(self, x: Tensor, weight: Tensor, activation: str, *, tuned: bool) -> Tensor:
        assert activation == "swiglu"
        self.tuned.append(tuned)
        return x @ weight.T

    def gemm_gated(self, A: Tensor, B: Tensor, *, store_preact: bool, **options: Any) -> tuple[Tensor | None, Tensor]:
        if "cu_seqlens_m" in options:
            assert options.pop("activation") == "swiglu"
            both = self.gemm(A, B, **options)
            return both if store_preact else None, gated(both)
        assert (store_preact, torch.is_grad_enabled()) == (False, False)
        return None, gated(self.product(A, B.T, **options))

    def gemm(
        self, A: Tensor, B: Tensor, *, tuned: bool, cu_seqlens_m: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None, A_idx: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Rows by expert, or sums over the rows of each expert."""
        self.tuned.append(tuned)
        starts = cu_seqlens_m if cu_seqlens_k is None else cu_seqlens_k
        assert starts is not None
        assert starts.dtype is torch.int32
        parts = [slice(*ends) for ends in zip(starts.tolist(), starts.tolist()[1:], strict=False)]
        if cu_seqlens_k is not None:
            return torch.stack([A[:, part] @ B[part] for part in parts])
        rows = A if A_idx is None else A[A_idx]
        return torch.cat([rows[part] @ one for part, one in zip(parts, B, strict=True)])

    def linear_gated_func(self, x: Tensor, weight: Tensor, activation: str, *, tuned: bool) -> tuple[Tensor, Tensor]:
        preactivation = self.product(x, weight, activation, tuned=tuned)
        return preactivation, gated(preactivation).detach()  # its post-activations carry no gradient

    def mlp_func(self, x: Tensor, weight1: Tensor, weight2: Tensor, activation: str, *, tuned: bool) -> Tensor:
        return gated(self.product(x, weight1, activation, tuned=tuned)) @ weight2.T


def swiglu_mlp(input: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor) -> Tensor:
    """What flash-swiglu-mlp and liger-kernel's LigerMLPFunction take; the input is [batch, tokens, hidden]."""
    assert input.dim() == 3
    return (silu(input @ gate_weight.T) * (input @ up_weight.T)) @ down_weight.T


def fused_moe(x: Tensor, gate_up_proj: Tensor, down_proj: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What liger-kernel's LigerFusedMoEFunction takes."""
    assert top_k_index.dtype is torch.int32
    return reference.swiglu_experts(x, gate_up_proj, down_proj, top_k_index, top_k_weights)


@pytest.fixture
def quack(monkeypatch: pytest.MonkeyPatch) -> Quack:
    """The packages; what a row gives to torch.compile runs as it is."""
    fake = Quack()
    for name, contents in {
        "quack": {},
        "quack.gemm_interface": {"gemm_gated": fake.gemm_gated, "gemm": fake.gemm},
        "quack.linear": {"linear_gated_func": fake.linear_gated_func},
        "quack.mlp": {"mlp_func": fake.mlp_func},
        "flash_swiglu_mlp": {"flash_swiglu": swiglu_mlp},
        "liger_kernel.ops.mlp": {"LigerMLPFunction": types.SimpleNamespace(apply=swiglu_mlp)},
        "liger_kernel.ops.fused_moe": {"LigerFusedMoEFunction": types.SimpleNamespace(apply=fused_moe)},
    }.items():
        module = types.ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    return fake


def failures(one: Implementation, case: Case, device: str = "cpu") -> list[str]:
    """What is wrong with the results of two calls."""
    problem, failed = make_problem(case, device), []
    judge, built = Judge(problem), Built(one, problem)
    for draw in (Draw(new_seed()), Draw(new_seed())):
        produced = built.infer(draw) if case.mode is Mode.FORWARD else built.train(draw)
        checks = judge_here(judge, produced, draw, others=built.parameters.values())
        assert {check.tensor for check in checks} == {"output", *produced}
        assert len(checks) == 1 + (case.mode is not Mode.FORWARD) * len(one.gradients(case.scope))
        failed += [f"{check.tensor}: {check.reason}" for check in checks if not check.ok]
    return failed


@pytest.mark.parametrize("mode", [Mode.FORWARD, Mode.STEP])
@pytest.mark.parametrize(("one", "scope"), ROWS, ids=lambda part: getattr(part, "name", part))
def test_a_row_is_right_if_its_package_is(quack: Quack, one: Implementation, scope: Scope, mode: Mode) -> None:
    assert failures(one, small_case(scope=scope, mode=mode)) == []
    if one.package == "quack":
        assert set(quack.tuned) == {one is peers.quack_tuned}


# Where they do not run


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.name)
def test_only_with_its_package_on_the_gpus_it_is_made_for(one: Implementation, monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"triton", one.package}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in there else None)
    assert one.unavailable("cuda", capability="9.0") is one.unavailable("cuda") is None
    older, cpu = str(one.unavailable("cuda", True, "8.0")), str(one.unavailable("cpu", True))
    needs = "It needs a GPU of compute capability 9.x or 10.x"
    assert (older.startswith(needs), cpu.startswith(needs)) == (bool(one.gpus), bool(one.gpus))
    assert older.endswith("this GPU has 8.0." if one.gpus else "None")
    assert "there is none here." in cpu or "a GPU only" in cpu
    there.remove(one.package)
    assert one.unavailable("cuda", capability="9.0") == f"The package {one.package} is not installed."


# On a GPU, with the real packages


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("one", "scope"), [row for row in ROWS if not row[0].on_request], ids=lambda part: getattr(part, "name", part)
)
def test_the_real_package(one: Implementation, scope: Scope) -> None:
    capability = "{}.{}".format(*torch.cuda.get_device_capability())
    shape = Shape("s", 256, 384, "a test", (130,))
    case = small_case(shape=shape, tokens=130, dtype=Dtype.BFLOAT16, scope=scope)
    reason = one.refuses(case) or one.unavailable("cuda", capability=capability)
    if reason:
        pytest.skip(reason)
    importlib.import_module(one.package)
    assert failures(one, case, "cuda") == []
