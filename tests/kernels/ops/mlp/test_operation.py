import functools
import itertools
import math

import pytest
import torch
from accuracy import DEVICE, DTYPES, LAYOUTS, assert_as_accurate_as_eager, check_against_reference, random_tensor
from clamped import GPT_OSS, keep_off_limit
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import opcheck

from swiglu_kernels import backend_for, reference, swiglu_mlp
from swiglu_kernels.ops.gate.formula import PLAIN
from swiglu_kernels.ops.glu.choice import INPUT_GRADS, SAVES, WEIGHT_GRADS
from swiglu_kernels.ops.glu.portable_backward import input_grad_launch
from swiglu_kernels.ops.mlp import operation as mlp
from swiglu_kernels.ops.mlp.portable_mlp import down_backward_launch

pytestmark = pytest.mark.skipif(backend_for(DEVICE) == "torch", reason="no kernel can run here: no Triton")

NAMES = "x w_gate w_up w_down bias_gate bias_up bias_down"
GATES = [{}, GPT_OSS, {"gate_multiplier": 0.7}, {"activation": "gelu_tanh"}]
CHUNKED = [
    {"weight_grad": weight_grad, "save": "input", "chunk_tokens": chunk}
    for weight_grad, chunk in [("triton", 10), ("torch", 16), ("none", 7), ("auto", 1000)]
]
WHOLE = [
    dict(zip(("weight_grad", "save", "input_grad"), values, strict=True))
    for values in itertools.product(WEIGHT_GRADS, SAVES, INPUT_GRADS)
]
VARIANTS = WHOLE + CHUNKED
ESSENTIAL = [
    {},
    {"weight_grad": "torch", "input_grad": "torch"},
    {"save": "input"},
    {"save": "input", "weight_grad": "torch", "input_grad": "torch"},
    {"weight_grad": "none"},
    *CHUNKED,
]
FORMULA = (PLAIN.numbers,)


def variant_name(options: dict) -> str:
    return "-".join(map(str, options.values())) or "default"


def problem(
    tokens: int,
    hidden: int,
    intermediate: int,
    hidden_out: int,
    dtype: torch.dtype = torch.float32,
    layouts: tuple[str, ...] = ("contiguous",) * 4,
) -> list[torch.Tensor]:
    """Draw x, three weights and three biases, everything around 1 on the way."""
    scale, scale_down = max(hidden, 1) ** -0.5, max(intermediate, 1) ** -0.5
    return [
        random_tensor(tokens, hidden, dtype=dtype, layout=layouts[0]),
        random_tensor(intermediate, hidden, dtype=dtype, layout=layouts[1], scale=scale, seed=1),
        random_tensor(intermediate, hidden, dtype=dtype, layout=layouts[2], scale=scale, seed=2),
        random_tensor(hidden_out, intermediate, dtype=dtype, layout=layouts[3], scale=scale_down, seed=3),
        random_tensor(intermediate, dtype=dtype, seed=4),
        random_tensor(intermediate, dtype=dtype, seed=5),
        random_tensor(hidden_out, dtype=dtype, seed=6),
    ]


def leaves(*shape: int) -> list[torch.Tensor]:
    return [tensor.requires_grad_() for tensor in problem(*shape)]


def check(inputs: list[torch.Tensor], options: dict, gate: dict | None = None) -> None:
    keep_off_limit(gate or {}, inputs[0], inputs[1:3], inputs[4:6])
    check_against_reference(
        NAMES,
        functools.partial(swiglu_mlp, **options, **(gate or {})),
        functools.partial(reference.swiglu_mlp, **(gate or {})),
        inputs,
        wanted=[0] if options.get("weight_grad") == "none" else None,
    )


@settings(derandomize=True, deadline=None, max_examples=20)
@given(
    tokens=st.sampled_from([0, 1, 17, 65]),
    hidden=st.sampled_from([0, 1, 33, 64]),
    intermediate=st.sampled_from([0, 1, 31, 70]),
    hidden_out=st.sampled_from([0, 1, 33, 70]),
    dtype=st.sampled_from(DTYPES),
    layouts=st.tuples(*[st.sampled_from(LAYOUTS)] * 4),
    options=st.sampled_from(VARIANTS),
    biased=st.booleans(),
)
def test_output_and_gradients(tokens, hidden, intermediate, hidden_out, dtype, layouts, options, biased):
    inputs = problem(tokens, hidden, intermediate, hidden_out, dtype, layouts)
    check(inputs if biased else inputs[:4], options)


