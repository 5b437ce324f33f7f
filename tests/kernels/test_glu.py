import functools
import importlib
import itertools

import pytest
import torch
from accuracy import DEVICE, DTYPES, LAYOUTS, assert_as_accurate_as_eager, check_against_reference, random_tensor
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import opcheck

from swiglu_kernels import backend_for, reference, swiglu_glu
from swiglu_kernels.glu import INPUT_GRADS, SAVES, WEIGHT_GRADS

pytestmark = pytest.mark.skipif(backend_for(DEVICE) == "torch", reason="no kernel can run here: no Triton")

VARIANTS = [
    {"weight_grad": weight_grad, "save": save, "input_grad": input_grad}
    for weight_grad, save, input_grad in itertools.product(WEIGHT_GRADS, SAVES, INPUT_GRADS)
    if "auto" not in (weight_grad, save, input_grad)
]


def variant_name(options: dict[str, str]) -> str:
    return "-".join(options.values())


def problem(
    tokens: int,
    hidden: int,
    intermediate: int,
    dtype: torch.dtype = torch.float32,
    layouts: tuple[str, str, str] = ("contiguous", "contiguous", "contiguous"),
) -> list[torch.Tensor]:
    """Draw x, w_gate and w_up with pre-activations around 1."""
    scale = max(hidden, 1) ** -0.5
    return [
        random_tensor(tokens, hidden, dtype=dtype, layout=layouts[0]),
        random_tensor(intermediate, hidden, dtype=dtype, layout=layouts[1], scale=scale, seed=1),
        random_tensor(intermediate, hidden, dtype=dtype, layout=layouts[2], scale=scale, seed=2),
    ]


def leaves(*shape: int) -> list[torch.Tensor]:
    return [tensor.requires_grad_() for tensor in problem(*shape)]


def check(inputs: list[torch.Tensor], options: dict[str, str]) -> None:
    check_against_reference(
        "x w_gate w_up",
        functools.partial(swiglu_glu, **options),
        reference.swiglu_glu,
        inputs,
        wanted=[0] if options.get("weight_grad") == "none" else None,
    )


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    tokens=st.sampled_from([0, 1, 2, 3, 17, 65, 130]),
    hidden=st.sampled_from([0, 1, 3, 16, 33, 70, 128]),
    intermediate=st.sampled_from([0, 1, 5, 16, 31, 129]),
    dtype=st.sampled_from(DTYPES),
    layouts=st.tuples(*[st.sampled_from(LAYOUTS)] * 3),
    options=st.sampled_from(VARIANTS),
)
def test_output_and_gradients(tokens, hidden, intermediate, dtype, layouts, options):
    check(problem(tokens, hidden, intermediate, dtype, layouts), options)


@pytest.mark.parametrize("options", VARIANTS, ids=variant_name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_variant_in_every_dtype(options, dtype):
    check(problem(37, 70, 45, dtype, ("contiguous", "transposed", "half")), options)


@pytest.mark.parametrize("options", VARIANTS, ids=variant_name)
def test_every_variant_where_nothing_needs_a_mask(options):
    check(problem(256, 128, 128, torch.bfloat16), options)


@pytest.mark.gpu
@pytest.mark.parametrize("options", VARIANTS, ids=variant_name)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 4096, 1408), (16, 1024, 1408), (200, 1024, 1408), (1000, 2880, 2880), (777, 509, 1031)]
)
def test_every_variant_at_model_sizes(shape, options, dtype):
    check(problem(*shape, dtype), options)


@pytest.mark.parametrize("shape", [(), (2,), (2, 3), (2, 0, 3)])
def test_leading_dimensions(shape):
    x, w_gate, w_up = problem(1, 9, 5)
    x = random_tensor(*shape, 9, dtype=torch.float32)
    check([x, w_gate, w_up], {})


def test_leading_dimensions_that_do_not_collapse_are_copied():
    x, w_gate, w_up = problem(1, 9, 5)
    x = random_tensor(4, 3, 9, dtype=torch.float32).transpose(0, 1)
    z = swiglu_glu(x, w_gate, w_up)
    torch.testing.assert_close(z, reference.swiglu_glu(x, w_gate, w_up))


def test_no_tokens_give_zero_weight_gradients():
    x, w_gate, w_up = leaves(0, 9, 5)
    for options in VARIANTS[:-6]:
        _, d_w_gate, d_w_up = torch.autograd.grad(swiglu_glu(x, w_gate, w_up, **options).sum(), (x, w_gate, w_up))
        assert not d_w_gate.any()
        assert not d_w_up.any()


