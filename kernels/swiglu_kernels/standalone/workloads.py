"""Every kernel of `candidates.KERNELS` on tensors of its own, to be run with one choice after another."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from swiglu_kernels.ops.experts import portable_experts
from swiglu_kernels.ops.experts.routing import route
from swiglu_kernels.ops.gate.formula import PLAIN
from swiglu_kernels.ops.glu.operation import multiply_and_gate, multiply_transposed, write_weight_grads
from swiglu_kernels.ops.glu.portable_backward import input_grad_launch, weight_grad_launch
from swiglu_kernels.ops.glu.portable_forward import NO_BIASES, forward_launch, recompute_launch
from swiglu_kernels.ops.mlp.operation import multiply_and_gate_backward
from swiglu_kernels.ops.mlp.portable_mlp import down_backward_launch, down_weight_grad_launch
from swiglu_kernels.runtime.launch import Launch
from swiglu_kernels.tiles.candidates import BY_TORCH, Choice, TileProblem
from swiglu_kernels.tiles.tuning import forced


class Runnable(Protocol):
    """A launch, or what takes its place."""

    def run(self) -> object:
        """Write the outputs."""


@dataclass(frozen=True)
class ByTorch:
    """The same by PyTorch's products."""

    function: Callable[..., object]
    arguments: tuple[Any, ...]

    def run(self) -> None:
        """Write the outputs."""
        self.function(*self.arguments)


@dataclass(frozen=True)
class Workload:
    """One kernel with its inputs drawn and its outputs allocated."""

    kernel: str
    problem: TileProblem
    device: torch.device
    outputs: tuple[torch.Tensor, ...]
    describe_launch: Callable[[], Launch]
    by_torch: "Runnable | None" = None
    """The same by PyTorch's products, where a kernel has that choice."""

    def describe(self, choice: Choice) -> "Runnable":
        """What runs with a choice; all of them write the same outputs."""
        if choice == BY_TORCH:
            assert self.by_torch is not None, f"{self.kernel} is not made of PyTorch's products"
            return self.by_torch
        with forced(self.device, self.kernel, self.problem, choice):
            return self.describe_launch()


def workload(kernel: str, problem: TileProblem, device: torch.device, seed: int = 0) -> Workload:
    """Draw what a kernel reads: activations and gradients standard normal, weights with variance 1 / in_features."""
    device = torch.empty(0, device=device).device  # with its index, by which tensors are known
    source = torch.Generator(device=device).manual_seed(seed)
    M, K, N = problem.tokens, problem.hidden, problem.intermediate

    def draw(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(rows, columns, generator=source, device=device)
        return values.mul_(scale).to(problem.dtype)

    def new(rows: int, columns: int) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=problem.dtype, device=device)

    def made(launch: Callable[..., Launch], *arguments: object, out: tuple[torch.Tensor, ...]) -> Workload:
        by_torch = None
        if launch is forward_launch:
            by_torch = ByTorch(multiply_and_gate, (*arguments, NO_BIASES, PLAIN))
        elif launch is down_backward_launch:
            by_torch = ByTorch(multiply_and_gate_backward, (*arguments, PLAIN))
        elif kernel == "weight-grad":
            _, d_gate, d_up, x, *d_weights = arguments
            by_torch = ByTorch(write_weight_grads, (d_gate, d_up, x, d_weights, "torch"))
        elif kernel == "mlp-weight-grad":
            by_torch = ByTorch(multiply_transposed, arguments)
        return Workload(kernel, problem, device, out, lambda: launch(*arguments), by_torch)

    def hidden_like(count: int) -> list[torch.Tensor]:
        return [draw(M, N) for _ in range(count)]

    def weights() -> list[torch.Tensor]:
        return [draw(N, K, K**-0.5) for _ in range(2)]

    if kernel.startswith("experts-"):
        return _of_experts(kernel, problem, device, source)
    match kernel:
        case "forward":
            z = new(M, N)
            return made(forward_launch, draw(M, K), *weights(), z, None, out=(z,))
        case "forward-preact":
            z, gate, up = new(M, N), new(M, N), new(M, N)
            return made(forward_launch, draw(M, K), *weights(), z, (gate, up), out=(z, gate, up))
        case "recompute":
            d_gate, d_up = new(M, N), new(M, N)
            return made(recompute_launch, draw(M, N), draw(M, K), *weights(), (d_gate, d_up), out=(d_gate, d_up))
        case "input-grad" | "input-grad-fused":
            dz = draw(M, N) if kernel == "input-grad-fused" else None
            dx = new(M, K)
            return made(input_grad_launch, dz, *hidden_like(2), *weights(), dx, out=(dx,))
        case "weight-grad" | "weight-grad-fused":
            dz = draw(M, N) if kernel == "weight-grad-fused" else None
            d_weights = new(N, K), new(N, K)
            return made(weight_grad_launch, dz, *hidden_like(2), draw(M, K), *d_weights, out=d_weights)
        case "mlp-hidden-grad":
            read, w_down = tuple(hidden_like(2)), draw(K, N, N**-0.5)
            d_gate, d_up, h = new(M, N), new(M, N), new(M, N)
            out = d_gate, d_up, h
            return made(down_backward_launch, draw(M, K), w_down, read, d_gate, d_up, h, out=out)
        case "mlp-weight-grad":
            d_w_down = new(K, N)
            return made(down_weight_grad_launch, draw(M, K), draw(M, N), d_w_down, out=(d_w_down,))
    raise ValueError(f"kernel: expected a name of candidates.KERNELS, got {kernel!r}")


