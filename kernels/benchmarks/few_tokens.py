"""Time candidate kernels for few tokens against torch, this package's kernels and the speed of a copy.

    python kernels/benchmarks/few_tokens.py [--part forward dx dw] [--shape llama7b llama3-8b] [--tokens 1 16]
    TRITON_INTERPRET=1 python kernels/benchmarks/few_tokens.py --check       on any machine: only whether they are right

steady   microseconds of one call within a CUDA graph that goes round sets of weights, together several times the L2
         cache: as in a model, where the cache is full of the last layer's weights
flushed  microseconds of one call in a graph, after a buffer of twice the L2 cache was zeroed: those dirty lines are
         written back while the call runs
limit    steady over the time in which a copy moves the weights' bytes; 1.00 is reading (dX, forward) or writing (dW)
         them once at copy speed

A wrong candidate has no time. Candidates are compiled in threads before anything is timed.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import few_tokens_kernels as kernels
import torch
import torch.nn.functional as F

from swiglu_bench.measure import ceilings
from swiglu_bench.measure.clock import make_clock
from swiglu_bench.spec.shapes import Shape, load_shapes
from swiglu_kernels import reference
from swiglu_kernels.launches.backend import INTERPRETING
from swiglu_kernels.launches.launch import Launch
from swiglu_kernels.launches.tiles import Tile
from swiglu_kernels.portable.glu_backward import input_grad_launch, weight_grad_launch
from swiglu_kernels.portable.glu_forward import forward_launch
from swiglu_kernels.tiles import tuning
from swiglu_kernels.tiles.candidates import Choice, Problem

SMALL = (96, 80)
"""Hidden and intermediate size of what is only checked."""
SETS, SETS_BYTES = 4, 2**28
"""At least so many sets of weights, and together so many bytes: several times the L2 cache."""
Tensors = tuple[torch.Tensor, ...]
Way = Callable[[Tensors, int], Any]
"""Takes the tensors of a part and the number of multiprocessors; returns launches, or a function to call."""


def tiled(tensors: Tensors, _: int, tile: Tile) -> Launch:
    """Describe the package's portable forward in a given tile."""
    x, w_gate, *_ = tensors
    problem = Problem(*x.shape, w_gate.shape[0], x.dtype, None)
    with tuning.forced(x.device, "forward", problem, Choice("portable", tile)):
        return forward_launch(*tensors, None)


def forward_ways(tokens: int) -> dict[str, Way]:
    """Name the ways from (x, w_gate, w_up, z) to z."""

    def eager(t: Tensors, _: int) -> Callable[[], object]:
        return lambda: torch.mul(F.silu(F.linear(t[0], t[1])), F.linear(t[0], t[2]), out=t[3])

    def products(t: Tensors, _: int) -> Callable[[], object]:
        both = torch.cat(t[1:3])
        out = torch.empty(t[0].shape[0], both.shape[0], dtype=t[0].dtype, device=t[0].device)
        return lambda: torch.mm(t[0], both.t(), out=out)

    def package(t: Tensors, _: int) -> Launch:
        return forward_launch(*t, None)

    ways: dict[str, Way] = {"eager": eager, "bare packed product": products, "package": package}
    rows = max(16, 1 << (tokens - 1).bit_length())
    for columns, depth, warps, stages in (
        (32, 128, 4, 3), (16, 128, 4, 4), (16, 128, 2, 5), (16, 256, 4, 3), (16, 256, 2, 4), (32, 128, 4, 4),
        (32, 64, 4, 3), (32, 64, 4, 6), (32, 128, 4, 5), (64, 64, 4, 4), (64, 64, 4, 5), (64, 128, 4, 4),
    ):  # fmt: skip
        for parts in (1, 2, 4, 8):
            if rows * columns <= 128 * 64 and (columns >= 32 or (parts == 1 and rows <= 64)):
                tile = Tile(rows, columns, depth, warps=warps, stages=stages, parts=parts)
                ways[f"tile {rows}x{columns}x{depth} w{warps} s{stages} /{parts}"] = partial(tiled, tile=tile)
    for waves, depth, warps, stages, hint in (
        (1, 64, 8, 0, ""), (1, 64, 8, 0, "evict_first"), (1, 64, 4, 0, ""), (1, 128, 8, 0, ""), (2, 64, 4, 0, ""),
        (2, 64, 4, 4, ""), (2, 128, 4, 0, ""), (3, 64, 4, 0, ""), (3, 128, 4, 0, ""), (4, 64, 4, 0, ""),
        (4, 128, 4, 0, ""), (4, 64, 2, 0, ""), (6, 64, 4, 0, ""), (8, 64, 2, 0, ""), (8, 128, 4, 0, ""),
    ):  # fmt: skip
        choice = {"waves": waves, "depth": depth, "warps": warps, "stages": stages, "hint": hint}
        ways[f"even {waves} waves d{depth} w{warps} s{stages or 'max'} {hint}"] = partial(kernels.even, **choice)
    if tokens <= 4:
        for rows, depth, warps, unroll, hint in (
            (4, 512, 4, 4, ""), (4, 512, 4, 4, "evict_first"), (4, 512, 4, 2, ""), (2, 1024, 4, 4, ""),
            (2, 512, 2, 4, ""), (8, 256, 4, 4, ""), (2, 512, 4, 8, ""), (1, 1024, 2, 4, ""), (4, 256, 1, 2, ""),
        ):  # fmt: skip
            choice = {"rows": rows, "depth": depth, "warps": warps, "unroll": unroll, "hint": hint}
            ways[f"fma {rows}x{depth} w{warps} u{unroll} {hint}"] = partial(kernels.fma, **choice)
    return ways