def test_expanded_upstream_gradient():
    x, w_gate, w_up = leaves(5, 9, 7)
    for options in VARIANTS[:-6]:
        got = torch.autograd.grad(swiglu_glu(x, w_gate, w_up, **options).sum(), (x, w_gate, w_up))
        expected = torch.autograd.grad(reference.swiglu_glu(x, w_gate, w_up).sum(), (x, w_gate, w_up))
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_frozen_weights_get_no_gradient():
    x, w_gate, w_up = leaves(5, 9, 7)
    swiglu_glu(x, w_gate, w_up, weight_grad="none").sum().backward()
    assert x.grad is not None
    assert w_gate.grad is None
    assert w_up.grad is None


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_only_some_inputs_need_a_gradient(wanted):
    inputs = problem(5, 9, 7)
    for position in wanted:
        inputs[position].requires_grad_()
    got = torch.autograd.grad(swiglu_glu(*inputs).sum(), [inputs[position] for position in wanted])
    expected = torch.autograd.grad(reference.swiglu_glu(*inputs).sum(), [inputs[position] for position in wanted])
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def saved_elements(**options: str) -> int:
    inputs = leaves(6, 9, 5)
    parameters = {tensor.data_ptr() for tensor in inputs[1:]}
    count = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += tensor.numel() if tensor.data_ptr() not in parameters else 0
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        swiglu_glu(*inputs, **options)
    return count


def test_what_is_saved_for_the_backward():
    tokens, hidden, intermediate = 6, 9, 5
    assert saved_elements(save="preact") == tokens * (hidden + 2 * intermediate)
    assert saved_elements(save="input") == tokens * hidden
    assert saved_elements(save="preact", weight_grad="none") == tokens * 2 * intermediate


def test_without_a_gradient_only_z_is_stored(monkeypatch):
    module = importlib.import_module("swiglu_kernels.glu")
    stored = []

    def spy(*args):
        launch = forward_launch(*args)
        stored.append(launch.arguments["STORE_PREACT"])
        return launch

    forward_launch = module.forward_launch
    monkeypatch.setattr(module, "forward_launch", spy)
    inputs = leaves(5, 9, 7)
    swiglu_glu(*inputs)
    with torch.no_grad():
        swiglu_glu(*inputs)
    swiglu_glu(*(tensor.detach() for tensor in inputs))
    assert stored == [True, False, False]


@pytest.mark.parametrize("options", VARIANTS, ids=variant_name)
def test_a_second_backward_is_right(options):
    inputs = leaves(5, 9, 7)
    wanted = inputs[:1] if options["weight_grad"] == "none" else inputs
    z = swiglu_glu(*inputs, **options)
    first = torch.autograd.grad(z.sum(), wanted, retain_graph=True)
    second = torch.autograd.grad(z.sum(), wanted)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        return z.clone()

    @staticmethod
    def backward(ctx, dz):
        return None


def test_an_undefined_upstream_gradient_gives_none():
    inputs = leaves(5, 9, 7)
    NoGradient.apply(swiglu_glu(*inputs)).sum().backward()
    assert all(tensor.grad is None for tensor in inputs)


def test_double_backward_is_refused():
    x, w_gate, w_up = leaves(5, 9, 7)
    (dx,) = torch.autograd.grad(swiglu_glu(x, w_gate, w_up).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="glu_backward cannot be differentiated"):
        dx.sum().backward()


def test_double_backward_is_refused_where_x_is_not_saved():
    x, w_gate, w_up = leaves(5, 9, 7)
    z = swiglu_glu(x, w_gate, w_up, weight_grad="none", save="preact")
    with pytest.raises(RuntimeError, match="glu_backward cannot be differentiated"):
        torch.autograd.grad(z.sum(), x, create_graph=True)


@pytest.mark.parametrize("options", [VARIANTS[0], VARIANTS[7], VARIANTS[-1]], ids=variant_name)
def test_operator_registration(options):
    x, w_gate, w_up = leaves(5, 9, 7)
    formula = ("silu", 1.0, 1.0, None, 0.0)
    opcheck(torch.ops.swiglu_kernels.glu.default, (x, w_gate, w_up, *options.values(), None, None, *formula))
    preactivation = (
        torch.zeros(5, 7, device=DEVICE) if options["save"] == "preact" else torch.zeros(0, 0, device=DEVICE)
    )
    arguments = (
        torch.ones(5, 7, device=DEVICE),
        *(t.detach() for t in (x, w_gate, w_up)),
        preactivation,
        preactivation,
    )
    opcheck(
        torch.ops.swiglu_kernels.glu_backward.default,
        (*arguments, *options.values(), True, False, None, None, *formula),
    )


