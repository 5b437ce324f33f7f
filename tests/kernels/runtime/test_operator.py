"""The package's own way to register operators; opcheck of each operator is in the tests of its file."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from swiglu_kernels.runtime.operator import operator

CALLS: list[str] = []


@operator("test_scaled_product")
def scaled_product(
    left: torch.Tensor, right: torch.Tensor | None, scale: float, flags: list[bool]
) -> tuple[torch.Tensor, torch.Tensor]:
    CALLS.append("kernel")
    product = left * scale if right is None else left * right * scale
    return product, left + 1.0


@scaled_product.register_fake
def _(left, right, scale, flags):
    return left.new_empty(left.shape), left.new_empty(left.shape)


def _setup_context(ctx, inputs, output):
    left, right, ctx.scale, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(left, right)


def _backward(ctx, gradient, _):
    left, right = ctx.saved_tensors
    needs_left, needs_right = ctx.needs_input_grad[:2]
    return (
        gradient * (1.0 if right is None else right) * ctx.scale if needs_left else None,
        gradient * left * ctx.scale if needs_right else None,
        None,
        None,
    )


scaled_product.register_autograd(_backward, _setup_context)


def operands(*, grad: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(1.0, 4.0).requires_grad_(grad), torch.full((3,), 2.0).requires_grad_(grad)


def test_registration_passes_opcheck():
    torch.library.opcheck(torch.ops.swiglu_kernels.test_scaled_product.default, (*operands(grad=True), 3.0, [True]))


def test_an_operand_may_be_absent_or_need_nothing():
    left, right = operands(grad=True)
    scaled_product(left, None, 3.0, [])[0].sum().backward()
    assert torch.equal(left.grad, torch.full((3,), 3.0))
    (gradient,) = torch.autograd.grad(scaled_product(left.detach(), right, 1.0, [])[0].sum(), right)
    assert torch.equal(gradient, left.detach())


@pytest.mark.parametrize("grad", [False, True])
def test_a_dispatch_mode_sees_the_operator(grad):
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.append(str(function))
            return function(*args, **(kwargs or {}))

    names: list[str] = []
    with Seen():
        scaled_product(*operands(grad=grad), 3.0, [])
    assert "swiglu_kernels.test_scaled_product.default" in names


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_function_holds_it_whole(backend, grad):
    compiled = torch.compile(lambda *t: scaled_product(*t, 3.0, [])[0] + 1.0, fullgraph=True, backend=backend)
    inputs = operands(grad=grad)
    before = len(CALLS)
    assert torch.equal(compiled(*inputs), scaled_product(*inputs, 3.0, [])[0] + 1.0)
    assert len(CALLS) == before + 2


def test_vmap_works_and_functional_gradients_are_refused():
    left, right = operands(grad=False)
    product, _ = torch.vmap(lambda one: scaled_product(one, right, 3.0, []))(torch.stack([left, left + 1.0]))
    assert torch.equal(product[1], (left + 1.0) * right * 3.0)

    def through_vmap(weight):
        return torch.vmap(lambda one: scaled_product(one, weight, 3.0, [])[0])(left[None]).sum()

    with pytest.raises(RuntimeError, match="functorch"):
        torch.func.grad(through_vmap)(right)
