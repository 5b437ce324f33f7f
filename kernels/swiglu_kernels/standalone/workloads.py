"""Every kernel of `candidates.KERNELS` on tensors of its own, to be run with one choice after another."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from swiglu_kernels.glu import multiply_and_gate
from swiglu_kernels.launches.formula import PLAIN
from swiglu_kernels.launches.launch import Launch
from swiglu_kernels.portable.glu_backward import input_grad_launch, weight_grad_launch
from swiglu_kernels.portable.glu_forward import NO_BIASES, forward_launch, recompute_launch
from swiglu_kernels.portable.mlp_backward import down_backward_launch, down_weight_grad_launch
from swiglu_kernels.tiles.candidates import BY_TORCH, KERNELS, Choice, Problem
from swiglu_kernels.tiles.tuning import forced


class Runnable(Protocol):
    """A launch, or what takes its place."""

    def run(self) -> object:
        """Write the outputs."""


@dataclass(frozen=True)
class ByTorch:
    """A forward by PyTorch's products: x, both weights, z, and gate and up or None."""

    arguments: tuple[Any, ...]

    def run(self) -> None:
        """Write the outputs."""
        x, w_gate, w_up, z, preactivations = self.arguments
        multiply_and_gate(x, w_gate, w_up, z, preactivations, NO_BIASES, PLAIN)


@dataclass(frozen=True)
class Workload:
    """One kernel with its inputs drawn and its outputs allocated."""

    kernel: str
    problem: Problem
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


def workload(kernel: str, problem: Problem, device: torch.device, seed: int = 0) -> Workload:
    """Draw what a kernel reads: activations and gradients standard normal, weights with variance 1 / in_features."""
    source = torch.Generator(device=device).manual_seed(seed)
    M, K, N = problem.tokens, problem.hidden, problem.intermediate

    def draw(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(rows, columns, generator=source, device=device)
        return values.mul_(scale).to(problem.dtype)

    def new(rows: int, columns: int) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=problem.dtype, device=device)

    def made(launch: Callable[..., Launch], *arguments: object, out: tuple[torch.Tensor, ...]) -> Workload:
        by_torch = ByTorch(arguments) if KERNELS[kernel].by_torch else None
        return Workload(kernel, problem, device, out, lambda: launch(*arguments), by_torch)

    def hidden_like(count: int) -> list[torch.Tensor]:
        return [draw(M, N) for _ in range(count)]

    def weights() -> list[torch.Tensor]:
        return [draw(N, K, K**-0.5) for _ in range(2)]

    match kernel:
        case "forward":
            z = new(M, N)
            return made(forward_launch, draw(M, K), *weights(), z, None, out=(z,))
        case "forward-preact":
            z, gate, up = new(M, N), new(M, N), new(M, N)
            return made(forward_launch, draw(M, K), *weights(), z, (gate, up), out=(z, gate, up))
        case "recompute":
            d_gate, d_up = new(M, N), new(M, N)
            return made(recompute_launch, draw(M, N), draw(M, K), *weights(), d_gate, d_up, out=(d_gate, d_up))
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
