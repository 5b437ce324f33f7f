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

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from swiglu_kernels.ops.fp8 import portable_codes, products
from swiglu_kernels.ops.fp8.definition import RECIPES
from swiglu_kernels.ops.fp8.kept_codes import SUFFIX, KeptCodes, find
from swiglu_kernels.ops.fp8.portable_codes import ALIGNMENT, BLOCK, Quantised, lines_of, quantise_both, quantise_rows
from swiglu_kernels.ops.fp8.products import write_glu, write_product
from swiglu_kernels.ops.gate.formula import Limit, check_formula
from swiglu_kernels.ops.glu import block
from swiglu_kernels.ops.glu.block import SEPARATE, Chosen, Gradients, Operands, new
from swiglu_kernels.ops.glu.choice import AUTO, SAVES
from swiglu_kernels.ops.glu.operation import sum_over_tokens, write_weight_grads
from swiglu_kernels.ops.glu.portable_forward import Pair
from swiglu_kernels.ops.mlp.operation import write_down_grad
from swiglu_kernels.runtime import autocast
from swiglu_kernels.runtime.backend import backend_for, capability_of
from swiglu_kernels.runtime.checks import check_option, check_tensor
from swiglu_kernels.runtime.main_grad import MARK
from swiglu_kernels.runtime.operator import call_and_keep, operator
from swiglu_kernels.runtime.shortcuts import door, plan
from swiglu_kernels.runtime.shortcuts.door import as_matrix, like_leading

PRECISIONS = ("bf16", *(f"fp8-{recipe}" for recipe in RECIPES))
"""What modules call them; with "bf16" operands stay as they are."""
WEIGHT_GRADS = ("fp8", "triton", "torch", "none", AUTO)
DTYPES = (torch.bfloat16, torch.float16)
MINIMUM_CAPABILITY = (8, 9)
T = TypeVar("T")


def why_not(device: torch.device) -> str | None:
    """Say why products of fp8 cannot run on a device, or return None where they can."""
    backend = backend_for(device)
    capability = capability_of(device)
    if backend == "torch" or (backend == "triton" and (capability is None or capability < MINIMUM_CAPABILITY)):
        found = f"compute capability {capability[0]}.{capability[1]}" if capability else f"the device {device}"
        return f"fp8 products need Triton and an NVIDIA GPU of compute capability 8.9 or newer, this is {found}"
    return None


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
    quantised = _made(quantise_rows, tensor, recipe, weight) if scales is None else Quantised(tensor, scales)
    hand(quantised, name)
    return quantised


def _made(quantise: Callable[..., T], tensor: torch.Tensor, recipe: str, weight: bool, *others: Any) -> T:
    """Quantise an operand; a weight, where its codes may be kept, once for all calls."""
    if not recipe.endswith(SUFFIX):
        return quantise(tensor, recipe, weight, *others)
    how = recipe.removesuffix(SUFFIX), weight, *others
    make = partial(quantise, tensor, *how)
    return find(tensor, (quantise, how), make) if weight else make()


def _both(
    name: str, tensor: torch.Tensor, recipe: str, rows: bool, along: bool, maxima: portable_codes.Maxima = (None, None)
) -> tuple[Quantised, Quantised]:
    """Quantise an operand by its name for products that sum over its last axis, its first, or one for each."""
    both = _made(quantise_both, tensor, recipe, name.startswith("w_"), rows, along, maxima)
    if rows:
        hand(both[0], name)
    if along and _handed is not None:
        codes, scales = both[1]
        hand(Quantised(codes.t()[: tensor.shape[0]], scales.t() if scales.dim() == 2 else scales[None, :]), f"{name}.T")
    return both


