"""Hold the forward in fp8 by hand against fp64, then time fp8 beside bf16 in the same rounds.

    python kernels/benchmarks/fp8.py [--shape llama7b llama3-8b] [--tokens 1024 8192] [--csv FILE]

launches   quantising x and h; both products and the gate (by hand in each tile, portable) of codes and scales; and
           torch._scaled_mm of the same operands as one product
calls      swiglu_glu_fp8 and swiglu_mlp_fp8 without a gradient, weights quantised before; the same in bf16; blockwise
           also as two products by PyTorch with a pass for the gate
step       forward and backward of swiglu_mlp and swiglu_mlp_fp8, everything quantised

Ratios are medians of per-round ratios with their 95% intervals: to the bare bf16 product of x with both weights, and of
the step to bf16's.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from side_by_side import Row, gpu_and_clock, require_right, timed_rows, write_rows

from swiglu_bench.spec.shapes import load_shapes
from swiglu_kernels import reference, swiglu_glu, swiglu_glu_fp8, swiglu_mlp, swiglu_mlp_fp8
from swiglu_kernels.hopper import fp8 as by_hand
from swiglu_kernels.launches.formula import PLAIN
from swiglu_kernels.launches.plan import run
from swiglu_kernels.operations import fp8_products
from swiglu_kernels.operations.fp8 import quantise
from swiglu_kernels.portable.fp8 import glu_launch
from swiglu_kernels.portable.fp8_codes import Quantised, quantise_both, quantise_rows
from swiglu_kernels.portable.fp8_gate import gradients_launch

RECIPES = ("rowwise", "blockwise")
Call = Callable[[], object]


def launches(x: Quantised, w_gate: Quantised, w_up: Quantised, z: torch.Tensor) -> dict[str, tuple[Any, ...]]:
    """Return, by name, what describes a launch of both products and the gate, and its arguments."""
    nothing = z.new_empty((0, 0))
    operands = x, w_gate, w_up
    found: dict[str, tuple[Any, ...]] = {"portable": (glu_launch, *operands, z, None, (nothing, nothing))}
    if by_hand.why_not(*operands, False, PLAIN) is not None:
        return found
    pairs = [(one.codes.view(z.dtype), one.scales) for one in operands]
    for columns in by_hand.BLOCK_COLUMNS if x.scales.dim() == 2 else (64, 80, 88, 96):
        launch = by_hand.forward_launch, *pairs, z, None, by_hand.tile_of(columns)
        found[f"by hand, {columns} columns"] = launch
    return found


def check(device: torch.device) -> None:
    """End the program where a launch is further from fp64 than rounding allows, at sizes that fill no tile."""
    for recipe in RECIPES:
        for tokens, hidden, intermediate in [(131, 80, 224), (1, 256, 96), (517, 272, 1056), (1024, 4096, 11008)]:
            x, w_gate, w_up = matrices(tokens, hidden, intermediate, device)[:3]
            operands = [quantise(one, recipe, weight=one is not x) for one in (x, w_gate, w_up)]
            exact_x, exact_gate, exact_up = (reference.dequantise(*one) for one in operands)
            gate = exact_x @ exact_gate.T
            exact = gate * gate.sigmoid() * (exact_x @ exact_up.T)
            z = torch.empty(tokens, intermediate, dtype=x.dtype, device=device)
            for name, launch in launches(operands[0], operands[1], operands[2], z).items():
                z.fill_(float("nan"))
                run(*launch)
                require_right(f"{name} {recipe} {tokens} x {hidden} x {intermediate}", z, exact)


def matrices(tokens: int, hidden: int, intermediate: int, device: torch.device) -> list[torch.Tensor]:
    """Draw x, w_gate, w_up, w_down and an upstream gradient in bf16."""
    shapes = [(tokens, hidden), (intermediate, hidden), (intermediate, hidden), (hidden, intermediate)]
    drawn = [torch.randn(shape, device=device) * (1.0 if not number else shape[1] ** -0.5) for number, shape in
             enumerate(shapes)]  # fmt: skip
    return [one.bfloat16() for one in [*drawn, torch.randn(tokens, hidden, device=device)]]


def forward(tokens: int, hidden: int, intermediate: int, device: torch.device) -> dict[str, Call]:
    """Return launches and calls by name; "bf16 product" is the baseline."""
    x, w_gate, w_up, w_down, _ = matrices(tokens, hidden, intermediate, device)
    both = torch.cat((w_gate, w_up))
    calls: dict[str, Call] = {
        "bf16 product": lambda: x @ both.T,
        "bf16 glu": lambda: swiglu_glu(x, w_gate, w_up),
        "bf16 mlp": lambda: swiglu_mlp(x, w_gate, w_up, w_down),
    }
    for recipe in RECIPES:
        z = torch.empty(tokens, intermediate, dtype=x.dtype, device=device)
        weights = [quantise(one, recipe, weight=True) for one in (w_gate, w_up, w_down)]
        of_x = quantise_rows(x, recipe, False)
        for name, launch in launches(of_x, weights[0], weights[1], z).items():
            calls[f"{recipe} {name}"] = partial(run, *launch)
        calls |= {
            f"{recipe} x by rows": partial(quantise_rows, x, recipe, False),
            f"{recipe} h by rows": partial(quantise_rows, z.normal_(), recipe, False),
            f"{recipe} h along both": partial(quantise_both, z, recipe, False),
            f"{recipe} torch._scaled_mm": scaled_mm(of_x, quantise(both, recipe, weight=True)),
            f"{recipe} glu": partial(swiglu_glu_fp8, x, *weights[:2], recipe=recipe),
            f"{recipe} d_gate, d_up, h": of_the_gate(z),
            f"{recipe} mlp": partial(swiglu_mlp_fp8, x, *weights, recipe=recipe),
        }
        if recipe == "blockwise" and by_hand.why_not(of_x, *weights[:2], False, PLAIN) is None:
            pairs = [(one.codes.view(z.dtype), one.scales) for one in (of_x, *weights[:2])]
            codes, scales = quantise_rows(z, recipe, False)
            calls["blockwise by hand, h in fp8"] = partial(
                run, by_hand.forward_launch, *pairs, (codes, scales.t()), None
            )
            calls |= {f"{name}, two products": by_torch(calls[name]) for name in ("blockwise glu", "blockwise mlp")}
    return calls


def by_torch(call: Call) -> Call:
    """Return a call whose gate and up are two products by PyTorch, not one launch by hand."""

    def with_two_products() -> None:
        with mock.patch.object(fp8_products, "_by_hand", return_value=False):
            call()

    return with_two_products


def of_the_gate(z: torch.Tensor) -> Call:
    """Return the pass of the backward that makes d_gate, d_up and h of d_h, all as large as z."""
    d_h, gate, up, *made = (torch.randn_like(z) for _ in range(6))
    nothing = ((None, None),) * 3
    return partial(run, gradients_launch, d_h, (gate, up), *made, nothing)


def scaled_mm(a: Quantised, b: Quantised) -> Call:
    """Return what multiplies a b^T with full accumulation."""
    by_rows = a.scales.dim() == 1
    scales = (a.scales[:, None], b.scales[None, :]) if by_rows else (a.scales, b.scales.t())
    return lambda: torch._scaled_mm(
        a.codes, b.codes.t(), scale_a=scales[0], scale_b=scales[1], out_dtype=torch.bfloat16
    )


def step(tokens: int, hidden: int, intermediate: int, device: torch.device) -> dict[str, Call]:
    """Return steps by name; "bf16 step" is the baseline."""
    *leaves, upstream = matrices(tokens, hidden, intermediate, device)
    for one in leaves:
        one.requires_grad_()

    def once(function: Callable[..., torch.Tensor]) -> None:
        for one in leaves:
            one.grad = None
        function(*leaves).backward(upstream)

    calls: dict[str, Call] = {"bf16 step": partial(once, swiglu_mlp)}
    for recipe in RECIPES:
        for grad in ("fp8", "triton"):
            function = partial(swiglu_mlp_fp8, recipe=recipe, weight_grad=grad)
            calls[f"{recipe} step, dW by {grad}"] = partial(once, function)
    return calls


def main() -> None:
    """Check, then print and write a row for each shape, token count and call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=["llama7b", "llama3-8b"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[128, 512, 1024, 8192])
    parser.add_argument("--budget", type=float, default=3.0, help="seconds of rounds")
    parser.add_argument("--csv", help="write the rows to this file")
    options = parser.parse_args()
    device, clock = gpu_and_clock()
    check(device)
    found: list[Row] = []
    for shape in load_shapes(",".join(options.shape)):
        for tokens in options.tokens:
            sizes = tokens, shape.hidden, shape.intermediate
            with torch.no_grad():
                made = list(timed_rows(forward(*sizes, device), clock, options.budget, "bf16 product"))
            made += timed_rows(step(*sizes, device), clock, options.budget, "bf16 step")
            for row in made:
                found.append({"shape": shape.name, "tokens": tokens, **row})
                print(*found[-1].values(), flush=True)
    if options.csv:
        write_rows(options.csv, found)


if __name__ == "__main__":
    main()
