"""swiglu_glu: z = silu(x w_gate^T + bias_gate) * (x w_up^T + bias_up), one launch forward, and ways to its gradients.

This file holds the operation: what is saved, which kernels make which gradient, the custom ops and the public function.
The choices, each by name (`choice.py` says what "auto" picks):

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

from collections.abc import Sequence
from typing import Any

import torch

from swiglu_kernels.ops.gate.formula import Formula, check_formula, formula_of
from swiglu_kernels.ops.gate.operation import forward_launch as gate_launch
from swiglu_kernels.ops.gate.operation import gate_gradients
from swiglu_kernels.ops.glu import choice, definition
from swiglu_kernels.ops.glu.choice import INPUT_GRADS, SAVES, WEIGHT_GRADS, resolve
from swiglu_kernels.ops.glu.definition import split_packed
from swiglu_kernels.ops.glu.portable_backward import input_grad_launch, weight_grad_launch
from swiglu_kernels.ops.glu.portable_forward import Biases, forward_launch, recompute_launch
from swiglu_kernels.runtime import autocast
from swiglu_kernels.runtime.backend import backend_for
from swiglu_kernels.runtime.checks import check_glu, check_option, check_vector
from swiglu_kernels.runtime.operator import call_and_keep, operator, register, save
from swiglu_kernels.runtime.shortcuts import door, plan
from swiglu_kernels.runtime.shortcuts.plan import run
from swiglu_kernels.runtime.shortcuts.series import Series

SEPARATE = "separate"
"""The layout of two weights; those of one that holds both are `packed.LAYOUTS`."""
Pair = tuple[torch.Tensor, torch.Tensor]
"""Of gate and up."""
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def new(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Allocate an output of the dtype and on the device of another tensor."""
    return like.new_empty(shape)