def dx_ways(tokens: int) -> dict[str, Way]:
    """Name the ways from (d_gate, d_up, w_gate, w_up, dx) to dx."""

    def by_torch(t: Tensors, _: int) -> Callable[[], object]:
        return lambda: torch.mm(t[0], t[2], out=t[4]).addmm_(t[1], t[3])

    def package(t: Tensors, _: int) -> Launch:
        return input_grad_launch(None, *t)

    ways: dict[str, Way] = {"torch, two products": by_torch, "package, two_step's kernel": package}
    for parts, columns, depth, warps, stages in (
        (33, 256, 32, 4, 5), (33, 256, 64, 4, 3), (17, 256, 32, 4, 6), (16, 256, 64, 4, 4), (8, 256, 64, 8, 4),
        (8, 128, 64, 4, 4), (16, 128, 64, 4, 4), (8, 128, 128, 4, 3), (4, 128, 64, 4, 6), (4, 64, 128, 4, 4),
    ):  # fmt: skip
        if tokens * parts <= 2048:  # more: the parts outweigh the weights
            warps = 8 if tokens > 64 else warps  # four spill
            choice = {"parts": parts, "columns": columns, "depth": depth, "warps": warps, "stages": stages}
            ways[f"split {parts} parts {columns}x{depth} w{warps} s{stages}"] = partial(kernels.split, **choice)
    return ways


def dw_ways(tokens: int) -> dict[str, Way]:
    """Name the ways from (d_gate, d_up, x, d_w_gate, d_w_up) to the weight gradients."""

    def by_torch(t: Tensors, _: int) -> Callable[[], object]:
        return lambda: (torch.mm(t[0].t(), t[2], out=t[3]), torch.mm(t[1].t(), t[2], out=t[4]))

    def package(t: Tensors, _: int) -> Launch:
        return weight_grad_launch(None, *t)

    ways: dict[str, Way] = {"torch, two products": by_torch, "package's kernel": package}
    depth = min(64, max(16, 1 << (tokens - 1).bit_length()))
    for rows, columns, warps in ((64, 128, 4), (128, 128, 4), (128, 128, 8), (64, 256, 4), (128, 256, 8), (32, 256, 4)):
        choice = {"rows": rows, "columns": columns, "depth": depth, "warps": warps}
        ways[f"outer {rows}x{columns}x{depth} w{warps}"] = partial(kernels.outer, **choice)
    if tokens <= 16:
        for rows, columns, warps in ((16, 512, 4), (8, 1024, 4), (16, 1024, 8), (4, 2048, 4), (32, 256, 4)):
            choice = {"rows": rows, "columns": columns, "depth": 0, "warps": warps}
            ways[f"outer, fma {rows}x{columns} w{warps}"] = partial(kernels.outer, **choice)
    return ways


