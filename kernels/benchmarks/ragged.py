"""Time every way to make the forward of 129 to 1000 tokens, in the same rounds: what `auto` chooses among.

    python kernels/benchmarks/ragged.py --csv FILE [--shape 4096x11008] [--tokens 300] [--budget 0.6]

The ways: the ping-pong kernel in each of its widths; the transposed one for each number of tokens in a tile, alone and
with the last wave's tiles shared by several programs; the portable kernel in two tiles; PyTorch's two products (`two`)
or its product with both weights side by side (`packed`) and one elementwise launch; eager; torch.compile. `bare` is the
packed product with no gate. `storing` also writes gate and up for the backward, which `two` and `packed` do anyway.
Each is timed behind a filled queue with a cold L2 cache. Ratios are medians of per-round ratios to `bare`, with their
95% intervals. Processes of their own compile first, so that the whole takes about a minute and a half.
"""

import argparse
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from side_by_side import gpu_and_clock, require_right, write_rows

from swiglu_bench.measure.rounds import Rule, on_clock, run_rounds
from swiglu_bench.measure.statistics import percentile
from swiglu_kernels import reference
from swiglu_kernels.hopper import forward, transposed
from swiglu_kernels.launches.formula import PLAIN
from swiglu_kernels.launches.launch import Launch
from swiglu_kernels.launches.tiles import Tile
from swiglu_kernels.operations.silu_mul import forward_launch as gate_launch
from swiglu_kernels.portable.glu_forward import forward_launch
from swiglu_kernels.tiles import tuning
from swiglu_kernels.tiles.candidates import Choice, Problem

TOKENS = (129, 160, 192, 256, 300, 333, 384, 448, 512, 560, 640, 768, 900, 1000)
SHAPES = ("4096x11008", "4096x14336", "5120x27648", "3584x18944")
MULTIPROCESSORS = 132
PORTABLE = (Tile(128, 64, 64, warps=4, stages=3), Tile(128, 128, 64, warps=8, stages=4))
Call = Callable[[], object]


def ways(x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor) -> tuple[dict[str, Launch], torch.Tensor]:
    """Return the launches of kernels of ours, by name, and the z that all of them write."""
    (tokens, hidden), intermediate = x.shape, w_gate.shape[0]
    z, gate, up = (x.new_empty(tokens, intermediate) for _ in range(3))
    problem = Problem(tokens, hidden, intermediate, x.dtype, (9, 0))
    launches = {}
    for storing in (False, True):
        kept, suffix = ((gate, up), " storing") if storing else (None, "")
        for columns in forward.COLUMNS:
            tile = Tile(**{**vars(forward.TILE), "columns": columns})
            launches[f"ping-pong {columns}{suffix}"] = forward.forward_launch(x, w_gate, w_up, z, kept, tile)
        for rows in transposed.TOKENS:
            for shares in sorted({1, transposed.most_shares(tokens, intermediate, hidden, rows, MULTIPROCESSORS)}):
                name = f"transposed {rows}{f' /{shares}' if shares > 1 else ''}{suffix}"
                launches[name] = transposed.forward_launch(x, w_gate, w_up, z, kept, transposed.tile(rows, shares))
        for tile in PORTABLE:
            kernel = "forward-preact" if storing else "forward"
            with tuning.forced(x.device, kernel, problem, Choice("portable", tile)):
                name = f"portable {tile.rows}x{tile.columns}{suffix}"
                launches[name] = forward_launch(x, w_gate, w_up, z, kept)
    return launches, z


def compile_some(part: int, parts: int) -> None:
    """Compile every `parts`-th launch, in a process of its own, into Triton's cache on disk."""
    for tokens in (160, 129):  # a multiple of 16, and none
        x, w_gate, w_up = (torch.zeros(rows, 512, device="cuda", dtype=torch.bfloat16) for rows in (tokens, 512, 512))
        launches, _ = ways(x, w_gate, w_up)
        for launch in list(launches.values())[part::parts]:
            launch.run()
    torch.cuda.synchronize()


def compile_all(processes: int) -> None:
    """Compile every launch."""
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        pool.starmap(compile_some, [(part, processes) for part in range(processes)])


def eager(x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor) -> torch.Tensor:
    """Return z as PyTorch's own operations make it."""
    return F.silu(F.linear(x, w_gate)) * F.linear(x, w_up)


