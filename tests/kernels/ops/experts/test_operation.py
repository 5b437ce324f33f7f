import functools

import pytest
import torch
from accuracy import DEVICE, assert_as_accurate_as_eager, check_against_reference, random_tensor
from clamped import keep_off_limit
from mixtures import GPT_OSS, drawn, layer
from torch.library import opcheck

from swiglu_kernels import backend_for, reference, swiglu_experts
from swiglu_kernels.ops.experts import choice, portable_gemv, portable_pairs
from swiglu_kernels.ops.experts import operation as experts
from swiglu_kernels.ops.gate.formula import Formula
from swiglu_kernels.tiles.rules import expert_tile_rows

pytestmark = pytest.mark.skipif(backend_for(DEVICE) == "torch", reason="no kernel can run here: no Triton")

NAMES = "x w_gate_up w_down top_k_weights b_gate_up b_down"
FLOAT16 = torch.float16


def problem(
    index: torch.Tensor, count: int, hidden: int, intermediate: int, dtype: torch.dtype, layout: str = "contiguous"
) -> list[torch.Tensor]:
    return layer(index, count, hidden, intermediate, dtype, layout, out=hidden + 3)


def called(function, index, options, x, w_gate_up, w_down, weights, b_gate_up=None, b_down=None):
    return function(x, w_gate_up, w_down, index, weights, b_gate_up=b_gate_up, b_down=b_down, **options)


def check(index: torch.Tensor, inputs: list[torch.Tensor], gate: dict | None = None, **options: object) -> None:
    keep_off_limit(gate or {}, inputs[0], inputs[1:2], inputs[4:5])
    check_against_reference(
        NAMES,
        functools.partial(called, swiglu_experts, index, (gate or {}) | options),
        functools.partial(called, reference.swiglu_experts, index, gate or {}),
        inputs,
    )


@pytest.mark.parametrize(
    ("dtype", "layout", "gate", "biased", "recompute"),
    [
        (torch.float32, "strided", GPT_OSS, True, False),
        (torch.float16, "transposed", GPT_OSS, True, True),
        (torch.bfloat16, "half", {}, False, False),
        (torch.float32, "contiguous", {"activation": "gelu_tanh"}, True, True),
        (torch.bfloat16, "contiguous", {"activation": "silu_clamp", "limit": 1.0}, True, False),
        (torch.float32, "half", {"activation": "silu_softcap", "limit": (1.0, 2.0)}, True, False),
    ],
)
def test_output_and_gradients(dtype, layout, gate, biased, recompute):
    index = drawn(19, 3, 4, beyond=1)
    check(index, problem(index, 4, 35, 18, dtype, layout)[: 6 if biased else 4], gate, recompute=recompute)


FEW = [
    torch.tensor([[2, 0]]),
    torch.tensor([[3, 1, 4, 1, -1, 0]]),
    torch.tensor([[1, 1, 4], [-1, 1, 0], [3, 3, 3]]),  # an expert twice, and some that do not exist
    torch.full((3, 2), 4),
    drawn(16, 2, 4, beyond=1),
    drawn(2, 16, 4),
    drawn(choice.MOST_TOKENS, 3, 4),
]


@pytest.mark.parametrize(
    ("dtype", "layout", "gate", "biased"),
    [
        (torch.float32, "strided", GPT_OSS, True),
        (torch.float16, "transposed", {}, True),
        (torch.bfloat16, "half", GPT_OSS | {"interleaved": False}, False),
        (torch.bfloat16, "contiguous", {"activation": "gelu_tanh"}, True),
        (torch.float32, "contiguous", {"activation": "silu_softcap", "limit": (1.0, 2.0)}, True),
    ],
)
@pytest.mark.parametrize("index", FEW, ids=lambda index: "x".join(map(str, index.shape)))
def test_few_pairs_without_gradients(monkeypatch, index, dtype, layout, gate, biased):
    seen, forward = [], portable_pairs.forward
    monkeypatch.setattr(portable_pairs, "forward", lambda *all_of_them: seen.append(0) or forward(*all_of_them))
    index = index.to(DEVICE)
    inputs = problem(index, 4, 35, 18, dtype, layout)[: 6 if biased else 4]
    with torch.no_grad():
        out = called(swiglu_experts, index, gate, *inputs)
    assert seen
    eager = called(reference.swiglu_experts, index, gate, *inputs)
    truth = called(reference.swiglu_experts, index, gate, *(operand.double() for operand in inputs))
    assert_as_accurate_as_eager("out", out, eager, truth)


@pytest.mark.parametrize("index", FEW[::2], ids=lambda index: "x".join(map(str, index.shape)))
def test_rows_of_weights_for_several_tokens(monkeypatch, index):
    monkeypatch.setattr(portable_gemv, "takes", lambda *_: True)
    test_few_pairs_without_gradients(monkeypatch, index, FLOAT16, "strided", GPT_OSS, True)


