"""The rows of other projects, on packages of the same names and signatures written in plain torch."""

import contextlib
import dataclasses
import importlib
import importlib.util
import sys
import types
from typing import Any

import pytest
import torch
from judged import judge_here
from specimens import SMALL, small_case
from torch import Tensor
from torch.nn.functional import silu

from swiglu_bench.cases import definition
from swiglu_bench.cases.cases import Case, Dtype, Extras, Mode, RoutingKind, Scope, Shape
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.check.built import Built
from swiglu_bench.check.inputs import Desk, Draw, make_problem, new_seed
from swiglu_bench.check.judge import Judge
from swiglu_bench.contenders import experts, peers
from swiglu_kernels import reference

ALL = (
    peers.quack, peers.quack_tuned, peers.flash_swiglu_mlp, peers.liger_mlp, experts.quack_experts,
    experts.liger_experts, experts.triton_kernels, experts.deep_gemm, experts.sonic_moe, experts.tileops,
    *experts.FLASHINFER, peers.tile_kernels,
)  # fmt: skip
ROWS = [(one, scope) for one in ALL for scope in sorted(one.scopes)]


BLOCK = 4
"""Rows, of the DeepGEMM that is acted here."""


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


class TritonKernels:
    """What the row takes from Triton's kernels; the metadata are the sizes of the slices."""

    @staticmethod
    def make_ragged_tensor_metadata(sizes: Tensor, rows: int) -> list[int]:
        assert (sizes.dtype, int(sizes.sum())) == (torch.int32, rows)
        return sizes.tolist()

    @staticmethod
    def swiglu(both: Tensor, alpha: float, limit: float | None) -> Tensor:
        return definition.gate_mul(both[..., ::2], both[..., 1::2], limit, alpha, 1.0)

    @staticmethod
    def matmul(
        a: Tensor, b: Tensor, bias: Tensor | None, a_ragged_metadata: list[int], gather_indx: Tensor | None = None,
        scatter_indx: Tensor | None = None, gammas: Tensor | None = None, fused_activation: Any = None,
    ) -> Tensor:  # fmt: skip
        assert a.is_contiguous()
        assert {index.dtype for index in (gather_indx, scatter_indx) if index is not None} == {torch.int32}
        assert bias is None or bias.dtype is torch.float32
        parts = (a if gather_indx is None else a[gather_indx]).split(a_ragged_metadata)
        found = torch.cat([rows @ one for rows, one in zip(parts, b, strict=True)])
        if bias is not None:
            found = found + bias.repeat_interleave(torch.tensor(a_ragged_metadata), 0)
        if fused_activation is not None:
            specs, arguments = fused_activation
            assert (specs["args"], specs["reduction_n"]) == (("alpha", "limit"), 2)
            found = specs["fn"](found, *arguments)
        found = found if gammas is None else found * gammas[:, None]
        return found if scatter_indx is None else torch.empty_like(found).index_copy_(0, scatter_indx.long(), found)