@pytest.mark.parametrize("options", ESSENTIAL, ids=variant_name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_variant_in_every_dtype(options, dtype):
    inputs = problem(37, 70, 45, 33, dtype, ("contiguous", "transposed", "half", "transposed"))
    check(inputs, options)
    check(inputs[:4], options)


@pytest.mark.parametrize("gate", GATES[1:], ids=str)
@pytest.mark.parametrize("save", ["preact", "input"])
def test_every_gate(gate, save):
    check(problem(17, 33, 31, 33, torch.float16), {"save": save}, gate)


@pytest.mark.parametrize("save", ["preact", "input"])
def test_where_nothing_needs_a_mask(save):
    check(problem(256, 128, 128, 128, torch.bfloat16)[:4], {"save": save})


@pytest.mark.gpu
@pytest.mark.parametrize("options", [*ESSENTIAL, {"save": "input", "chunk_tokens": 256}], ids=variant_name)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 4096, 1408, 4096), (16, 1024, 1408, 1024), (1000, 2880, 2880, 2880), (777, 509, 1031, 509)]
)
def test_every_variant_at_model_sizes(shape, options, dtype):
    check(problem(*shape, dtype)[:4], options)


@pytest.mark.gpu
@pytest.mark.parametrize("gate", GATES[1:], ids=str)
@pytest.mark.parametrize("save", ["preact", "input"])
def test_every_gate_at_model_sizes(gate, save):
    check(problem(1000, 2880, 2880, 2880, torch.bfloat16), {"save": save}, gate)


