"""A kernel by hand on trial, in this process: right at odd sizes, like the portable kernel, and as fast."""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from swiglu_kernels.hopper import admission
from swiglu_kernels.ops.experts.operation import swiglu_experts
from swiglu_kernels.ops.fp8 import products
from swiglu_kernels.ops.fp8.portable_codes import quantise_rows
from swiglu_kernels.ops.gate.formula import PLAIN
from swiglu_kernels.runtime import internals
from swiglu_kernels.runtime.backend import capability_of, multiprocessors
from swiglu_kernels.standalone.odd_sizes import ROUNDINGS, allocated_as_nan, by_hand_cases
from swiglu_kernels.standalone.workloads import Runnable, workload
from swiglu_kernels.tiles.candidates import KERNELS, Choice, Schedule, TileProblem

DTYPE = torch.float16
DENSE: dict[str, tuple[str, Schedule, tuple[int, int, int]]] = {
    "forward": ("forward", "ping-pong", (2048, 2048, 5632)),
    "transposed forward": ("forward", "transposed", (320, 2048, 5632)),
    "row forward": ("forward", "cooperative", (96, 2048, 5632)),
    "dX": ("input-grad", "cooperative", (2048, 2048, 5632)),
    "dW": ("weight-grad", "ping-pong", (2048, 1024, 2048)),
    "hidden gradient": ("mlp-hidden-grad", "gate", (2048, 2048, 5632)),
}
"""Of a kernel: its name in `tiles.candidates`, a schedule, and tokens, hidden and intermediate at which it is timed."""
FP8_SIZE, EXPERTS_SIZE = (2048, 2048, 5632), (2048, 1024, 1024)
ODD, ODD_FP8, ODD_EXPERTS = (133, 200, 328), (133, 208, 352), (261, 192, 256)
ROUNDS, CALLS = 9, 5
Make = Callable[[], Sequence[torch.Tensor]]
"""Makes outputs."""


def run(kernel: str, device: torch.device) -> dict[str, Any]:
    """Return how many launches were made, how many roundings the worst was off, and why the kernel is refused or ""."""
    with torch.cuda.device(device), admission.by_hand_aside(None):
        with allocated_as_nan():
            outcomes = [outcome for case in by_hand_cases(kernel, device, [DTYPE], few=True) for outcome in case()]
        found = {"launches": len(outcomes), "roundings": max(outcome.roundings for outcome in outcomes), "refused": ""}
        if wrong := [outcome for outcome in outcomes if not outcome.right]:
            numbers = (outcome.roundings for outcome in wrong if outcome.roundings == outcome.roundings)  # no NaN
            found["roundings"] = max(numbers, default=0.0)
            reason = wrong[0].reason or f"{wrong[0].roundings:.1f} roundings off"
            return found | {"refused": f"{len(wrong)} of {len(outcomes)} launches are wrong; {wrong[0].name}: {reason}"}
        for odd in (True, False):
            (by_hand, portable), size = ways(kernel, device, odd)
            found_by_hand = [output.clone() for output in by_hand()]  # both may write to the same
            off = max(map(_difference, found_by_hand, portable()))
            if not off <= 4 * ROUNDINGS[DTYPE]:  # NaN neither
                return found | {"refused": f"it differs from the portable kernel by {off:.1e} at {size}"}
        return found


def timed(kernel: str, device: torch.device) -> dict[str, Any]:
    """Return the median times of the kernel and of the portable one in the same rounds, and their ratio."""
    with torch.cuda.device(device), admission.by_hand_aside(None):
        both, size = ways(kernel, device, odd=False)
        times: tuple[list[float], list[float]] = [], []
        for number in range(ROUNDS + 1):
            for make, mine in zip(both, times, strict=True):
                events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                if internals.spin is not None:
                    internals.spin(20_000_000)  # some 10 ms, so that the host is ahead
                events[0].record()
                for _ in range(CALLS):
                    make()
                events[1].record()
                torch.cuda.synchronize()
                if number:
                    mine.append(events[0].elapsed_time(events[1]) / CALLS * 1e3)
        ours, theirs = map(statistics.median, times)
        return {"at": size, "by_hand_us": ours, "portable_us": theirs, "ratio": ours / theirs}


