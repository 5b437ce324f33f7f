"""swiglu_glu: z = silu(x w_gate^T) * (x w_up^T), one launch forward, and the ways to its gradients.

Kernels: `glu_forward.py`, `glu_backward.py`. This file holds the operation: what is saved, which kernels make which
gradient, the custom ops and the public function. The choices, each by name:

    save         "preact"    the forward also stores gate and up from the same launch (2 x tokens x intermediate)
                 "input"     nothing but the inputs; the backward recomputes the products and emits d_gate and d_up
    input_grad   "fused"     dX in one launch from dZ, gate and up; with save="input" it reads the d_gate and d_up that
                             the recomputation has made
                 "two_step"  an elementwise kernel makes d_gate and d_up, then dX in one launch
    weight_grad  "triton"    both weight gradients in one launch; forms d_gate and d_up on the fly, or reads them
                 "torch"     d_gate and d_up are made, PyTorch does the products
                 "none"      the weights are frozen
"""

import torch

from swiglu_kernels import reference
from swiglu_kernels.backend import backend_for
from swiglu_kernels.checks import check_glu, check_option
from swiglu_kernels.double_backward import refuse_double_backward
from swiglu_kernels.glu_backward import input_grad_launch, weight_grad_launch
from swiglu_kernels.glu_forward import forward_launch, recompute_launch
from swiglu_kernels.silu_mul import silu_mul_backward

WEIGHT_GRADS = ("triton", "torch", "none")
SAVES = ("preact", "input")
INPUT_GRADS = ("fused", "two_step")


