"""swiglu_glu: z = silu(x w_gate^T + bias_gate) * (x w_up^T + bias_up), one launch forward, and ways to its gradients.

This file says which kernels make which output and gradient. The choices, each by name (`choice.py` says what "auto"
picks):

    save         "preact"    the forward also stores gate and up from the same launch (2 x tokens x intermediate)
                 "input"     nothing but the inputs; the backward recomputes the products and emits d_gate and d_up
    input_grad   "fused"     dX in one launch from dZ, gate and up; with save="input" it reads the d_gate and d_up that
                             the recomputation has made
                 "two_step"  an elementwise kernel makes d_gate and d_up, then dX in one launch
                 "torch"     the same, but PyTorch does the two products, the second added to the first
    weight_grad  "triton"    both weight gradients in one launch; forms d_gate and d_up on the fly, or reads them
                 "torch"     d_gate and d_up are made, PyTorch does the products
                 "none"      weights and biases are frozen

A bias gradient is the sum of d_gate or d_up over the tokens, so these are made whenever one is wanted; the sum is fp32,
in one fixed order.
"""

import torch
from torch import Tensor

from swiglu_kernels.ops.gate.formula import Formula, Limit
from swiglu_kernels.ops.gate.operation import forward_launch as gate_launch
from swiglu_kernels.ops.gate.operation import gate_gradients
from swiglu_kernels.ops.glu import choice
from swiglu_kernels.ops.glu.block import Chosen, GatedOperation, Gradients, Operands, in_pairs, new
from swiglu_kernels.ops.glu.portable_backward import input_grad_launch, weight_grad_launch
from swiglu_kernels.ops.glu.portable_forward import Biases, Pair, any_of, forward_launch, recompute_launch
from swiglu_kernels.runtime import internals
from swiglu_kernels.runtime.shortcuts import door, plan
from swiglu_kernels.runtime.shortcuts.plan import run


def write_forward(
    x: Tensor, w_gate: Tensor, w_up: Tensor, z: Tensor, preactivations: Pair | None, biases: Biases, formula: Formula
) -> None:
    """Write z, and gate and up if they are given, by whatever is fastest for these tensors."""
    chosen = choice.forward(x, w_gate, w_up, z, preactivations is not None, any_of(biases), formula)
    if chosen.schedule != "torch":
        run(forward_launch, x, w_gate, w_up, z, preactivations, biases, formula, chosen)
    else:
        multiply_and_gate(x, w_gate, w_up, z, preactivations, biases, formula)


def multiply_and_gate(
    x: Tensor, w_gate: Tensor, w_up: Tensor, z: Tensor, preactivations: Pair | None, biases: Biases, formula: Formula
) -> None:
    """Write the same by two products of PyTorch and one elementwise launch."""
    made = preactivations or (z, new(z, *z.shape))  # the gate is written over the product
    for weight, bias, out in zip((w_gate, w_up), biases, made, strict=True):
        plan.apply(multiply, x, weight, bias, out, returning=torch.nn.functional.linear)
    run(gate_launch, *made, z, formula)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write x weight^T + bias to out by PyTorch."""
    torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


def sum_over_tokens(gradient: Tensor, out: Tensor) -> None:
    """Write the fp32 sum of a [tokens, features] gradient to a bias gradient."""
    out.copy_(gradient.sum(0, dtype=torch.float32))


def write_input_grad(d_gate: Tensor, d_up: Tensor, w_gate: Tensor, w_up: Tensor, dx: Tensor, input_grad: str) -> None:
    """Write d_gate w_gate + d_up w_up to dx."""
    if input_grad == "torch":
        plan.apply(sum_of_products, d_gate, w_gate, d_up, w_up, dx, returning=sum_of_products)
    else:
        run(input_grad_launch, None, d_gate, d_up, w_gate, w_up, dx)


def write_weight_grads(d_gate: Tensor, d_up: Tensor, x: Tensor, d_weights: Pair, weight_grad: str) -> None:
    """Write d_gate^T x and d_up^T x to d_weights."""
    if weight_grad != "torch":
        run(weight_grad_launch, None, d_gate, d_up, x, *d_weights)
    else:
        for d_preactivation, d_weight in zip((d_gate, d_up), d_weights, strict=True):
            plan.apply(multiply_transposed, d_preactivation, x, d_weight, returning=multiply_transposed)


def sum_of_products(d_gate: Tensor, w_gate: Tensor, d_up: Tensor, w_up: Tensor, dx: Tensor | None = None) -> Tensor:
    """Return d_gate w_gate + d_up w_up by PyTorch, in dx or in a new tensor."""
    return torch.mm(d_gate, w_gate, out=dx).addmm_(d_up, w_up)


def multiply_plainly(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Write left right to out by PyTorch."""
    torch.mm(left, right, out=out)


