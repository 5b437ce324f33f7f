"""Time each part of a step by every way to make it, in the same rounds: what `auto` chooses among.

    python kernels/benchmarks/parts.py --csv FILE [--shape 4096x11008] [--tokens 300] [--budget 0.2]
    python kernels/benchmarks/parts.py --csv FILE --waves --part input-grad mlp-weight-grad

The parts: the forward that keeps gate and up; d_gate, d_up and h of an MLP; dX; d_w_gate and d_w_up; d_w_down. The
ways: `torch` (PyTorch's products, and one elementwise launch where there is a gate), the portable kernel, and each
schedule by hand. Without options the sizes are those of layers whose rows begin at multiples of 16, 32, 64 and 128
bytes; with --waves, those whose tiles fill the multiprocessors well or badly. Each is timed behind a filled queue with
a cold L2 cache. Ratios to `torch` are medians of per-round ratios, with 95% intervals. Processes of their own compile
first.
"""

import argparse
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from side_by_side import gpu_and_clock, time_calls, write_rows

from swiglu_bench.measure.statistics import percentile
from swiglu_kernels.launches.formula import PLAIN
from swiglu_kernels.operations import glu
from swiglu_kernels.operations.glu import multiply_and_gate, multiply_transposed
from swiglu_kernels.operations.mlp import multiply_and_gate_backward
from swiglu_kernels.portable.glu_backward import input_grad_launch, weight_grad_launch
from swiglu_kernels.portable.glu_forward import NO_BIASES, forward_launch
from swiglu_kernels.portable.mlp_backward import down_backward_launch, down_weight_grad_launch
from swiglu_kernels.tiles import tuning
from swiglu_kernels.tiles.candidates import KERNELS, Choice, Problem

CASES = {
    "2048x768": (3, 26, 267, 684, 2370),
    "4096x11008": (3, 43, 250, 453, 512),
    "2880x2880": (1000, 2048, 4096),
    "5120x25600": (3, 26, 300),
    "4168x3320": (2, 13, 79, 262, 1142, 3656),
    "3032x11848": (1, 13, 79, 262, 1142, 3656),
    "4176x3344": (13, 262, 1142, 3656),
    "4192x3360": (13, 262, 1142, 3656),
    "4128x3296": (262, 1142, 3656),
}
WAVES = {
    "4096x14336": (896, 1408, 2304, 2707, 3643, 5309),
    "4096x11008": (453, 896, 1408, 2304, 2707),
    "2880x2880": (2634, 4872, 7428),
    "8192x28672": (1150, 2300, 3000),
    "2048x768": (684, 1300, 2370, 2745),
    "2048x1024": (684, 1500, 2654, 3803),
    "4096x1536": (1300, 2304, 3643),
    "7168x2048": (1300, 2100, 3200),
}
"""Whose dX fills 62 to 97% of its waves of tiles."""
Call = Callable[[], object]


