import functools
from typing import Any

import blocks
import pytest
import torch
from accuracy import DEVICE, FP8_LOST, assert_equal, check_against_reference, poisoned_outputs, random_tensor, same_bits
from clamped import GPT_OSS, keep_off_limit
from replayed import as_on_a_gpu
from stock_mlp import LlamaMLP
from torch.library import opcheck

import swiglu_kernels
from swiglu_kernels import patch_model, reference, swiglu_glu_fp8, swiglu_mlp_fp8, unpatch
from swiglu_kernels.ops.fp8 import choice, products
from swiglu_kernels.ops.fp8 import operation as fp8
from swiglu_kernels.reference import RECIPES
from swiglu_kernels.runtime.backend import backend_for

pytestmark = pytest.mark.skipif(fp8.why_not(DEVICE) is not None, reason=f"{fp8.why_not(DEVICE)}")

NAMES = "x w_gate w_up w_down bias_gate bias_up bias_down"
BFLOAT16 = torch.bfloat16
by_recipe = pytest.mark.parametrize("recipe", RECIPES)


def problem(
    tokens: int = 37, hidden: int = 80, intermediate: int = 144, hidden_out: int = 96,
    dtype: torch.dtype = BFLOAT16, layout: str = "contiguous", gradients: bool = False,
) -> list[torch.Tensor]:  # fmt: skip
    """Draw operands by `NAMES`; more columns than one block has, and a last block that is smaller."""
    drawn = blocks.problem(tokens, hidden, intermediate, hidden_out, dtype, (layout,) * 4, biased=True)
    return [operand.requires_grad_(gradients) for operand in drawn]


@by_recipe
@pytest.mark.parametrize(
    ("shape", "layout"), [((1, 16), "contiguous"), ((256, 128), "transposed"), ((130, 272), "strided")], ids=str
)
def test_codes_and_scales_have_the_bits_of_the_definition(shape, layout, recipe):
    matrix = random_tensor(*shape, dtype=BFLOAT16, layout=layout)
    matrix *= torch.exp2(random_tensor(*shape, dtype=BFLOAT16, scale=3, seed=1))
    matrix[0] = 0
    matrix[-1, :8] *= 2.0**-20
    for weight in (False, True):
        with poisoned_outputs():
            got = fp8.quantise(matrix, recipe, weight=weight)
        assert_equal(got, reference.quantise(matrix, recipe, weight))


@by_recipe
def test_every_code_and_every_tie(recipe):
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(BFLOAT16).nan_to_num(448.0)
    middle = ((codes[1:] + codes[:-1]) / 2).nan_to_num()
    matrix = torch.stack([codes, torch.cat([middle, codes[:1]]), codes.flip(0)]).to(DEVICE)
    matrix[:, 0] = matrix[:, 128] = 448  # so that scales are 1
    (got, scales), (defined, _) = fp8.quantise(matrix, recipe), reference.quantise(matrix, recipe)
    assert bool((scales == 1).all())
    assert same_bits(got, defined)


@by_recipe
@pytest.mark.parametrize("dtype", [BFLOAT16, torch.float16])
def test_every_scale(recipe, dtype):
    """Rows whose largest magnitudes are all those that a 16-bit type has, beside random parts of them.

    Of the interpreter, which divides as PyTorch does, every 31st.
    """
    every = 31 if backend_for(DEVICE) == "interpreter" else 1
    bits = torch.arange(1, 0x7F80 if dtype is BFLOAT16 else 0x7C00, every, dtype=torch.int16)
    largest = bits.view(dtype).to(DEVICE)
    parts = random_tensor(len(bits), 16, dtype=torch.float32).clamp(-1, 1) * torch.exp2(
        -5 * random_tensor(len(bits), 16, dtype=torch.float32, seed=1).abs()
    )
    matrix = (parts * largest[:, None].float()).to(dtype)
    matrix[:, 3], matrix[:, 4], matrix[:, 5] = largest, 0.0, -0.0
    if backend_for(DEVICE) == "interpreter":  # which does not read subnormal bfloat16
        matrix[matrix.abs() < torch.finfo(dtype).smallest_normal] = 0
    assert_equal(fp8.quantise(matrix, recipe), reference.quantise(matrix, recipe))