def forward_outputs(x: torch.Tensor, intermediate: int, save: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocate z, gate and up; gate and up are empty unless they are saved."""
    shape = (x.shape[0], intermediate)
    saved_shape = shape if save == "preact" else (0, 0)
    return new(x, *shape), new(x, *saved_shape), new(x, *saved_shape)


def run_forward(
    x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor, biases: Biases, formula: Formula, save: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return z, and gate and up if they are saved."""
    z, gate, up = forward_outputs(x, w_gate.shape[0], save)
    write_forward(x, w_gate, w_up, z, (gate, up) if save == "preact" else None, biases, formula)
    return z, gate, up


def write_forward(
    x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor, z: torch.Tensor,
    preactivations: tuple[torch.Tensor, torch.Tensor] | None, biases: Biases, formula: Formula,
) -> None:  # fmt: skip
    """Write z, and gate and up if they are given, by whatever is fastest for these tensors."""
    has_bias = biases[0] is not None or biases[1] is not None
    chosen = choice.forward(
        x, w_gate, w_up, z, stored=preactivations is not None, has_bias=has_bias, formula=formula
    )  # fmt: skip
    if chosen.schedule != "torch":
        run(forward_launch, x, w_gate, w_up, z, preactivations, None, biases, formula, chosen)
    else:
        multiply_and_gate(x, w_gate, w_up, z, preactivations, biases, formula)


def multiply_and_gate(
    x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor, z: torch.Tensor,
    preactivations: tuple[torch.Tensor, torch.Tensor] | None, biases: Biases, formula: Formula,
) -> None:  # fmt: skip
    """Write the same by two products of PyTorch and one elementwise launch."""
    made = preactivations or (z, new(z, *z.shape))  # the gate is written over the product
    for weight, bias, out in zip((w_gate, w_up), biases, made, strict=True):
        plan.apply(multiply, x, weight, bias, out, returning=torch.nn.functional.linear)
    run(gate_launch, *made, z, formula)


def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """Write x weight^T + bias to out by PyTorch."""
    torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


def sum_over_tokens(gradient: torch.Tensor, out: torch.Tensor) -> None:
    """Write the fp32 sum of a [tokens, features] gradient to a bias gradient."""
    out.copy_(gradient.sum(0, dtype=torch.float32))


def write_input_grad(
    d_gate: torch.Tensor, d_up: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor, dx: torch.Tensor,
    input_grad: str,
) -> None:  # fmt: skip
    """Write d_gate w_gate + d_up w_up to dx."""
    if input_grad == "torch":
        plan.apply(add_products, d_gate, w_gate, d_up, w_up, dx, returning=sum_of_products)
    else:
        run(input_grad_launch, None, d_gate, d_up, w_gate, w_up, dx)


def write_weight_grads(
    d_gate: torch.Tensor, d_up: torch.Tensor, x: torch.Tensor, d_weights: tuple[torch.Tensor, torch.Tensor],
    weight_grad: str,
) -> None:  # fmt: skip
    """Write d_gate^T x and d_up^T x to d_weights."""
    if weight_grad != "torch":
        run(weight_grad_launch, None, d_gate, d_up, x, *d_weights)
    else:
        for d_preactivation, d_weight in zip((d_gate, d_up), d_weights, strict=True):
            plan.apply(multiply_transposed, d_preactivation, x, d_weight, returning=product_of_transposed)


def add_products(
    d_gate: torch.Tensor, w_gate: torch.Tensor, d_up: torch.Tensor, w_up: torch.Tensor, dx: torch.Tensor
) -> None:
    """Write d_gate w_gate + d_up w_up to dx by PyTorch."""
    torch.mm(d_gate, w_gate, out=dx)
    dx.addmm_(d_up, w_up)


def sum_of_products(d_gate: torch.Tensor, w_gate: torch.Tensor, d_up: torch.Tensor, w_up: torch.Tensor) -> torch.Tensor:
    """Return d_gate w_gate + d_up w_up by PyTorch."""
    return torch.mm(d_gate, w_gate).addmm_(d_up, w_up)


def multiply_plainly(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    """Write left right to out by PyTorch."""
    torch.mm(left, right, out=out)


def multiply_transposed(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    """Write left^T right to out by PyTorch."""
    torch.mm(left.t(), right, out=out)


def product_of_transposed(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return left^T right by PyTorch."""
    return torch.mm(left.t(), right)


def run_backward(
    dz: torch.Tensor, x: torch.Tensor | None, weights: Pair, preactivations: Pair, biases: Biases, formula: Formula,
    options: tuple[str, str, str], outs: tuple[torch.Tensor | None, Pair | None, Pair | None], in_place: bool,
) -> None:  # fmt: skip
    """Write those of dX, the weight gradients and the bias gradients that are given; x may be None if not read.

    `in_place` says that gate and up may be overwritten.
    """
    (w_gate, w_up), (gate, up), (dx, d_weights, d_biases) = weights, preactivations, outs
    weight_grad, save, input_grad = options
    d_gate = d_up = None
    if save == "input":
        assert x is not None, "the recomputation starts from x"
        d_gate, d_up = new(dz, *dz.shape), new(dz, *dz.shape)
        run(recompute_launch, dz, x, w_gate, w_up, d_gate, d_up, None, biases, formula)
    elif weight_grad == "torch" or input_grad in ("two_step", "torch") or d_biases is not None:
        reads_both = save == "preact" and input_grad == "fused" and dx is not None
        d_gate, d_up = gate_gradients(dz, gate, up, formula, in_place and not reads_both)

    if dx is not None:
        if d_gate is None or d_up is None or (save == "preact" and input_grad == "fused"):
            run(input_grad_launch, dz, gate, up, w_gate, w_up, dx, None, formula)
        else:
            write_input_grad(d_gate, d_up, w_gate, w_up, dx, input_grad)

    if d_biases is not None:
        assert d_gate is not None
        assert d_up is not None
        plan.apply(sum_over_tokens, d_gate, d_biases[0])
        plan.apply(sum_over_tokens, d_up, d_biases[1])

    if d_weights is None:
        return
    assert x is not None, "weight gradients are products with x"
    if d_gate is None or d_up is None:
        run(weight_grad_launch, dz, gate, up, x, *d_weights, None, formula)
    else:
        write_weight_grads(d_gate, d_up, x, d_weights, weight_grad)


def _z_alone(
    x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor, bias_gate: torch.Tensor | None,
    bias_up: torch.Tensor | None, formula: Formula,
) -> torch.Tensor:  # fmt: skip
    z = new(x, x.shape[0], w_gate.shape[0])
    write_forward(x, w_gate, w_up, z, None, (bias_gate, bias_up), formula)
    return z


def _intermediate(w_gate: torch.Tensor, layout: str) -> int:
    if layout == SEPARATE:
        return w_gate.shape[0]
    return w_gate.shape[1 if layout == "transposed" else 0] // 2


def _halves(
    w_gate: torch.Tensor, w_up: torch.Tensor | None, bias_gate: torch.Tensor | None, bias_up: torch.Tensor | None,
    layout: str,
) -> tuple[tuple[torch.Tensor, torch.Tensor], Biases]:  # fmt: skip
    """Return both weights and both biases: as they are, or as views of packed ones, which come as the gate's."""
    if w_up is None:
        return split_packed(w_gate, bias_gate, layout)
    return (w_gate, w_up), (bias_gate, bias_up)


def _backward_outputs(
    dz: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor | None, needs_dx: bool, needs_bias: bool, layout: str,
    weight_grad: str,
) -> Gradients:  # fmt: skip
    """Allocate dX and the gradients of weights and biases, empty where not wanted; packed ones are the gate's."""
    hidden = w_gate.shape[0 if layout == "transposed" else 1]
    dx = new(dz, *((dz.shape[0], hidden) if needs_dx else (0, 0)))
    size = dz.shape[1] if needs_bias else 0
    shape = w_gate.shape if weight_grad != "none" else (0, 0)
    if w_up is not None:
        return dx, new(dz, *shape), new(dz, *shape), new(dz, size), new(dz, size)
    d_weight = torch.empty_like(w_gate) if weight_grad != "none" else new(dz, *shape)  # with its strides
    return dx, d_weight, new(dz, 0, 0), new(dz, 2 * size), new(dz, 0)


@operator("glu")
def glu(
    x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor | None, bias_gate: torch.Tensor | None,
    bias_up: torch.Tensor | None, layout: str, weight_grad: str, save: str, input_grad: str,
    gate_numbers: Sequence[float],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return z, and gate and up if they are saved; w_gate and bias_gate hold both halves where w_up is None."""
    weights, biases = _halves(w_gate, w_up, bias_gate, bias_up, layout)
    return run_forward(x, *weights, biases, formula_of(gate_numbers), save)


@glu.register_fake
def _(x: torch.Tensor, w_gate: torch.Tensor, layout: str, save: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return forward_outputs(x, _intermediate(w_gate, layout), save)


@operator("glu_backward")
def _glu_backward(
    dz: torch.Tensor, x: torch.Tensor | None, w_gate: torch.Tensor, w_up: torch.Tensor | None, gate: torch.Tensor,
    up: torch.Tensor, bias_gate: torch.Tensor | None, bias_up: torch.Tensor | None, needs_dx: bool, needs_bias: bool,
    layout: str, weight_grad: str, save: str, input_grad: str, gate_numbers: Sequence[float], *,
    in_place: bool = False,
) -> Gradients:  # fmt: skip
    """Return dX and the gradients of weights and biases, empty where not wanted; x may be None if not read.

    `in_place` lets it overwrite gate and up, which the operator, being functional, must not.
    """
    results = _backward_outputs(dz, w_gate, w_up, needs_dx, needs_bias, layout, weight_grad)
    dx, d_w_gate, d_w_up, d_bias_gate, d_bias_up = results
    wanted: tuple[Any, Any] = (d_w_gate, d_w_up), (d_bias_gate, d_bias_up)
    if w_up is None:
        halves = split_packed(d_w_gate if weight_grad != "none" else w_gate, d_bias_gate, layout)
        wanted = halves if needs_bias else (halves[0], None)
    weights, biases = _halves(w_gate, w_up, bias_gate, bias_up, layout)
    run_backward(
        dz, x, weights, (gate, up), biases, formula_of(gate_numbers), (weight_grad, save, input_grad),
        (dx if needs_dx else None, wanted[0] if weight_grad != "none" else None, wanted[1] if needs_bias else None),
        in_place,
    )  # fmt: skip
    return results


_glu_backward.register_fake(_backward_outputs)


def _keep(ctx, tensors, options, output) -> None:
    x, w_gate, w_up, bias_gate, bias_up = tensors
    _, weight_grad, kept, *_ = options
    biases = (bias_gate, bias_up) if kept == "input" else (None, None)
    save(ctx, None if (weight_grad, kept) == ("none", "preact") else x, (w_gate, w_up, *biases), output[1:], options)


def _gradients(backward, dz, saved, needs, options):
    x, w_gate, w_up, bias_gate, bias_up, gate, up = saved
    needs_x, *needs_weights, needs_bias_gate, needs_bias_up = needs
    needs_bias = needs_bias_gate or needs_bias_up
    made = backward(dz, x, w_gate, w_up, gate, up, bias_gate, bias_up, needs_x, needs_bias, *options)
    frozen = options[1] == "none"
    wanted = needs_x, *(need and not frozen for need in needs_weights), needs_bias_gate, needs_bias_up
    return tuple(gradient if want else None for gradient, want in zip(made, wanted, strict=True))


register(glu, _glu_backward, _keep, _gradients, tensors=5, preactivations=2)


def as_matrix(x: torch.Tensor) -> torch.Tensor:
    """View x [..., hidden] as [tokens, hidden], or copy it where its leading dimensions do not collapse."""
    if x.dim() == 2:
        return x
    return x.flatten(0, -2) if x.dim() > 1 else x[None]


def like_leading(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Give [tokens, features] the leading dimensions of x."""
    if x.dim() == 2:
        return out
    return out.unflatten(0, x.shape[:-1]) if x.dim() > 1 else out[0]


def of_matrix(x: torch.Tensor, again: door.Again) -> door.Again:
    """Let what makes a call again for a matrix x do so for a tensor with as many dimensions as this one."""
    return again if x.dim() == 2 else lambda x, *others: like_leading(again(as_matrix(x), *others), x)


def swiglu_glu(
    x: torch.Tensor,
    w_gate: torch.Tensor,
    w_up: torch.Tensor,
    bias_gate: torch.Tensor | None = None,
    bias_up: torch.Tensor | None = None,
    *,
    activation: str = "silu",
    gate_multiplier: float = 1.0,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
    weight_grad: str = "auto",
    save: str = "auto",
    input_grad: str = "auto",
) -> torch.Tensor:
    """Return `silu(x w_gate^T + bias_gate) * (x w_up^T + bias_up)`: both products and the gate in one launch.

    Source: Shazeer 2020, "GLU Variants Improve Transformer" (arXiv:2002.05202).

    Args:
        x: [..., hidden]; float32, float16 or bfloat16. Strides are taken as they are where the leading dimensions
            collapse into one; otherwise x is copied. Under autocast all operands are cast to its dtype.
        w_gate: [intermediate, hidden], any strides, dtype and device of x.
        w_up: as w_gate.
        bias_gate: [intermediate], any stride, dtype and device of x; None: no bias.
        bias_up: as bias_gate.
        activation: "silu" (SwiGLU) or "gelu_tanh" (GeGLU with the tanh approximation).
        gate_multiplier: the gate's pre-activation, bias included, is multiplied by it (Falcon-H1).
        alpha: SiLU becomes gate * sigmoid(alpha * gate) (gpt-oss: 1.702); 1.0 with any other activation.
        limit: gate is bounded from above by it and up to [-limit, limit], after the multiplication (gpt-oss: 7); None:
            unbounded. Beyond a bound the gradient is zero; on it it passes until torch 2.13 and is zero later, as with
            torch.clamp.
        up_offset: added to up, after the bound (gpt-oss: 1).
        weight_grad: "triton" (one deterministic launch for both weight gradients), "torch" (d_gate and d_up are stored,
            PyTorch does the products), "none" (weights and biases are frozen, their gradients are None) or "auto".
        save: "preact" (keep gate and up, 2 x tokens x intermediate elements, for the backward), "input" (keep x only
            and recompute) or "auto".
        input_grad: "fused" (dX in one launch that forms d_gate and d_up on the way), "two_step" (an elementwise launch
            makes them first), "torch" (the same, then two PyTorch products into one output) or "auto". With
            save="input" all of them read what the recomputation made. `choice.py` says what "auto" picks.

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

    Where no kernel can run (`backend_for(x) == "torch"`), this is `reference.swiglu_glu`; of the options that choose
    how gradients are made, weight_grad="none" keeps its meaning.
    """
    tensors = x, w_gate, w_up, bias_gate, bias_up
    gate, options = (activation, gate_multiplier, alpha, limit, up_offset), (weight_grad, save, input_grad)
    kind, again = door.find("glu", tensors[:3], tensors[3:], (*gate, *options))
    return _first_call(kind, tensors, gate, options) if again is None else again(*tensors)


def _first_call(
    kind: door.Kind | None, tensors: tuple[Any, ...], gate: tuple[Any, ...], options: tuple[str, str, str]
) -> torch.Tensor:
    """Check the arguments, call the operator, and let calls of this kind be made again."""
    x, w_gate, w_up, bias_gate, bias_up = tensors
    weight_grad, save, input_grad = options
    check_option("weight_grad", weight_grad, WEIGHT_GRADS)
    check_option("save", save, SAVES)
    check_option("input_grad", input_grad, INPUT_GRADS)
    formula = check_formula(*gate)
    x, w_gate, w_up, bias_gate, bias_up = autocast.operands(x, w_gate, w_up, bias_gate, bias_up)
    x, w_gate, w_up = check_glu(x, w_gate, w_up)
    intermediate = w_gate.shape[0]
    bias_gate = check_vector("bias_gate", bias_gate, intermediate, "the first dimension of w_gate", "x", x)
    bias_up = check_vector("bias_up", bias_up, intermediate, "the first dimension of w_gate", "x", x)
    if weight_grad == "none":
        w_gate, w_up = w_gate.detach(), w_up.detach()
        bias_gate = None if bias_gate is None else bias_gate.detach()
        bias_up = None if bias_up is None else bias_up.detach()
    if backend_for(x) == "torch":
        return definition.swiglu_glu(x, w_gate, w_up, bias_gate, bias_up, **formula.options)
    rows = as_matrix(x)
    weight_grad, save, input_grad = resolve(weight_grad, save, input_grad, rows, intermediate)
    frozen = weight_grad == "none"  # and so these weights and biases are not those that were given
    if not (w_gate.requires_grad or w_up.requires_grad):
        weight_grad = "none"
    with_grad = needs_backward(x, w_gate, w_up, bias_gate, bias_up)
    if not with_grad:
        save = "input"
    given = rows, w_gate, w_up, bias_gate, bias_up
    others = SEPARATE, weight_grad, save, input_grad, formula.numbers
    z = call_and_keep(glu, *given, *others)
    if kind is not None and not (frozen and with_grad):
        series = Series()

        def again(*tensors: torch.Tensor | None) -> torch.Tensor:
            if with_grad:
                return glu.first_output(series, tensors, others)
            return series.call(_z_alone, tensors, (formula,))

        door.remember(kind, of_matrix(x, again))
    return like_leading(z, x)


def needs_backward(*tensors: torch.Tensor | None) -> bool:
    """Tell whether autograd will ask for the gradient of any of these."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
