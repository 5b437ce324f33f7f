"""What a call costs the CPU, and where: microseconds from the call until it returns.

    python kernels/benchmarks/host_time.py [--tokens 1 --tokens 128] [--hidden 2880]
    python kernels/benchmarks/host_time.py --no-gpu

The GPU is synchronised before each series of calls and never after one; a series launches less than the GPU's queue
holds, so that the host waits for nothing. All contenders take their series in turns. Each figure is the median of
SERIES series, with the fastest and the slowest; the table at the end has medians of the ratios of each turn to eager's.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.nn.functional as F
import triton

from swiglu_kernels import silu_mul, swiglu_glu, swiglu_mlp, unsloth_silu_mul
from swiglu_kernels.calls import repeat
from swiglu_kernels.launches import direct, plan
from swiglu_kernels.launches.formula import PLAIN
from swiglu_kernels.launches.launch import Launch
from swiglu_kernels.operations import glu, mlp
from swiglu_kernels.portable.glu_forward import NO_BIASES, forward_launch

SERIES, CALLS = 25, 20
Call = Callable[[], object]
Name = TypeVar("Name")


def series(call: Call) -> float:
    """Return microseconds of a call, the mean over a series."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter_ns()
    for _ in range(CALLS):
        call()
    return (time.perf_counter_ns() - start) / CALLS / 1000


def microseconds(calls: dict[Name, Call]) -> dict[Name, list[float]]:
    """Return microseconds of each call, for all of them in turns."""
    for call in calls.values():
        for _ in range(20):
            call()
    turns = [{name: series(call) for name, call in calls.items()} for _ in range(SERIES)]
    return {name: [turn[name] for turn in turns] for name in calls}


def eager(x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor) -> torch.Tensor:
    """Compute z by PyTorch."""
    return F.silu(F.linear(x, w_gate)) * F.linear(x, w_up)


def contenders() -> dict[str, Callable[..., torch.Tensor]]:
    """Name the ways from x, w_gate and w_up to z."""

    def around(gate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda x, w_gate, w_up: gate(F.linear(x, w_gate), F.linear(x, w_up))

    return {
        "eager": eager,
        "compile": torch.compile(eager, dynamic=False),
        "silu_mul": around(silu_mul),
        "unsloth_silu_mul": around(lambda gate, up: unsloth_silu_mul(gate, up, overwrite=True)),
        "swiglu_glu": swiglu_glu,
    }


def forward(function: Callable[..., torch.Tensor], inputs: list[torch.Tensor], grad: bool, **options: str) -> Call:
    """Return what calls a function, with gradients or without."""

    def call() -> None:
        with torch.set_grad_enabled(grad):
            function(*inputs, **options)

    return call


def step(
    function: Callable[..., torch.Tensor], inputs: list[torch.Tensor], upstream: torch.Tensor, **options: str
) -> Call:
    """Return what calls a function and its backward."""

    def call() -> None:
        function(*inputs, **options).backward(upstream)
        for leaf in inputs:
            leaf.grad = None

    return call


def rows(tokens: int, hidden: int) -> list[str]:
    """Print forward without and with gradients, and forward with backward; return lines of ratios to eager."""
    shapes = ((tokens, hidden), (hidden, hidden), (hidden, hidden), (hidden, hidden))
    tensors = [torch.randn(shape, device="cuda").mul_(hidden**-0.5).bfloat16() for shape in shapes]
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    upstream = torch.ones(tokens, hidden, device="cuda", dtype=torch.bfloat16)

    def mlp(glu: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda x, w_gate, w_up, w_down: F.linear(glu(x, w_gate, w_up), w_down)

    glus = contenders()
    mlps = {"mlp eager": mlp(glus["eager"]), "mlp swiglu_glu": mlp(swiglu_glu), "mlp swiglu_mlp": swiglu_mlp}

    lines = []
    for group, count in ((glus, 3), (mlps, 4)):
        figures = {
            "no grad": microseconds({name: forward(one, tensors[:count], False) for name, one in group.items()}),
            "grad": microseconds({name: forward(one, leaves[:count], True) for name, one in group.items()}),
            "step": microseconds({name: step(one, leaves[:count], upstream) for name, one in group.items()}),
        }
        baseline = next(iter(group))
        for name in group:
            columns = ratios = ""
            for what, all_turns in figures.items():
                turns = all_turns[name]
                middle = statistics.median(turns)
                columns += f"{what:>9} {middle:6.1f} ({min(turns):.0f}-{max(turns):.0f})".ljust(30)
                quotient = statistics.median(a / b for a, b in zip(turns, all_turns[baseline], strict=True))
                ratios += f"{what:>9} {quotient:5.2f}"
            print(f"{tokens:6} tokens  {name:18}{columns}", flush=True)
            lines.append(f"{tokens:6} tokens  {name:18}{ratios}")
    return lines


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
            "its kind": lambda: repeat.find("glu", (x, w_gate, w_up), (None, None), (*numbers, "auto", "auto", "auto")),
            "output": lambda: x.new_empty((tokens, hidden)),
            "operator": lambda: glu._glu(x, w_gate, w_up, None, None, "none", "input", "two_step", *numbers),
            "launch": lambda: plan.run(forward_launch, *arguments),
            "described anew": lambda: forward_launch(*arguments).run(),
        }
        known = plan.known(forward_launch, *arguments)
        if known is not None:
            tensors = [x, w_gate, w_up, z]
            calls["arguments, descriptors"] = lambda: known.arguments(tensors)
            calls["launch, directly"] = lambda: known.launch(tensors)
            calls["launch, Triton's way"] = lambda: known.by_triton(tensors)
        times = {name: statistics.median(turns) for name, turns in microseconds(calls).items()}
    print(f"\n{tokens} tokens, swiglu_glu without gradients, us")
    parts = ("its kind", "output", "launch, directly", "whole call")
    for name in parts if known is not None else ("whole call",):
        print(f"  {name:24} {times[name]:6.1f}")
    print("  of the long way, which a first call and a watched one take")
    for name in ("operator", "launch", "arguments, descriptors", "launch, Triton's way", "described anew"):
        print(f"    {name:22} {times[name]:6.1f}")
    if known is None:
        print("  no plan: every launch goes through Triton's binder")


class _Compiled:
    """Takes the place of a compiled kernel."""

    class Launcher:
        """What Triton's launcher holds."""

        global_scratch_size = profile_scratch_size = 0
        launch_cooperative_grid = launch_pdl = False
        arg_annotations, kernel_signature = (), b""

    metadata, src = SimpleNamespace(), SimpleNamespace(signature={})
    function, packed_metadata = 0, ()
    run = Launcher()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *_: None


@contextmanager
def launching_nothing() -> Iterator[None]:
    """Tensors of the CPU are taken for a GPU's, and no kernel is compiled or launched."""
    utils = SimpleNamespace(launch=lambda *_: None)
    driver = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda _: 0, utils=utils))
    knobs = SimpleNamespace(runtime=SimpleNamespace(launch_enter_hook=None, launch_exit_hook=None))
    replaced: list[tuple[Any, dict[str, Any]]] = [
        (Launch, {"run_alone": lambda _: _Compiled()}),
        (direct, {"CudaLauncher": _Compiled.Launcher, "driver": driver, "knobs": knobs}),
        (direct, {"wrap_handle_tensordesc": lambda launcher, *_: launcher}),
        (plan, {"INTERPRETING": False}),
        (repeat, {"INTERPRETING": False, "on_gpu": lambda _: True}),
        (glu, {"backend_for": lambda _: "triton"}),
        (mlp, {"backend_for": lambda _: "triton"}),
    ]
    with ExitStack() as stack:
        for where, names in replaced:
            stack.enter_context(mock.patch.multiple(where, create=True, **names))
        yield


