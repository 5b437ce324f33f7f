"""Time swiglu_experts and others in the same rounds: forward and step whole, and the products that they consist of.

    python kernels/benchmarks/experts.py [--shape qwen3-30b-a3b mixtral-8x7b] [--tokens 512 8192] [--routing zipf]

whole   the suite's implementations after a verdict by fp64; ratio to `grouped`; peak MiB of a step beyond the gradients
parts   each product of the hand-scheduled kernels and of the portable ones; ratio to the bare grouped product of
        torch, which gathers, gates and adds nothing

Ratios are medians of per-round ratios with their 95% intervals; TFLOP/s count no padding and no gate.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from side_by_side import Row, gpu_and_clock, require_sound, timed_rows, write_rows

from swiglu_bench.check.built import Built
from swiglu_bench.check.inputs import Draw, make_problem, new_seed
from swiglu_bench.check.judge import Judge
from swiglu_bench.implementations import experts as rows_of_experts
from swiglu_bench.measure.ceilings import grouped_products
from swiglu_bench.measure.clock import Clock
from swiglu_bench.spec import costs
from swiglu_bench.spec.cases import Case, Dtype, Mode, Routing, Scope, tensors
from swiglu_bench.spec.implementation import Implementation
from swiglu_bench.spec.problem import Problem
from swiglu_bench.spec.shapes import load_shapes
from swiglu_kernels.launches.formula import PLAIN
from swiglu_kernels.launches.tiles import expert_tile_rows
from swiglu_kernels.operations.experts import KERNELS
from swiglu_kernels.routing import route
from swiglu_kernels.tiles.choices import why_not_hopper

BASELINE = "grouped"


def rows(calls: Mapping[str, Callable[[], object]], baseline: str, flops: int, clock: Clock, s: float) -> Iterator[Row]:
    """Time calls of the same work; a row for each."""
    for row in timed_rows(calls, clock, s, baseline):
        yield row | {"tflops": round(flops / row["time_ms"] / 1e9, 1)}


def whole(problem: Problem, contenders: list[Implementation], draw: Draw, clock: Clock, s: float) -> Iterator[Row]:
    """Rows of the whole call, in the case's mode."""
    case, judge = problem.case, Judge(problem)
    calls: dict[str, Callable[[], object]] = {}
    peaks: dict[str, float] = {}
    for one in contenders:
        built = Built(one, problem)
        require_sound(one.name, judge, built.train(draw), draw)
        gradients = sum(value.nbytes for value in problem.parameters.values())
        peaks[one.name] = round((built.memory(draw).peak_bytes - gradients) / 2**20, 1)
        built.desk.activations(draw)
        built.desk.upstream(draw)
        calls[one.name] = built.recordable(case.mode)
    flops = sum(2 * m * n * k for m, n, k in costs.products(case, tensors(case.scope)))
    for row in rows(calls, BASELINE, flops, clock, s):
        yield row | {"peak_mib": peaks[row["contender"]] if case.mode is Mode.STEP else ""}


def parts(problem: Problem, draw: Draw, clock: Clock, s: float) -> Iterator[Row]:
    """Rows of the products one by one; what takes its rows from those of the tokens does so within its time."""
    case, desk = problem.case, Judge(problem).desk
    x, index, weights = desk.activations(draw)
    count = len(problem.weights["w_gate"])
    w_gate_up = torch.cat((problem.weights["w_gate"], problem.weights["w_up"]), 1)
    w_down = problem.weights["w_down"]
    counts = index.flatten().bincount(minlength=count)
    hidden, intermediate, pairs = case.shape.hidden, case.shape.intermediate, case.pairs
    bare = {
        "h": ((pairs, 2 * intermediate, hidden), False), "y": ((pairs, hidden, intermediate), False),
        "d_pre": ((pairs, intermediate, hidden), False), "dx": ((pairs, hidden, 2 * intermediate), False),
        "dW_gate_up": ((2 * intermediate, hidden, pairs), True), "dW_down": ((hidden, intermediate, pairs), True),
    }  # fmt: skip
    of: dict[str, dict[str, Callable[[], object]]] = {
        part: {"torch": grouped_products(*([], [size]) if summed else ([size], []), counts, x.dtype)}
        for part, (size, summed) in bare.items()
    }
    for name, kernels in KERNELS.items():
        if name == "hopper" and why_not_hopper(x, w_gate_up, w_down, "silu"):
            continue
        tile_rows = kernels.ROWS if name == "hopper" else expert_tile_rows(index.numel(), count, x.dtype)
        routing = route(index, count, tile_rows)
        rows_of_x = kernels.gather(x, routing)
        h, pre = kernels.gate_up(rows_of_x, w_gate_up, routing, None, PLAIN, False, True, True)
        backward = rows_of_x, w_down, pre, weights, routing, PLAIN, False
        d_pre, wh, _ = kernels.down_backward(*backward)

        # Bound as defaults: each set of kernels has its own.
        def calls(k=kernels, r=routing, x_=rows_of_x, h_=h, b=backward, d=d_pre, wh_=wh) -> dict[str, Any]:  # type: ignore[no-untyped-def]
            return {
                "h": lambda: k.gate_up(x_, w_gate_up, r, None, PLAIN, False, True, False),
                "y": lambda: k.down(h_, w_down, r, None),
                "d_pre": lambda: k.down_backward(*b),
                "dx": lambda: k.rows_times(d, w_gate_up, r),
                "dW_gate_up": lambda: k.weight_grad(d, x, r, w_gate_up)[0],
                "dW_down": lambda: k.weight_grad(x, wh_, r, w_down)[0],
            }

        for part, call in calls().items():
            of[part][name] = call
    for part, timed in of.items():
        m, n, k = bare[part][0]
        yield from ({"part": part, **row} for row in rows(timed, "torch", 2 * m * n * k, clock, s))


def main() -> None:
    """Print and write a row for each shape, token count, work and contender."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=["qwen3-30b-a3b"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192])
    parser.add_argument("--routing", default="uniform", choices=list(Routing))
    names = [one.name for one in rows_of_experts.ROWS]
    parser.add_argument("--impl", nargs="+", default=[BASELINE, "grouped-compile", "fused-experts"], choices=names)
    parser.add_argument("--budget", type=float, default=3.0, help="seconds of rounds")
    parser.add_argument("--csv", help="write the rows to this file")
    options = parser.parse_args()
    device, clock = gpu_and_clock()
    chosen = [one for one in rows_of_experts.ROWS if one.name in {BASELINE, *options.impl}]
    found: list[Row] = []
    for shape in load_shapes(",".join(options.shape)):
        for tokens in options.tokens:
            draw = Draw(new_seed())
            for mode in (Mode.FORWARD, Mode.STEP):
                case = Case(shape.routed(Routing(options.routing)), tokens, Dtype.BFLOAT16, Scope.EXPERTS, mode)
                problem = make_problem(case, device)
                made = ({"part": mode.value, **row} for row in whole(problem, chosen, draw, clock, options.budget))
                for row in made:
                    found.append({"shape": case.shape.name, "tokens": tokens, "peak_mib": "", **row})
                    print(*found[-1].values(), flush=True)
            for row in parts(problem, draw, clock, options.budget):
                found.append({"shape": case.shape.name, "tokens": tokens, "peak_mib": "", **row})
                print(*found[-1].values(), flush=True)
    if options.csv:
        write_rows(options.csv, found)


if __name__ == "__main__":
    main()