def hand(operand: Quantised, name: str, row: torch.Tensor | None = None) -> None:
    """Enter an operand by its name, if somebody looks; sorted rows of experts in the order of pairs.

    `row` is that of a routing in which every index names an expert.
    """
    if _handed is None:
        return
    codes, scales = operand.codes, operand.scales
    scales = scales if scales.dim() == codes.dim() else scales[..., None]
    if row is not None:
        codes, scales = codes.view(torch.uint8)[row.long()].view(codes.dtype), scales[row.long()]
    _handed[name] = codes, scales


def _by_rows_of(given: Operands, recipe: str) -> tuple[Quantised, Quantised, Quantised]:
    """Quantise x and the weights of gate and up, as far as they are not."""
    assert given.w_up is not None, "no packed layout has fp8"
    return (
        _by_rows("x", given.x, given.s_x, recipe),
        _by_rows("w_gate", given.w_gate, given.s_gate, recipe),
        _by_rows("w_up", given.w_up, given.s_up, recipe),
    )


def _forward(given: Operands, options: Chosen, out: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> None:
    operands, formula = _by_rows_of(given, options.recipe), options.formula
    biases = given.bias_gate, given.bias_up
    if given.w_down is None:
        write_glu(operands, out, (gate, up), biases, formula)
        return
    h = products.glu_codes(operands, (gate, up), biases, formula)
    if h is None:
        z = new(out, given.x.shape[0], given.w_gate.shape[0])
        write_glu(operands, z, (gate, up), biases, formula)
        h = _by_rows("h", z, None, options.recipe)
        del z
    else:
        hand(h, "h")
    del operands
    write_product(h, _by_rows("w_down", given.w_down, given.s_down, options.recipe), out, given.bias_down)


def _backward(
    d_out: torch.Tensor, given: Operands, preactivations: Pair, results: Gradients, options: Chosen, in_place: bool
) -> None:
    """What is not read any more is given back before the next is allocated."""
    x, w_gate, w_up, bias_gate, bias_up, w_down, *_ = given
    assert w_up is not None, "no packed layout has fp8"
    recipe, weight_grad, formula = options.recipe, options.weight_grad, options.formula
    keep, in_fp8 = options.save == "preact", weight_grad == "fp8"
    tokens, intermediate = d_out.shape[0], w_gate.shape[0]
    if tokens == 0:
        for gradient in results.of(block.NAMES):
            gradient.zero_()
        return
    wants_down = results.wants("w_down")
    (gate, up), h = preactivations, None
    if not keep:
        assert x is not None, "the recomputation starts from x"
        gate, up, h = (new(d_out, tokens, intermediate) for _ in range(3))
        write_glu(_by_rows_of(given, recipe), h, (gate, up), (bias_gate, bias_up), formula)
    wants_along = results.wants("w_gate") and in_fp8
    maxima = recipe.startswith("rowwise") and (results.wants("x") or in_fp8)
    d_gate, d_up = (gate, up) if in_place or not keep else (torch.empty_like(gate), torch.empty_like(up))
    if w_down is None:
        of_gate, of_up, _ = products.write_gate_gradients(d_out, (gate, up), (d_gate, d_up, None), formula, maxima)
    else:
        by_rows, along = _both("upstream", d_out, recipe, True, wants_down and in_fp8)
        _, w_down_along = _both("w_down", w_down, recipe, False, True)
        made = d_gate, d_up, new(d_out, tokens, intermediate) if wants_down and keep else None
        of_gate, of_up, of_h = products.write_hidden_grad(by_rows, w_down_along, (gate, up), made, formula, maxima)
        h = made[2] if keep else h
        del by_rows, w_down_along, made
        if wants_down:
            assert h is not None
            if in_fp8:
                _, h_along = _both("h", h, recipe, False, True, of_h)
                write_product(along, h_along, results["w_down"])
                del h_along
            else:
                write_down_grad(d_out, h, results["w_down"], weight_grad)
        del along
    del h, gate, up
    if results.wants("x") or wants_along:
        gate_rows, gate_along = _both("d_gate", d_gate, recipe, results.wants("x"), wants_along, of_gate)
        up_rows, up_along = _both("d_up", d_up, recipe, results.wants("x"), wants_along, of_up)
        if results.wants("x"):
            _, w_gate_along = _both("w_gate", w_gate, recipe, False, True)
            _, w_up_along = _both("w_up", w_up, recipe, False, True)
            products.write_sum(gate_rows, w_gate_along, up_rows, w_up_along, results["x"])
            del w_gate_along, w_up_along
        del gate_rows, up_rows
        if wants_along:
            assert x is not None, "weight gradients are products with x"
            _, x_along = _both("x", x, recipe, False, True)
            write_product(gate_along, x_along, results["w_gate"])
            write_product(up_along, x_along, results["w_up"])
    if results.wants("w_gate") and not in_fp8:
        assert x is not None, "weight gradients are products with x"
        write_weight_grads(d_gate, d_up, x, (results["w_gate"], results["w_up"]), weight_grad)
    for name, gradient in (("bias_gate", d_gate), ("bias_up", d_up), ("bias_down", d_out)):
        if results.wants(name):
            plan.apply(sum_over_tokens, gradient, results[name])


MLP = block.GatedOperation("fp8_mlp", 11, _forward, _backward)


@operator("fp8_quantise")
def _quantise(matrix: torch.Tensor, recipe: str, weight: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes to the ends of their rows, and scales; blockwise to the ends of their lines."""
    codes, scales = quantise_rows(matrix, recipe, weight)
    return lines_of(codes), scales if recipe == "rowwise" else lines_of(scales if weight else scales.t())


@_quantise.register_fake
def _(matrix: torch.Tensor, recipe: str, weight: bool) -> tuple[torch.Tensor, torch.Tensor]:
    *shape, columns = matrix.shape
    blocks = -(-columns // BLOCK)
    codes = matrix.new_empty((*shape, blocks * BLOCK), dtype=torch.float8_e4m3fn)
    if recipe == "blockwise":
        count, line = (-(-shape[0] // BLOCK), blocks) if weight else (blocks, shape[0])
        shape = [count, portable_codes.up_to(line, portable_codes.ROWS)]
    return codes, matrix.new_empty(shape, dtype=torch.float32)


def quantise(matrix: torch.Tensor, recipe: str, *, weight: bool = False) -> Quantised:
    """Quantise a matrix to fp8 for products that sum over its last axis; bit for bit `reference.quantise`.

    Args:
        matrix: [rows, depth], bfloat16 or float16, any strides; depth a multiple of 16. "rowwise", [experts, rows,
            depth] as well: the weights of `swiglu_experts`.
        recipe: "rowwise" or "blockwise".
        weight: whether it is a weight, whose blocks are 128 x 128.

    Returns:
        Quantised(codes, scales): [rows, depth] in float8_e4m3fn, contiguous but that rows lie a multiple of 128 bytes
        apart, blockwise with zeros between; and float32 scales: rowwise [rows], blockwise [rows, ceil(depth / 128)], of
        a weight [ceil(rows / 128), ceil(depth / 128)], in lines of a multiple of four. Of experts, [experts, rows,
        depth] and [experts, rows]. No gradient.

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
    if recipe == "blockwise":
        scales = scales[:, : -(-tensor.shape[1] // BLOCK)] if weight else scales[:, : len(tensor)].t()
    return Quantised(codes[..., : tensor.shape[-1]], scales)


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
    kinds = [(part.dtype, part.dim()) for part in operand if isinstance(part, torch.Tensor)]
    if not (
        len(operand) == len(kinds) == 2 and kinds[0] == (torch.float8_e4m3fn, 2) and kinds[1][0] == torch.float32
        and portable_codes.lies_as_codes(operand[0])
    ):  # fmt: skip
        raise TypeError(f"{name}: expected what `quantise` returns, codes and scales")
    codes, scales = operand
    rows, blocks = codes.shape[0], -(-codes.shape[1] // BLOCK)
    shape = (rows,) if recipe == "rowwise" else (-(-rows // BLOCK) if weight else rows, blocks)
    if scales.shape != shape:
        raise ValueError(f"{name}: expected scales {shape} as recipe={recipe!r} has them, got {tuple(scales.shape)}")
    return Quantised(codes, scales if recipe == "rowwise" else portable_codes.laid(scales, weight))


Operand = torch.Tensor | Quantised


def swiglu_mlp_fp8(
    x: Operand, w_gate: Operand, w_up: Operand, w_down: Operand | None, bias_gate: torch.Tensor | None = None,
    bias_up: torch.Tensor | None = None, bias_down: torch.Tensor | None = None, *, recipe: str,
    activation: str = "silu", gate_multiplier: float = 1.0, alpha: float = 1.0, limit: Limit = None,
    up_offset: float = 0.0, weight_grad: str = AUTO, save: str = AUTO, kept: KeptCodes | None = None,
    accumulate_into_main_grad: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Return `swiglu_mlp(x, w_gate, w_up, w_down, ...)` with the operands of every product in fp8.

    `reference.swiglu_mlp_fp8` is the definition, `reference.quantise` that of the recipes, with their sources.

    Args:
        x: [..., hidden], bfloat16 or float16; or where the weights are, Quantised, [tokens, hidden]. Under autocast
            operands are cast first.
        w_gate: [intermediate, hidden], any strides, dtype and device of x, quantised in every call; or Quantised by
            `quantise(w_gate, recipe, weight=True)`, once for many calls without a gradient.
        w_up: as w_gate, and quantised where that is.
        w_down: [hidden_out, intermediate]; as w_up. None: the result is z, as of `swiglu_glu`.
        bias_gate, bias_up, bias_down: as for `swiglu_mlp`; biases are not quantised.
        recipe: "rowwise" or "blockwise".
        activation, gate_multiplier, alpha, limit, up_offset: the gate, as for `swiglu_glu`.
        weight_grad: "fp8" (also "auto"): the products for the weight gradients have quantised operands; "triton" or
            "torch": they have 16 bits, as for `swiglu_glu`; "none": weights and biases are frozen.
        save: "preact" (also "auto") or "input", as for `swiglu_glu`.
        kept: holds the weights' codes from call to call, for the backward too, until a weight changes: one for each
            layer. None: weights are quantised in every call.
        accumulate_into_main_grad: as for `swiglu_glu`; products of quantised operands are made in 16 bits, then added.

    Returns:
        [..., hidden_out], contiguous, in x's dtype, bfloat16 for a quantised x. Sums, scales and the gate are fp32; h,
        d_gate and d_up are rounded to 16 bits before they are quantised, gate and up where PyTorch multiplies.
        Differentiable once; a second backward of a retained graph is right, and has the same bits.

    Raises:
        TypeError, ValueError: as for `swiglu_glu`; ValueError also where the GPU has no fp8, hidden, intermediate or
            hidden_out is no multiple of 16, or a gradient is wanted for a tensor that was given quantised.
    """
    gate, kind = (activation, gate_multiplier, alpha, limit, up_offset), None
    if kept is None and _handed is None and not accumulate_into_main_grad:
        parts = [operand if type(operand) is Quantised else (operand, None) for operand in (x, w_gate, w_up, w_down)]
        (*tensors, down), of_codes = zip(*parts, strict=True)
        others = bias_gate, bias_up, down, bias_down, *of_codes
        kind, again = door.find(MLP.name, tuple(tensors), others, (recipe, *gate, weight_grad, save))
        if again is not None:
            return again(*tensors, *others)
    check_option("recipe", recipe, RECIPES)
    check_option("weight_grad", weight_grad, WEIGHT_GRADS)
    check_option("save", save, SAVES)
    formula = check_formula(*gate)
    given, scales = _given((x, w_gate, w_up, w_down), (bias_gate, bias_up, bias_down), recipe)
    if frozen := weight_grad == "none":
        given = block.frozen(given)
    with_grad = block.needs_backward(*given)
    quantised = ", ".join(name for name, scale in zip(_NAMES, scales, strict=True) if scale is not None)
    if with_grad and quantised:
        raise ValueError(f"{quantised}: expected 16 bits if a gradient is wanted, got fp8; use torch.no_grad()")
    asked = "fp8" if weight_grad == AUTO else weight_grad
    weight_grad = MARK * accumulate_into_main_grad + asked if block.trains(given) else "none"
    if kept is not None and not quantised and kept.take(given.w_gate, given.w_up, given.w_down):
        recipe += SUFFIX
    save = "preact" if with_grad and save != "input" else "input"
    rows, options = as_matrix(given.x), (weight_grad, save, "", formula.numbers, SEPARATE, 0, recipe)
    out = call_and_keep(MLP.forward, rows, *given[1:7], *scales, *options)
    if not (frozen and with_grad):
        MLP.remember(kind, given.x, options, with_grad)
    return like_leading(out, given.x)


_NAMES = ("x", "w_gate", "w_up", "w_down")


def _given(
    operands: tuple[Any, ...], biases: tuple[Any, ...], recipe: str
) -> tuple[Operands, list[torch.Tensor | None]]:  # fmt: skip
    """Return the operands, checked, in fp8 as codes; and the scales of those four that may be."""
    given = list(operands)
    scales: list[torch.Tensor | None] = [None] * 4
    for at, operand in enumerate(given):
        if isinstance(operand, tuple):
            given[at], scales[at] = _check_quantised(_NAMES[at], operand, recipe, at > 0)
    of_weights = {scale is not None for scale, weight in zip(scales[1:], given[1:], strict=True) if weight is not None}
    if len(of_weights) > 1 or (scales[0] is not None and not all(of_weights)):
        raise ValueError("x, w_gate, w_up, w_down: expected all weights quantised, or nothing")
    in_16_bits = (operand if scale is None else None for operand, scale in zip(given, scales, strict=True))
    *cast, bias_gate, bias_up, bias_down = autocast.operands(*in_16_bits, *biases)
    given = [operand if scale is None else codes for operand, codes, scale in zip(cast, given, scales, strict=True)]
    # The checks of shapes and devices know no fp8.
    dtype = torch.bfloat16 if scales[0] is not None else getattr(given[0], "dtype", torch.bfloat16)
    x, w_gate, w_up, w_down = (
        operand if scale is None else operand.new_empty(1, dtype=dtype).expand(operand.shape)
        for operand, scale in zip(given, scales, strict=True)
    )
    tensors = x, w_gate, w_up, bias_gate, bias_up, w_down, bias_down
    shapes = block.check_operands(tensors, SEPARATE, w_down is not None)
    sizes = [("hidden", w_gate.shape[1]), ("intermediate", w_gate.shape[0])]
    check("x", shapes.x, sizes if w_down is None else [*sizes, ("hidden_out", w_down.shape[0])])
    x, w_gate, w_up, w_down = given
    return Operands(x, w_gate, w_up, shapes.bias_gate, shapes.bias_up, w_down, shapes.bias_down), scales


def swiglu_glu_fp8(
    x: Operand, w_gate: Operand, w_up: Operand, bias_gate: torch.Tensor | None = None,
    bias_up: torch.Tensor | None = None, *, recipe: str, **options: Any,
) -> torch.Tensor:  # fmt: skip
    """Return `swiglu_glu(x, w_gate, w_up, ...)`, [..., intermediate], with x and weights in fp8: `swiglu_mlp_fp8`.

    Arguments, result and errors are those of that function.
    """
    return swiglu_mlp_fp8(x, w_gate, w_up, None, bias_gate, bias_up, recipe=recipe, **options)