def forward_tensors(tokens: int, hidden: int, intermediate: int, dtype: torch.dtype, device: str) -> Tensors:
    """Return (x, w_gate, w_up, z)."""
    x = torch.randn(tokens, hidden, device=device).to(dtype)
    weights = [(torch.randn(intermediate, hidden, device=device) * hidden**-0.5).to(dtype) for _ in range(2)]
    return x, *weights, x.new_full((tokens, intermediate), float("nan"))


def dx_tensors(tokens: int, hidden: int, intermediate: int, dtype: torch.dtype, device: str) -> Tensors:
    """Return (d_gate, d_up, w_gate, w_up, dx)."""
    _, w_gate, w_up, _ = forward_tensors(1, hidden, intermediate, dtype, device)
    d_gate, d_up = (torch.randn(tokens, intermediate, device=device).to(dtype) for _ in range(2))
    return d_gate, d_up, w_gate, w_up, d_gate.new_full((tokens, hidden), float("nan"))


def dw_tensors(tokens: int, hidden: int, intermediate: int, dtype: torch.dtype, device: str) -> Tensors:
    """Return (d_gate, d_up, x, d_w_gate, d_w_up)."""
    x = torch.randn(tokens, hidden, device=device).to(dtype)
    d_gate, d_up = (torch.randn(tokens, intermediate, device=device).to(dtype) for _ in range(2))
    return d_gate, d_up, x, *(x.new_full((intermediate, hidden), float("nan")) for _ in range(2))


def forward_errors(t: Tensors) -> list[float]:
    """Relative error of z."""
    return [relative(t[3], reference.swiglu_glu(*(tensor.float() for tensor in t[:3])))]


def dx_errors(t: Tensors) -> list[float]:
    """Relative error of dx."""
    d_gate, d_up, w_gate, w_up = (tensor.float() for tensor in t[:4])
    return [relative(t[4], d_gate @ w_gate + d_up @ w_up)]


def dw_errors(t: Tensors) -> list[float]:
    """Relative error of both weight gradients."""
    d_gate, d_up, x = (tensor.float() for tensor in t[:3])
    return [relative(t[3], d_gate.t() @ x), relative(t[4], d_up.t() @ x)]


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return ||got - expected|| / ||expected||."""
    return ((got.float() - expected).norm() / expected.norm()).item()


PARTS: dict[str, tuple[Callable[[int], dict[str, Way]], Callable[..., Tensors], Callable[[Tensors], list[float]]]] = {
    "forward": (forward_ways, forward_tensors, forward_errors),
    "dx": (dx_ways, dx_tensors, dx_errors),
    "dw": (dw_ways, dw_tensors, dw_errors),
}
OUTPUTS = {"forward": 1, "dx": 1, "dw": 2}
TOKENS = {"forward": (1, 4, 16, 32, 64), "dx": (1, 16, 64, 128, 256), "dw": (1, 8, 16, 64, 128)}


def caller(way: Way, tensors: Tensors, processors: int) -> tuple[Callable[[], object], list[Launch]]:
    """Return a function that runs a way, and its launches."""
    made = way(tensors, processors)
    if callable(made):
        return made, []
    launches = made if isinstance(made, list) else [made]
    return lambda: [launch.run() for launch in launches], launches


def compile_one(launch: Launch) -> str | None:
    """Compile a launch, or say why it cannot be."""
    try:
        launch.kernel.warmup(
            **launch.arguments, grid=launch.grid, num_warps=launch.num_warps, num_stages=launch.num_stages
        )
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
    return None


def poisoned_error(part: str, call: Callable[[], object], tensors: Tensors) -> float:
    """Run a call on poisoned outputs and return its largest error."""
    for output in tensors[-OUTPUTS[part] :]:
        output.fill_(float("nan"))
    call()
    return max(PARTS[part][2](tensors))


def graph_of(calls: list[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """Record calls, one after the other."""
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def median_us(run: Callable[[], object], before: Callable[[], object], count: int) -> float:
    """Return the median of microseconds between events around `run`, with the queue kept full."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    torch.cuda._sleep(2_000_000)
    for start, end in events:
        before()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) * 1000