def ways(tokens: int, hidden: int, intermediate: int) -> Iterator[tuple[str, dict[str, Call]]]:
    """Yield each part with what makes it, by name."""
    weights = torch.randn(3, intermediate, hidden, device="cuda").bfloat16() * hidden**-0.5
    w_gate, w_up, w_down = weights[0], weights[1], weights[2].view(hidden, intermediate)
    x, d_out, dx = torch.randn(3, tokens, hidden, device="cuda").bfloat16()
    gate, up, z, d_gate, d_up = torch.randn(5, tokens, intermediate, device="cuda").bfloat16()
    d_weights = torch.empty_like(weights)
    d_w_gate, d_w_up, d_w_down = d_weights[0], d_weights[1], d_weights[2].view(hidden, intermediate)

    def weight_grads() -> None:
        multiply_transposed(gate, x, d_w_gate)
        multiply_transposed(up, x, d_w_up)

    by_torch: dict[str, Call] = {
        "forward-preact": lambda: multiply_and_gate(x, w_gate, w_up, z, (gate, up), NO_BIASES, PLAIN),
        "mlp-hidden-grad": lambda: multiply_and_gate_backward(d_out, w_down, (gate, up), d_gate, d_up, z, PLAIN),
        "input-grad": lambda: glu.add_products(gate, w_gate, up, w_up, dx),
        "weight-grad": weight_grads,
        "mlp-weight-grad": lambda: multiply_transposed(d_out, gate, d_w_down),
    }
    ours = {
        "forward-preact": lambda: forward_launch(x, w_gate, w_up, z, (gate, up)),
        "mlp-hidden-grad": lambda: down_backward_launch(d_out, w_down, (gate, up), d_gate, d_up, z),
        "input-grad": lambda: input_grad_launch(None, gate, up, w_gate, w_up, dx),
        "weight-grad": lambda: weight_grad_launch(None, gate, up, x, d_w_gate, d_w_up),
        "mlp-weight-grad": lambda: down_weight_grad_launch(d_out, gate, d_w_down),
    }
    problem = Problem(tokens, hidden, intermediate, x.dtype, (9, 0))
    for name, kernel in KERNELS.items():
        if name not in ours:
            continue
        choices = [Choice("portable", kernel.shipped(problem))]
        choices += [Choice(one, tiles(problem)[0]) for one, tiles in kernel.by_hand.items() if tiles(problem)]
        by_hand = kernel.shipped_by_hand(problem)
        choices = [by_hand if by_hand and by_hand.schedule == one.schedule else one for one in choices]
        calls = {"torch": by_torch[name]}
        for choice in choices:
            with tuning.forced(x.device, name, problem, choice):
                calls[choice.schedule] = ours[name]().run
        yield name, calls


def compile_some(cases: Sequence[tuple[str, int]]) -> None:
    """Run cases once, in a process of its own, so that their kernels are in Triton's cache."""
    for shape, tokens in cases:
        for _, calls in ways(tokens, *map(int, shape.split("x"))):
            for call in calls.values():
                call()
    torch.cuda.synchronize()


def main() -> None:
    """Measure all cases, write a row for each way, and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--shape", nargs="+", help="HIDDENxINTERMEDIATE")
    parser.add_argument("--tokens", nargs="+", type=int)
    parser.add_argument("--waves", action="store_true", help="other sizes, see above")
    parser.add_argument("--part", nargs="+", help="default: all")
    parser.add_argument("--budget", type=float, default=0.2, help="seconds for a part of a case")
    parser.add_argument("--processes", type=int, default=16, help="that compile at once; 0: none")
    options = parser.parse_args()
    began, rows = time.monotonic(), []
    sizes = WAVES if options.waves else CASES
    shapes = options.shape or list(sizes)
    cases = [(one, tokens) for one in shapes for tokens in options.tokens or sizes.get(one, (1, 13, 262, 1142))]
    if options.processes:
        with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
            pool.map(compile_some, [cases[first :: options.processes] for first in range(options.processes)])
    _, clock = gpu_and_clock()
    print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    for shape, tokens in cases:
        hidden, intermediate = map(int, shape.split("x"))
        for part, calls in ways(tokens, hidden, intermediate):
            if part not in (options.part or [part]):
                continue
            rounds = time_calls(calls, clock, options.budget, "torch")
            said = []
            for name in calls:
                ratio, us = rounds.ratio(name, "torch"), 1e3 * percentile(rounds.timings[name].ms, 50)
                if ratio is None:
                    raise SystemExit(f"{name}: {rounds.timings[name].failure}")
                said.append(f"{name} {us:.1f}")
                rows.append(
                    {"hidden": hidden, "intermediate": intermediate, "tokens": tokens, "part": part, "way": name}
                    | {"us": round(us, 2), "rounds": len(rounds.timings[name].samples)}
                    | {"ratio": round(ratio.median, 4), "low": round(ratio.low, 4), "high": round(ratio.high, 4)}
                )
            print(f"{shape:11}{tokens:6} {part:16} {'  '.join(said)}", flush=True)
        write_rows(options.csv, rows)  # a run that is cut off counts as well
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {time.monotonic() - began:.0f} s in all")


if __name__ == "__main__":
    main()
