"""Time mixtures for few tokens, as CUDA graphs, over a copy that moves as many bytes as the active experts' weights.

    python kernels/benchmarks/experts_few.py [--shape qwen3-30b-a3b] [--routing zipf] [--tokens 1 4] [--csv FILE]

in turn   a graph goes through four layers, each with weights, tokens and experts of its own; a call is a fourth of it,
          as in a model, where one layer follows the other
alone     a graph of one layer, behind a cold L2: what a graph takes to begin and to end is in it

The copy reads half of the bytes and writes half, in the same rounds and the same way. Every contender is one of the
suite, after a verdict by fp64 on each layer. Ratios are medians of per-round ratios with their 95% intervals.
"""

import argparse
from itertools import product

import torch
from side_by_side import Calls, copy_of, gpu_and_clock, graphs, require_sound, timed_rows, write_rows

from swiglu_bench.check.built import Built
from swiglu_bench.check.inputs import Draw, make_problem, new_seed
from swiglu_bench.check.judge import Judge
from swiglu_bench.implementations import experts as rows_of_experts
from swiglu_bench.spec.cases import Case, Dtype, Mode, Routing, Scope
from swiglu_bench.spec.implementation import Implementation
from swiglu_bench.spec.shapes import load_shapes

LAYERS = 4
COPY = "copy"


def layer(case: Case, contenders: list[Implementation], device: torch.device) -> tuple[int, Calls]:
    """Return how many experts a layer's tokens have, and the calls on it."""
    problem, draw = make_problem(case, device), Draw(new_seed())
    judge = Judge(problem)
    *_, index, _ = judge.desk.activations(draw)
    active = len(index.unique())
    weights = sum(value.nbytes for value in problem.weights.values()) // len(problem.weights["w_down"])
    calls: Calls = {COPY: copy_of(active * weights, device)}
    for one in contenders:
        built = Built(one, problem)
        require_sound(one.name, judge, built.infer(draw), draw)
        built.desk.activations(draw)
        calls[one.name] = built.recordable(Mode.FORWARD)
    return active, calls


def main() -> None:
    """Print and write a row for each shape, routing, token count, graph and contender."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=["qwen3-30b-a3b"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--routing", nargs="+", default=["uniform"], choices=list(Routing))
    names = [one.name for one in rows_of_experts.ROWS]
    parser.add_argument("--impl", nargs="+", default=["grouped", "fused-experts"], choices=names)
    parser.add_argument("--budget", type=float, default=2.0, help="seconds of rounds")
    parser.add_argument("--csv", help="write the rows to this file")
    options = parser.parse_args()
    device, clock = gpu_and_clock()
    chosen = [one for one in rows_of_experts.ROWS if one.name in options.impl]
    rows = []
    for shape, routing, tokens in product(load_shapes(",".join(options.shape)), options.routing, options.tokens):
        torch.compiler.reset()  # what is compiled for other sizes would count against the limit of recompilations
        case = Case(shape.routed(Routing(routing)), tokens, Dtype.BFLOAT16, Scope.EXPERTS, Mode.FORWARD)
        layers = [layer(case, chosen, device) for _ in range(LAYERS)]
        for graph, timed in {"in turn": layers, "alone": layers[:1]}.items():
            calls = graphs([calls for _, calls in timed], device)
            experts = sum(active for active, _ in timed) / len(timed)
            of = {"shape": shape.name, "routing": routing, "tokens": tokens, "graph": graph, "active_experts": experts}
            for row in timed_rows(calls, clock, options.budget, COPY, len(timed)):
                rows.append(of | row)
                print(*rows[-1].values(), flush=True)
    if options.csv:
        write_rows(options.csv, rows)


if __name__ == "__main__":
    main()
