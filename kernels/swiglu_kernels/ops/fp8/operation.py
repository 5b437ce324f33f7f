"""SwiGLU with fp8 products: swiglu_glu_fp8 and swiglu_mlp_fp8, for training and inference.

Weights, gradients and what is kept for the backward stay in 16 bits: operands are quantised on their way into a
product. `reference.quantise` defines the two recipes, `portable_fp8.py` has the kernels. Forward, with M tokens, N
intermediate, K hidden and H out:

    1. x by rows; each weight by rows, unless it came quantised
    2. one launch: both products and the gate. It writes h in 16 bits, or in an MLP with blocks of 128 its codes and
       scales; the rows of a "rowwise" h are wider than a program's tile, so that h is quantised by a launch of its own.
       By blocks and from many tokens on, where the hand-scheduled kernel does not take the call: two products by
       PyTorch, and a pass that writes h or its codes
    3. h w_down^T

Backward, where each operand is quantised for the axis that its product sums over:

    1. save="input": the forward's launch again, for gate, up and h
    2. d_out, by rows and along the tokens in one pass; w_down along H
    3. d_h = d_out w_down, and d_gate, d_up and h of it in 16 bits: in the product's epilogue, or after PyTorch's in a
       pass that finds the largest magnitudes, which "rowwise" scales need, on the way
    4. d_w_down = d_out^T h, h along the tokens
    5. d_gate and d_up, by rows and along the tokens in one pass each; w_gate and w_up along N; dX in one launch
    6. d_w_gate = d_gate^T x, d_w_up = d_up^T x, x along the tokens

weight_grad="triton" or "torch" makes 4 and 6 in 16 bits, as `swiglu_mlp` does.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from swiglu_kernels.ops.fp8.definition import RECIPES
from swiglu_kernels.ops.fp8.portable_codes import ALIGNMENT, BLOCK, Maxima, Quantised, quantise_both, quantise_rows
from swiglu_kernels.ops.fp8.products import (
    glu_codes,
    write_gate_gradients,
    write_glu,
    write_hidden_grad,
    write_product,
    write_sum,
)
from swiglu_kernels.ops.gate.formula import check_formula, formula_of
from swiglu_kernels.ops.glu.choice import AUTO, SAVES
from swiglu_kernels.ops.glu.operation import (
    as_matrix,
    like_leading,
    multiply_transposed,
    needs_backward,
    new,
    sum_over_tokens,
    write_weight_grads,
)
from swiglu_kernels.ops.mlp.portable_mlp import down_weight_grad_launch
from swiglu_kernels.runtime import autocast
from swiglu_kernels.runtime.backend import backend_for, capability_of
from swiglu_kernels.runtime.checks import check_down, check_glu, check_option, check_tensor, check_vector
from swiglu_kernels.runtime.operator import call_and_keep, operator, register, save
from swiglu_kernels.runtime.shortcuts import plan
from swiglu_kernels.runtime.shortcuts.plan import run

PRECISIONS = ("bf16", *(f"fp8-{recipe}" for recipe in RECIPES))
"""What modules call them; with "bf16" operands stay as they are."""
WEIGHT_GRADS = ("fp8", "triton", "torch", "none", AUTO)
DTYPES = (torch.bfloat16, torch.float16)
MINIMUM_CAPABILITY = (8, 9)

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Of the seven tensors that an MLP is differentiated by."""

# Positions in a list of needs or gradients: those of the tensors in the op's arguments.
X, W_GATE, W_UP, W_DOWN, BIAS_GATE, BIAS_UP, BIAS_DOWN = range(7)


def why_not(device: torch.device) -> str | None:
    """Say why products of fp8 cannot run on a device, or return None where they can."""
    backend = backend_for(device)
    capability = capability_of(device)
    if backend == "torch" or (backend == "triton" and (capability is None or capability < MINIMUM_CAPABILITY)):
        found = f"compute capability {capability[0]}.{capability[1]}" if capability else f"the device {device}"
        return f"fp8 products need Triton and an NVIDIA GPU of compute capability 8.9 or newer, this is {found}"
    return None


