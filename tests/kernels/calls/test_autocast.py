"""The functional operations take part in autocast as torch.nn.functional.linear does."""

import pytest
import torch

from swiglu_kernels import swiglu_glu, swiglu_glu_packed, swiglu_mlp

HIDDEN, INTERMEDIATE = 32, 48
WEIGHTS = {
    swiglu_glu: [(INTERMEDIATE, HIDDEN), (INTERMEDIATE, HIDDEN)],
    swiglu_glu_packed: [(2 * INTERMEDIATE, HIDDEN)],
    swiglu_mlp: [(INTERMEDIATE, HIDDEN), (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)],
}


@pytest.mark.parametrize("operation", WEIGHTS, ids=lambda operation: operation.__name__)
def test_operands_are_cast_and_gradients_cast_back(operation):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    shapes = [(20, HIDDEN), *WEIGHTS[operation], (WEIGHTS[operation][0][0],)]  # x, weights, a bias
    tensors = [(torch.randn(shape, device=device) / 6).requires_grad_() for shape in shapes]
    halves = [tensor.detach().bfloat16().requires_grad_() for tensor in tensors]

    def call(x, *rest):
        *weights, bias = rest
        return operation(x, *weights, bias)

    with torch.autocast(device, torch.bfloat16):
        out = call(*tensors)
    expected = call(*halves)
    assert out.dtype is torch.bfloat16
    assert torch.equal(out, expected)
    out.float().sum().backward()
    expected.float().sum().backward()
    for tensor, half in zip(tensors, halves, strict=True):
        assert tensor.grad.dtype is torch.float32
        assert torch.equal(tensor.grad, half.grad.float())


@pytest.mark.parametrize("operation", WEIGHTS, ids=lambda operation: operation.__name__)
def test_float64_is_refused_as_without_autocast(operation):
    shapes = [(4, HIDDEN), *WEIGHTS[operation]]
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match="float64"):
        operation(*(torch.ones(shape, dtype=torch.float64) for shape in shapes))
