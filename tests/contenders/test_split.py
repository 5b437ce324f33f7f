"""The rows of Megatron's dispatchers on one that is acted, in plain torch: a rank of two that sees all tokens."""

import importlib.util
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from swiglu_bench.cases.cases import Dtype, Experts, Mode, Scope, Shape
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.check.inputs import Desk, Draw, make_problem
from swiglu_bench.check.judge import compute_truth
from swiglu_bench.contenders import split
from swiglu_bench.tasks.tp import SplitCase
from swiglu_bench.tasks.tp.judge import part_of

RANKS = 2
SHAPE = Shape("s", 16, 32, "a test", (12,), Experts(6, 2))
CASE = SplitCase(SHAPE, 12, Dtype.FLOAT32, Scope.EXPERTS, Mode.STEP, ranks=RANKS)


class Dispatcher:
    """Megatron's methods, as the rows call them; what has no expert of this rank goes nowhere."""

    def __init__(self, count: int, mine: list[int], config: Any, groups: Any) -> None:
        assert (count, config.num_moe_experts, config.expert_model_parallel_size) == (len(mine), RANKS * count, RANKS)
        assert vars(groups) == {"ep": "all", "tp_ep": "all", "expt_tp": None}
        self.mine, self.config = mine, config

    def dispatch_preprocess(self, x: Tensor, chosen: Tensor, probabilities: Tensor) -> tuple[Tensor, Tensor]:
        assert (chosen.dtype, probabilities.dtype) == (torch.bool, torch.float32)
        assert chosen.sum(1).eq(self.config.moe_router_topk).all()
        assert not probabilities[~chosen].any()
        self.like, self.chosen = x, chosen[:, self.mine]
        return x, probabilities

    def token_dispatch(self, x: Tensor, probabilities: Tensor) -> tuple[Tensor, Tensor]:
        return x, probabilities[:, self.mine]

    def dispatch_postprocess(self, x: Tensor, probabilities: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        expert, self.token = self.chosen.T.nonzero(as_tuple=True)
        return x[self.token], self.chosen.sum(0), probabilities[self.token, expert]

    def combine_preprocess(self, found: Tensor) -> Tensor:
        return found

    token_combine = combine_preprocess

    def combine_postprocess(self, found: Tensor) -> Tensor:
        return torch.zeros_like(self.like).index_add(0, self.token, found)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What dispatchers are asked for; what a row gives to torch.compile runs as it is."""
    heard: list[tuple[str, ...]] = []

    def acted(kind: str) -> Any:
        def make(count: int, mine: list[int], config: Any, groups: Any) -> Dispatcher:
            heard.append((kind, config.moe_token_dispatcher_type, getattr(config, "moe_flex_dispatcher_backend", "")))
            return Dispatcher(count, mine, config, groups)

        return make

    kinds = ("MoEAlltoAllTokenDispatcher", "MoEFlexTokenDispatcher")
    for name, contents in {
        "process_groups_config": {"ProcessGroupCollection": types.SimpleNamespace},
        "transformer.moe": {},
        "transformer.moe.token_dispatcher": {kind: acted(kind) for kind in kinds},
        "transformer.transformer_config": {"TransformerConfig": types.SimpleNamespace},
    }.items():
        module = types.ModuleType(f"megatron.core.{name}")
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    dispatchers = sys.modules["megatron.core.transformer.moe.token_dispatcher"]
    monkeypatch.setattr(sys.modules["megatron.core.transformer.moe"], "token_dispatcher", dispatchers, raising=False)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    return heard


@pytest.mark.parametrize("known", split.MEGATRON, ids=lambda known: known.name)
def test_each_rank_has_its_experts_part(known: Implementation, asked: list[tuple[str, ...]]) -> None:
    whole, draw = make_problem(CASE, "cpu", seed=3), Draw(5)
    desk = Desk(whole)
    upstream, summed = desk.upstream(draw), dict.fromkeys(("output", "x", "top_k_weights"), torch.tensor(0.0))
    truth = compute_truth(whole, desk.activations(draw), upstream)
    for rank in range(RANKS):
        part = part_of(types.SimpleNamespace(rank=rank, size=RANKS), whole)  # type: ignore[arg-type]
        for weight in part.weights.values():
            weight.requires_grad_()
        mesh: Any = types.SimpleNamespace(
            size=lambda: RANKS, get_local_rank=lambda rank=rank: rank, get_group=lambda: "all"
        )
        step = split.split(known, mesh, whole, by_sequence=True).build(part)
        x, index, weights = desk.activations(draw)
        leaves = [x.requires_grad_(), weights.requires_grad_(), *(own := step.parameters or {}).values()]
        out = step.forward(x, index, weights)
        d_x, d_weights, *others = torch.autograd.grad(out, leaves, upstream)
        for name, value in {"output": out.detach(), "x": d_x, "top_k_weights": d_weights}.items():
            summed[name] = summed[name] + value
        assert step.to_canonical
        for name, value in step.to_canonical(dict(zip(own, others, strict=True))).items():
            torch.testing.assert_close(value.double(), truth[name].chunk(RANKS)[rank], rtol=1e-5, atol=1e-6)
    for name, value in summed.items():
        torch.testing.assert_close(value.double(), truth[name], rtol=1e-5, atol=1e-6)
    alltoall = "MoEAlltoAllTokenDispatcher", "alltoall", ""
    assert asked == [alltoall if known is split.MEGATRON[0] else ("MoEFlexTokenDispatcher", "flex", "deepep")] * RANKS


def test_why_they_take_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"triton", "megatron", "deep_ep"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in there else None)
    monkeypatch.setattr(split, "find_spec", importlib.util.find_spec)
    alltoall, deep_ep = split.MEGATRON
    for known in split.MEGATRON:
        assert split.why_not(known, "cuda", True, 2) is known.unavailable("cuda", capability="9.0") is None
        assert "needs a GPU" in str(known.unavailable("cpu"))
    assert (split.why_not(alltoall, "cuda", True, 1), "several" in str(split.why_not(deep_ep, "cuda", True, 1))) == (
        None,
        True,
    )
    there -= {"megatron"}
    assert "megatron is not installed" in str(split.why_not(deep_ep, "cuda", True, 2))
    assert alltoall.unavailable("cuda", capability="9.0") == "The package megatron is not installed."
    there -= {"deep_ep"}
    assert deep_ep.unavailable("cuda", capability="9.0") == "The package deep_ep is not installed."
    sequence = split.why_not(split.async_tp, "cuda", False, 2), split.why_not(split.async_tp, "cpu", True, 2)
    assert ["sequence parallelism" in str(sequence[0]), "needs GPUs" in str(sequence[1])] == [True, True]
    assert split.why_not(split.async_tp, "cuda", True, 2) is None