def _of_experts(kernel: str, problem: TileProblem, device: torch.device, source: torch.Generator) -> Workload:
    """Draw for a kernel of experts, each token of which has `top_k` different ones with equal probability."""
    H, I, E, k = problem.hidden, problem.intermediate, problem.experts, problem.top_k  # noqa: E741

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=source, device=device).mul_(sizes[-1] ** -0.5).to(problem.dtype)

    def new(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, dtype=problem.dtype, device=device)

    index = torch.rand(problem.tokens, E, generator=source, device=device).topk(k).indices
    routing = route(index, E, problem.kept_for)
    pair, _, tile_expert, starts, *_ = routing
    rows, used = pair.shape[0], int(starts[-1])  # what lies behind is not written

    def made(*out: torch.Tensor, launch: Callable[[], Launch]) -> Workload:
        return Workload(kernel, problem, device, out, launch)

    match kernel:
        case "experts-gate-up":
            x, w, out = draw(problem.tokens, H), draw(E, 2 * I, H), new(rows, I)
            launch = partial(portable_experts.gate_up_launch, x, w, (out, None), routing, None, PLAIN, False)
            return made(out[:used], launch=launch)
        case "experts-down" | "experts-input-grad":
            a, out = draw(rows, I if kernel == "experts-down" else 2 * I), new(rows, H)
            w = draw(E, H, I) if kernel == "experts-down" else draw(E, 2 * I, H).mT
            return made(
                out[:used],
                launch=partial(portable_experts.rows_launch, a, w, out, pair, tile_expert, None, None, kernel),
            )
        case "experts-hidden-grad":
            dy, w, pre, weights = draw(problem.tokens, H), draw(E, H, I).mT, draw(rows, 2 * I), draw(problem.tokens, k)
            d_pre, wh = new(rows, 2 * I), new(rows, I)

            def with_dots() -> Launch:
                dots = torch.empty(
                    portable_experts.dots_parts(dy, w, routing), rows, dtype=torch.float32, device=device
                )
                return portable_experts.down_backward_launch(
                    dy, w, pre, weights, (d_pre, wh, dots), routing, PLAIN, False
                )

            return made(d_pre[:used], wh[:used], launch=with_dots)
        case "experts-weight-grad" | "experts-down-weight-grad":
            of_down = kernel == "experts-down-weight-grad"
            a, b = (draw(problem.tokens, H), draw(rows, I)) if of_down else (draw(rows, 2 * I), draw(problem.tokens, H))
            out = new(E, a.shape[1], b.shape[1])
            return made(out, launch=partial(portable_experts.weight_grad_launch, a, b, out, routing))
    raise ValueError(f"kernel: expected a name of candidates.KERNELS, got {kernel!r}")
