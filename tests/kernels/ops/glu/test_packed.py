import pytest
import torch
from accuracy import DEVICE, DTYPES, LAYOUTS, random_tensor
from blocks import WITH_AUTO, check, variant_name
from clamped import GPT_OSS
from hypothesis import given, settings
from hypothesis import strategies as st

from swiglu_kernels import backend_for, swiglu_glu, swiglu_glu_packed
from swiglu_kernels.ops.glu import operation as glu
from swiglu_kernels.ops.glu.packed import LAYOUTS as PACKINGS
from swiglu_kernels.ops.glu.portable_forward import forward_launch

pytestmark = pytest.mark.skipif(backend_for(DEVICE) == "torch", reason="no kernel can run here: no Triton")

PACKING = pytest.mark.parametrize("packing", PACKINGS)


def problem(
    tokens: int, hidden: int, intermediate: int, packing: str, dtype: torch.dtype = torch.float32,
    layouts: tuple[str, str] = ("contiguous", "contiguous"),
) -> list[torch.Tensor]:  # fmt: skip
    """Draw x, w_gate_up and bias_gate_up."""
    shape = (hidden, 2 * intermediate) if packing == "transposed" else (2 * intermediate, hidden)
    return [
        random_tensor(tokens, hidden, dtype=dtype, layout=layouts[0]),
        random_tensor(*shape, dtype=dtype, layout=layouts[1], scale=max(hidden, 1) ** -0.5, seed=1),
        random_tensor(2 * intermediate, dtype=dtype, seed=2),
    ]


@settings(derandomize=True, deadline=None, max_examples=25)
@given(
    tokens=st.sampled_from([0, 1, 17, 65]),
    hidden=st.sampled_from([0, 1, 33, 128]),
    intermediate=st.sampled_from([0, 1, 31, 64]),
    dtype=st.sampled_from(DTYPES),
    layouts=st.tuples(*[st.sampled_from(LAYOUTS)] * 2),
    packing=st.sampled_from(PACKINGS),
    options=st.sampled_from(WITH_AUTO),
    biased=st.booleans(),
)
def test_output_and_gradients(tokens, hidden, intermediate, dtype, layouts, packing, options, biased):
    inputs = problem(tokens, hidden, intermediate, packing, dtype, layouts)
    check("swiglu_glu_packed", inputs if biased else inputs[:2], options, layout=packing)


@PACKING
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_packing_in_every_dtype(packing, dtype):
    for weight_grad, gate in (("triton", GPT_OSS), ("torch", {})):
        inputs = problem(37, 70, 45, packing, dtype)
        check("swiglu_glu_packed", inputs, {"weight_grad": weight_grad}, gate, layout=packing)


@pytest.mark.gpu
@PACKING
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", WITH_AUTO[::5], ids=variant_name)
@pytest.mark.parametrize("shape", [(1, 4096, 1408), (1000, 2880, 2880), (777, 509, 1031)])
def test_every_packing_at_model_sizes(shape, packing, dtype, options):
    check("swiglu_glu_packed", problem(*shape, packing, dtype), options, layout=packing)


def test_the_layout_of_each_packing():
    x, w_gate, w_up = (random_tensor(*shape, dtype=torch.float32) for shape in [(5, 9), (7, 9), (7, 9)])
    w_up = w_up + 1
    packed = {
        "packed": torch.cat([w_gate, w_up]),
        "interleaved": torch.stack([w_gate, w_up], dim=1).flatten(0, 1),
        "transposed": torch.cat([w_gate.t(), w_up.t()], dim=1),
    }
    expected = swiglu_glu(x, w_gate, w_up)
    for packing in PACKINGS:
        torch.testing.assert_close(swiglu_glu_packed(x, packed[packing], layout=packing), expected)


def test_columns_that_alternate_as_gpt_oss_stores_them():
    x, stored, bias = problem(17, 33, 31, "transposed")  # [hidden, 2 * intermediate]
    check("swiglu_glu_packed", [x, stored.t(), bias], {}, GPT_OSS, layout="interleaved")
    stored.requires_grad_()
    (gradient,) = torch.autograd.grad(swiglu_glu_packed(x, stored.t(), layout="interleaved").sum(), stored)
    assert gradient.stride() == stored.stride(), "no copy is needed to add it to the parameter's"


@pytest.mark.parametrize(("packing", "weight_grad"), zip(PACKINGS, ("triton", "torch", "torch"), strict=True))
def test_nothing_is_copied(packing, weight_grad, monkeypatch):
    x, weight = (tensor.requires_grad_() for tensor in problem(5, 16, 16, packing)[:2])
    seen = []

    def spy(*args):
        launch = forward_launch(*args)
        seen.extend(launch.arguments[name] for name in ("w_gate_ptr", "w_up_ptr"))
        return launch

    monkeypatch.setattr(glu, "forward_launch", spy)
    z = swiglu_glu_packed(x, weight, layout=packing, weight_grad=weight_grad)
    assert [one.untyped_storage().data_ptr() for one in seen] == [weight.untyped_storage().data_ptr()] * 2
    (gradient,) = torch.autograd.grad(z.sum(), weight)
    assert gradient._base is None, "one tensor of the weight's shape, written directly"
    assert gradient.shape == weight.shape