@by_recipe
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(recipe, bad):
    x, *weights = problem()[:4]
    x[3, 5] = bad
    out = swiglu_mlp_fp8(x, *weights, recipe=recipe)
    assert not out[3].isfinite().any()
    assert out[:3].isfinite().all()
    assert out[4:].isfinite().all()


HANDED = {"x", "w_gate", "w_up", "h", "w_down", "upstream", "upstream.T", "w_down.T", "h.T", "d_gate", "d_up"}
HANDED |= {"d_gate.T", "d_up.T", "w_gate.T", "w_up.T", "x.T"}


def by_plain_products(monkeypatch, of_blocks=True):
    """The way of PyTorch's products, with plain ones in their place that ask for what it asks for: no GPU is needed."""

    def multiply(codes, turned, scales, turned_scales, out):
        depth = codes.shape[1]
        assert depth == len(turned)
        assert out.shape == (len(codes), turned.shape[1])
        assert depth % 16 == turned.shape[1] % 16 == 0
        if scales.shape[1] > 1 or turned_scales.shape[0] > 1:
            assert depth % 128 == len(codes) % 4 == 0
            assert scales.shape == (len(codes), depth // 128)
            assert scales.stride() == (1, len(codes))
        if turned_scales.shape[1] not in (1, turned.shape[1]):  # of a weight's blocks
            assert len(turned_scales) % 4 == 0
            turned_scales = turned_scales[: depth // 128]
        out.copy_(value(codes, scales) @ value(turned, turned_scales))

    def scaled_mm(codes, turned, *, scale_a, scale_b, out_dtype, out):
        assert out.dtype == out_dtype
        if scale_a.dim() == 0:  # of whole matrices
            scale_a, scale_b = scale_a.expand(len(codes), 1), scale_b.expand(1, turned.shape[1])
        multiply(codes, turned, scale_a, scale_b, out)

    def multiply_blocks(codes, scales, turned, turned_scales, out):
        multiply(codes, turned, scales, turned_scales, out)

    monkeypatch.setattr(choice.hopper_fp8, "why_not", lambda *_: "PyTorch's products are asked for")
    monkeypatch.setattr(choice, "why_not_by_torch", lambda *_: None)
    monkeypatch.setattr(choice, "TORCH_FROM", 1)
    monkeypatch.setattr(products.internals, "scaled_mm", scaled_mm)
    monkeypatch.setattr(products.internals, "multiply_blocks", multiply_blocks)
    monkeypatch.setattr(products.internals, "scaled_mm_of_blocks", of_blocks)


def product(left, right):
    """left @ right and the sum of the magnitudes."""
    return left @ right, left.abs() @ right.abs()


@by_recipe
@pytest.mark.parametrize(("tokens", "by_torch"), [(1, False), (150, False), (149, True), (150, True), (149, "old")])
def test_products_are_those_of_the_codes(recipe, tokens, by_torch, monkeypatch):
    """Each result against fp64 on exactly the codes that were handed over: nothing but its own rounding is lost."""
    if by_torch:
        by_plain_products(monkeypatch, of_blocks=by_torch != "old")
    inputs = problem(tokens, gradients=True)[:4]
    codes: dict[str, Any] = {}
    fp8.hand_over(codes)
    try:
        with poisoned_outputs():
            out = swiglu_mlp_fp8(*inputs, recipe=recipe).mul_(1)  # a result may be changed in place
            upstream = random_tensor(*out.shape, dtype=BFLOAT16, seed=9)
            d_x, d_gate, d_up, d_down = torch.autograd.grad(out, inputs, upstream)
    finally:
        fp8.hand_over(None)
    assert codes.keys() == HANDED
    given = dict(zip(NAMES.split(), inputs, strict=False)) | {"upstream": upstream}
    for name, (handed, scales) in codes.items():
        matrix = given.get(name.removesuffix(".T"))
        if matrix is not None:
            turned, weight = name.endswith(".T"), name.startswith("w_")
            defined, right = reference.quantise(matrix.t() if turned else matrix, recipe, weight)
            right = right[:, None] if right.dim() == 1 else right
            assert same_bits(handed, defined.t() if turned else defined), name
            assert same_bits(scales, right.t() if turned else right), name
    meant = {name: value(*quantised) for name, quantised in codes.items()}
    (gate, of_gate), (up, of_up) = (product(meant["x"], meant[name].t()) for name in ("w_gate", "w_up"))
    if by_torch and recipe == "blockwise":  # gate and up are products of their own
        gate, up = gate.bfloat16().double(), up.bfloat16().double()
    z = swiglu_glu_fp8(*(operand.detach() for operand in inputs[:3]), recipe=recipe)
    d_x_gate, d_x_up = (product(meant[f"d_{name}"], meant[f"w_{name}.T"]) for name in ("gate", "up"))
    d_x_truth, d_x_terms = (sum(pair) for pair in zip(d_x_gate, d_x_up, strict=True))
    if by_torch:  # both are rounded before they are added
        d_x_terms += (d_x_gate[0].abs() + d_x_up[0].abs()) * 2.0**-8 / FP8_LOST
    for name, got, (truth, terms) in (
        ("z", z, (reference.silu_mul(gate, up), 1.1 * up.abs() * of_gate + gate.abs() * of_up)),
        ("out", out, product(meant["h"], meant["w_down"].t())),
        ("d_x", d_x, (d_x_truth, d_x_terms)),
        ("d_w_down", d_down, product(meant["upstream.T"].t(), meant["h.T"])),
        ("d_w_gate", d_gate, product(meant["d_gate.T"].t(), meant["x.T"])),
        ("d_w_up", d_up, product(meant["d_up.T"].t(), meant["x.T"])),
    ):
        bound = 2.0**-8 * truth.abs() + FP8_LOST * terms  # one rounding to bfloat16, and what the sums lose
        excess = ((got.detach().double() - truth).abs() / bound).max().item()
        assert excess <= 1, f"{name}: {excess:.2f} of the bound"
    defined, right = reference.quantise(z, recipe)  # h is z, rounded before it is quantised
    assert same_bits(codes["h"][0], defined)
    assert same_bits(codes["h"][1].flatten(), right.flatten())


def value(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What codes stand for, in fp64, from scales with as many rows and columns as there are groups."""
    for dim, size in enumerate(codes.shape):
        if scales.shape[dim] not in (1, size):
            scales = scales.repeat_interleave(128, dim).narrow(dim, 0, size)
    return codes.double() * scales.double()


@by_recipe
@pytest.mark.parametrize(
    ("options", "gate", "count", "layout", "dtype"),
    [
        ({}, {}, 3, "contiguous", BFLOAT16),
        ({"weight_grad": "triton"}, GPT_OSS, 7, "strided", torch.float16),
        ({"weight_grad": "torch", "save": "input"}, {"activation": "gelu_tanh"}, 7, "half", BFLOAT16),
        ({"save": "input"}, {"gate_multiplier": 0.7}, 4, "transposed", BFLOAT16),
        ({}, {"activation": "silu_softcap", "limit": (1.0, 2.0)}, 7, "contiguous", BFLOAT16),
    ],
)
def test_output_and_gradients(options, gate, count, layout, dtype, recipe):
    inputs = problem(dtype=dtype, layout=layout)[:count]
    keep_off_limit(gate, inputs[0], inputs[1:3], inputs[4:6], recipe)
    in_fp8 = options.get("weight_grad") is None
    check_against_reference(
        NAMES,
        functools.partial(swiglu_mlp_fp8 if len(inputs) > 3 else swiglu_glu_fp8, recipe=recipe, **options, **gate),
        functools.partial(reference.swiglu_mlp_fp8, recipe=recipe, fp8_weight_grad=in_fp8, **gate),
        inputs,
    )


@by_recipe
def test_frozen_weights_leading_dimensions_and_no_tokens(recipe):
    x, *weights = problem(6, gradients=True)[:4]
    out = swiglu_mlp_fp8(x.view(2, 3, 80), *weights, recipe=recipe, weight_grad="none")
    out.sum().backward()
    assert out.shape == (2, 3, 96)
    assert [operand.grad is None for operand in (x, *weights)] == [False, True, True, True]
    empty = x.detach()[:0].requires_grad_()
    gradients = torch.autograd.grad(swiglu_mlp_fp8(empty, *weights, recipe=recipe).sum(), [empty, *weights])
    assert not any(gradient.any() for gradient in gradients)


@by_recipe
@pytest.mark.parametrize("by_torch", [False, True])
def test_weights_that_were_quantised_before(recipe, by_torch, monkeypatch):
    if by_torch:
        by_plain_products(monkeypatch)
    x, *weights = problem()[:4]
    kept = [fp8.quantise(weight, recipe, weight=True) for weight in weights]
    expected = swiglu_mlp_fp8(x, *weights, recipe=recipe)
    dense = [reference.quantise(matrix, recipe, matrix is not x) for matrix in (x, *weights)]
    for given in ([x, *kept], [fp8.quantise(x, recipe), *kept], dense):
        assert torch.equal(swiglu_mlp_fp8(*given, recipe=recipe), expected)
    with pytest.raises(ValueError, match="w_gate, w_up, w_down: expected 16 bits if a gradient is wanted"):
        swiglu_mlp_fp8(x.requires_grad_(), *kept, recipe=recipe)
    with pytest.raises(ValueError, match="expected all weights quantised, or nothing"):
        swiglu_mlp_fp8(x.detach(), *kept[:2], weights[2], recipe=recipe)
    other = RECIPES[recipe == RECIPES[0]]
    with pytest.raises(ValueError, match=f"w_gate: expected scales .* as recipe='{other}'"):
        swiglu_mlp_fp8(x.detach(), *kept, recipe=other)


@by_recipe
@pytest.mark.skipif(backend_for(DEVICE) != "interpreter", reason="needs Triton's interpreter")
@pytest.mark.parametrize("by_torch", [False, True])
def test_calls_of_a_kind_are_made_again(recipe, by_torch, monkeypatch):
    if by_torch:
        by_plain_products(monkeypatch)
    inputs = problem(37, gradients=True)[:4]
    kept = [fp8.quantise(weight, recipe, weight=True) for weight in inputs[1:]]

    def calls():
        inferred = swiglu_mlp_fp8(inputs[0].detach(), *kept, recipe=recipe)
        out = swiglu_mlp_fp8(*inputs, recipe=recipe)
        return inferred, out, *torch.autograd.grad(out, inputs, torch.ones_like(out))

    expected, called = calls(), []
    for name in ("_given", "_by_rows_of"):
        made = getattr(fp8, name)
        monkeypatch.setattr(fp8, name, lambda *given, name=name, made=made: called.append(name) or made(*given))
    with as_on_a_gpu():
        for _ in range(3):
            assert all(map(torch.equal, calls(), expected))
    assert sorted(called) == ["_by_rows_of"] * 4 + ["_given"] * 2, "checked once of each kind, the next is the record"


def test_operator_conventions():
    for recipe, weight in (("rowwise", False), ("blockwise", False), ("blockwise", True)):
        opcheck(fp8._quantise._overload, (problem(3)[1], recipe, weight), test_utils=("test_schema", "test_faketensor"))


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=BFLOAT16, device=DEVICE)


BAD = [
    ({"recipe": "tensorwise"}, ValueError, "recipe: expected one of 'rowwise', 'blockwise', got 'tensorwise'"),
    ({"weight_grad": "bf16"}, ValueError, "weight_grad: expected one of 'fp8', 'triton'"),
    ({"save": "all"}, ValueError, "save: expected one of"),
    ({"x": zeros(3, 20)}, ValueError, r"w_gate: expected \[intermediate, 20\]"),
    ({"x": zeros(3, 20), "w_gate": zeros(32, 20), "w_up": zeros(32, 20)}, ValueError, "multiple of 16 as hidden, got"),
    ({"w_down": zeros(8, 32)}, ValueError, "multiple of 16 as hidden_out, got 8"),
    ({"w_gate": (1, 2)}, TypeError, "w_gate: expected what `quantise` returns"),
    ({"x": 3}, TypeError, "x: expected a torch.Tensor, got int"),
]


@pytest.mark.parametrize(("change", "error", "words"), BAD)
def test_bad_input_names_the_argument(change, error, words):
    given = {"x": zeros(3, 16), "w_gate": zeros(32, 16), "w_up": zeros(32, 16), "w_down": zeros(16, 32)}
    with pytest.raises(error, match=words):
        swiglu_mlp_fp8(**(given | {"recipe": "rowwise"} | change))


def test_what_fp8_is_not_for():
    with pytest.raises(TypeError, match=r"x: expected one of torch.bfloat16, torch.float16 for fp8, got torch.float32"):
        swiglu_mlp_fp8(*problem(dtype=torch.float32), recipe="rowwise")
    with pytest.raises(ValueError, match="matrix: fp8 products need a multiple of 16 as depth, got 8"):
        fp8.quantise(zeros(3, 8), "rowwise")


def test_patch_model(monkeypatch):
    model = torch.nn.Sequential(*(LlamaMLP(hidden, 144, dtype=BFLOAT16, device=DEVICE) for hidden in (80, 20)))
    with monkeypatch.context() as patch:
        patch.setattr(fp8, "why_not", lambda device: "there is no fp8 here")
        with pytest.raises(ValueError, match="precision: there is no fp8 here"):
            patch_model(model, precision="fp8-rowwise")
    report = patch_model(model, precision="fp8-rowwise")
    assert [changed.path for changed in report.changed] == ["0"]
    assert "a multiple of 16 as hidden, got 20" in report.left_alone[0].reason
    x = random_tensor(5, 80, dtype=BFLOAT16)
    weights = model[0].gate_proj.weight, model[0].up_proj.weight, model[0].down_proj.weight
    assert torch.equal(model[0](x), swiglu_mlp_fp8(x, *weights, recipe="rowwise"))
    unpatch(model)
    report = patch_model(model, precision="fp8-blockwise", keep_codes=True, tokens=3000)
    assert model[0]._codes is not None
    assert report.notes == (
        "fp8-blockwise at 3000 tokens: it pays at no number of tokens that was measured in a forward of 80 x 144: 0",
        "fp8-blockwise at 3000 tokens: it pays at no number of tokens that was measured in a step of 80 x 144: 0",
    )
    unpatch(model)
    assert "_codes" not in vars(model[0])
    assert patch_model(model, precision="fp8-rowwise").notes == ()
    with pytest.raises(ValueError, match="keep_codes: expected False with precision='bf16'"):
        patch_model(model, keep_codes=True)


@by_recipe
@pytest.mark.parametrize("trains", [False, True])
def test_from_which_tokens_on_fp8_pays_is_one_table(recipe, trains):
    least = choice.PAYS_FROM[recipe, trains][0][-1]
    assert [choice.pays_from(recipe, trains, hidden, 11008) for hidden in (8192, 512)] == [least, None]
    assert list(map(str, sorted(least for *_, least in choice.PAYS_FROM[recipe, trains]))) == [
        str(least) for *_, least in choice.PAYS_FROM[recipe, trains]
    ], "the first entry that fits is taken"
    found = swiglu_kernels.explain(*problem()[:3], precision=f"fp8-{recipe}").splitlines()[trains]
    assert f"{'in ' if trains else ''}bf16 at no number of tokens that was measured" in found


@pytest.mark.parametrize("capability", [(8, 6), None])
def test_a_device_without_fp8_is_named(monkeypatch, capability):
    monkeypatch.setattr(fp8, "backend_for", lambda device: "triton" if capability else "torch")
    monkeypatch.setattr(fp8, "capability_of", lambda device: capability)
    with pytest.raises(ValueError, match=r"x: fp8 products need Triton and an NVIDIA GPU of compute capability 8\.9"):
        swiglu_mlp_fp8(*problem(), recipe="rowwise")


def test_products_are_by_hand_where_pytorch_s_tiles_are_cut():
    sizes = (2988, 6112), (8192, 4096), (128, 6112)
    assert [choice.hopper_fp8.product_pays(*size, 132) for size in sizes] == [True, False, False]


@pytest.mark.gpu
@by_recipe
@pytest.mark.parametrize("shape", [(1, 512, 1408, 512), (100, 1040, 720, 528), (2049, 1024, 2816, 1024)], ids=str)
def test_on_a_gpu(shape, recipe):
    inputs = problem(*shape)[:4]
    function = functools.partial(swiglu_mlp_fp8, recipe=recipe)
    check_against_reference(NAMES, function, functools.partial(reference.swiglu_mlp_fp8, recipe=recipe), inputs)
