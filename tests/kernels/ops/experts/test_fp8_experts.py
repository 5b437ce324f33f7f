"""swiglu_experts with fp8 products: bits of codes, products of exactly these, gradients in 16 bits, and refusals."""

from typing import Any

import mixtures
import pytest
import torch
from accuracy import DEVICE, FP8_LOST, assert_equal, poisoned_outputs, random_tensor
from clamped import keep_off_limit
from mixtures import GPT_OSS
from torch.library import opcheck

from swiglu_kernels import FusedSwiGLUExperts, reference, swiglu_experts
from swiglu_kernels.ops.fp8 import operation as fp8
from swiglu_kernels.ops.fp8.operation import quantise
from swiglu_kernels.ops.gate.formula import PLAIN

pytestmark = pytest.mark.skipif(fp8.why_not(DEVICE) is not None, reason=f"{fp8.why_not(DEVICE)}")

BFLOAT16 = torch.bfloat16
COUNT, SLOTS = 4, 2


def drawn(tokens: int) -> torch.Tensor:
    return mixtures.drawn(tokens, SLOTS, COUNT)


def problem(
    tokens: int, hidden: int = 144, intermediate: int = 80, dtype: torch.dtype = BFLOAT16, layout: str = "contiguous"
) -> list[torch.Tensor]:
    """Weights of very different size from expert to expert."""
    sizes = torch.tensor([1.0, 4.0, 0.25, 2.0], dtype=dtype, device=DEVICE)[:, None, None]
    return mixtures.layer(drawn(tokens), COUNT, hidden, intermediate, dtype, layout, sizes=sizes)


def call(function: Any, index: torch.Tensor, inputs: list[torch.Tensor], **options: Any) -> torch.Tensor:
    x, w_gate_up, w_down, weights, *biases = inputs
    named = dict(zip(("b_gate_up", "b_down"), biases, strict=False))
    return function(x, w_gate_up, w_down, index, weights, precision="fp8-rowwise", **named, **options)


@pytest.mark.parametrize("layout", ["transposed", "strided"])
def test_codes_of_experts_have_the_bits_of_the_definition(layout: str) -> None:
    weight = random_tensor(3, 34, 48, dtype=BFLOAT16, layout=layout)
    with poisoned_outputs():
        codes, scales = quantise(weight, "rowwise", weight=True)
    for expert in range(3):
        assert_equal((codes[expert], scales[expert]), reference.quantise(weight[expert], "rowwise"))


@pytest.mark.parametrize("tokens", [1, 150])
def test_products_are_those_of_the_codes(tokens: int) -> None:
    """The output against fp64 on exactly the codes that were handed over: nothing but its own rounding is lost."""
    index, inputs = drawn(tokens), problem(tokens)[:4]
    codes: dict[str, Any] = {}
    fp8.hand_over(codes)
    try:
        with poisoned_outputs():
            out = call(swiglu_experts, index, inputs)
    finally:
        fp8.hand_over(None)
    assert codes.keys() == {"x", "w_gate_up", "h", "w_down"}
    x, w_gate_up, w_down, weights = inputs
    for name, matrices in (("x", [x]), ("w_gate_up", w_gate_up), ("w_down", w_down)):
        for number, matrix in enumerate(matrices):
            handed = [part if name == "x" else part[number] for part in codes[name]]
            defined, scales = reference.quantise(matrix, "rowwise")
            assert_equal(handed, (defined, scales[:, None]))
    meant = {name: handed.double() * scales.double() for name, (handed, scales) in codes.items()}
    pairs, expert = meant["x"].repeat_interleave(SLOTS, 0), index.flatten()
    gate, up = torch.einsum("pk,pnk->pn", pairs, meant["w_gate_up"][expert]).chunk(2, 1)
    h = reference.silu_mul(gate, up).bfloat16()
    found = torch.einsum("pn,phn->ph", meant["h"], meant["w_down"][expert])
    terms = torch.einsum("pn,phn->ph", meant["h"].abs(), meant["w_down"][expert].abs())
    factor = weights.double().flatten()[:, None]
    weighted, rounded = ((part).unflatten(0, (-1, SLOTS)) for part in (found * factor, terms * FP8_LOST * factor.abs()))
    bound = 2.0**-8 * (weighted.abs().sum(1) + weighted.sum(1).abs()) + rounded.sum(1)
    assert ((out.double() - weighted.sum(1)).abs() <= bound).all()
    defined, scales = reference.quantise(h, "rowwise")
    other = defined.float() * scales[:, None] - meant["h"].float()
    assert other.abs().max() <= scales.max() * 32  # a code's step, where a sum was rounded otherwise
    differing = (other != 0).float().mean()  # fp8 tensor cores sum with some 14 bits
    assert differing < (0.02 if DEVICE.type == "cpu" else 0.05)


