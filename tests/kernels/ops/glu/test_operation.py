"""swiglu_glu: output and gradients against fp64, its options, gates and biases, and what it launches."""

import functools

import pytest
import torch
from accuracy import DEVICE, DTYPES, LAYOUTS, assert_equal, check_against_reference, random_tensor
from blocks import GATES, WITH_AUTO, leaves, problem, variant_name
from blocks import check as check_operation
from clamped import keep_off_limit
from hypothesis import given, settings
from hypothesis import strategies as st

from swiglu_kernels import backend_for, reference, swiglu_glu
from swiglu_kernels.ops.glu import choice
from swiglu_kernels.ops.glu.portable_forward import forward_launch
from swiglu_kernels.runtime.shortcuts import plan

pytestmark = pytest.mark.skipif(backend_for(DEVICE) == "torch", reason="no kernel can run here: no Triton")

VARIANTS = [options for options in WITH_AUTO if "auto" not in options.values()]
check = functools.partial(check_operation, "swiglu_glu")


@settings(derandomize=True, deadline=None, max_examples=30)
@given(
    tokens=st.sampled_from([0, 1, 2, 3, 17, 65, 130]),
    hidden=st.sampled_from([0, 1, 3, 16, 33, 70, 128]),
    # one element alone may lie where another gate's derivative cancels to almost nothing, in eager by luck less so
    intermediate=st.sampled_from([0, 5, 9, 16, 31, 129]),
    dtype=st.sampled_from(DTYPES),
    layouts=st.tuples(*[st.sampled_from(LAYOUTS)] * 3),
    options=st.sampled_from(WITH_AUTO),
    gate=st.sampled_from(list(GATES.values())),
    biased=st.booleans(),
)
def test_output_and_gradients(tokens, hidden, intermediate, dtype, layouts, options, gate, biased):
    check(problem(tokens, hidden, intermediate, None, dtype, layouts, biased), options, gate)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_column(dtype):
    check(problem(17, 3, 1, dtype=dtype), {})


