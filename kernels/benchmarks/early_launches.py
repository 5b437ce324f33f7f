"""What an elementwise launch gains that begins before PyTorch's product ahead of it has ended.

    python kernels/benchmarks/early_launches.py

Products and the launch behind them, CALLS times in a queue that was filled before; the same launch once as the stream
orders it and once early, in turns. GPU time of one call, the median over ROUNDS, and that of the ratios of each round
with the third of them from either end.
"""

import statistics
from collections.abc import Callable
from functools import partial
from unittest import mock

import torch
import triton

from swiglu_kernels.launches.launch import Launch
from swiglu_kernels.operations import silu_mul

ROUNDS, CALLS, WARMUP = 13, 40, 3
LONG = 1000
"""Tokens from which on a quarter of the calls do."""
FILL_CYCLES = 12_000_000
"""What the GPU waits while its queue is filled."""
FORWARD = [
    (3672, 1960, 50), (3672, 1960, 277), (6072, 2296, 31), (4824, 1896, 167), (7208, 4776, 533), (2880, 2880, 128),
    (7168, 2048, 128), (4096, 11008, 300), (4096, 11008, 1024), (7168, 2048, 4662),
]  # fmt: skip
BACKWARD = [(2880, 2880, 128), (2880, 2880, 1000), (4096, 14336, 3643)]


def described(describe: Callable[[], Launch], early: bool) -> Launch:
    """Describe a launch as an early one or not."""
    with mock.patch.object(silu_mul, "starts_early", return_value=early):
        return describe()


def microseconds(call: Callable[[], object], calls: int) -> float:
    """Return what a call takes behind a filled queue."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(FILL_CYCLES)
    began.record()
    for _ in range(calls):
        call()
    ended.record()
    torch.cuda.synchronize()
    return began.elapsed_time(ended) * 1e3 / calls


def measure(hidden: int, intermediate: int, tokens: int, backward: bool) -> str:
    """Measure one size: gate and up and what is behind them, or dh and its gate."""

    def draw(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, device="cuda").bfloat16()

    x, w_gate, w_up, w_down = (
        draw(tokens, hidden),
        *(draw(intermediate, hidden) for _ in range(2)),
        draw(hidden, intermediate),
    )
    gate, up, h, dh, d_gate, d_up = (draw(tokens, intermediate) for _ in range(6))

    def describe() -> Launch:
        if backward:
            return silu_mul.backward_launch(dh, gate, up, d_gate, d_up)
        return silu_mul.forward_launch(gate, up, h)

    def call(launch: Launch) -> None:
        if backward:
            torch.mm(x, w_down, out=dh)
        else:
            torch.mm(x, w_gate.t(), out=gate)
            torch.mm(x, w_up.t(), out=up)
        launch.run()

    launches = {early: described(describe, early) for early in (False, True)}
    found: dict[bool, list[float]] = {False: [], True: []}
    for number in range(WARMUP + ROUNDS):
        for early in (False, True) if number % 2 else (True, False):
            taken = microseconds(partial(call, launches[early]), CALLS if tokens < LONG else CALLS // 4)
            if number >= WARMUP:
                found[early].append(taken)
    ratios = sorted(after / before for before, after in zip(*found.values(), strict=True))
    before, after = map(statistics.median, found.values())
    return (
        f"{'backward' if backward else 'forward'} {hidden}x{intermediate} {tokens}: {before:.2f} us -> {after:.2f} us "
        f"early, x{statistics.median(ratios):.4f} [{ratios[2]:.4f}, {ratios[-3]:.4f}]"
    )


def main() -> None:
    """Print a line for each size."""
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}")
    for sizes, backward in ((FORWARD, False), (BACKWARD, True)):
        for size in sizes:
            print(measure(*size, backward), flush=True)


if __name__ == "__main__":
    main()