@pytest.mark.parametrize("options", [VARIANTS[0], VARIANTS[7], VARIANTS[-1]], ids=variant_name)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_a_graph_break(options, dynamic):
    inputs = leaves(5, 9, 7)
    wanted = inputs[:1] if options["weight_grad"] == "none" else inputs
    function = functools.partial(swiglu_glu, **options)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    got = torch.autograd.grad(compiled(*inputs).sum(), wanted)
    expected = torch.autograd.grad(function(*inputs).sum(), wanted)
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("layout", ["rows far apart", "columns far apart"])
def test_strides_beyond_32_bits(layout):
    # A view over 4 GiB of which a few elements are touched; memory that is never touched costs nothing.
    shape, strides = (3, 5), (2**30, 1) if layout == "rows far apart" else (1, 2**29)
    x = torch.empty(2**31 + 16, dtype=torch.float16, device=DEVICE).as_strided(shape, strides)
    _, w_gate, w_up = problem(3, 5, 7, torch.float16)
    x.copy_(random_tensor(3, 5, dtype=torch.float16))
    dense = x.clone(memory_format=torch.contiguous_format)
    for weight in (w_gate, w_up):
        weight.requires_grad_()
    z, expected = swiglu_glu(x, w_gate, w_up), swiglu_glu(dense, w_gate, w_up)
    assert torch.equal(z, expected)
    got = torch.autograd.grad(z.sum(), (w_gate, w_up))
    for one, other in zip(got, torch.autograd.grad(expected.sum(), (w_gate, w_up)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [VARIANTS[0], VARIANTS[3]], ids=variant_name)
def test_above_two_to_the_31_elements(options):
    tokens, hidden, intermediate = 2**17 + 5, 64, 2**14 + 16
    x, w_gate, w_up = (
        (torch.randn(shape, device="cuda") * scale).bfloat16().requires_grad_()
        for shape, scale in [((tokens, hidden), 1), ((intermediate, hidden), 0.125), ((intermediate, hidden), 0.125)]
    )
    z = swiglu_glu(x, w_gate, w_up, **options)
    assert z.numel() > 2**31
    dx, d_w_gate, _ = torch.autograd.grad(z, (x, w_gate, w_up), torch.ones_like(z))
    boundary = 2**31 // intermediate

    def part(dtype: torch.dtype, rows: slice, columns: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        inputs = [tensor.detach().to(dtype).requires_grad_() for tensor in (x[rows], w_gate[columns], w_up[columns])]
        output = reference.swiglu_glu(*inputs)
        gradients = torch.autograd.grad(output.sum(), inputs)
        return output.detach(), gradients[0], gradients[1]

    everything = slice(None)
    for rows in (slice(0, 64), slice(boundary - 64, boundary + 64), slice(tokens - 64, tokens)):
        eager, truth = part(torch.bfloat16, rows, everything), part(torch.float64, rows, everything)
        assert_as_accurate_as_eager("z", z[rows].detach(), eager[0], truth[0])
        assert_as_accurate_as_eager("dx", dx[rows], eager[1], truth[1])
    for columns in (slice(0, 64), slice(intermediate - 64, intermediate)):
        eager, truth = part(torch.bfloat16, everything, columns), part(torch.float64, everything, columns)
        assert_as_accurate_as_eager("d_w_gate", d_w_gate[columns], eager[2], truth[2])


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_tf32_only_where_torch_allows_it(precision):
    from swiglu_kernels.portable.glu_forward import forward_launch

    x, w_gate, w_up = problem(5, 9, 7)
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = precision
        assert forward_launch(x, w_gate, w_up, x, None).arguments["PRECISION"] == precision
    finally:
        matmul.fp32_precision = before


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": 3}, TypeError, r"x: expected a torch.Tensor, got int"),
        ({"x": torch.ones(2, 4).double()}, TypeError, r"x: expected one of .*, got torch.float64"),
        ({"x": torch.ones(())}, ValueError, r"x: expected at least one dimension"),
        ({"w_gate": torch.ones(3, 4).half()}, TypeError, r"w_gate: expected torch.float32 as x has, got torch.float16"),
        ({"w_up": torch.ones(3, 4, device="meta")}, ValueError, r"w_up: expected device cpu as x has, got meta"),
        (
            {"w_gate": torch.ones(4)},
            ValueError,
            r"w_gate: expected two dimensions, \[intermediate, hidden\], got \(4,\)",
        ),
        ({"w_gate": torch.ones(3, 5)}, ValueError, r"w_gate: expected \[intermediate, 4\] .* got \(3, 5\)"),
        (
            {"w_up": torch.ones(2, 4)},
            ValueError,
            r"w_up: expected shape \(3, 4\) \(the shape of w_gate\), got \(2, 4\)",
        ),
        (
            {"weight_grad": "both"},
            ValueError,
            r"weight_grad: expected one of 'triton', 'torch', 'none', 'auto', got 'both'",
        ),
        ({"save": None}, ValueError, r"save: expected one of 'preact', 'input', 'auto', got None"),
        (
            {"input_grad": "slow"},
            ValueError,
            r"input_grad: expected one of 'fused', 'two_step', 'torch', 'auto', got 'slow'",
        ),
        (
            {"x": torch.ones(1).expand(2**31, 4)},
            ValueError,
            r"x: expected every dimension up to 2147482624, got \(2147483648, 4\)",
        ),
    ],
)
def test_bad_input_names_the_argument(change, error, message):
    arguments = {"x": torch.ones(2, 4), "w_gate": torch.ones(3, 4), "w_up": torch.ones(3, 4)} | change
    with pytest.raises(error, match=message):
        swiglu_glu(arguments.pop("x"), arguments.pop("w_gate"), arguments.pop("w_up"), **arguments)
