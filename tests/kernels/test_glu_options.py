"""What swiglu_glu can do beyond plain SiLU: biases, other gates, dX by torch, "auto"."""

import functools
import inspect
import itertools
import math

import pytest
import torch
from accuracy import DEVICE, DTYPES, check_against_reference, random_tensor
from hypothesis import given, settings
from hypothesis import strategies as st

from swiglu_kernels import backend_for, reference, swiglu_glu, swiglu_glu_packed, swiglu_mlp
from swiglu_kernels.launches.formula import PLAIN, Formula
from swiglu_kernels.portable.glu_forward import forward_launch
from swiglu_kernels.tiles.choices import INPUT_GRADS, SAVES, WEIGHT_GRADS, resolve

pytestmark = pytest.mark.skipif(backend_for(DEVICE) == "torch", reason="no kernel can run here: no Triton")

GATES = {
    "silu": {},
    "gpt-oss": {"alpha": 1.702, "limit": 1.0, "up_offset": 1.0},  # limit 7 in the model: here many values meet it
    "falcon-h1": {"gate_multiplier": 0.7},
    "gelu": {"activation": "gelu_tanh"},
    "gelu, all at once": {"activation": "gelu_tanh", "gate_multiplier": -1.5, "limit": 0.5, "up_offset": -0.25},
}
GATE = pytest.mark.parametrize("gate", GATES.values(), ids=GATES.keys())
VARIANTS = [
    dict(zip(("weight_grad", "save", "input_grad"), values, strict=True))
    for values in itertools.product(WEIGHT_GRADS, SAVES, INPUT_GRADS)
]