@pytest.mark.gpu
@pytest.mark.alone  # for its memory
def test_above_two_to_the_31_elements():
    tokens, hidden, intermediate = 2**17 + 5, 64, 2**14 + 16
    d_out = torch.randn(tokens, hidden, device="cuda").bfloat16()
    w_down = (torch.randn(hidden, intermediate, device="cuda") * 0.125).bfloat16()
    gate, up = (torch.randn(tokens, intermediate, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    d_gate, d_up, h = (torch.full_like(gate, float("nan")) for _ in range(3))
    assert d_gate.numel() > 2**31
    down_backward_launch(d_out, w_down, (gate, up), d_gate, d_up, h).run()
    boundary = 2**31 // intermediate

    def part(rows: slice, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        pair = gate[rows].to(dtype).requires_grad_(), up[rows].to(dtype).requires_grad_()
        product = reference.silu_mul(*pair)
        gradients = torch.autograd.grad(product, pair, d_out[rows].to(dtype) @ w_down.to(dtype))
        return *gradients, product.detach()

    for rows in (slice(0, 64), slice(boundary - 64, boundary + 64), slice(tokens - 64, tokens)):
        eager, truth = part(rows, torch.bfloat16), part(rows, torch.float64)
        for name, got, one, exact in zip(("d_gate", "d_up", "h"), (d_gate, d_up, h), eager, truth, strict=True):
            assert_as_accurate_as_eager(name, got[rows], one, exact, terms=hidden)


def largest_allocations(monkeypatch, **options) -> tuple[int, int]:
    """Return the most elements of a [*, intermediate] tensor that the forward and the backward allocate at once."""
    tokens, hidden, intermediate, hidden_out = 40, 9, 48, 6
    inputs = leaves(tokens, hidden, intermediate, hidden_out)
    sizes = []
    new = mlp.new

    def spy(like, *shape):
        if not {hidden, hidden_out} & set(shape):
            sizes.append(math.prod(shape))
        return new(like, *shape)

    monkeypatch.setattr(mlp, "new", spy)
    monkeypatch.setattr(mlp, "TILE", 8)
    out = swiglu_mlp(*inputs, **options)
    forward, sizes[:] = max(sizes), []
    torch.autograd.grad(out.sum(), inputs)
    return forward, max(sizes)


def test_chunks_bound_what_is_allocated(monkeypatch):
    assert largest_allocations(monkeypatch, save="input") == (40 * 48, 40 * 48)
    assert largest_allocations(monkeypatch, save="input", chunk_tokens=16) == (16 * 48, 40 * 24)


@pytest.mark.parametrize("chunk", [1, 3, 8, 9])
def test_the_output_does_not_depend_on_the_chunks(chunk):
    inputs = problem(8, 9, 7, 6)
    torch.testing.assert_close(
        swiglu_mlp(*inputs, save="input", chunk_tokens=chunk), swiglu_mlp(*inputs), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("chunk", [1, 3, 5, 8])
@pytest.mark.parametrize("weight_grad", ["triton", "torch"])
def test_gradients_do_not_depend_on_the_slices(monkeypatch, chunk, weight_grad):
    monkeypatch.setattr(mlp, "TILE", 8)
    inputs = leaves(8, 9, 40, 6)
    whole = torch.autograd.grad(swiglu_mlp(*inputs, save="input").sum(), inputs)
    out = swiglu_mlp(*inputs, save="input", weight_grad=weight_grad, chunk_tokens=chunk)
    for one, other in zip(torch.autograd.grad(out.sum(), inputs), whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("tokens", "intermediate", "chunk", "expected"),
    [
        (8192, 11008, 1024, [1536] * 7 + [256]),  # 43 waves of 132 tiles; slices of 1408 have 47
        (8192, 14336, 1024, [1792] * 8),  # 56, and none fewer
        (8192, 11008, 0, [11008]),
        (8192, 11008, 8192, [11008]),
        (4, 11008, 1, [2816] * 3 + [2560]),
        (0, 5, 2, [5]),
        (3, 0, 1, [0]),
        (3, 5, 1, [5]),
    ],
)
def test_slices_are_whole_tiles(tokens, intermediate, chunk, expected):
    slices = list(mlp._columns(tokens, intermediate, chunk, 132))
    assert [one.stop - one.start for one in slices] == expected
    assert [one.start for one in slices[1:]] == [one.stop for one in slices[:-1]]


def test_dx_is_summed_over_slices_in_fp32():
    # Slices that add 1 each: a bfloat16 sum stops growing at 256.
    one, weight = torch.ones(1, 1, device=DEVICE).bfloat16(), torch.full((1, 1), 0.5, device=DEVICE).bfloat16()
    dx = torch.full((1, 1), 250.0, device=DEVICE)
    for _ in range(10):
        input_grad_launch(None, one, one, weight, weight, dx, accumulate=True).run()
    assert dx.item() == 260


@pytest.mark.parametrize(
    "options",
    [("triton", "preact", "fused", 0), ("torch", "input", "torch", 2), ("none", "input", "fused", 0)],
    ids=str,
)
def test_operator_registration(options):
    inputs = leaves(5, 9, 7, 6)
    opcheck(torch.ops.swiglu_kernels.mlp.default, (*inputs, *options, *FORMULA))
    x, w_gate, w_up, w_down, bias_gate, bias_up, _ = (tensor.detach() for tensor in inputs)
    gate = torch.ones((5, 7) if options[1] == "preact" else (0, 0), device=DEVICE)
    d_out = torch.ones(5, 6, device=DEVICE)
    arguments = (d_out, x, w_gate, w_up, w_down, gate, gate, bias_gate, bias_up, [True] * 7, *options, *FORMULA)
    opcheck(torch.ops.swiglu_kernels.mlp_backward.default, arguments)


def test_a_changed_number_is_never_stale_in_a_compiled_function():
    inputs = problem(5, 9, 7, 6)
    compiled = torch.compile(swiglu_mlp, fullgraph=True, backend="aot_eager")
    for limit, alpha in [(0.5, 1.0), (0.25, 1.5), (None, 2.0), (1.0, 1.702)]:
        expected = reference.swiglu_mlp(*inputs, limit=limit, alpha=alpha)
        torch.testing.assert_close(compiled(*inputs, limit=limit, alpha=alpha), expected)