@pytest.mark.parametrize(
    ("options", "dtype"),
    [(options, DTYPES[(number + number // 3) % 3]) for number, options in enumerate(VARIANTS)],
    ids=str,
)
def test_every_variant(options, dtype):
    """Each value of an option in each dtype."""
    check(problem(37, 70, 45, None, dtype, ("contiguous", "transposed", "half")), options)


@pytest.mark.parametrize(("save", "input_grad"), [("preact", "fused"), ("preact", "two_step"), ("input", "fused")])
def test_every_kernel_where_nothing_needs_a_mask(save, input_grad):
    check(
        problem(256, 128, 128, dtype=torch.bfloat16), {"weight_grad": "triton", "save": save, "input_grad": input_grad}
    )


WAYS = [{}, {"weight_grad": "torch", "input_grad": "torch"}, {"save": "input", "input_grad": "torch"}]


@pytest.mark.parametrize(
    ("name", "dtype", "options"),
    [
        (name, dtype, WAYS[(number + shift) % len(WAYS)])
        for number, name in enumerate(GATES)
        for shift, dtype in enumerate(DTYPES)
    ],
    ids=str,
)
def test_every_gate_in_every_dtype_and_way(name, dtype, options):
    inputs = problem(21, 70, 45, dtype=dtype, biased=True)
    check(inputs, options, GATES[name])
    check(inputs[:3], options, GATES[name])


AT_MODEL_SIZES = pytest.mark.parametrize(
    "shape", [(1, 4096, 1408), (200, 1024, 1408), (1000, 2880, 2880), (777, 509, 1031)]
)


@pytest.mark.gpu
@pytest.mark.parametrize("options", VARIANTS, ids=variant_name)
@pytest.mark.parametrize("dtype", DTYPES)
@AT_MODEL_SIZES
def test_every_variant_at_model_sizes(shape, options, dtype):
    check(problem(*shape, dtype=dtype), options)


@pytest.mark.gpu
@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("dtype", DTYPES)
@AT_MODEL_SIZES
def test_every_gate_at_model_sizes(shape, dtype, name):
    for options in WAYS:
        check(problem(*shape, dtype=dtype, biased=True), options, GATES[name])


def test_leading_dimensions_that_do_not_collapse_are_copied():
    x, w_gate, w_up = problem(1, 9, 5)
    x = random_tensor(4, 3, 9, dtype=torch.float32).transpose(0, 1)
    z = swiglu_glu(x, w_gate, w_up)
    torch.testing.assert_close(z, reference.swiglu_glu(x, w_gate, w_up))


def test_without_a_gradient_only_z_is_stored(monkeypatch):
    choose = choice.forward
    monkeypatch.setattr(choice, "forward", lambda *of, **how: choose(*of, **how | {"launch": True}))
    inputs = leaves(5, 9, 7)
    launches = []
    with plan.surveyed(launches.append):
        swiglu_glu(*inputs)
        with torch.no_grad():
            swiglu_glu(*inputs)
        swiglu_glu(*(tensor.detach() for tensor in inputs))
    assert [launch.arguments["STORE_PREACT"] for launch in launches] == [True, False, False]


@pytest.mark.parametrize("layout", ["rows far apart", "columns far apart"])
def test_strides_beyond_32_bits(layout):
    # A view over 4 GiB of which a few elements are touched; memory that is never touched costs nothing.
    shape, strides = (3, 5), (2**30, 1) if layout == "rows far apart" else (1, 2**29)
    x = torch.empty(2**31 + 16, dtype=torch.float16, device=DEVICE).as_strided(shape, strides)
    _, w_gate, w_up = problem(3, 5, 7, dtype=torch.float16)
    x.copy_(random_tensor(3, 5, dtype=torch.float16))
    dense = x.clone(memory_format=torch.contiguous_format)
    for weight in (w_gate, w_up):
        weight.requires_grad_()
    z, expected = swiglu_glu(x, w_gate, w_up), swiglu_glu(dense, w_gate, w_up)
    assert torch.equal(z, expected)
    assert_equal(*(torch.autograd.grad(out.sum(), (w_gate, w_up)) for out in (z, expected)))


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_tf32_only_where_torch_allows_it(precision):
    x, w_gate, w_up = problem(5, 9, 7)
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = precision
        assert forward_launch(x, w_gate, w_up, x, None).arguments["PRECISION"] == precision
    finally:
        matmul.fp32_precision = before


@pytest.mark.parametrize(("present", "save"), [("bias_gate", "preact"), ("bias_up", "input")])
def test_one_bias_alone(present, save):
    x, w_gate, w_up, bias, _ = problem(5, 9, 7, biased=True)
    check_against_reference(
        "x w_gate w_up bias",
        lambda x, w_gate, w_up, bias: swiglu_glu(x, w_gate, w_up, **{present: bias}, save=save),
        lambda x, w_gate, w_up, bias: reference.swiglu_glu(x, w_gate, w_up, **{present: bias}),
        [x, w_gate, w_up, bias],
    )


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
    torch.testing.assert_close(got, expected)
    stopped = torch.gt if torch.__version__ < "2.14" else torch.ge
    assert torch.equal(got[0][:, 0] == 0, stopped(grid[:, 0], 7) | (grid[:, 1] == -1))
    assert torch.equal(got[1][:, 0] == 0, stopped(grid[:, 1].abs(), 7) | (grid[:, 0] == 0))


BOUNDED = [
    {"limit": 7.0, "alpha": 1.702, "up_offset": 1.0},
    {"activation": "silu_clamp", "limit": 7.0},
    {"activation": "silu_softcap", "limit": (4.0, 25.0)},
]


@pytest.mark.parametrize("options", BOUNDED, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_pass_the_bound_as_in_the_reference(dtype, options):
    nan, inf = float("nan"), float("inf")
    pairs = torch.tensor([[nan, 1.0], [1.0, nan], [inf, 1.0], [1.0, inf], [1.0, -inf]], device=DEVICE, dtype=dtype)
    x = torch.ones(1, 1, device=DEVICE, dtype=dtype)
    gate, up = pairs.unbind(1)
    expected = reference.swiglu_glu(x.double(), gate[:, None].double(), up[:, None].double(), **options).to(dtype)
    torch.testing.assert_close(swiglu_glu(x, gate[:, None], up[:, None], **options), expected, equal_nan=True)


@pytest.mark.parametrize("options", BOUNDED[1:], ids=str)
def test_small_and_large_values_and_their_gradients_keep_their_digits(options):
    sizes = torch.logspace(-6, 2, 65, device=DEVICE)
    values = torch.cat([sizes, -sizes[: len(sizes) * 3 // 4]])
    x, leaves = torch.ones(1, 1, device=DEVICE), [values[:, None].clone().requires_grad_() for _ in range(2)]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    z, truth = swiglu_glu(x, *leaves, **options), reference.swiglu_glu(x.double(), *exact, **options)
    torch.testing.assert_close(z.double(), truth, rtol=2e-6, atol=1e-12)
    pairs = zip(*(torch.autograd.grad(out.sum(), own) for out, own in ((z, leaves), (truth, exact))), strict=True)
    for got, expected in pairs:
        torch.testing.assert_close(got.double(), expected, rtol=2e-5, atol=1e-5)  # 1 - tanh^2 cancels


NUMBERS = {"gate_multiplier": [0.5, 2.0, 1], "alpha": [1.5, 0.5, 2], "limit": [0.5, 0.25, None], "up_offset": [1.0, -1]}


@pytest.mark.parametrize(
    ("name", "compiled"),
    [
        *((name, how) for name in NUMBERS for how in (None, {})),
        ("limit", {"dynamic": False}),
        ("limit", {"dynamic": True}),
    ],
)
def test_a_changed_number_is_never_stale(name, compiled):
    torch.compiler.reset()
    inputs = leaves(5, 9, 7, biased=True)

    def results(call, value):
        z = call(*inputs, **{name: value})
        return [z, *torch.autograd.grad(z.sum(), inputs)]

    call = swiglu_glu
    if compiled is not None:
        call = torch.compile(swiglu_glu, fullgraph=True, backend="aot_eager", **compiled)
    for value in NUMBERS[name]:
        keep_off_limit({name: value}, inputs[0], inputs[1:3], inputs[3:])
        torch.testing.assert_close(results(call, value), results(reference.swiglu_glu, value), rtol=1e-4, atol=1e-5)