def problem(tokens: int, hidden: int, intermediate: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Draw x, w_gate, w_up, bias_gate and bias_up; the biases lie two elements apart."""
    scale = max(hidden, 1) ** -0.5
    return [
        random_tensor(tokens, hidden, dtype=dtype),
        random_tensor(intermediate, hidden, dtype=dtype, scale=scale, seed=1),
        random_tensor(intermediate, hidden, dtype=dtype, scale=scale, seed=2),
        random_tensor(2 * intermediate, dtype=dtype, seed=3)[::2],
        random_tensor(2 * intermediate, dtype=dtype, seed=4)[1::2],
    ]


def check(inputs: list[torch.Tensor], gate: dict, options: dict) -> None:
    check_against_reference(
        "x w_gate w_up bias_gate bias_up",
        functools.partial(swiglu_glu, **gate, **options),
        functools.partial(reference.swiglu_glu, **gate),
        inputs,
        wanted=[0] if options.get("weight_grad") == "none" else None,
    )


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    tokens=st.sampled_from([0, 1, 17, 65]),
    hidden=st.sampled_from([0, 3, 33, 70]),
    # one element alone may lie where the derivative cancels to almost nothing, in eager by luck less so
    intermediate=st.sampled_from([0, 9, 31, 129]),
    dtype=st.sampled_from(DTYPES),
    gate=st.sampled_from(list(GATES.values())),
    options=st.sampled_from(VARIANTS),
)
def test_output_and_gradients(tokens, hidden, intermediate, dtype, gate, options):
    check(problem(tokens, hidden, intermediate, dtype), gate, options)


@GATE
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_grad": "torch", "input_grad": "torch"},
        {"save": "input", "input_grad": "torch"},
        {"weight_grad": "auto", "save": "auto", "input_grad": "auto"},
    ],
    ids=["on the fly", "torch", "recomputed", "auto"],
)
def test_every_gate_in_every_dtype(gate, options, dtype):
    check(problem(21, 70, 45, dtype), gate, options)
    x, w_gate, w_up, *_ = problem(21, 70, 45, dtype)
    check_against_reference(
        "x w_gate w_up",
        functools.partial(swiglu_glu, **gate, **options),
        functools.partial(reference.swiglu_glu, **gate),
        [x, w_gate, w_up],
    )


@pytest.mark.gpu
@GATE
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"weight_grad": "torch", "input_grad": "torch"}, {"save": "input"}], ids=str)
@pytest.mark.parametrize("shape", [(1, 2880, 2880), (1000, 2880, 2880), (777, 509, 1031)])
def test_every_gate_at_model_sizes(shape, options, dtype, gate):
    # Hundreds of values meet a bound of 6, and none of the millions lies within fp32's rounding of it: there the
    # gradient jumps, and which side a value falls on is a matter of the order of its sum.
    check(problem(*shape, dtype), gate | ({"limit": 6.0} if "limit" in gate else {}), options)


@pytest.mark.parametrize("present", ["bias_gate", "bias_up"])
@pytest.mark.parametrize("save", ["preact", "input"])
def test_one_bias_alone(present, save):
    x, w_gate, w_up, bias, _ = problem(5, 9, 7)
    check_against_reference(
        "x w_gate w_up bias",
        lambda x, w_gate, w_up, bias: swiglu_glu(x, w_gate, w_up, **{present: bias}, save=save),
        lambda x, w_gate, w_up, bias: reference.swiglu_glu(x, w_gate, w_up, **{present: bias}),
        [x, w_gate, w_up, bias],
    )


def test_only_the_biases_need_a_gradient():
    inputs = problem(5, 9, 7)
    biases = [bias.clone().requires_grad_() for bias in inputs[3:]]
    got = torch.autograd.grad(swiglu_glu(*inputs[:3], *biases).sum(), biases)
    expected = torch.autograd.grad(reference.swiglu_glu(*inputs[:3], *biases).sum(), biases)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_frozen_biases_get_no_gradient():
    inputs = [tensor.clone().requires_grad_() for tensor in problem(5, 9, 7)]
    swiglu_glu(*inputs, weight_grad="none").sum().backward()
    assert [tensor.grad is None for tensor in inputs] == [False, True, True, True, True]


@pytest.mark.parametrize("save", ["preact", "input"])
def test_the_gradient_on_and_beyond_the_bound_is_that_of_clamp(save):
    # One token, hidden 1, x = 1: the weights are the pre-activations.
    values = torch.tensor([-9.0, -7.0, -6.5, 0.0, 6.5, 7.0, 9.0], device=DEVICE)
    grid = torch.cartesian_prod(values, values)
    gate = {"alpha": 1.702, "limit": 7.0, "up_offset": 1.0}
    leaves = [column[:, None].clone().requires_grad_() for column in grid.unbind(1)]
    x = torch.ones(1, 1, device=DEVICE)
    got = torch.autograd.grad(swiglu_glu(x, *leaves, **gate, save=save).sum(), leaves)
    expected = torch.autograd.grad(reference.swiglu_glu(x, *leaves, **gate).sum(), leaves)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)
    stopped = torch.gt if torch.__version__ < "2.14" else torch.ge
    assert torch.equal(got[0][:, 0] == 0, stopped(grid[:, 0], 7) | (grid[:, 1] == -1))
    assert torch.equal(got[1][:, 0] == 0, stopped(grid[:, 1].abs(), 7) | (grid[:, 0] == 0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_pass_the_bound_as_in_the_reference(dtype):
    nan, inf = float("nan"), float("inf")
    pairs = torch.tensor([[nan, 1.0], [1.0, nan], [inf, 1.0], [1.0, inf], [1.0, -inf]], device=DEVICE, dtype=dtype)
    x = torch.ones(1, 1, device=DEVICE, dtype=dtype)
    gate, up = pairs.unbind(1)
    options = {"limit": 7.0, "alpha": 1.702, "up_offset": 1.0}
    expected = reference.swiglu_glu(x.double(), gate[:, None].double(), up[:, None].double(), **options).to(dtype)
    torch.testing.assert_close(swiglu_glu(x, gate[:, None], up[:, None], **options), expected, equal_nan=True)


NUMBERS = {"gate_multiplier": [0.5, 2.0, 1], "alpha": [1.5, 0.5, 2], "limit": [0.5, 0.25, None], "up_offset": [1.0, -1]}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_changed_number_is_never_stale(name):
    inputs = problem(5, 9, 7)
    for value in NUMBERS[name]:
        expected = reference.swiglu_glu(*inputs, **{name: value})
        torch.testing.assert_close(swiglu_glu(*inputs, **{name: value}), expected)


@pytest.mark.parametrize("dynamic", [None, False, True])
@pytest.mark.parametrize("name", NUMBERS)
def test_a_changed_number_is_never_stale_in_a_compiled_function(name, dynamic):
    torch.compiler.reset()
    inputs = [tensor.clone().requires_grad_() for tensor in problem(5, 9, 7)]

    def function(value, call):
        z = call(*inputs, **{name: value})
        return [z, *torch.autograd.grad(z.sum(), inputs)]

    compiled = torch.compile(swiglu_glu, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for value in NUMBERS[name]:
        for one, other in zip(function(value, compiled), function(value, reference.swiglu_glu), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_numbers_are_run_time_arguments_and_plain_silu_has_none():
    x, w_gate, w_up, *biases = problem(5, 9, 7)
    plain = forward_launch(x, w_gate, w_up, x, None)
    assert plain.arguments["FORMULA"] == "silu"
    names = ("multiplier", "alpha", "limit", "up_offset", "bias_gate_ptr", "bias_up_ptr", "bias_gate_n", "bias_up_n")
    assert all(plain.arguments[name] is None for name in names), "None is compiled away"
    launches = [
        forward_launch(x, w_gate, w_up, x, None, None, tuple(biases), Formula(alpha=alpha, limit=limit))
        for alpha, limit in [(1.702, 7.0), (1.5, None)]
    ]
    parameters = launches[0].kernel.params if hasattr(launches[0].kernel, "params") else []
    assert not any(parameter.is_constexpr for parameter in parameters if parameter.name in names)
    first, second = (launch.arguments for launch in launches)
    assert (first["alpha"], first["limit"], second["alpha"], second["limit"]) == (1.702, 7.0, 1.5, math.inf)
    assert first["FORMULA"] == second["FORMULA"] == "scaled_silu"


def test_a_second_backward_is_the_same_bits():
    inputs = [tensor.clone().requires_grad_() for tensor in problem(40, 9, 7)]
    z = swiglu_glu(*inputs, **GATES["gpt-oss"], input_grad="torch")
    first = torch.autograd.grad(z.sum(), inputs, retain_graph=True)
    second = torch.autograd.grad(z.sum(), inputs)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def test_every_public_function_has_the_same_options():
    def options(function):
        parameters = inspect.signature(function).parameters.values()
        return {one.name: one.default for one in parameters if one.kind is one.KEYWORD_ONLY}

    shared = options(swiglu_glu)
    assert options(swiglu_glu_packed) == {"layout": "packed"} | shared
    assert options(swiglu_mlp) == shared | {"chunk_tokens": None}
    assert Formula(**{name: shared[name] for name in vars(PLAIN)}) == PLAIN


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(1, ("triton", "preact", "two_step")), (8, ("triton", "preact", "two_step")), (9, ("torch", "preact", "torch"))],
)
def test_what_auto_picks_for_portable_kernels(tokens, expected):
    x = torch.empty(tokens, 64)
    assert resolve("auto", "auto", "auto", x, 128) == expected
    assert resolve("auto", "auto", "auto", x, 128, chunk_tokens=4)[1] == "input"
    assert resolve("none", "input", "fused", x, 128) == ("none", "input", "fused")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"activation": "relu"}, ValueError, r"activation: expected one of 'silu', 'gelu_tanh', got 'relu'"),
        ({"gate_multiplier": "2"}, TypeError, r"gate_multiplier: expected a number, got str"),
        ({"up_offset": True}, TypeError, r"up_offset: expected a number, got bool"),
        ({"alpha": float("nan")}, ValueError, r"alpha: expected a finite number, got nan"),
        ({"limit": float("inf")}, ValueError, r"limit: expected a finite number, got inf"),
        ({"limit": -1}, ValueError, r"limit: expected a number of at least 0, or None, got -1"),
        (
            {"activation": "gelu_tanh", "alpha": 2.0},
            ValueError,
            r"alpha: expected 1.0 with activation='gelu_tanh' \(it belongs to 'silu'\), got 2.0",
        ),
        ({"bias_gate": [1.0]}, TypeError, r"bias_gate: expected a torch.Tensor, got list"),
        (
            {"bias_gate": torch.ones(4)},
            ValueError,
            r"bias_gate: expected shape \(3,\) \(the first dimension of w_gate\), got \(4,\)",
        ),
        ({"bias_up": torch.ones(3).half()}, TypeError, r"bias_up: expected torch.float32 as x has, got torch.float16"),
    ],
)
def test_bad_input_names_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        swiglu_glu(torch.ones(2, 4), torch.ones(3, 4), torch.ones(3, 4), **change)