def multiply_transposed(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """Return left^T right by PyTorch, in out or in a new tensor; where out alone is float32, it is added to."""
    if out is None or out.dtype == left.dtype:
        return torch.mm(left.t(), right, out=out)
    if left.is_cuda and internals.adds_in_float32:
        return torch.addmm(out, left.t(), right, out_dtype=torch.float32, out=out)
    return out.addmm_(left.t().float(), right.float())


def _forward(given: Operands, options: Chosen, z: Tensor, gate: Tensor, up: Tensor) -> None:
    weights, biases = in_pairs(*given[1:5], options.layout)
    write_forward(given.x, *weights, z, (gate, up) if options.save == "preact" else None, biases, options.formula)


def _backward(
    dz: Tensor, given: Operands, preactivations: Pair, results: Gradients, options: Chosen, in_place: bool
) -> None:
    x, (gate, up), formula, fused = given.x, preactivations, options.formula, options.input_grad == "fused"
    (w_gate, w_up), biases = in_pairs(*given[1:5], options.layout)
    d_weights, d_biases = results.pairs()
    d_gate = d_up = None
    if options.save == "input":
        assert x is not None, "the recomputation starts from x"
        d_gate, d_up = new(dz, *dz.shape), new(dz, *dz.shape)
        run(recompute_launch, dz, x, w_gate, w_up, (d_gate, d_up), biases, formula)
    elif options.weight_grad == "torch" or not fused or d_biases is not None:
        d_gate, d_up = gate_gradients(dz, gate, up, formula, in_place and not (fused and results.wants("x")))

    if results.wants("x"):
        if d_gate is None or d_up is None or (options.save == "preact" and fused):
            run(input_grad_launch, dz, gate, up, w_gate, w_up, results["x"], formula)
        else:
            write_input_grad(d_gate, d_up, w_gate, w_up, results["x"], options.input_grad)

    if d_biases is not None:
        for gradient, d_bias in zip((d_gate, d_up), d_biases, strict=True):
            plan.apply(sum_over_tokens, gradient, d_bias)

    if d_weights is None:
        return
    assert x is not None, "weight gradients are products with x"
    if d_gate is None or d_up is None:
        run(weight_grad_launch, dz, gate, up, x, *d_weights, formula)
    else:
        write_weight_grads(d_gate, d_up, x, d_weights, options.weight_grad)


GLU = GatedOperation("glu", 5, _forward, _backward)


def swiglu_glu(
    x: Tensor, w_gate: Tensor, w_up: Tensor, bias_gate: Tensor | None = None,
    bias_up: Tensor | None = None, *, activation: str = "silu", gate_multiplier: float = 1.0, alpha: float = 1.0,
    limit: Limit = None, up_offset: float = 0.0, weight_grad: str = "auto", save: str = "auto",
    input_grad: str = "auto", accumulate_into_main_grad: bool = False,
) -> Tensor:  # fmt: skip
    """Return `silu(x w_gate^T + bias_gate) * (x w_up^T + bias_up)`: products and gate, on Hopper in one launch.

    Source: Shazeer 2020, "GLU Variants Improve Transformer" (arXiv:2002.05202).

    Args:
        x: [..., hidden]; float32, float16, bfloat16 or float64. Strides are taken as they are where the leading
            dimensions collapse into one; otherwise x is copied. Under autocast all operands are cast to its dtype.
        w_gate, w_up: [intermediate, hidden], any strides, dtype and device of x.
        bias_gate, bias_up: [intermediate], any stride, dtype and device of x; None: no bias.
        activation: "silu" (SwiGLU), "gelu_tanh" (GeGLU with the tanh approximation), "silu_clamp" (Step-3.7) or
            "silu_softcap" (Inkling-2); the latter two differ in what `limit` means.
        gate_multiplier: the gate's pre-activation, bias included, is multiplied by it (Falcon-H1).
        alpha: SiLU becomes gate * sigmoid(alpha * gate) (gpt-oss: 1.702); 1.0 with any other activation.
        limit: gate is bounded from above by it and up to [-limit, limit], after the multiplication (gpt-oss: 7); None:
            unbounded. Beyond a bound the gradient is zero; on it it passes until torch 2.13 and is zero later, as with
            torch.clamp. "silu_clamp": silu(gate) is bounded from above, not gate. "silu_softcap": two numbers (c, d)
            above 0; z = c tanh(gate / c) sigmoid(gate) * d tanh(up / d) (Inkling-2: 4 and 25).
        up_offset: added to up, after the bound (gpt-oss: 1).
        weight_grad: "triton" (one deterministic launch for both weight gradients), "torch" (d_gate and d_up are stored,
            PyTorch does the products), "none" (weights and biases are frozen, their gradients are None) or "auto".
        save: "preact" (keep gate and up, 2 x tokens x intermediate elements, for the backward), "input" (keep x only
            and recompute) or "auto".
        input_grad: "fused" (dX in one launch that forms d_gate and d_up on the way), "two_step" (an elementwise launch
            makes them first), "torch" (the same, then two PyTorch products into one output) or "auto". With
            save="input" all of them read what the recomputation made. `choice.py` says what "auto" picks.
        accumulate_into_main_grad: the gradient of a weight with a `main_grad`, float32 of its shape and strides, is
            added to that in fp32, by the kernel that makes it; autograd gets zeros, and `grad_added_to_main_grad` is
            set, as `runtime/main_grad.py` says. A weight without one has its gradient as ever.

    The numbers (gate_multiplier to up_offset) are run-time arguments of the kernels: a new value compiles nothing anew.

    Returns:
        z, [..., intermediate], contiguous, in x's dtype. Sums and the gate are fp32, z is rounded once. Without a
        gradient to compute, nothing but z is written, whatever `save` says. float32 products use TensorFloat-32 only
        where `torch.backends.cuda.matmul` allows it. Differentiable once; a second backward of a retained graph is
        right. Bias gradients are fp32 sums over the tokens in a fixed order.

    Raises:
        TypeError: an argument is not a tensor, or of another dtype than expected; a number is not one.
        ValueError: shapes or devices do not fit together, an option has an unknown value, a number is not finite, or
            one dimension (not the number of elements) exceeds 2^31 - 1024.

    In float64, slowly, and where no kernel can run (`backend_for(x) == "torch"`), this is `reference.swiglu_glu`, which
    is differentiable any number of times; of the options that choose how gradients are made, weight_grad="none" keeps
    its meaning.
    """
    gate = activation, gate_multiplier, alpha, limit, up_offset
    tensors, asked = (x, w_gate, w_up, bias_gate, bias_up), (weight_grad, save, input_grad)
    if accumulate_into_main_grad:
        return GLU.first_call(None, tensors, gate, asked, into_main_grad=True)
    kind, again = door.find("glu", tensors[:3], tensors[3:], (*gate, *asked))
    return GLU.first_call(kind, tensors, gate, asked) if again is None else again(*tensors)
