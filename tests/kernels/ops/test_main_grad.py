"""Weight gradients that are added to main_grad in fp32, and what autograd gets in their place."""

import functools

import pytest
import torch
from accuracy import DEVICE, random_tensor
from torch.utils.checkpoint import checkpoint

import swiglu_kernels

BFLOAT16 = torch.bfloat16
KINDS = ["FusedSwiGLU", "FusedSwiGLUMLP", "FusedSwiGLUPackedMLP", "experts"]


def layer(kind: str = "FusedSwiGLUMLP", accumulates: bool = True, dtype: torch.dtype = BFLOAT16, **options):
    torch.manual_seed(0)
    how = {"device": DEVICE, "dtype": dtype, "accumulate_into_main_grad": accumulates, **options}
    if kind == "experts":
        module = swiglu_kernels.FusedSwiGLUExperts(32, 48, 4, **how)
        weights = torch.tensor([[0.3, 0.7]], device=DEVICE, dtype=dtype).expand(6, 2)
        index = torch.tensor([[0, 1], [1, 3], [3, 0], [0, 3], [3, 1], [1, 0]], device=DEVICE)  # none has expert 2
        call = lambda x: module(x, index, weights)  # noqa: E731
    else:
        module = getattr(swiglu_kernels, kind)(32, 48, **how)
        call = module
    module.__dict__["call"] = call
    for weight in module.parameters() if accumulates else ():
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    return module


def x(seed: int, dtype: torch.dtype = BFLOAT16) -> torch.Tensor:
    return random_tensor(6, 32, dtype=dtype, seed=seed).requires_grad_()


def train(module, seeds=(0, 1), call=None, dtype: torch.dtype = BFLOAT16) -> list[torch.Tensor]:
    """Micro-batches; the gradient of each x."""
    found = []
    for seed in seeds:
        given = x(seed, dtype)
        (module.call if call is None else call)(given).square().sum().backward()
        found.append(given.grad)
    return found


@pytest.mark.parametrize("weight_grad", ["triton", "torch"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_micro_batches(kind, weight_grad):
    """They add up in fp32, before which nothing is rounded; each run has the same bits."""
    options = {} if kind == "experts" else {"weight_grad": weight_grad}
    both, again, second = (layer(kind, **options) for _ in range(3))
    plain, alone = layer(kind, False, **options), layer(kind, False, **options)
    d_x = train(both)
    assert all(torch.equal(own, other) for own, other in zip(d_x, train(plain), strict=True))
    train(again), train(second, [1]), train(alone, [1])
    for at, weight in enumerate(both.parameters()):
        of_again, of_second, of_plain, of_alone = (
            list(each.parameters())[at] for each in (again, second, plain, alone)
        )
        assert weight.grad_added_to_main_grad
        assert not weight.grad.any()  # zeros stand for it
        assert torch.equal(weight.main_grad, of_again.main_grad)
        torch.testing.assert_close(of_second.main_grad.to(BFLOAT16), of_alone.grad, rtol=2**-8, atol=0)
        rounded = (of_plain.grad.float() - weight.main_grad).norm() / weight.main_grad.norm()
        assert 2**-10 < rounded < 2**-7  # by each .grad, and by their sum
    first = layer(kind, **options)
    train(first, [0])
    for weight, own, other in zip(both.parameters(), first.parameters(), second.parameters(), strict=True):
        expected = own.main_grad.double() + other.main_grad.double()
        assert (weight.main_grad - expected).norm() <= 2**-22 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])
@pytest.mark.parametrize("kind", ["FusedSwiGLUMLP", "experts"])
def test_what_a_kernel_adds_is_not_rounded(kind, dtype):
    """In bfloat16 main_grad has more bits than the gradient that autograd would get; in fp32 it is that gradient."""
    module, plain = layer(kind, dtype=dtype), layer(kind, False, dtype)
    train(module, [0], dtype=dtype), train(plain, [0], dtype=dtype)
    for weight, other in zip(module.parameters(), plain.parameters(), strict=True):
        added = weight.main_grad
        torch.testing.assert_close(added, other.grad.float(), rtol=2**-8, atol=2e-7)
        assert not torch.equal(added.to(BFLOAT16).float(), added)


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_and_checkpointed(kind):
    expected = layer(kind)
    train(expected)
    for around in ("checkpoint", "compile"):
        module = layer(kind)
        call = functools.partial(checkpoint, module.call, use_reentrant=False)
        if around == "compile":
            call = torch.compile(module.call, backend="aot_eager", fullgraph=True)
        train(module, call=call)
        for weight, other in zip(module.parameters(), expected.parameters(), strict=True):
            found = weight.main_grad
            if around == "compile" and kind == "FusedSwiGLUPackedMLP":
                found = found + weight.grad.float()  # a view has no main_grad in a graph: its gradient comes as ever
            torch.testing.assert_close(found, other.main_grad, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_in_fp8_products_are_added_behind(recipe):
    module, plain = (layer(accumulates=each, precision=f"fp8-{recipe}") for each in (True, False))
    train(module, [0]), train(plain, [0])
    for weight, other in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(weight.main_grad, other.grad.float())


def test_what_megatron_drops_and_what_has_none():
    module = layer()
    gate, up, down = module.parameters()
    for weight in (gate, up, down):
        weight.grad_added_to_main_grad = False
    gate.zero_out_wgrad = True
    del up.main_grad
    train(module, [0])
    plain = layer(accumulates=False)
    train(plain, [0])
    assert torch.equal(gate.main_grad, plain.gate_proj.weight.grad.float())  # alone it is added behind
    assert torch.equal(up.grad, plain.up_proj.weight.grad)
    assert (gate.grad_added_to_main_grad, up.grad_added_to_main_grad, down.grad_added_to_main_grad) == (
        True,
        False,
        True,
    )
    assert not gate.grad.any()
    assert down.grad.shape == down.shape
    down.main_grad = down.main_grad.to(BFLOAT16)
    with pytest.raises(
        ValueError, match=r"main_grad: expected float32 \(32, 48\) with the parameter's strides, got torch.bfloat16"
    ):
        train(module, [0])


def test_recomputed_gate_and_up_of_experts():
    found, expected = layer("experts", recompute=True), layer("experts")
    train(found), train(expected)
    for weight, other in zip(found.parameters(), expected.parameters(), strict=True):
        assert torch.equal(weight.main_grad, other.main_grad)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu(kind):
    test_two_micro_batches(kind, "triton")
    test_two_micro_batches(kind, "torch")
