"""Time silu_mul and its backward against a copy of as many bytes, which a launch takes time to begin and to end, too.

    python kernels/benchmarks/activation.py [--shape llama7b] [--tokens 2048 8192] [--budget 2]

All in the same rounds, each behind a filled queue with a cold L2. Above 1 is faster than a copy: medians of per-round
ratios with their 95% intervals. The forward reads two matrices and writes one, the backward reads three and writes two.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import torch
from side_by_side import gpu_and_clock, require_right, time_calls

from swiglu_bench.spec.shapes import load_shapes
from swiglu_kernels import reference
from swiglu_kernels.operations.silu_mul import backward_launch, forward_launch


def contenders(rows: int, columns: int, device: torch.device) -> dict[str, tuple[Callable[[], object], int]]:
    """Return what is timed and the bytes that it moves, after a look at the results."""
    gate, up, dh = (torch.randn(rows, columns, device=device).bfloat16() for _ in range(3))
    h, d_gate, d_up = (torch.empty_like(gate) for _ in range(3))
    forward, backward = forward_launch(gate, up, h), backward_launch(dh, gate, up, d_gate, d_up)
    forward.run()
    backward.run()
    inputs = gate.double().requires_grad_(), up.double().requires_grad_()
    product = reference.silu_mul(*inputs)
    exact = product.detach(), *torch.autograd.grad(product, inputs, dh.double())
    for name, result, truth in zip(("h", "d_gate", "d_up"), (h, d_gate, d_up), exact, strict=True):
        require_right(name, result, truth)
    calls: dict[str, tuple[Callable[[], object], int]] = {}
    for name, launch, matrices in (("forward", forward, 3), ("backward", backward, 5)):
        moved = matrices * gate.numel() * gate.element_size()
        source = torch.randint(256, (moved // 2,), dtype=torch.uint8, device=device)
        calls[name] = launch.run, moved
        calls[f"copy like {name}"] = partial(torch.empty_like(source).copy_, source), moved
    return calls


def main() -> None:
    """Print a row for each token count and direction."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama7b")
    parser.add_argument("--tokens", nargs="+", type=int, default=[2048, 8192])
    parser.add_argument("--budget", type=float, default=2.0, help="seconds a case")
    options = parser.parse_args()
    device, clock = gpu_and_clock()
    for shape in load_shapes(options.shape):
        for tokens in options.tokens:
            calls = contenders(tokens, shape.intermediate, device)
            rounds = time_calls({name: call for name, (call, _) in calls.items()}, clock, options.budget, "forward")
            for name in ("forward", "backward"):
                copy = f"copy like {name}"
                ratio = rounds.ratio(copy, name)
                if ratio is None:
                    raise SystemExit(f"{name}: {rounds.timings[name].failure or rounds.timings[copy].failure}")
                microseconds = {one: 1000 * statistics.median(rounds.timings[one].ms) for one in (name, copy)}
                speeds = {one: calls[one][1] / microseconds[one] / 1000 for one in (name, copy)}
                print(
                    f"{shape.name} {tokens:6} tokens  {name:9} {microseconds[name]:7.2f} us {speeds[name]:5.0f} GB/s  "
                    f"copy {microseconds[copy]:7.2f} us {speeds[copy]:5.0f} GB/s  "
                    f"{ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]",
                    flush=True,
                )


if __name__ == "__main__":
    main()
