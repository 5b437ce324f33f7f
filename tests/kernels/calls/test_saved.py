"""What the forward saved is overwritten in the last backward of a graph, and in no other."""

import pytest
import torch

from swiglu_kernels import swiglu_glu, swiglu_glu_packed, swiglu_mlp
from swiglu_kernels.calls.saved import may_overwrite

HIDDEN, INTERMEDIATE = 32, 48
OPERATIONS = {
    swiglu_glu: [(INTERMEDIATE, HIDDEN), (INTERMEDIATE, HIDDEN)],
    swiglu_glu_packed: [(2 * INTERMEDIATE, HIDDEN)],
    swiglu_mlp: [(INTERMEDIATE, HIDDEN), (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)],
}


def operands(operation, dtype=torch.float32):
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = [(20, HIDDEN), *OPERATIONS[operation]]
    return [torch.randn(shape, device=device, dtype=dtype).requires_grad_() for shape in shapes]


class Asks(torch.autograd.Function):
    """Notes what `may_overwrite` says of what it saved."""

    answers: list[bool]

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x * 1)
        ctx.keeps_to_itself = True
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        (saved,) = ctx.saved_tensors
        Asks.answers.append(may_overwrite(ctx, saved))
        return gradient * 2


def test_only_a_backward_that_frees_its_graph_is_the_last():
    Asks.answers = []
    x = torch.ones(3, requires_grad=True)
    y = Asks.apply(x).sum()
    y.backward(retain_graph=True)
    torch.autograd.grad(y, x, retain_graph=True)
    y.backward()
    torch.autograd.grad(Asks.apply(x).sum(), x, create_graph=True)
    assert Asks.answers == [False, False, True, False]


def test_what_somebody_else_holds_is_left_alone():
    """The operator itself returns gate and up, as torch.library.opcheck sees them."""
    x, w_gate, w_up = operands(swiglu_glu)
    options = ("torch", "preact", "torch", None, None, "silu", 1.0, 1.0, None, 0.0)
    z, gate, up = torch.ops.swiglu_kernels.glu(x, w_gate, w_up, *options)
    before = gate.clone(), up.clone()
    z.sum().backward()
    assert torch.equal(gate, before[0])
    assert torch.equal(up, before[1])


@pytest.mark.parametrize("options", [{}, {"input_grad": "fused", "weight_grad": "torch"}, {"input_grad": "torch"}])
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
def test_every_backward_of_a_retained_graph_has_the_same_bits(operation, options):
    inputs = operands(operation)
    out = operation(*inputs, save="preact", **options)
    upstream = torch.randn_like(out)
    backwards = [torch.autograd.grad(out, inputs, upstream, retain_graph=keep) for keep in (True, True, False)]
    for again in backwards[1:]:
        for first, second in zip(backwards[0], again, strict=True):
            assert torch.equal(first, second)


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
def test_the_last_backward_keeps_gate_and_up_for_d_gate_and_d_up(operation):
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    inputs = operands(operation)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = operation(*inputs, save="preact")
    gate, up = (tensor for tensor in saved if tensor is not None and tensor.shape == (20, INTERMEDIATE))
    before = gate.clone(), up.clone()
    out.sum().backward(retain_graph=True)
    assert torch.equal(gate, before[0])
    assert torch.equal(up, before[1])
    out.sum().backward()
    assert not torch.equal(gate, before[0])
    assert not torch.equal(up, before[1])