def contenders(
    x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor, compiled: Callable[..., torch.Tensor]
) -> dict[str, Call]:
    """Return what is timed, after a look at its results; w_gate and w_up are the halves of one matrix."""
    launches, z = ways(x, w_gate, w_up)
    intermediate = w_gate.shape[0]
    both = x.new_empty(x.shape[0], 2 * intermediate)
    gate, up = x.new_empty(2, x.shape[0], intermediate)
    packed = w_gate.as_strided((2 * intermediate, x.shape[1]), w_gate.stride())
    gates = {"two": gate_launch(gate, up, z, PLAIN)}
    gates["packed"] = gate_launch(both[:, :intermediate], both[:, intermediate:], z, PLAIN)

    def two() -> torch.Tensor:
        torch.mm(x, w_gate.t(), out=gate)
        torch.mm(x, w_up.t(), out=up)
        gates["two"].run()
        return z

    def in_one() -> torch.Tensor:
        torch.mm(x, packed.t(), out=both)
        gates["packed"].run()
        return z

    def ours(launch: Launch) -> Callable[[], torch.Tensor]:
        def call() -> torch.Tensor:
            launch.run()
            return z

        return call

    calls: dict[str, Callable[[], torch.Tensor]] = {name: ours(launch) for name, launch in launches.items()}
    calls |= {"two": two, "packed": in_one}
    calls |= {"eager": lambda: eager(x, w_gate, w_up), "compile": lambda: compiled(x, w_gate, w_up)}
    exact = reference.swiglu_glu(x.float(), w_gate.float(), w_up.float())
    for name, call in calls.items():
        z.fill_(torch.nan)
        require_right(name, call(), exact)
    return {"bare": lambda: torch.mm(x, packed.t(), out=both), **calls}


def main() -> None:
    """Measure all cases, write a row for each way, and print the fastest of each kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--shape", nargs="+", default=list(SHAPES), help="HIDDENxINTERMEDIATE")
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--budget", type=float, default=0.6, help="seconds a case")
    parser.add_argument("--processes", type=int, default=12, help="that compile at once; 0: none")
    options = parser.parse_args()
    began = time.monotonic()
    device, clock = gpu_and_clock()
    if options.processes:
        compile_all(options.processes)
    print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    rule = Rule(min_s=options.budget / 2, budget_s=options.budget)
    rows, table = [], []
    for shape in options.shape:
        hidden, intermediate = map(int, shape.split("x"))
        weights = (torch.randn(2, intermediate, hidden, device=device) * hidden**-0.5).bfloat16()
        torch._dynamo.reset()
        compiled = torch.compile(eager, fullgraph=True)
        for tokens in options.tokens:
            x = torch.randn(tokens, hidden, device=device).bfloat16()
            torch._dynamo.maybe_mark_dynamic(x, 0)
            calls = contenders(x, weights[0], weights[1], compiled)
            timed = [on_clock(name, clock, lambda number, call=call: call) for name, call in calls.items()]  # type: ignore[misc]
            rounds = run_rounds(timed, rule, baseline="bare")
            us = {}
            for name in calls:
                ratio, timing = rounds.ratio(name, "bare"), rounds.timings[name]
                if ratio is None:
                    raise SystemExit(f"{name}: {timing.failure}")
                us[name] = 1e3 * percentile(timing.ms, 50)
                rows.append(
                    {"hidden": hidden, "intermediate": intermediate, "tokens": tokens, "way": name}
                    | {"us": round(us[name], 2), "rounds": len(timing.samples), "ratio": round(ratio.median, 4)}
                    | {"low": round(ratio.low, 4), "high": round(ratio.high, 4)}
                )
            write_rows(options.csv, rows)  # a run that is cut off counts as well
            table.append(line(shape, tokens, us))
            del calls, timed
    print(f"{'us':11}{'':5}{'bare':>7}{'two':>7}{'packed':>7}{'compile':>8}{'eager':>7}  of ours, and storing")
    print("\n".join(table))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {time.monotonic() - began:.0f} s in all")


def line(shape: str, tokens: int, us: dict[str, float]) -> str:
    """Say what a case takes: PyTorch's ways, then the fastest of ours."""
    others = "".join(f"{us[name]:{width}.1f}" for name, width in zip(("bare", "two", "packed"), (7, 7, 7), strict=True))
    others += f"{us['compile']:8.1f}{us['eager']:7.1f}"
    best = (
        min((one for one in us if one.startswith(kind) and one.endswith("storing") is storing), key=us.__getitem__)
        for storing in (False, True)
        for kind in ("ping-pong", "transposed", "portable")
    )
    return f"{shape:11}{tokens:5}{others}  " + ", ".join(f"{us[name]:.1f} {name}" for name in best)


if __name__ == "__main__":
    main()