def grouped_product(a: Tensor, b: Tensor, d: Tensor, ends: Tensor, *, use_psum_layout: bool) -> None:
    """DeepGEMM's m_grouped_bf16_gemm_nt_contiguous; what lies between the groups is NaN."""
    assert (use_psum_layout, ends.dtype, len(a) % BLOCK) == (True, torch.int32, 0)
    assert {a.requires_grad, b.requires_grad} == {False}
    d.fill_(torch.nan)
    start = 0
    for weights, end in zip(b, ends.tolist(), strict=True):
        assert start <= end <= len(a)
        d[start:end] = a[start:end] @ weights.T
        start = -(-end // BLOCK) * BLOCK


def by_32(
    x: Tensor, index: Tensor, weights: Tensor, w_up_gate: Tensor, w_down: Tensor, experts: int, top_k: int, *,
    use_fused_finalize: bool, swiglu_limit: float | None = None, swiglu_alpha: float = 1.0, swiglu_beta: float = 0.0,
) -> Tensor:  # fmt: skip
    """FlashInfer's cute_dsl_fused_moe_bf16."""
    assert (experts, top_k, weights.dtype) == (len(w_down), index.shape[1], torch.float32)
    assert isinstance(use_fused_finalize, bool)
    up, gate = (part.flatten(1, 2) for part in w_up_gate.unflatten(1, (-1, 2, 32)).unbind(2))
    names = dict(zip(("w_gate", "w_up", "w_down"), (gate, up, w_down), strict=True))
    variant = {"limit": swiglu_limit, "alpha": swiglu_alpha, "up_offset": swiglu_beta}
    return definition.experts(x, int32(index), weights, names, **variant)


def int32(index: Tensor) -> Tensor:
    assert index.dtype is torch.int32
    return index.long()


def tileops(x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, index: Tensor, *biases: Tensor) -> Tensor:
    """TileOPs' FusedMoEExpertsFwdOp."""
    assert weights.dtype is torch.float32
    given = dict(zip(("b_gate_up", "b_down"), biases, strict=bool(biases)))
    return reference.swiglu_experts(x, w_gate_up, w_down, int32(index), weights.to(x.dtype), **given)


def general_routing(
    x: Tensor, scores: Tensor, token: Tensor, expert: Tensor, w1: Tensor, b1: None, w2: Tensor, b2: None, experts: int,
    stream: int, activation: str, *, is_inference_mode_enabled: bool,
) -> tuple[Tensor, None]:  # fmt: skip
    """SonicMoE's moe_general_routing_inputs; weights [n, k, experts] in memory as [experts, n, k]."""
    assert (w1.permute(2, 0, 1).is_contiguous(), w2.permute(2, 0, 1).is_contiguous(), b1, b2) == (
        True,
        True,
        None,
        None,
    )
    assert (is_inference_mode_enabled, activation) == (not torch.is_grad_enabled(), "swiglu")
    assert int32(token).equal(torch.arange(len(x)).repeat_interleave(len(expert) // len(x)))
    index, weights = (value.unflatten(0, (len(x), -1)) for value in (int32(expert), scores))
    own = {"w_gate": w1[::2].permute(2, 0, 1), "w_up": w1[1::2].permute(2, 0, 1), "w_down": w2.permute(2, 0, 1)}
    return definition.experts(x, index, weights, own), None


def swiglu_backward(both: Tensor, d_hidden: Tensor, fmt: str) -> tuple[Tensor]:
    """TileKernels' backward of silu(gate) * up."""
    assert (both.dim(), d_hidden.is_contiguous(), fmt) == (2, True, "bf16")
    with torch.enable_grad():
        leaf = both.detach().requires_grad_()
        return torch.autograd.grad(silu(leaf.chunk(2, 1)[0]) * leaf.chunk(2, 1)[1], leaf, d_hidden)


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
        "deep_gemm": {
            "get_mk_alignment_for_contiguous_layout": lambda: BLOCK,
            "m_grouped_bf16_gemm_nt_contiguous": grouped_product,
        },
        "triton_kernels": {},
        "triton_kernels.matmul": {
            "FnSpecs": lambda name, fn, args, reduction_n: {"fn": fn, "args": args, "reduction_n": reduction_n},
            "FusedActivation": lambda specs, arguments: (specs, arguments),
            "matmul": TritonKernels.matmul,
        },
        "triton_kernels.reduce": {"reduce": lambda rows, dim: (rows.sum(dim), None)},
        "triton_kernels.swiglu": {"swiglu_fn": TritonKernels.swiglu},
        "triton_kernels.tensor": {"make_ragged_tensor_metadata": TritonKernels.make_ragged_tensor_metadata},
        "flashinfer": {"cute_dsl_fused_moe_bf16": by_32, "autotune": lambda tune, **buckets: contextlib.nullcontext()},
        "flashinfer.fused_moe.utils": {"map_to_hybrid_bucket_uncapped": int},
        "tile_kernels.quant": {
            "swiglu_forward": lambda both, fmt: silu(both.chunk(2, 1)[0]) * both.chunk(2, 1)[1],
            "swiglu_backward": swiglu_backward,
        },
        "tileops.moe": {"FusedMoEExpertsFwdOp": lambda: tileops},
        "sonicmoe": {"moe_general_routing_inputs": general_routing},
        "sonicmoe.enums": {"ActivationType": types.SimpleNamespace(SWIGLU="swiglu")},
        "liger_kernel.ops.fused_moe": {"LigerFusedMoEFunction": types.SimpleNamespace(apply=fused_moe)},
    }.items():
        module = types.ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch, "compile", lambda function=None, **options: function or (lambda given: given))
    return fake


def of_32(one: Implementation) -> Shape:
    """A small shape that a row takes."""
    return dataclasses.replace(SMALL, hidden=64, intermediate=192) if one.multiple in (32, 64) else SMALL


def failures(one: Implementation, case: Case, device: str = "cpu") -> list[str]:
    """What is wrong with the results of two calls."""
    problem, failed = make_problem(case, device), []
    judge, built = Judge(problem), Built(one, problem)
    for draw in (Draw(new_seed()), Draw(new_seed())):
        produced = built.infer(draw) if case.mode is Mode.FORWARD else built.train(draw)
        checks = judge_here(judge, produced, draw, others=built.parameters.values())
        assert {check.tensor for check in checks} == {"output", *produced}
        gradients = len(one.gradients(case.scope)) + len(problem.biases)
        assert len(checks) == 1 + (case.mode is not Mode.FORWARD) * gradients
        failed += [f"{check.tensor}: {check.reason}" for check in checks if not check.ok]
    return failed


@pytest.mark.parametrize("mode", [Mode.FORWARD, Mode.STEP])
@pytest.mark.parametrize(("one", "scope"), ROWS, ids=lambda part: getattr(part, "name", part))
def test_a_row_is_right_if_its_package_is(quack: Quack, one: Implementation, scope: Scope, mode: Mode) -> None:
    assert failures(one, small_case(scope=scope, mode=mode, shape=of_32(one))) == []
    if one.package == "quack":
        assert set(quack.tuned) == {one is peers.quack_tuned}


@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize(
    ("one", "extras"),
    [
        (experts.triton_kernels, Extras(limit=0.5)),
        (experts.triton_kernels, Extras(bias=True)),
        (experts.triton_kernels, Extras(bias=True, limit=0.5, alpha=1.702, interleaved=True)),
        (experts.deep_gemm, Extras(limit=0.5, alpha=1.702, interleaved=True)),
        (experts.FLASHINFER[0], Extras(limit=0.5)),
        (experts.FLASHINFER[1], Extras(limit=0.5, alpha=1.702, interleaved=True)),
        (experts.tileops, Extras(bias=True)),
    ],
)
def test_every_gate_that_it_offers(quack: Quack, one: Implementation, extras: Extras, tokens: int) -> None:
    shape = dataclasses.replace(small_case(scope=Scope.EXPERTS, shape=of_32(one)).shape, extras=extras)
    assert failures(one, small_case(scope=Scope.EXPERTS, mode=Mode.FORWARD, tokens=tokens, shape=shape)) == []


def test_those_of_transformers_are_its_own() -> None:
    """Those that fetch kernels raise what transformers says without the package that fetches them."""
    pytest.importorskip("transformers")
    grouped, batched, *hub = experts.TRANSFORMERS
    for routing in (RoutingKind.UNIFORM, RoutingKind.LOCAL):
        for extras in (Extras(), Extras(bias=True, limit=0.5, alpha=1.702, interleaved=True)):
            case = small_case(scope=Scope.EXPERTS, shape=dataclasses.replace(SMALL, extras=extras))
            case = dataclasses.replace(case, shape=case.shape.routed(routing))
            assert failures(grouped, case) == []
            assert routing is RoutingKind.LOCAL or failures(batched, case) == []
    problem = make_problem(small_case(scope=Scope.EXPERTS), "cpu")
    for one in hub:
        with pytest.raises((ImportError, ValueError)):
            one.build(problem).forward(*Desk(problem).activations(Draw(1)))


# Where they do not run


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.name)
def test_only_with_its_package_on_the_gpus_it_is_made_for(one: Implementation, monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"triton", one.package}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in there else None)
    assert one.unavailable("cuda", capability="9.0") is one.unavailable("cuda") is None
    older, cpu = str(one.unavailable("cuda", True, "8.0")), str(one.unavailable("cpu", True))
    needs = "It needs a GPU of compute capability 9.x"
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