@pytest.mark.parametrize(
    ("tokens", "dtype", "layout", "gate", "biased", "options"),
    [
        (37, BFLOAT16, "contiguous", {}, False, {}),
        (19, torch.float16, "transposed", GPT_OSS, True, {"recompute": True}),
        (70, BFLOAT16, "strided", {"activation": "gelu_tanh"}, True, {}),
    ],
)
def test_output_and_gradients_are_the_reference_s(
    tokens: int, dtype: torch.dtype, layout: str, gate: dict[str, Any], biased: bool, options: dict[str, Any]
) -> None:
    index, inputs = drawn(tokens), problem(tokens, dtype=dtype, layout=layout)[: 6 if biased else 4]
    keep_off_limit(gate, inputs[0], inputs[1:2], inputs[4:5], "rowwise")
    inputs = [operand.requires_grad_() for operand in inputs]
    exact = [operand.detach().double().requires_grad_() for operand in inputs]
    with poisoned_outputs():
        out = call(swiglu_experts, index, inputs, **gate, **options)
        upstream = random_tensor(*out.shape, dtype=dtype, seed=9)
        gradients = torch.autograd.grad(out, inputs, upstream)
    truth = call(reference.swiglu_experts, index, exact, **gate)
    right = torch.autograd.grad(truth, exact, upstream.double())
    for got, exactly in zip((out, *gradients), (truth, *right), strict=True):
        lost = (got.double() - exactly).norm()  # its own rounding, and codes of h that are a step away
        assert lost <= 0.02 * exactly.norm()


def test_weights_that_were_quantised_before() -> None:
    index, inputs = drawn(20), problem(20)
    codes = [quantise(weight, "rowwise", weight=True) for weight in inputs[1:3]]
    by_codes = call(swiglu_experts, index, [inputs[0], *codes, *inputs[3:]])
    assert torch.equal(by_codes, call(swiglu_experts, index, inputs))
    x = inputs[0].requires_grad_()
    with pytest.raises(ValueError, match="expected 16 bits if a gradient is wanted"):
        call(swiglu_experts, index, [x, *codes, *inputs[3:]])


@pytest.mark.parametrize("tokens", [0, 3])
def test_tokens_without_experts_and_none_at_all(tokens: int) -> None:
    index = torch.full((tokens, SLOTS), COUNT, device=DEVICE)
    inputs = [operand.requires_grad_() for operand in problem(tokens)]
    out = call(swiglu_experts, index, inputs)
    assert not out.any()
    assert not any(gradient.any() for gradient in torch.autograd.grad(out.sum(), inputs))


def test_operators_keep_their_contracts() -> None:
    index, inputs = drawn(5), [operand.requires_grad_() for operand in problem(5)]
    arguments = (*inputs, index, None, None, 16, True, True, "portable", False, "fp8-rowwise", PLAIN.numbers)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    opcheck(torch.ops.swiglu_kernels.experts.default, arguments, test_utils=tests)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"precision": "fp8"}, ValueError, "precision: expected one of"),
        ({"hidden": 40}, ValueError, "multiple of 16 as hidden, got 40"),
        ({"intermediate": 24}, ValueError, "multiple of 16 as intermediate, got 24"),
        ({"dtype": torch.float32}, TypeError, "for fp8, got torch.float32"),
        ({"half": True}, ValueError, "expected both weights quantised"),
        ({"wrong": True}, TypeError, "w_down: expected what `quantise` returns"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(change: dict[str, Any], error: type[Exception], message: str) -> None:
    precision, half, wrong = (change.pop(name, None) for name in ("precision", "half", "wrong"))
    index, (x, w_gate_up, w_down, weights, *_) = drawn(5), problem(5, **change)
    given: list[Any] = [w_gate_up, w_down]
    if half or wrong:
        given[0] = quantise(w_gate_up, "rowwise")
    if wrong:
        given[1] = w_down, w_down
    with pytest.raises(error, match=message):
        swiglu_experts(x, *given, index, weights, precision=precision or "fp8-rowwise")


def test_the_module_keeps_codes_until_a_weight_changes() -> None:
    module = FusedSwiGLUExperts(32, 48, COUNT, precision="fp8-rowwise", device=DEVICE, dtype=BFLOAT16)
    assert "precision='fp8-rowwise'" in repr(module)
    index, x = drawn(5), random_tensor(5, 32, dtype=BFLOAT16)
    weights = random_tensor(5, SLOTS, dtype=BFLOAT16, seed=1)
    with torch.no_grad():
        expected = swiglu_experts(x, module.gate_up_proj, module.down_proj, index, weights, precision="fp8-rowwise")
        assert torch.equal(module(x, index, weights), expected)
        module.keep_codes()
        for _ in range(2):
            assert torch.equal(module(x, index, weights), expected)
        module.down_proj.mul_(2)
        assert torch.equal(module(x, index, weights), 2 * expected)
    with pytest.raises(ValueError, match="expected a module with precision="):
        FusedSwiGLUExperts(32, 48, COUNT).keep_codes()
