"""What every operation owes autograd, torch.compile and whoever calls it wrongly; accuracy is in each's own file."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from accuracy import DEVICE, assert_equal, check_against_reference, random_tensor
from blocks import WITH_AUTO
from clamped import GPT_OSS

import swiglu_kernels
from swiglu_kernels import (
    backend_for,
    reference,
    silu_mul,
    swiglu_DWf_DW_dfg_kernel,
    swiglu_experts,
    swiglu_fg_kernel,
    swiglu_glu,
    swiglu_glu_packed,
    swiglu_mlp,
    unsloth_silu_mul,
)  # fmt: skip
from swiglu_kernels.ops.fp8 import operation as fp8

pytestmark = pytest.mark.skipif(backend_for(DEVICE) == "torch", reason="no kernel can run here: no Triton")

TOKENS, HIDDEN, INTERMEDIATE, HIDDEN_OUT = 5, 9, 7, 6
X, WEIGHT, PACKED, W_DOWN = (TOKENS, HIDDEN), (INTERMEDIATE, HIDDEN), (2 * INTERMEDIATE, HIDDEN), (HIDDEN_OUT, 7)
BIAS = (INTERMEDIATE,)


@dataclass(frozen=True)
class Operation:
    """A public function, its definition, and the shapes of what it is given."""

    function: Callable[..., torch.Tensor]
    reference: Callable[..., torch.Tensor]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype = torch.float32

    def inputs(self, *wanted: int) -> list[torch.Tensor]:
        """Drawn anew; those at the positions `wanted` need a gradient (none given: all)."""
        drawn = [random_tensor(*shape, dtype=self.dtype, seed=seed) for seed, shape in enumerate(self.shapes)]
        return [tensor.requires_grad_(not wanted or position in wanted) for position, tensor in enumerate(drawn)]


def packed(layout: str) -> Operation:
    weight = PACKED[::-1] if layout == "transposed" else PACKED
    functions = (functools.partial(module.swiglu_glu_packed, layout=layout) for module in (swiglu_kernels, reference))
    return Operation(*functions, (X, weight, (2 * INTERMEDIATE,)))


def overwriting(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return unsloth_silu_mul(gate * 1, up * 1, overwrite=True)


PACKINGS = {f"glu_packed {layout}": packed(layout) for layout in ("packed", "interleaved", "transposed")}
PRODUCTS = {
    name: Operation(function, reference.silu_mul, ((4, 9), (4, 9)))
    for name, function in (("silu_mul", silu_mul), ("unsloth", unsloth_silu_mul), ("unsloth overwriting", overwriting))
}
INDEX = torch.tensor([[0, 1], [2, 3], [1, 1], [3, 0], [2, 5]], device=DEVICE)
"""Of three experts; the others do not exist."""


def experts(hidden: int, intermediate: int, hidden_out: int, dtype: torch.dtype, **fixed: object) -> Operation:
    def with_index(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(x, w_gate_up, w_down, weights, b_gate_up, b_down, **options):
            biases = {"b_gate_up": b_gate_up, "b_down": b_down}
            return function(x, w_gate_up, w_down, INDEX, weights, **biases, **options, **fixed)

        return call

    weights = (3, 2 * intermediate, hidden), (3, hidden_out, intermediate)
    shapes = ((TOKENS, hidden), *weights, tuple(INDEX.shape), (3, 2 * intermediate), (3, hidden_out))
    return Operation(with_index(swiglu_experts), with_index(reference.swiglu_experts), shapes, dtype)


def mlp_fp8(recipe: str) -> Operation:
    functions = (functools.partial(module.swiglu_mlp_fp8, recipe=recipe) for module in (swiglu_kernels, reference))
    return Operation(*functions, ((TOKENS, 48), (32, 48), (32, 48), (80, 32), (32,), (32,), (80,)), torch.bfloat16)


FP8 = {} if fp8.why_not(DEVICE) else {
    "fp8 rowwise": mlp_fp8("rowwise"), "fp8 blockwise": mlp_fp8("blockwise"),
    "experts in fp8": experts(48, 32, 80, torch.bfloat16, precision="fp8-rowwise"),
}  # fmt: skip
OPERATIONS = {
    "experts": experts(HIDDEN, INTERMEDIATE, HIDDEN_OUT, torch.float32),
    "glu": Operation(swiglu_glu, reference.swiglu_glu, (X, WEIGHT, WEIGHT)),
    "glu biased": Operation(swiglu_glu, reference.swiglu_glu, (X, WEIGHT, WEIGHT, BIAS, BIAS)),
    "mlp": Operation(swiglu_mlp, reference.swiglu_mlp, (X, WEIGHT, WEIGHT, W_DOWN, BIAS, BIAS, (HIDDEN_OUT,))),
} | PACKINGS | PRODUCTS | FP8  # fmt: skip
GLU = [options for options in WITH_AUTO if "auto" not in options.values()]
MLP: list[dict[str, Any]] = [
    {},
    {"weight_grad": "torch", "input_grad": "torch"},
    {"save": "input"},
    {"weight_grad": "triton", "save": "input", "chunk_tokens": 10},
    {"save": "input", "weight_grad": "torch", "input_grad": "torch"},
    {"weight_grad": "none"},
    {"weight_grad": "torch", "save": "input", "chunk_tokens": 16},
    {"weight_grad": "none", "save": "input", "chunk_tokens": 7},
    {"weight_grad": "auto", "save": "input", "chunk_tokens": 1000},
    {"save": "input", "chunk_tokens": 2, "weight_grad": "torch"},
]


def cases(glu: list[dict], mlp: list[dict], *others: str) -> pytest.MarkDecorator:
    """Operations with options, and others as they are."""
    listed = [("glu", options) for options in glu] + [("mlp", options) for options in mlp]
    listed += [(name, {}) for name in others]
    ids = [" ".join([name, *map(str, options.values())]) for name, options in listed]
    return pytest.mark.parametrize(("name", "options"), listed, ids=ids)


@cases([*GLU, GPT_OSS | {"input_grad": "torch"}], MLP, "glu biased", *PACKINGS, "silu_mul", "unsloth", "experts", *FP8)
def test_a_second_backward_has_the_same_bits_and_writes_into_nothing_given(name, options):
    inputs = OPERATIONS[name].inputs()
    wanted = inputs[:1] if options.get("weight_grad") == "none" else inputs
    before = tuple(tensor.detach().clone() for tensor in inputs)
    out = OPERATIONS[name].function(*inputs, **options)
    upstream = random_tensor(*out.shape, dtype=out.dtype, seed=9)
    same = upstream.clone()
    first = torch.autograd.grad(out, wanted, upstream, retain_graph=True)
    assert_equal(torch.autograd.grad(out, wanted, upstream), first)
    assert_equal((*inputs, upstream), (*before, same))


@cases([{}], [{}], "glu biased", *PACKINGS)
def test_frozen_weights_get_no_gradient(name, options):
    inputs = OPERATIONS[name].inputs()
    OPERATIONS[name].function(*inputs, weight_grad="none").sum().backward()
    assert [tensor.grad is None for tensor in inputs] == [False] + [True] * (len(inputs) - 1)


SOME = [(0,), (1,), (2,), (4,), (6,), (0, 2), (0, 3), (1, 2), (2, 6), (3, 4), (3, 5)]


@pytest.mark.parametrize(
    ("name", "options", "wanted"),
    [
        (name, options, wanted)
        for (name, options), wanted in itertools.product([("glu biased", {}), ("mlp", {}), ("mlp", MLP[-1])], SOME)
        if max(wanted) < len(OPERATIONS[name].shapes)
    ]
    + [("experts", {}, wanted) for wanted in ((0,), (3,), (1, 4), (2, 5))]
    + [("experts", {"recompute": True}, (2,))]
    + [(name, {}, wanted) for name, wanted in itertools.product(FP8, ((0,), (3,), (2, 5)))],
    ids=str,
)
def test_only_some_inputs_need_a_gradient(name, options, wanted):
    operation = OPERATIONS[name]
    inputs = operation.inputs(*wanted)
    chosen = [inputs[position] for position in wanted]
    got = torch.autograd.grad(operation.function(*inputs, **options).sum(), chosen)
    if name in FP8:  # whose codes may be a step from the reference's
        every = operation.inputs()
        expected = torch.autograd.grad(operation.function(*every).sum(), [every[position] for position in wanted])
        assert_equal(got, expected)
    else:
        expected = torch.autograd.grad(operation.reference(*inputs).sum(), chosen)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@cases([{}], [{}], "silu_mul", "glu_packed packed")
@pytest.mark.parametrize("lead", [(), (2,), (2, 3), (2, 0, 3)], ids=str)
def test_leading_dimensions(name, options, lead):
    operation = OPERATIONS[name]
    first, *rest = (tensor.detach() for tensor in operation.inputs())
    if name == "silu_mul":
        rest = [random_tensor(*lead, 9, dtype=torch.float32, seed=1)]
    inputs = [random_tensor(*lead, first.shape[-1], dtype=torch.float32), *rest]
    check_against_reference("a b c d e f g", operation.function, operation.reference, inputs)


@pytest.mark.parametrize(
    ("name", "options", "of_x", "of_gate_and_up"),
    [
        ("glu", {"save": "preact"}, 1, 1),
        ("glu", {"save": "input"}, 1, 0),
        ("glu", {"save": "preact", "weight_grad": "none"}, 0, 1),
        ("mlp", {"save": "preact"}, 1, 1),
        ("mlp", {"save": "input"}, 1, 0),
        ("mlp", {"save": "auto", "chunk_tokens": 2}, 1, 0),
        ("mlp", {"save": "preact", "weight_grad": "none"}, 0, 1),
    ],
)
def test_what_is_saved_for_the_backward(name, options, of_x, of_gate_and_up):
    inputs = OPERATIONS[name].inputs()
    parameters, saved = {tensor.data_ptr() for tensor in inputs[1:]}, []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda saved: saved):
        OPERATIONS[name].function(*inputs, **options)
    kept = sum(tensor.numel() for tensor in saved if tensor.data_ptr() not in parameters)
    assert kept == TOKENS * (of_x * HIDDEN + of_gate_and_up * 2 * INTERMEDIATE)


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out):
        return out.clone()

    @staticmethod
    def backward(ctx, d_out):
        return None


@cases([{}], [{}], *PACKINGS, "experts")
def test_an_undefined_upstream_gradient_gives_none(name, options):
    inputs = OPERATIONS[name].inputs()
    NoGradient.apply(OPERATIONS[name].function(*inputs)).sum().backward()
    assert all(tensor.grad is None for tensor in inputs)


X_NOT_SAVED = {"weight_grad": "none", "save": "preact"}


@cases([{}, X_NOT_SAVED], [{}, X_NOT_SAVED], *PACKINGS, *PRODUCTS, "experts", *FP8)
def test_a_second_derivative_is_refused(name, options):
    first, *rest = OPERATIONS[name].inputs()
    out = OPERATIONS[name].function(first, *rest, **options)
    with pytest.raises(RuntimeError, match="cannot be differentiated"):
        torch.autograd.grad(out.sum(), first, create_graph=True)[0].sum().backward()


@cases([{}], [{}], *PACKINGS, "silu_mul", "unsloth", "experts")
def test_forward_mode_differentiation_is_refused(name, options):
    inputs = tuple(tensor.detach() for tensor in OPERATIONS[name].inputs())
    with pytest.raises(RuntimeError, match="forward-mode"):
        torch.func.jvp(OPERATIONS[name].function, inputs, inputs)


@cases([GLU[0], GLU[7], GLU[-1]], MLP[:4], "glu_packed packed", "silu_mul", "unsloth overwriting", "experts", *FP8)
@pytest.mark.parametrize("dynamic", [True, False])
def test_compiles_without_a_graph_break(name, options, dynamic):
    if not dynamic and options:
        pytest.skip("options change nothing in that")
    torch.compiler.reset()
    inputs = OPERATIONS[name].inputs()
    wanted = inputs[:1] if options.get("weight_grad") == "none" else inputs
    function = functools.partial(OPERATIONS[name].function, **options)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    outs = compiled(*inputs), function(*inputs)
    upstream = torch.randn_like(outs[0])  # not expanded, which the one may get as it is and the other copied
    got, expected = (torch.autograd.grad(out, wanted, upstream) for out in outs)
    assert_equal(got, expected)


IN_FLOAT64 = [name for name in OPERATIONS if name not in (*FP8, "unsloth overwriting")]


@pytest.mark.parametrize("name", IN_FLOAT64)
def test_float64_is_computed_by_the_definition_and_differentiable_twice(name):
    operation = OPERATIONS[name]
    inputs = [tensor.detach().double().requires_grad_() for tensor in operation.inputs()]
    with torch.autocast(DEVICE.type, torch.bfloat16):  # which leaves float64 alone
        assert torch.equal(operation.function(*inputs), operation.reference(*inputs))
    assert torch.autograd.gradcheck(operation.function, inputs)
    assert torch.autograd.gradgradcheck(operation.function, inputs, fast_mode=True)


def test_float64_has_every_public_operation_but_those_in_fp8_and_in_place():
    functions = (getattr(swiglu_kernels, name) for name in swiglu_kernels.__all__)
    named = {function.__name__ for function in functions if getattr(function, "__module__", "").startswith(OPS)}
    tried = (OPERATIONS[name].function for name in IN_FLOAT64)
    names = {getattr(function, "func", function).__name__ for function in tried}
    names |= {"swiglu_experts", "swiglu_experts_parallel"}  # the latter of one rank is the former
    assert named - names == {"swiglu_glu_fp8", "swiglu_mlp_fp8", "swiglu_fg_kernel", "swiglu_DWf_DW_dfg_kernel"}
    e, g = (random_tensor(1, 2, 3, dtype=torch.float64, seed=seed) for seed in (0, 1))
    assert torch.equal(swiglu_fg_kernel(e, g), reference.silu_mul(e, g))  # which is not differentiable
    x, w_gate_up, w_down, weights, *biases = OPERATIONS["experts"].inputs()
    with pytest.raises(TypeError, match=r"top_k_weights: expected .*float32.*, got torch.float64"):
        OPERATIONS["experts"].function(x, w_gate_up, w_down, weights.double(), *biases)


@pytest.mark.parametrize("name", FP8)
def test_fp8_refuses_float64(name):
    with pytest.raises(TypeError, match="float64"):
        OPERATIONS[name].function(*(tensor.detach().double() for tensor in OPERATIONS[name].inputs()))


OPS = "swiglu_kernels.ops."
ones = torch.ones
GIVEN: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "glu": (swiglu_glu, {"x": ones(2, 4), "w_gate": ones(3, 4), "w_up": ones(3, 4)}),
    "packed": (swiglu_glu_packed, {"x": ones(2, 4), "w_gate_up": ones(6, 4)}),
    "mlp": (swiglu_mlp, {"x": ones(2, 4), "w_gate": ones(3, 4), "w_up": ones(3, 4), "w_down": ones(4, 3)}),
    "silu_mul": (silu_mul, {"gate": ones(2), "up": ones(2)}),
    "unsloth": (unsloth_silu_mul, {"gate": ones(2), "up": ones(2)}),
    "fg": (swiglu_fg_kernel, {"e": ones(1, 2, 3), "g": ones(1, 2, 3)}),
    "DWf": (swiglu_DWf_DW_dfg_kernel, {"DW": ones(2, 3), "e": ones(2, 3), "g": ones(2, 3)}),
}
GELU, SOFTCAP = {"activation": "gelu_tanh", "alpha": 2.0}, {"activation": "silu_softcap"}


@pytest.mark.parametrize(
    ("name", "change", "error", "words"),
    [
        ("glu", {"x": 3}, TypeError, r"x: .*torch.Tensor, got int"),
        ("glu", {"x": ones(2, 4).long()}, TypeError, r"x: expected one of .*, got torch.int64"),
        ("glu", {"x": ones(())}, ValueError, r"x: .*at least one dimension"),
        ("glu", {"x": ones(1).expand(2**31, 4)}, ValueError, r"x: .*up to 2147482624, got \(2147483648, 4\)"),
        ("glu", {"w_gate": ones(3, 4).half()}, TypeError, r"w_gate: expected torch.float32 .*, got torch.float16"),
        ("glu", {"w_up": ones(3, 4, device="meta")}, ValueError, r"w_up: expected device cpu .*, got meta"),
        ("glu", {"w_gate": ones(3, 5)}, ValueError, r"w_gate: expected \[intermediate, 4\] .* got \(3, 5\)"),
        ("glu", {"w_up": ones(2, 4)}, ValueError, r"w_up: .*\(3, 4\).*w_gate.*, got \(2, 4\)"),
        ("glu", {"weight_grad": "both"}, ValueError, r"weight_grad: .*'triton', 'torch', 'none', 'auto', got 'both'"),
        ("glu", {"save": None}, ValueError, r"save: .*'preact', 'input', 'auto', got None"),
        ("glu", {"input_grad": "slow"}, ValueError, r"input_grad: .*'fused', 'two_step', 'torch', 'auto', got 'slow'"),
        ("glu", {"activation": "relu"}, ValueError, r"activation: .*'silu', 'gelu_tanh', .*, got 'relu'"),
        ("glu", {"gate_multiplier": "2"}, TypeError, r"gate_multiplier: .*number, got str"),
        ("glu", {"alpha": float("nan")}, ValueError, r"alpha: .*finite number, got nan"),
        ("glu", {"limit": -1}, ValueError, r"limit: .*at least 0, or None, got -1"),
        ("glu", SOFTCAP, ValueError, r"limit: expected two numbers, of gate and up, with .*, got None"),
        ("glu", SOFTCAP | {"limit": (4.0, 0)}, ValueError, r"limit: expected numbers above 0 .*, got \(4.0, 0\)"),
        ("glu", SOFTCAP | {"limit": (4.0, "1")}, TypeError, r"limit\[1\]: expected a number, got str"),
        ("glu", {"limit": (4.0, 1.0)}, TypeError, r"limit: expected a number, got tuple"),
        ("glu", GELU | {"activation": "silu_clamp"}, ValueError, r"alpha: expected 1.0 .*'silu_clamp'.*, got 2.0"),
        ("glu", GELU, ValueError, r"alpha: expected 1.0 .*activation='gelu_tanh'.*'silu'.*, got 2.0"),
        ("glu", {"bias_gate": [1.0]}, TypeError, r"bias_gate: .*torch.Tensor, got list"),
        ("glu", {"bias_gate": ones(4)}, ValueError, r"bias_gate: .*\(3,\).*w_gate.*, got \(4,\)"),
        ("packed", {"layout": "mixed"}, ValueError, r"layout: .*'packed', 'interleaved', 'transposed', got 'mixed'"),
        ("packed", {"w_gate_up": ones(6, 5)}, ValueError, r"w_gate_up: .*\[2 \* intermediate, 4\].* got \(6, 5\)"),
        ("packed", {"layout": "transposed"}, ValueError, r"w_gate_up: .*\[4, 2 \* intermediate\].* got \(6, 4\)"),
        ("packed", {"w_gate_up": ones(5, 4)}, ValueError, r"w_gate_up: .*even.*, got \(5, 4\)"),
        ("packed", {"bias_gate_up": ones(3)}, ValueError, r"bias_gate_up: .*\(6,\).*, got \(3,\)"),
        ("mlp", {"w_down": 3}, TypeError, r"w_down: .*torch.Tensor, got int"),
        ("mlp", {"w_down": ones(4, 5)}, ValueError, r"w_down: .*\[hidden_out, 3\].*w_gate, got \(4, 5\)"),
        ("mlp", {"bias_down": ones(3)}, ValueError, r"bias_down: .*\(4,\).*w_down.*, got \(3,\)"),
        ("mlp", {"chunk_tokens": 2.0}, TypeError, r"chunk_tokens: .*int or None, got float"),
        ("mlp", {"chunk_tokens": 0, "save": "input"}, ValueError, r"chunk_tokens: .*at least 1, or None, got 0"),
        ("mlp", {"chunk_tokens": 8, "save": "preact"}, ValueError, r"save: .*'input' or 'auto' .*=8, got 'preact'"),
        ("silu_mul", {"gate": ones(2).double()}, TypeError, r"up: expected torch.float64 .*, got torch.float32"),
        ("silu_mul", {"up": ones(2).half()}, TypeError, r"up: expected torch.float32 .*, got torch.float16"),
        ("silu_mul", {"up": ones(3)}, ValueError, r"up: .*\(2,\).*gate.*, got \(3,\)"),
        ("silu_mul", {"up": ones(2, device="meta")}, ValueError, r"up: expected device cpu .*, got meta"),
        ("fg", {"e": ones(2, 3), "g": ones(2, 3)}, ValueError, r"e: .*three dimensions"),
        ("fg", {"g": ones(1, 2, 4)}, ValueError, r"g: .*\(1, 2, 3\)"),
        ("DWf", {"g": ones(3)}, ValueError, r"g: .*\(2, 3\).*DW.*, got \(3,\)"),
        ("unsloth", {"overwrite": "yes"}, TypeError, r"overwrite: .*bool, got str"),
    ],
)
def test_bad_input_names_the_argument(name, change, error, words):
    function, given = GIVEN[name]
    given = given | change
    needed = [given.pop(argument) for argument in GIVEN[name][1]]
    with pytest.raises(error, match=words):
        function(*needed, **given)