def without_gpu(tokens: int, hidden: int) -> None:
    """Print the times of both ways to multiply, and eager's."""
    torch.set_num_threads(1)
    shapes = ((tokens, hidden), (hidden, hidden), (hidden, hidden), (hidden, hidden))
    leaves = [torch.randn(shape).mul_(hidden**-0.5).bfloat16().requires_grad_() for shape in shapes]
    upstream = torch.ones(tokens, hidden, dtype=torch.bfloat16)

    def eager_mlp(x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor, w_down: torch.Tensor) -> torch.Tensor:
        return F.linear(eager(x, w_gate, w_up), w_down)

    by_hand = {"weight_grad": "triton", "input_grad": "two_step"}
    by_torch = {"weight_grad": "torch", "input_grad": "torch"}
    print(f"{tokens} tokens, {hidden} x {hidden}, torch {torch.__version__}, no launches; us of a call (eager's)")
    for name, by_eager, function, inputs in (
        ("glu", eager, swiglu_glu, leaves[:3]),
        ("mlp", eager_mlp, swiglu_mlp, leaves),
    ):
        for options in (by_hand, by_torch):
            calls = {
                ("no grad", "eager"): forward(by_eager, inputs, False),
                ("no grad", "ours"): forward(function, inputs, False, **options),
                ("grad", "eager"): forward(by_eager, inputs, True),
                ("grad", "ours"): forward(function, inputs, True, **options),
                ("step", "eager"): step(by_eager, inputs, upstream),
                ("step", "ours"): step(function, inputs, upstream, **options),
            }
            with (
                mock.patch.object(glu, "multiplied_by_torch", return_value=options == by_torch),
                mock.patch.object(mlp, "hidden_grad_by_torch", return_value=options == by_torch),
            ):
                least = {key: min(turns) for key, turns in microseconds(calls).items()}
            columns = (
                f"{what:>9} {least[what, 'ours']:6.1f} ({least[what, 'eager']:.1f})"
                for what in ("no grad", "grad", "step")
            )
            way = "PyTorch's products" if options == by_torch else "by hand"
            print(f"{name}  {way:20}{''.join(columns)}", flush=True)


def main() -> None:
    """Print the rows and the breakdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, action="append", help="repeatable (default 1, 128 and 1000)")
    parser.add_argument("--hidden", type=int, default=2880, help="also the intermediate size")
    parser.add_argument("--no-gpu", action="store_true", help="what Python takes, of 8 tokens of 16 x 16 on a CPU")
    options = parser.parse_args()
    if options.no_gpu:
        with launching_nothing():
            without_gpu(8, 16)
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}; us a call")
    counts = options.tokens or [1, 128, 1000]
    ratios = [line for tokens in counts for line in rows(tokens, options.hidden)]
    for tokens in counts:
        breakdown(tokens, options.hidden)
    print("\nratios to eager")
    print("\n".join(ratios))


if __name__ == "__main__":
    main()
