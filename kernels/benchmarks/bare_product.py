"""Time the fused forward against the bare product x [w_gate | w_up]^T, which has no gate at all, and against QuACK.

    python kernels/benchmarks/bare_product.py [--shape llama7b llama3-8b] [--tokens 16 128 1024] [--csv FILE]

All in the same rounds, each behind a filled queue with a cold L2; up to 128 tokens as CUDA graphs. `storing` also
writes gate and up, as training needs them; `auto` is `swiglu_glu`, which may take two products by PyTorch and an
elementwise launch. Ratios are medians of per-round ratios with their 95% intervals.

Up to 64 tokens the time is that of reading the weights. There a graph goes round the weights of four layers, so that
none are in the cache, a call is a fourth of it, and ratios are to a copy that moves as many bytes as the weights have.
"""

import argparse
import sys
from collections.abc import Callable

import torch
from side_by_side import Calls, copy_of, gpu_and_clock, graphs, require_right, timed_rows, write_rows

from swiglu_bench.implementations.peers import interleave
from swiglu_bench.spec.shapes import load_shapes
from swiglu_kernels import reference, swiglu_glu
from swiglu_kernels.portable.glu_forward import forward_launch

GRAPH_TOKENS, FEW_TOKENS = 128, 64
LAYERS = 4
"""Of a graph for few tokens; together several times the L2 cache."""


def quack(x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    """Return QuACK's gated product, without and with storing; nothing where it is not installed."""
    try:
        from quack.gemm_interface import gemm_gated
    except ImportError as error:
        print(f"without QuACK: {error}", file=sys.stderr)
        return {}
    joined = interleave(w_gate, w_up)

    def call(storing: bool) -> torch.Tensor:
        z: torch.Tensor = gemm_gated(x, joined.T, activation="swiglu", store_preact=storing, tuned=False)[1]
        return z

    return {"quack": lambda: call(False), "quack storing": lambda: call(True)}


def contenders(x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor) -> Calls:
    """Return what is timed, by name, after a look at its result."""
    z, gate, up = (x.new_empty(x.shape[0], w_gate.shape[0]) for _ in range(3))
    packed = torch.cat((w_gate, w_up))
    out = x.new_empty(x.shape[0], packed.shape[0])
    capability = torch.cuda.get_device_capability()
    launches = {
        "fused": forward_launch(x, w_gate, w_up, z, None, capability),
        "fused storing": forward_launch(x, w_gate, w_up, z, (gate, up), capability),
    }

    def of(name: str) -> Callable[[], torch.Tensor]:
        def call() -> torch.Tensor:
            launches[name].run()
            return z

        return call

    calls = {name: of(name) for name in launches} | {"auto": lambda: swiglu_glu(x, w_gate, w_up)}
    calls |= quack(x, w_gate, w_up)
    exact = reference.swiglu_glu(x.double(), w_gate.double(), w_up.double())
    for name, call in calls.items():
        z.fill_(torch.nan)
        require_right(name, call(), exact)
    return {"bare product": lambda: torch.mm(x, packed.T, out=out), **calls}


def main() -> None:
    """Print and write a row for each shape, token count and contender."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=["llama7b", "llama3-8b"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16, 128, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--budget", type=float, default=3.0, help="seconds a case")
    parser.add_argument("--csv", help="write the rows to this file")
    options = parser.parse_args()
    device, clock = gpu_and_clock()
    rows = []
    for shape in load_shapes(",".join(options.shape)):
        sizes = (2, shape.intermediate, shape.hidden)
        weights = [(torch.randn(sizes, device=device) * shape.hidden**-0.5).bfloat16() for _ in range(LAYERS)]
        for tokens in options.tokens:
            few = tokens <= FEW_TOKENS
            x = torch.randn(tokens, shape.hidden, device=device).bfloat16()
            layers = [contenders(x, *pair) for pair in weights[: LAYERS if few else 1]]
            if few:
                layers = [
                    {"copy": copy_of(pair.nbytes, device), **calls} for pair, calls in zip(weights, layers, strict=True)
                ]
            calls = graphs(layers, device) if tokens <= GRAPH_TOKENS else layers[0]
            baseline = "copy" if few else "bare product"
            of = {"shape": shape.name, "tokens": tokens, "graph": tokens <= GRAPH_TOKENS}
            for row in timed_rows(calls, clock, options.budget, baseline, len(layers)):
                rows.append(of | row)
                print(*rows[-1].values(), flush=True)
    if options.csv:
        write_rows(options.csv, rows)


if __name__ == "__main__":
    main()