def ways(kernel: str, device: torch.device, odd: bool) -> tuple[tuple[Make, Make], str]:
    """Return what makes the same outputs by hand and by the portable kernel, and the size: odd, or the timed one."""
    if kernel in DENSE:
        name, schedule, size = DENSE[kernel]
        if odd:
            size = min(size[0], ODD[0]), *ODD[1:]
        return _dense(name, schedule, size, device), " x ".join(map(str, size))
    if kernel == "fp8 forward":
        size = ODD_FP8 if odd else FP8_SIZE
        make = _fp8(size, device)
        return (partial(make, None), partial(make, "the portable kernel is asked for")), " x ".join(map(str, size))
    size = ODD_EXPERTS if odd else EXPERTS_SIZE
    of_backend = _experts(size, "fp8-rowwise" if kernel == "fp8 experts" else "bf16", device)
    return (partial(of_backend, "hopper"), partial(of_backend, "portable")), f"{' x '.join(map(str, size))}, 8 experts"


def _dense(name: str, schedule: Schedule, size: tuple[int, int, int], device: torch.device) -> tuple[Make, Make]:
    problem = TileProblem(*size, DTYPE, capability_of(device), multiprocessors(device))
    work, kernel = workload(name, problem, device), KERNELS[name]
    by_hand = work.describe(Choice(schedule, kernel.by_hand[schedule](problem)[0]))
    portable = work.describe(Choice("portable", kernel.tile(problem, True)))

    def outputs(launch: Runnable) -> Sequence[torch.Tensor]:
        launch.run()
        return work.outputs

    return partial(outputs, by_hand), partial(outputs, portable)


def _fp8(size: tuple[int, int, int], device: torch.device) -> Callable[[str | None], Sequence[torch.Tensor]]:
    tokens, hidden, intermediate = size
    draw = partial(_draw, torch.Generator().manual_seed(tokens), device)
    x, w_gate, w_up = draw(tokens, hidden), *(draw(intermediate, hidden) * hidden**-0.5 for _ in range(2))
    codes = [quantise_rows(matrix, "rowwise", matrix is not x) for matrix in (x, w_gate, w_up)]
    nothing = x.new_empty(0, 0), x.new_empty(0, 0)

    def make(aside: str | None) -> Sequence[torch.Tensor]:
        z = x.new_empty(tokens, intermediate)
        with admission.by_hand_aside(aside):
            products.write_glu((codes[0], codes[1], codes[2]), z, nothing, (None, None), PLAIN)
        return [z]

    return make


def _experts(
    size: tuple[int, int, int], precision: str, device: torch.device
) -> Callable[[str], Sequence[torch.Tensor]]:
    tokens, hidden, intermediate = size
    draw = partial(_draw, torch.Generator().manual_seed(tokens), device)
    leaves = [draw(tokens, hidden), draw(8, 2 * intermediate, hidden), draw(8, hidden, intermediate), draw(tokens, 2)]
    index = torch.rand(tokens, 8, generator=torch.Generator().manual_seed(1)).topk(2).indices.to(device)
    d_out, trains = draw(tokens, hidden), precision == "bf16"

    def make(backend: str) -> Sequence[torch.Tensor]:
        with torch.set_grad_enabled(trains):
            own = x, w_gate_up, w_down, weights = [leaf.detach().requires_grad_(trains) for leaf in leaves]
            out = swiglu_experts(x, w_gate_up, w_down, index, weights, backend=backend, precision=precision)
            return [out.detach(), *(torch.autograd.grad(out, own, d_out) if trains else ())]

    return make


def _draw(source: torch.Generator, device: torch.device, *sizes: int) -> torch.Tensor:
    scale = sizes[-1] ** -0.5 if len(sizes) == 3 else 1.0
    return (torch.randn(sizes, generator=source) * scale).to(DTYPE).to(device)


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())