def _results(
    x: torch.Tensor, w_gate: torch.Tensor, w_down: torch.Tensor | None, s_x: torch.Tensor | None, keep: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocate the output, gate and up; gate and up are empty unless they are kept."""
    dtype = x.dtype if s_x is None else torch.bfloat16
    tokens, intermediate = x.shape[0], w_gate.shape[0]
    kept = (tokens, intermediate) if keep else (0, 0)
    out = (tokens, intermediate if w_down is None else w_down.shape[0])
    return x.new_empty(out, dtype=dtype), x.new_empty(kept, dtype=dtype), x.new_empty(kept, dtype=dtype)


_handed: dict[str, tuple[torch.Tensor, torch.Tensor]] | None = None


def hand_over(into: dict[str, tuple[torch.Tensor, torch.Tensor]] | None) -> None:
    """Enter codes and scales of the operands of every call from now on into a dictionary, by name; None: no longer.

    The names are those of `swiglu_mlp_fp8`, "upstream" (the gradient of out), "d_gate", "d_up", and with ".T" for a
    matrix [rows, columns] that a product sums over its rows. Codes are [rows, columns], scales have as many rows and
    columns as they belong to along each. For tests and benchmarks: it is one dictionary for all threads.
    """
    global _handed
    _handed = into


def _by_rows(name: str, tensor: torch.Tensor, scales: torch.Tensor | None, recipe: str) -> Quantised:
    """Quantise an operand by its name for a product that sums over its last axis, if there are no scales yet."""
    weight = name.startswith("w_")
    quantised = quantise_rows(tensor, recipe, weight) if scales is None else Quantised(tensor, scales)
    _hand_over(name, quantised)
    return quantised


def _both(
    name: str, tensor: torch.Tensor, recipe: str, rows: bool, along: bool, maxima: Maxima = (None, None)
) -> tuple[Quantised, Quantised]:
    """Quantise an operand by its name for products that sum over its last axis, its first, or one for each."""
    both = quantise_both(tensor, recipe, name.startswith("w_"), rows, along, maxima)
    if rows:
        _hand_over(name, both[0])
    if along and _handed is not None:
        codes, scales = both[1]
        _handed[f"{name}.T"] = codes.t()[: tensor.shape[0]], scales.t() if scales.dim() == 2 else scales[None, :]
    return both


def _hand_over(name: str, operand: Quantised) -> None:
    if _handed is not None:
        _handed[name] = operand.codes, operand.scales if operand.scales.dim() == 2 else operand.scales[:, None]


def hand(operand: Quantised, name: str, row: torch.Tensor | None = None) -> None:
    """Enter "rowwise" codes of an operand of experts, if somebody looks; of sorted rows in the order of pairs.

    `row` is that of a routing in which every index names an expert.
    """
    if _handed is None:
        return
    codes, scales = operand.codes, operand.scales[..., None]
    if row is not None:
        codes, scales = codes.view(torch.uint8)[row.long()].view(codes.dtype), scales[row.long()]
    _handed[name] = codes, scales


@operator("fp8_mlp")
def _mlp(
    x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor, w_down: torch.Tensor | None,
    bias_gate: torch.Tensor | None, bias_up: torch.Tensor | None, bias_down: torch.Tensor | None,
    s_x: torch.Tensor | None, s_gate: torch.Tensor | None, s_up: torch.Tensor | None, s_down: torch.Tensor | None,
    recipe: str, weight_grad: str, keep: bool, gate_numbers: Sequence[float],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return out, or z where w_down is None, and gate and up if they are kept; s_* are scales of what is in fp8."""
    formula = formula_of(gate_numbers)
    out, gate, up = _results(x, w_gate, w_down, s_x, keep)
    operands = (
        _by_rows("x", x, s_x, recipe),
        _by_rows("w_gate", w_gate, s_gate, recipe),
        _by_rows("w_up", w_up, s_up, recipe),
    )
    biases = bias_gate, bias_up
    if w_down is None:
        write_glu(operands, out, (gate, up), biases, formula)
        return out, gate, up
    h = glu_codes(operands, (gate, up), biases, formula)
    if h is None:
        z = new(out, x.shape[0], w_gate.shape[0])
        write_glu(operands, z, (gate, up), biases, formula)
        h = _by_rows("h", z, None, recipe)
        del z
    else:
        _hand_over("h", h)
    del operands
    write_product(h, _by_rows("w_down", w_down, s_down, recipe), out, bias_down)
    return out, gate, up


_mlp.register_fake(_results)


def _gradient_shapes(
    d_out: torch.Tensor, w_gate: torch.Tensor, w_down: torch.Tensor | None, needs: Sequence[bool], weight_grad: str
) -> list[tuple[int, ...]]:
    """Return the shapes of the seven gradients; those that are not wanted are empty."""
    (N, K), frozen = w_gate.shape, weight_grad == "none"
    shapes: list[tuple[int, ...]] = [(d_out.shape[0], K), (N, K), (N, K), (d_out.shape[1], N)]
    shapes += [(N,), (N,), (d_out.shape[1],)]
    wanted = [need and not (frozen and X < at <= W_DOWN) for at, need in enumerate(needs)]
    wanted[W_GATE] = wanted[W_UP] = wanted[W_GATE] or wanted[W_UP]
    return [shape if want else (0,) * len(shape) for want, shape in zip(wanted, shapes, strict=True)]


@operator("fp8_mlp_backward")
def _mlp_backward(
    d_out: torch.Tensor, x: torch.Tensor | None, w_gate: torch.Tensor, w_up: torch.Tensor, w_down: torch.Tensor | None,
    gate: torch.Tensor, up: torch.Tensor, bias_gate: torch.Tensor | None, bias_up: torch.Tensor | None,
    needs: Sequence[bool], recipe: str, weight_grad: str, keep: bool, gate_numbers: Sequence[float], *,
    in_place: bool = False,
) -> Gradients:  # fmt: skip
    """Return the gradients of the seven tensors, empty where not wanted; x may be None where it is not read.

    `in_place` lets it overwrite gate and up, which the operator, being functional, must not.
    """
    formula = formula_of(gate_numbers)
    results = [new(d_out, *shape) for shape in _gradient_shapes(d_out, w_gate, w_down, needs, weight_grad)]
    tokens, intermediate = d_out.shape[0], w_gate.shape[0]
    if tokens == 0:
        return tuple(gradient.zero_() for gradient in results)  # type: ignore[return-value]
    wants_gate_up, wants_down = math.prod(results[W_GATE].shape) > 0, math.prod(results[W_DOWN].shape) > 0
    in_fp8 = weight_grad == "fp8"
    h = None
    if not keep:
        assert x is not None, "the recomputation starts from x"
        gate, up, h = (new(d_out, tokens, intermediate) for _ in range(3))
        operands = (
            _by_rows("x", x, None, recipe),
            _by_rows("w_gate", w_gate, None, recipe),
            _by_rows("w_up", w_up, None, recipe),
        )
        write_glu(operands, h, (gate, up), (bias_gate, bias_up), formula)
        del operands
    in_place = in_place or not keep
    wants_along = wants_gate_up and in_fp8
    wants_maxima = recipe == "rowwise" and (needs[X] or in_fp8)
    d_gate, d_up = (gate, up) if in_place else (torch.empty_like(gate), torch.empty_like(up))
    if w_down is None:
        of_gate, of_up, _ = write_gate_gradients(d_out, (gate, up), (d_gate, d_up, None), formula, wants_maxima)
    else:
        by_rows, along = _both("upstream", d_out, recipe, True, wants_down and in_fp8)
        _, w_down_along = _both("w_down", w_down, recipe, False, True)
        made = new(d_out, tokens, intermediate) if wants_down and keep else None
        gradients = d_gate, d_up, made
        of_gate, of_up, of_h = write_hidden_grad(by_rows, w_down_along, (gate, up), gradients, formula, wants_maxima)
        h = made if keep else h
        del by_rows, w_down_along, made
        if wants_down:
            assert h is not None
            if in_fp8:
                _, h_along = _both("h", h, recipe, False, True, of_h)
                write_product(along, h_along, results[W_DOWN])
                del h_along
            elif weight_grad == "triton":
                run(down_weight_grad_launch, d_out, h, results[W_DOWN])
            else:
                plan.apply(multiply_transposed, d_out, h, results[W_DOWN])
        del along
    del h, gate, up
    if needs[X] or wants_along:
        gate_rows, gate_along = _both("d_gate", d_gate, recipe, needs[X], wants_along, of_gate)
        up_rows, up_along = _both("d_up", d_up, recipe, needs[X], wants_along, of_up)
        if needs[X]:
            _, w_gate_along = _both("w_gate", w_gate, recipe, False, True)
            _, w_up_along = _both("w_up", w_up, recipe, False, True)
            write_sum(gate_rows, w_gate_along, up_rows, w_up_along, results[X])
            del w_gate_along, w_up_along
        del gate_rows, up_rows
        if wants_along:
            assert x is not None, "weight gradients are products with x"
            _, x_along = _both("x", x, recipe, False, True)
            write_product(gate_along, x_along, results[W_GATE])
            write_product(up_along, x_along, results[W_UP])
    if wants_gate_up and not in_fp8:
        assert x is not None, "weight gradients are products with x"
        write_weight_grads(d_gate, d_up, x, (results[W_GATE], results[W_UP]), weight_grad)
    for position, gradient in ((BIAS_GATE, d_gate), (BIAS_UP, d_up), (BIAS_DOWN, d_out)):
        if needs[position]:
            plan.apply(sum_over_tokens, gradient, results[position])
    return tuple(results)  # type: ignore[return-value]


@_mlp_backward.register_fake
def _(
    d_out: torch.Tensor, w_gate: torch.Tensor, w_down: torch.Tensor | None, needs: Sequence[bool], weight_grad: str
) -> tuple[torch.Tensor, ...]:
    return tuple(new(d_out, *shape) for shape in _gradient_shapes(d_out, w_gate, w_down, needs, weight_grad))


def _keep(ctx, tensors, options, output) -> None:
    x, w_gate, w_up, w_down, bias_gate, bias_up, *_ = tensors
    _, weight_grad, keep, *_ = options
    biases = (None, None) if keep else (bias_gate, bias_up)
    saved_x = None if weight_grad == "none" and keep else x
    save(ctx, saved_x, (w_gate, w_up, w_down, *biases), output[1:], options)


def _gradients(backward, d_out, saved, needs, options):
    *others, bias_gate, bias_up, gate, up = saved
    needs = needs[:7]  # the others are scales
    gradients = backward(d_out, *others, gate, up, bias_gate, bias_up, needs, *options)
    return [gradient if need else None for gradient, need in zip(gradients, needs, strict=True)] + [None] * 4


register(_mlp, _mlp_backward, _keep, _gradients, tensors=11, preactivations=2)


@operator("fp8_quantise")
def _quantise(matrix: torch.Tensor, recipe: str, weight: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales; blockwise scales of an activation with their axes swapped."""
    codes, scales = quantise_rows(matrix, recipe, weight)
    return codes, scales.t().contiguous() if recipe == "blockwise" and not weight else scales


@_quantise.register_fake
def _(matrix: torch.Tensor, recipe: str, weight: bool) -> tuple[torch.Tensor, torch.Tensor]:
    *shape, columns = matrix.shape
    if recipe == "blockwise":
        rows, blocks = matrix.shape[0], -(-columns // BLOCK)
        shape = [-(-rows // BLOCK), blocks] if weight else [blocks, rows]
    return torch.empty_like(matrix, dtype=torch.float8_e4m3fn), matrix.new_empty(shape, dtype=torch.float32)


def quantise(matrix: torch.Tensor, recipe: str, *, weight: bool = False) -> Quantised:
    """Quantise a matrix to fp8 for products that sum over its last axis; bit for bit `reference.quantise`.

    Args:
        matrix: [rows, depth], bfloat16 or float16, any strides; depth a multiple of 16. "rowwise", [experts, rows,
            depth] as well: the weights of `swiglu_experts`.
        recipe: "rowwise" or "blockwise".
        weight: whether it is a weight, whose blocks are 128 x 128.

    Returns:
        Quantised(codes, scales): [rows, depth] in float8_e4m3fn, contiguous, and float32 scales: rowwise [rows],
        blockwise [rows, ceil(depth / 128)], of a weight [ceil(rows / 128), ceil(depth / 128)]. Of experts, [experts,
        rows, depth] and [experts, rows]. No gradient.

    Raises:
        TypeError: matrix is not a tensor of one of these dtypes.
        ValueError: it has not two dimensions or its depth is no multiple of 16, recipe is unknown, or its device has no
            fp8 products.
    """
    check_option("recipe", recipe, RECIPES)
    tensor = check_tensor("matrix", matrix).detach()
    if tensor.dim() != 2 and (tensor.dim(), recipe) != (3, "rowwise"):
        raise ValueError(f"matrix: expected two dimensions, [rows, depth], got {tuple(tensor.shape)}")
    check("matrix", tensor, (("depth", tensor.shape[-1]),))
    codes, scales = _quantise(tensor, recipe, weight)
    return Quantised(codes, scales.t() if recipe == "blockwise" and not weight else scales)


def check(name: str, tensor: torch.Tensor, sizes: Sequence[tuple[str, int]]) -> None:
    """Raise unless a tensor's device has fp8 products, its dtype is one of DTYPES, and the sizes fit."""
    if tensor.dtype not in DTYPES:
        raise TypeError(f"{name}: expected one of {', '.join(map(str, DTYPES))} for fp8, got {tensor.dtype}")
    reason = why_not(tensor.device) or why_not_sizes(sizes)
    if reason is not None:
        raise ValueError(f"{name}: {reason}")


def why_not_sizes(sizes: Sequence[tuple[str, int]]) -> str | None:
    """Say which named size is no positive multiple of 16, as fp8 products need, or return None."""
    for name, size in sizes:
        if size < ALIGNMENT or size % ALIGNMENT:
            return f"fp8 products need a multiple of {ALIGNMENT} as {name}, got {size}"
    return None


def _check_quantised(name: str, operand: Any, recipe: str, weight: bool) -> Quantised:
    """Return codes and scales if they are those of a recipe."""
    if not (
        isinstance(operand, tuple)
        and len(operand) == 2
        and all(isinstance(part, torch.Tensor) for part in operand)
        and (operand[0].dtype, operand[1].dtype, operand[0].dim()) == (torch.float8_e4m3fn, torch.float32, 2)
        and operand[0].is_contiguous()
    ):
        raise TypeError(f"{name}: expected what `quantise` returns, contiguous codes and scales")
    rows, blocks = operand[0].shape[0], -(-operand[0].shape[1] // BLOCK)
    shape = (rows,) if recipe == "rowwise" else (-(-rows // BLOCK) if weight else rows, blocks)
    if operand[1].shape != shape:
        raise ValueError(
            f"{name}: expected scales {shape} as recipe={recipe!r} has them, got {tuple(operand[1].shape)}"
        )
    return Quantised(*operand)


Operand = torch.Tensor | Quantised


def swiglu_mlp_fp8(
    x: Operand,
    w_gate: Operand,
    w_up: Operand,
    w_down: Operand | None,
    bias_gate: torch.Tensor | None = None,
    bias_up: torch.Tensor | None = None,
    bias_down: torch.Tensor | None = None,
    *,
    recipe: str,
    activation: str = "silu",
    gate_multiplier: float = 1.0,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
    weight_grad: str = AUTO,
    save: str = AUTO,
) -> torch.Tensor:
    """Return `swiglu_mlp(x, w_gate, w_up, w_down, ...)` with the operands of every product in fp8.

    Source: `reference.swiglu_mlp_fp8` is the definition, `reference.quantise` that of the recipes.

    Args:
        x: [..., hidden], bfloat16 or float16; or where the weights are, Quantised, [tokens, hidden]. Under autocast
            operands are cast first.
        w_gate: [intermediate, hidden], any strides, dtype and device of x, quantised in every call; or Quantised by
            `quantise(w_gate, recipe, weight=True)`, once for many calls without a gradient.
        w_up: as w_gate, and quantised where that is.
        w_down: [hidden_out, intermediate]; as w_up. None: the result is z, as of `swiglu_glu`.
        bias_gate: [intermediate] or None; biases are not quantised.
        bias_up: as bias_gate.
        bias_down: [hidden_out] or None.
        recipe: "rowwise" or "blockwise".
        activation, gate_multiplier, alpha, limit, up_offset: the gate, as for `swiglu_glu`.
        weight_grad: "fp8" (also "auto"): the products for the weight gradients have quantised operands; "triton" or
            "torch": they have 16 bits, as for `swiglu_glu`; "none": weights and biases are frozen.
        save: "preact" (also "auto") or "input", as for `swiglu_glu`.

    Returns:
        [..., hidden_out], contiguous, in x's dtype, bfloat16 for a quantised x. Sums, scales and the gate are fp32; h,
        d_gate and d_up are rounded to 16 bits before they are quantised, gate and up where PyTorch multiplies.
        Gradients are in the dtype of what they belong to. Differentiable once; a second backward of a retained graph is
        right, and has the same bits.

    Raises:
        TypeError: an argument is not a tensor, or of another dtype than expected; a number is not one.
        ValueError: shapes or devices do not fit together, or an option has an unknown value; the GPU has no fp8;
            hidden, intermediate or hidden_out is no multiple of 16; a gradient is wanted for a tensor that was given
            quantised.
    """
    gate = activation, gate_multiplier, alpha, limit, up_offset
    return _checked_call([x, w_gate, w_up, w_down], (bias_gate, bias_up, bias_down), gate, (recipe, weight_grad, save))


def _checked_call(
    given: list[Any], biases_given: tuple[Any, ...], gate: tuple[Any, ...], options: tuple[str, str, str]
) -> torch.Tensor:
    """Check the arguments and call the operator."""
    recipe, weight_grad, save = options
    bias_gate, bias_up, bias_down = biases_given
    check_option("recipe", recipe, RECIPES)
    check_option("weight_grad", weight_grad, WEIGHT_GRADS)
    check_option("save", save, SAVES)
    formula = check_formula(*gate)
    names = ("x", "w_gate", "w_up", "w_down")
    scales: list[torch.Tensor | None] = [None] * 4
    for at, operand in enumerate(given):
        if isinstance(operand, tuple):
            given[at], scales[at] = _check_quantised(names[at], operand, recipe, at != X)
    of_weights = {scale is not None for scale, weight in zip(scales[1:], given[1:], strict=True) if weight is not None}
    if len(of_weights) > 1 or (scales[X] is not None and not all(of_weights)):
        raise ValueError("x, w_gate, w_up, w_down: expected all weights quantised, or nothing")
    in_16_bits = (operand if scale is None else None for operand, scale in zip(given, scales, strict=True))
    *cast, bias_gate, bias_up, bias_down = autocast.operands(*in_16_bits, bias_gate, bias_up, bias_down)
    given = [operand if scale is None else codes for operand, codes, scale in zip(cast, given, scales, strict=True)]
    # The checks of shapes and devices know no fp8.
    dtype = torch.bfloat16 if scales[X] is not None else getattr(given[X], "dtype", torch.bfloat16)
    shapes = [
        operand if scale is None else operand.new_empty(1, dtype=dtype).expand(operand.shape)
        for operand, scale in zip(given, scales, strict=True)
    ]
    x_like, gate_like, _ = check_glu(*shapes[:3])
    (intermediate, hidden), hidden_out = gate_like.shape, None
    sizes = [("hidden", hidden), ("intermediate", intermediate)]
    if given[W_DOWN] is not None:
        hidden_out = check_down(shapes[W_DOWN], gate_like, x_like).shape[0]
        sizes.append(("hidden_out", hidden_out))
    check("x", x_like, sizes)
    biases = [
        check_vector("bias_gate", bias_gate, intermediate, "the first dimension of w_gate", "x", x_like),
        check_vector("bias_up", bias_up, intermediate, "the first dimension of w_gate", "x", x_like),
        None
        if hidden_out is None
        else check_vector("bias_down", bias_down, hidden_out, "the first dimension of w_down", "x", x_like),
    ]
    weights = given[1:]
    if weight_grad == "none":
        weights = [None if weight is None else weight.detach() for weight in weights]
        biases = [None if bias is None else bias.detach() for bias in biases]
    with_grad = needs_backward(given[X], *weights, *biases)
    if with_grad and any(scale is not None for scale in scales):
        quantised = ", ".join(name for name, scale in zip(names, scales, strict=True) if scale is not None)
        raise ValueError(f"{quantised}: expected 16 bits if a gradient is wanted, got fp8; use torch.no_grad()")
    if not any(weight is not None and weight.requires_grad for weight in weights):
        weight_grad = "none"
    out = call_and_keep(
        _mlp, as_matrix(given[X]), *weights, *biases, *scales, recipe,
        "fp8" if weight_grad == AUTO else weight_grad, with_grad and save != "input", formula.numbers,
    )  # fmt: skip
    return like_leading(out, given[X])


def swiglu_glu_fp8(
    x: Operand,
    w_gate: Operand,
    w_up: Operand,
    bias_gate: torch.Tensor | None = None,
    bias_up: torch.Tensor | None = None,
    *,
    recipe: str,
    **options: Any,
) -> torch.Tensor:
    """Return `swiglu_glu(x, w_gate, w_up, ...)`, [..., intermediate], with x and weights in fp8: `swiglu_mlp_fp8`.

    Arguments, result and errors are those of that function.
    """
    return swiglu_mlp_fp8(x, w_gate, w_up, None, bias_gate, bias_up, recipe=recipe, **options)