@pytest.mark.parametrize(
    ("tokens", "slots", "experts", "hidden", "intermediate"),
    [(1, 1, 14, 1100, 1040), (1, 14, 14, 72, 1040), (3, 2, 24, 1100, 24)],
)
def test_rows_of_weights_that_are_long(tokens, slots, experts, hidden, intermediate):
    index = drawn(tokens, slots, experts).to(DEVICE)
    assert portable_gemv.takes(index, experts)
    inputs = problem(index, experts, hidden, intermediate, FLOAT16)
    out = swiglu_experts(*inputs[:3], index, inputs[3])
    eager = reference.swiglu_experts(*inputs[:3], index, inputs[3])
    truth = reference.swiglu_experts(*(operand.double() for operand in inputs[:3]), index, inputs[3].double())
    assert_as_accurate_as_eager("out", out, eager, truth)


def test_more_pairs_or_gradients_take_a_routing(monkeypatch):
    monkeypatch.setattr(portable_pairs, "forward", None)
    for tokens, slots in ((choice.MOST_TOKENS + 1, 2), (17, 1 + choice.MOST_PAIRS // 17)):
        inputs = problem(drawn(tokens, slots, 4), 4, 16, 8, FLOAT16)
        swiglu_experts(inputs[0], *inputs[1:3], drawn(tokens, slots, 4), inputs[3])
    few = problem(drawn(3, 2, 4), 4, 16, 8, FLOAT16)
    swiglu_experts(few[0].requires_grad_(), *few[1:3], drawn(3, 2, 4), few[3]).sum().backward()


ROUTINGS = {
    "one token": torch.tensor([[2, 0]]),
    "more slots than tokens": torch.tensor([[3, 1, 0, 2], [0, 1, 2, 3]]),
    "one expert has all, an expert twice": torch.full((9, 2), 3),
    "no pair has an expert": torch.full((3, 2), 4),
    "no tokens": torch.zeros(0, 2, dtype=torch.int64),
    "many tokens": drawn(1030, 4, 4, beyond=1),
}


@pytest.mark.parametrize("name", ROUTINGS)
def test_extreme_routings(name):
    index = ROUTINGS[name].to(DEVICE).int()
    check(index, problem(index, 4, 16, 8, FLOAT16))


@pytest.mark.parametrize(("tokens", "tile_rows"), [(40, 32), (100, 64), (200, 128)])
def test_every_height_of_tiles(tokens, tile_rows):
    index = drawn(tokens, 1, 2)
    assert expert_tile_rows(index.numel(), 2, FLOAT16) == tile_rows
    check(index, problem(index, 2, 40, 72, FLOAT16), GPT_OSS)


def test_routing_weights_may_have_another_dtype():
    index = drawn(5, 2, 3)
    x, w_gate_up, w_down, weights, *_ = problem(index, 3, 16, 8, FLOAT16)
    weights = weights.float().requires_grad_()
    out = swiglu_experts(x, w_gate_up, w_down, index, weights)
    assert out.dtype == FLOAT16
    (gradient,) = torch.autograd.grad(out.sum(), weights)
    (expected,) = torch.autograd.grad(reference.swiglu_experts(x, w_gate_up, w_down, index, weights).sum(), weights)
    torch.testing.assert_close(gradient, expected, rtol=1e-2, atol=1e-2)


def test_gradients_have_the_layout_of_their_weights():
    index = drawn(3, 2, 2)
    x, w_gate_up, w_down, weights, *_ = problem(index, 2, 16, 8, torch.float32, "transposed")
    stored = [weight.mT.contiguous().requires_grad_() for weight in (w_gate_up, w_down)]
    swiglu_experts(x, stored[0].mT, stored[1].mT, index, weights).sum().backward()
    assert all(weight.grad is not None and weight.grad.is_contiguous() for weight in stored)


def test_operator_conventions():
    index = drawn(3, 2, 3)
    x, *weights = [operand.requires_grad_() for operand in problem(index, 3, 16, 8, torch.float32)]
    numbers = Formula(alpha=1.702, limit=7.0, up_offset=1.0).numbers
    options = (None, None, 16, True, False, "portable", True, "bf16", numbers)
    # What lies behind the last tile in use is not written: outputs compared by test_aot_dispatch would differ there.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    opcheck(experts._experts._overload, (x, *weights, index, *options), test_utils=checks)


BAD = {
    "w_gate_up: expected": {"w_gate_up": torch.zeros(3, 7, 16)},
    "w_down: expected": {"w_down": torch.zeros(3, 16, 9)},
    "top_k_index: expected a tensor of integers": {"top_k_index": torch.zeros(5, 2)},
    "top_k_index: expected \\[5, k\\]": {"top_k_index": torch.zeros(4, 2, dtype=torch.int64)},
    "top_k_weights: expected shape": {"top_k_weights": torch.zeros(5, 3)},
    "b_down: expected shape": {"b_down": torch.zeros(3, 8)},
    "backend: expected": {"backend": "nothing"},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named(message):
    good = {"x": torch.zeros(5, 16), "w_gate_up": torch.zeros(3, 16, 16), "w_down": torch.zeros(3, 16, 8)}
    good |= {"top_k_index": torch.zeros(5, 2, dtype=torch.int64), "top_k_weights": torch.zeros(5, 2)}
    with pytest.raises((TypeError, ValueError), match=message):
        swiglu_experts(**(good | BAD[message]))


class Travelling:
    """An exchange whose rows arrive when they are waited for, NaN until then, and that keeps what was sent."""

    def __init__(self, like: torch.Tensor, first: int) -> None:
        self.like, self.first, self.under_way, self.sent = like, first, [], []

    def begin(self, rows: torch.Tensor) -> torch.Tensor:
        coming = rows.detach().clone()
        coming[self.first :] = float("nan")
        self.under_way.append((coming, rows.detach()[self.first :]))
        return coming

    def wait(self) -> None:
        for coming, rows in self.under_way:
            coming[self.first :] = rows
        self.under_way.clear()

    def results(self, columns: int) -> torch.Tensor:
        return self.like.new_full((len(self.like), columns), float("nan"))

    def send(self, results: torch.Tensor, values: torch.Tensor | None = None) -> None:
        self.sent.append((results[self.first :].clone(), values))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("tokens", "first", "sizes", "dtype", "gate"),
    [
        (60, 40, (4, 20, 12), torch.float32, GPT_OSS),
        (60, 0, (4, 20, 12), torch.float32, {}),
        pytest.param(2000, 1100, (4, 512, 256), torch.bfloat16, {}, marks=pytest.mark.gpu),
        pytest.param(2000, 1100, (4, 512, 256), torch.bfloat16, GPT_OSS, marks=pytest.mark.gpu),
    ],
)
def test_what_is_computed_while_rows_travel_has_the_same_bits(tokens, first, sizes, dtype, gate, recompute):
    index = drawn(tokens, 3, sizes[0], beyond=1)
    inputs, d_out = layer(index, *sizes, dtype), random_tensor(tokens, sizes[1], dtype=dtype, seed=9)

    def step(exchange: Travelling | None) -> list[torch.Tensor]:
        leaves = [leaf.detach().clone().requires_grad_() for leaf in inputs]
        x, gradient = leaves[0], d_out
        if exchange is not None:
            x = leaves[0] = exchange.begin(x).requires_grad_()
        with experts.under_way(exchange):
            out = called(swiglu_experts, index, gate | {"recompute": recompute}, x, *leaves[1:])
        if exchange is not None:
            gradient = exchange.begin(d_out)
        out.backward(gradient)
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    travelling = Travelling(d_out, first)
    whole, found = step(None), step(travelling)
    for name, right, got in zip(f"out {NAMES}".split(), whole, found, strict=True):
        assert torch.equal(right, got), name
    (out, nothing), (dx, d_weights) = travelling.sent
    assert nothing is None
    assert torch.equal(out, whole[0][first:]), "results of later tokens are there when they are sent"
    assert torch.equal(dx, whole[1][first:])
    assert torch.equal(d_weights, whole[4])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("gate", [{}, GPT_OSS], ids=["plain", "gpt-oss"])
@pytest.mark.parametrize(
    "shape", [(1, 8, 64, 512, 192), (100, 4, 32, 720, 720), (2048, 8, 16, 512, 256), (300, 2, 16, 520, 264)]
)
def test_on_a_gpu(shape, gate, dtype):
    tokens, slots, count, hidden, intermediate = shape
    index = drawn(tokens, slots, count, beyond=1)
    inputs = problem(index, count, hidden, intermediate, dtype, "transposed" if gate else "contiguous")
    check(index, inputs[: 6 if gate else 4], gate)


@pytest.mark.gpu
def test_a_graph_replays_with_another_routing():
    index, other = (drawn(tokens, 2, 8)[:33] for tokens in (33, 34))
    inputs = problem(index, 8, 64, 32, torch.bfloat16)[:4]
    held = index.clone()
    called(swiglu_experts, held, {}, *inputs)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = called(swiglu_experts, held, {}, *inputs)
    held.copy_(other)
    graph.replay()
    torch.testing.assert_close(out, called(swiglu_experts, other, {}, *inputs), rtol=0, atol=0)
