"""What a call costs the CPU, and where: microseconds from the call until it returns, on matrices too small to matter.

    python kernels/benchmarks/host_time.py [--tokens 1 --tokens 128] [--hidden 256]

The GPU is synchronised before each series of calls and never after one, and its work per call (a few microseconds) is
shorter than what is measured, so that its queue does not fill. Each figure is the median of 15 series, with the fastest
and the slowest.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton

from swiglu_kernels import glu, silu_mul, swiglu_glu, swiglu_mlp, unsloth_silu_mul
from swiglu_kernels.calls import repeat
from swiglu_kernels.launches import plan
from swiglu_kernels.launches.formula import PLAIN
from swiglu_kernels.portable.glu_forward import NO_BIASES, forward_launch

SERIES, CALLS = 15, 100
Call = Callable[[], object]


def microseconds(call: Call) -> tuple[float, float, float]:
    """Return (median, fastest, slowest) microseconds of a call over the series."""
    for _ in range(20):
        call()
    per_call = []
    for _ in range(SERIES):
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        for _ in range(CALLS):
            call()
        per_call.append((time.perf_counter_ns() - start) / CALLS / 1000)
    return statistics.median(per_call), min(per_call), max(per_call)


def contenders() -> dict[str, Callable[..., torch.Tensor]]:
    """Name the ways from x, w_gate and w_up to z."""

    def around(gate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda x, w_gate, w_up: gate(F.linear(x, w_gate), F.linear(x, w_up))

    def eager(x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor) -> torch.Tensor:
        return F.silu(F.linear(x, w_gate)) * F.linear(x, w_up)

    return {
        "eager": eager,
        "compile": torch.compile(eager, dynamic=False),
        "silu_mul": around(silu_mul),
        "unsloth_silu_mul": around(lambda gate, up: unsloth_silu_mul(gate, up, overwrite=True)),
        "swiglu_glu": swiglu_glu,
    }


def rows(tokens: int, hidden: int) -> None:
    """Print forward without and with gradients, and forward with backward, for each contender."""
    shapes = ((tokens, hidden), (hidden, hidden), (hidden, hidden), (hidden, hidden))
    tensors = [torch.randn(shape, device="cuda").mul_(hidden**-0.5).bfloat16() for shape in shapes]
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    upstream = torch.ones(tokens, hidden, device="cuda", dtype=torch.bfloat16)

    def mlp(glu: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda x, w_gate, w_up, w_down: F.linear(glu(x, w_gate, w_up), w_down)

    glus = contenders()
    mlps = {"mlp eager": mlp(glus["eager"]), "mlp swiglu_glu": mlp(swiglu_glu), "mlp swiglu_mlp": swiglu_mlp}
    for name, function in (glus | mlps).items():
        count = 4 if name in mlps else 3

        def forward(inputs: list[torch.Tensor], function=function, count=count) -> torch.Tensor:
            return function(*inputs[:count])

        def step(forward=forward) -> None:
            forward(leaves).backward(upstream)
            for leaf in leaves:
                leaf.grad = None

        with torch.no_grad():
            plain = microseconds(lambda forward=forward: forward(tensors))
        figures = {
            "no grad": plain,
            "grad": microseconds(lambda forward=forward: forward(leaves)),
            "step": microseconds(step),
        }
        columns = "".join(
            f"{what:>9} {m:6.1f} ({low:.0f}-{high:.0f})".ljust(30) for what, (m, low, high) in figures.items()
        )
        print(f"{tokens:6} tokens  {name:18}{columns}", flush=True)


def breakdown(tokens: int, hidden: int) -> None:
    """Print where swiglu_glu without gradients spends its time, called again and by the long way."""
    x, w_gate, w_up = (
        torch.randn(shape, device="cuda").bfloat16() for shape in ((tokens, hidden), (hidden, hidden), (hidden, hidden))
    )
    z = torch.empty_like(x)
    numbers = ("silu", 1.0, 1.0, None, 0.0)
    arguments = (x, w_gate, w_up, z, None, None, NO_BIASES, PLAIN)
    with torch.no_grad():
        swiglu_glu(x, w_gate, w_up)
        plan.run(forward_launch, *arguments)
        calls: dict[str, Call] = {
            "whole call": lambda: swiglu_glu(x, w_gate, w_up),
            "its kind": lambda: repeat.kind_of(
                "glu", (x, w_gate, w_up, None, None), (*numbers, "auto", "auto", "auto")
            ),
            "output": lambda: x.new_empty((tokens, hidden)),
            "operator": lambda: glu._glu(x, w_gate, w_up, "none", "input", "two_step", None, None, *numbers),
            "launch": lambda: plan.run(forward_launch, *arguments),
            "described anew": lambda: forward_launch(*arguments).run(),
        }
        known = plan.known(forward_launch, *arguments)
        if known is not None:
            tensors = [x, w_gate, w_up, z]
            values = known.arguments(tensors)
            calls["arguments, descriptors"] = lambda: known.arguments(tensors)
            calls["Triton's launcher"] = lambda: known.launcher(*values)
        times = {name: microseconds(call)[0] for name, call in calls.items()}
    print(f"\n{tokens} tokens, swiglu_glu without gradients, us")
    parts = ("its kind", "output", "arguments, descriptors", "Triton's launcher", "whole call")
    for name in parts if known is not None else ("whole call",):
        print(f"  {name:24} {times[name]:6.1f}")
    print("  of the long way, which a first call and a watched one take")
    for name in ("operator", "launch", "described anew"):
        print(f"    {name:22} {times[name]:6.1f}")
    if known is None:
        print("  no plan: every launch goes through Triton's binder")


def main() -> None:
    """Print the rows and the breakdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, action="append", help="repeatable (default 1 and 128)")
    parser.add_argument("--hidden", type=int, default=256, help="also the intermediate size")
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}; us a call")
    for tokens in options.tokens or [1, 128]:
        rows(tokens, options.hidden)
    for tokens in options.tokens or [1, 128]:
        breakdown(tokens, options.hidden)


if __name__ == "__main__":
    main()