def _new(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def _forward_outputs(
    x: torch.Tensor, w_gate: torch.Tensor, save: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocate z, gate and up; gate and up are empty unless they are saved."""
    shape = (x.shape[0], w_gate.shape[0])
    saved_shape = shape if save == "preact" else (0, 0)
    return _new(x, *shape), _new(x, *saved_shape), _new(x, *saved_shape)


def _backward_outputs(
    dz: torch.Tensor, w_gate: torch.Tensor, weight_grad: str, needs_dx: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocate dX and the weight gradients; those that are not wanted are empty."""
    N, K = w_gate.shape
    dx_shape = (dz.shape[0], K) if needs_dx else (0, 0)
    weight_shape = (N, K) if weight_grad != "none" else (0, 0)
    return _new(dz, *dx_shape), _new(dz, *weight_shape), _new(dz, *weight_shape)


@torch.library.custom_op("swiglu_kernels::glu", mutates_args=())
def _glu(
    x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor, weight_grad: str, save: str, input_grad: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return z, and gate and up if they are saved."""
    z, gate, up = _forward_outputs(x, w_gate, save)
    forward_launch(x, w_gate, w_up, z, (gate, up) if save == "preact" else None).run()
    return z, gate, up


@_glu.register_fake
def _(
    x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor, weight_grad: str, save: str, input_grad: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _forward_outputs(x, w_gate, save)


@torch.library.custom_op("swiglu_kernels::glu_backward", mutates_args=())
def _glu_backward(
    dz: torch.Tensor,
    x: torch.Tensor | None,
    w_gate: torch.Tensor,
    w_up: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    weight_grad: str,
    save: str,
    input_grad: str,
    needs_dx: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dX and the two weight gradients, empty where they are not wanted; x may be None where it is not read."""
    dx, d_w_gate, d_w_up = _backward_outputs(dz, w_gate, weight_grad, needs_dx)
    d_gate = d_up = None
    if save == "input":
        assert x is not None, "the recomputation starts from x"
        d_gate, d_up = _new(dz, *dz.shape), _new(dz, *dz.shape)
        recompute_launch(dz, x, w_gate, w_up, d_gate, d_up).run()
    elif weight_grad == "torch" or input_grad == "two_step":
        d_gate, d_up = silu_mul_backward(dz, gate, up)

    if needs_dx:
        if d_gate is None or d_up is None or (save == "preact" and input_grad == "fused"):
            input_grad_launch(dz, gate, up, w_gate, w_up, dx).run()
        else:
            input_grad_launch(None, d_gate, d_up, w_gate, w_up, dx).run()

    if weight_grad == "none":
        return dx, d_w_gate, d_w_up
    assert x is not None, "weight gradients are products with x"
    if d_gate is None or d_up is None:
        weight_grad_launch(dz, gate, up, x, d_w_gate, d_w_up).run()
    elif weight_grad == "triton":
        weight_grad_launch(None, d_gate, d_up, x, d_w_gate, d_w_up).run()
    else:
        torch.mm(d_gate.t(), x, out=d_w_gate)
        torch.mm(d_up.t(), x, out=d_w_up)
    return dx, d_w_gate, d_w_up


@_glu_backward.register_fake
def _(
    dz: torch.Tensor,
    x: torch.Tensor | None,
    w_gate: torch.Tensor,
    w_up: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    weight_grad: str,
    save: str,
    input_grad: str,
    needs_dx: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _backward_outputs(dz, w_gate, weight_grad, needs_dx)


def _setup_context(ctx, inputs, output) -> None:
    x, w_gate, w_up, *ctx.options = inputs
    weight_grad, save, _ = ctx.options
    _, gate, up = output
    ctx.mark_non_differentiable(gate, up)
    ctx.set_materialize_grads(False)  # or autograd fills two [M, N] tensors of zeros for gate and up
    ctx.save_for_backward(None if (weight_grad, save) == ("none", "preact") else x, w_gate, w_up, gate, up)


def _backward(ctx, dz, _d_gate, _d_up):
    if dz is None:  # undefined, since gradients are not materialised
        return None, None, None, None, None, None
    needs_x, needs_w_gate, needs_w_up = ctx.needs_input_grad[:3]
    dx, d_w_gate, d_w_up = _glu_backward(dz, *ctx.saved_tensors, *ctx.options, needs_x)
    frozen = ctx.options[0] == "none"
    return (
        dx if needs_x else None,
        d_w_gate if needs_w_gate and not frozen else None,
        d_w_up if needs_w_up and not frozen else None,
        None,
        None,
        None,
    )


_glu.register_autograd(_backward, setup_context=_setup_context)
refuse_double_backward(_glu_backward)


def swiglu_glu(
    x: torch.Tensor,
    w_gate: torch.Tensor,
    w_up: torch.Tensor,
    *,
    weight_grad: str = "triton",
    save: str = "preact",
    input_grad: str = "fused",
) -> torch.Tensor:
    """Return `silu(x w_gate^T) * (x w_up^T)`: both products and the gate in one launch.

    Source: Shazeer 2020, "GLU Variants Improve Transformer" (arXiv:2002.05202).

    Args:
        x: [..., hidden]; float32, float16 or bfloat16. Strides are taken as they are where the leading dimensions
            collapse into one; otherwise x is copied.
        w_gate: [intermediate, hidden], any strides, dtype and device of x.
        w_up: as w_gate.
        weight_grad: "triton" (one deterministic launch for both weight gradients), "torch" (d_gate and d_up are stored,
            PyTorch does the products) or "none" (weights are frozen, their gradients are None).
        save: "preact" (keep gate and up, 2 x tokens x intermediate elements, for the backward) or "input" (keep x only
            and recompute).
        input_grad: "fused" (dX in one launch that forms d_gate and d_up on the way) or "two_step" (an elementwise
            launch makes them first). With save="input" both read what the recomputation made.

    Returns:
        z, [..., intermediate], contiguous, in x's dtype. Sums and the gate are fp32, z is rounded once. Without a
        gradient to compute, nothing but z is written, whatever `save` says. float32 products use TensorFloat-32 only
        where `torch.backends.cuda.matmul` allows it. Differentiable once; a second backward of a retained graph is
        right.

    Raises:
        TypeError: an argument is not a tensor, or of another dtype than expected.
        ValueError: shapes or devices do not fit together, an option has an unknown value, or one dimension (not the
            number of elements) exceeds 2^31 - 1024.

    Where no kernel can run (`backend_for(x) == "torch"`), this is `reference.swiglu_glu`; of the options,
    weight_grad="none" keeps its meaning.
    """
    check_option("weight_grad", weight_grad, WEIGHT_GRADS)
    check_option("save", save, SAVES)
    check_option("input_grad", input_grad, INPUT_GRADS)
    x, w_gate, w_up = check_glu(x, w_gate, w_up)
    if weight_grad == "none":
        w_gate, w_up = w_gate.detach(), w_up.detach()
    if backend_for(x) == "torch":
        return reference.swiglu_glu(x, w_gate, w_up)
    if not (w_gate.requires_grad or w_up.requires_grad):
        weight_grad = "none"
    if not (torch.is_grad_enabled() and (x.requires_grad or weight_grad != "none")):
        save = "input"
    z, _, _ = _glu(x.flatten(0, -2) if x.dim() > 1 else x[None], w_gate, w_up, weight_grad, save, input_grad)
    return z.unflatten(0, x.shape[:-1]) if x.dim() > 1 else z[0]