def copy_gbps() -> float:
    """Return the speed of a large copy, read plus written, as the suite measures it: a recorded one is far slower."""
    device = torch.device("cuda")
    return ceilings.copy_gbps(device, make_clock(device), 2**30)


def measure(part: str, shape: Shape, tokens: int, gbps: float, flush: torch.Tensor) -> None:
    """Print a line for each way of a part at one size, fastest first."""
    ways, make, _ = PARTS[part]
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    hidden, intermediate = shape.hidden, shape.intermediate
    count = max(SETS, -(-SETS_BYTES // (4 * hidden * intermediate)))
    sets = [make(tokens, hidden, intermediate, torch.bfloat16, "cuda") for _ in range(count)]
    limit_us = 2 * 2 * hidden * intermediate / gbps / 1000
    made = {name: [caller(way, tensors, processors) for tensors in sets] for name, way in ways(tokens).items()}
    launches = [(name, launch) for name, calls in made.items() for launch in calls[0][1]]
    with ThreadPoolExecutor(16) as pool:
        failed = {
            name: reason
            for (name, _), reason in zip(launches, pool.map(lambda pair: compile_one(pair[1]), launches), strict=True)
            if reason is not None
        }
    lines = []
    for name, calls in made.items():
        if name in failed:
            lines.append((float("inf"), f"{name:34} does not compile: {failed[name]}"))
            continue
        try:
            error = 0.0 if name.startswith("bare") else poisoned_error(part, calls[0][0], sets[0])
            if not error < 6e-3:
                lines.append((float("inf"), f"{name:34} WRONG: error {error:.2e}"))
                continue
            steady = median_us(graph_of([call for call, _ in calls]).replay, lambda: None, 25) / count
            flushed = median_us(graph_of([calls[0][0]]).replay, flush.zero_, 15)
        except Exception as exception:
            lines.append((float("inf"), f"{name:34} failed: {str(exception).splitlines()[0][:80]}"))
            continue
        speed = f"limit {steady / limit_us:5.2f}  {limit_us / steady * gbps:5.0f} GB/s"
        lines.append((steady, f"{name:34} steady {steady:7.1f}  {speed}  flushed {flushed:7.1f}  error {error:.1e}"))
    print(f"\n{part}, {shape.name}, {tokens} tokens: {limit_us:.1f} us at copy speed")
    for _, line in sorted(lines):
        print("  " + line, flush=True)


def check(parts: list[str]) -> None:
    """Say of every candidate whether it is right, on small tensors and under the interpreter."""
    for part in parts:
        ways, make, _ = PARTS[part]
        for tokens in (1, 3, 17):
            for name, way in ways(tokens).items():
                tensors = make(tokens, *SMALL, torch.float16, "cpu")
                call, launches = caller(way, tensors, 3)
                if launches:
                    error = poisoned_error(part, call, tensors)
                    print(f"{part:8} {tokens:3} tokens  {name:34} error {error:.1e}", "" if error < 2e-3 else "WRONG")


def main() -> None:
    """Check or measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--shape", nargs="+", default=["llama7b"])
    parser.add_argument("--tokens", nargs="+", type=int)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--seconds", type=float, default=85.0, help="start no further size after that long")
    options = parser.parse_args()
    if options.check or INTERPRETING:
        check(options.part)
        return
    start = time.monotonic()
    gbps = copy_gbps()
    print(f"{torch.cuda.get_device_name()}: copy {gbps:.0f} GB/s", flush=True)
    flush = torch.empty(2 * torch.cuda.get_device_properties(0).L2_cache_size // 4, dtype=torch.int32, device="cuda")
    for shape in load_shapes(",".join(options.shape)):
        for part in options.part:
            for tokens in options.tokens or TOKENS[part]:
                if time.monotonic() - start > options.seconds:
                    print(f"not measured, out of time: {part}, {shape.name}, {tokens} tokens")
                    continue
                measure(part, shape, tokens, gbps, flush)


if __name__ == "__main__":
    main()
