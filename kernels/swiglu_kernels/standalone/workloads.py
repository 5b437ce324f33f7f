"""What every kernel runs on: tensors by name, and the launches that read and write them, each of them named once.

`covering.py` describes the launches on meta tensors, to be compiled. `odd_sizes.py` runs them between margins and
compares with fp64, also for `swiglu_kernels.check`. `workload` draws a layer, to be run with one choice after another.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch

from swiglu_kernels.ops.experts import portable_experts
from swiglu_kernels.ops.experts.routing import Routing, route
from swiglu_kernels.ops.gate import operation as silu_mul
from swiglu_kernels.ops.gate import unsloth
from swiglu_kernels.ops.gate.formula import PLAIN
from swiglu_kernels.ops.glu import hopper_forward, hopper_products, hopper_row, hopper_transposed, hopper_weights
from swiglu_kernels.ops.glu.operation import multiply_and_gate, multiply_transposed, write_weight_grads
from swiglu_kernels.ops.glu.portable_backward import input_grad_launch, weight_grad_launch
from swiglu_kernels.ops.glu.portable_forward import forward_launch, recompute_launch
from swiglu_kernels.ops.mlp import portable_mlp
from swiglu_kernels.ops.mlp.operation import multiply_and_gate_backward
from swiglu_kernels.runtime.launch import Launch
from swiglu_kernels.tiles.candidates import BY_TORCH, Choice, TileProblem
from swiglu_kernels.tiles.tuning import forced

Shape = tuple[int, ...]
Make = Callable[[str, Shape], torch.Tensor | None]
"""Makes a tensor from its name and shape, or None where a launch shall do without it."""
WRITTEN = frozenset({
    "z", "kept_gate", "kept_up", "d_gate", "d_up", "dx", "sums", "d_w_gate", "d_w_up", "d_w_down",
    "h_made", "pre_made", "y_made", "d_pre", "wh", "d_w_gate_up",
})  # fmt: skip
"""The tensors that launches write; all others they read."""


class LayerTensors:
    """The tensors of a layer by name, each of which is made when a launch asks for it, and what else launches take."""

    none, plain = None, PLAIN
    formula, interleaved, capability = PLAIN, False, None
    routing: Any = None

    def __init__(self, shapes: dict[str, Shape], make: Make, **more: Any) -> None:
        self._shapes = {name: shape for names, shape in shapes.items() for name in names.split()}
        self._make = make
        vars(self).update(more)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in PAIRS:
            return tuple(getattr(self, part) for part in PAIRS[name])
        if name.endswith(ACROSS):  # of experts, as gradients of h and x are multiplied by it
            return getattr(self, name.removesuffix(ACROSS)).mT
        made = self.__dict__[name] = self._make(name, self._shapes[name])
        return made

    def launch(self, kernel: str) -> Launch:
        """Describe a launch of `LAUNCHES`."""
        return self.call(*LAUNCHES[kernel])

    def call(self, function: Callable[..., Any], names: str) -> Any:
        """Call a function with what has these names."""
        return function(*(getattr(self, name) for name in names.split()))

    @property
    def written(self) -> tuple[torch.Tensor, ...]:
        """The outputs of what has been described so far."""
        return tuple(made for name, made in vars(self).items() if name in WRITTEN and made is not None)

    @property
    def dots(self) -> torch.Tensor:
        """As many parts as the tile says that is chosen now."""
        parts = portable_experts.dots_parts(self.d_out, self.w_down_across, self.routing, self.capability)
        return self.x.new_empty((parts, self.pre.shape[0]), dtype=torch.float32)


def dense_shapes(tokens: int, hidden: int, intermediate: int) -> dict[str, Shape]:
    """Return the shapes of the tensors of a dense block, by all names that have one; `sums` is fp32."""
    return {
        "x d_out dx sums": (tokens, hidden), "w_gate w_up d_w_gate d_w_up": (intermediate, hidden),
        "z gate up dz h_made kept_gate kept_up d_gate d_up": (tokens, intermediate),
        "w_down d_w_down": (hidden, intermediate), "bias_gate bias_up": (intermediate,),
    }  # fmt: skip


PAIRS = {
    "biases": ("bias_gate", "bias_up"), "kept": ("kept_gate", "kept_up"), "read": ("gate", "up"),
    "d_weights": ("d_w_gate", "d_w_up"), "hidden_gradients": ("d_gate", "d_up"),
    "h_and_pre": ("h_made", "pre_made"), "hidden_grads": ("d_pre", "wh", "dots"),
}  # fmt: skip
"""Tensors that launches take as one argument."""
ACROSS = "_across"
"""Behind the name of a weight: its transpose."""
Calls = dict[str, tuple[Callable[..., Any], str]]
"""Functions, and what of `LayerTensors` their arguments are."""
DENSE: Calls = {
    "forward": (forward_launch, "x w_gate w_up z none biases formula"),
    "forward-preact": (forward_launch, "x w_gate w_up z kept biases formula"),
    "recompute": (recompute_launch, "dz x w_gate w_up hidden_gradients biases formula"),
    "input-grad-fused": (input_grad_launch, "dz gate up w_gate w_up dx formula"),
    "input-grad": (input_grad_launch, "none gate up w_gate w_up dx"),
    "weight-grad-fused": (weight_grad_launch, "dz gate up x d_w_gate d_w_up formula"),
    "weight-grad": (weight_grad_launch, "none gate up x d_w_gate d_w_up"),
    "mlp-hidden-grad": (portable_mlp.down_backward_launch, "d_out w_down read d_gate d_up h_made formula"),
    "mlp-weight-grad": (portable_mlp.down_weight_grad_launch, "d_out gate d_w_down"),
    "silu_mul": (silu_mul.forward_launch, "gate up h_made"),
    "silu_mul backward": (silu_mul.backward_launch, "dz gate up d_gate d_up formula none"),
    "silu_mul backward, h": (silu_mul.backward_launch, "dz gate up d_gate d_up formula h_made"),
    "unsloth": (unsloth.forward_launch, "gate up h_made"),
    "unsloth backward": (unsloth.backward_launch, "dz gate up"),  # written over what it reads
}
"""Portable launches of a dense block."""
EXPERTS: Calls = {
    "experts-gate-up": (
        portable_experts.gate_up_launch,
        "x w_gate_up h_and_pre routing b_gate_up formula interleaved capability",
    ),
    "experts-down": (portable_experts.rows_launch, "h w_down y_made pair tile_expert b_down capability"),
    "experts-input-grad": (
        partial(portable_experts.rows_launch, kernel="experts-input-grad"),
        "pre w_gate_up_across y_made pair tile_expert none capability",
    ),
    "experts-hidden-grad": (
        portable_experts.down_backward_launch,
        "d_out w_down_across pre weights hidden_grads routing formula interleaved capability",
    ),
    "experts-weight-grad": (portable_experts.weight_grad_launch, "pre x d_w_gate_up routing capability"),
    "experts-down-weight-grad": (portable_experts.weight_grad_launch, "d_out h d_w_down routing capability"),
}
"""Portable products of a mixture."""
LAUNCHES = DENSE | EXPERTS
OF_TORCH: Calls = {
    "forward": (multiply_and_gate, "x w_gate w_up z none biases plain"),
    "forward-preact": (multiply_and_gate, "x w_gate w_up z kept biases plain"),
    "weight-grad": (partial(write_weight_grads, weight_grad="torch"), "gate up x d_weights"),
    "mlp-hidden-grad": (multiply_and_gate_backward, "d_out w_down read d_gate d_up h_made plain"),
    "mlp-weight-grad": (multiply_transposed, "d_out gate d_w_down"),
}
"""The same by PyTorch's products, where a kernel has that choice."""


def by_hand(kernel: str, at: Any, shares: Sequence[int] = (1, 3)) -> Iterator[tuple[str, Launch]]:
    """Yield launches of a dense kernel of `admission.KERNELS` in all its forms, each described when it is asked for.

    `shares` are those of a transposed forward's tile.
    """
    forward = at.x, at.w_gate, at.w_up
    stored = (("", False), (", gate and up stored", True))
    match kernel:
        case "forward":
            for columns, (kept, keeps) in itertools.product(hopper_forward.COLUMNS, stored):
                tile = replace(hopper_forward.TILE, columns=columns)
                launch = hopper_forward.forward_launch(*forward, at.z, at.kept if keeps else None, tile)
                yield f"ping-pong forward, {columns} columns{kept}", launch
        case "transposed forward":
            for rows, share, (kept, keeps) in itertools.product(hopper_transposed.TOKENS, shares, stored):
                tile = hopper_transposed.tile(rows, share)
                launch = hopper_transposed.forward_launch(*forward, at.z, at.kept if keeps else None, tile)
                yield f"transposed forward, {rows} tokens{', shared' if launch.then else ''}{kept}", launch
        case "row forward":
            for kept, keeps in stored:
                yield f"row forward{kept}", hopper_row.forward_launch(*forward, at.z, at.kept if keeps else None)
        case "dX":
            for lies, turns in (("", _as_it_lies), (", weights transposed", _across)):
                pairs = [(at.gate, turns(at.w_gate)), (at.up, turns(at.w_up))]
                for schedule in ("ping-pong", "cooperative"):
                    yield f"{schedule} dX{lies}", hopper_products.sum_launch(pairs, at.dx, schedule)
                yield f"ping-pong dX, added{lies}", hopper_products.sum_launch(pairs, at.sums, accumulate=True)
        case "dW":
            for outputs in (1, 2):
                pairs = [(at.gate, at.x), (at.up, at.x)][:outputs]
                made = [at.d_w_gate, at.d_w_up] if outputs == 2 else [at.d_w_gate]  # each is made when it is asked for
                yield f"ping-pong dW of {outputs}", hopper_products.transposed_launch(pairs, made)
            yield "cooperative dW", hopper_weights.weights_launch(at.x, (at.gate, at.up), (at.d_w_gate, at.d_w_up))
        case "hidden gradient":
            for lies, turns, wants_h in (
                ("", _as_it_lies, False), ("", _as_it_lies, True), (", weights transposed", _across, True),
            ):  # fmt: skip
                pair, h = (at.d_gate, at.d_up), at.h_made if wants_h else None  # in place
                launch = hopper_products.gate_backward_launch(at.d_out, turns(at.w_down), pair, *pair, h)
                yield f"gate backward{', h' if wants_h else ''}{lies}", launch


def _as_it_lies(matrix: torch.Tensor) -> torch.Tensor:
    return matrix


def _across(matrix: torch.Tensor) -> torch.Tensor:
    """The same matrix with a first stride of 1; made on the CPU, whose kernels no sanitizer watches."""
    return (matrix if matrix.is_meta else matrix.cpu()).t().contiguous().to(matrix.device).t()


def mixture(
    index: torch.Tensor, routing: Routing, sizes: tuple[int, int, int], make: Make, **more: Any
) -> LayerTensors:
    """Return the tensors of a mixture of experts, hidden and intermediate size `sizes`, for its routing."""
    (experts, hidden, intermediate), (tokens, slots), rows = sizes, index.shape, routing.pair.shape[0]
    shapes: dict[str, Shape] = {
        "x d_out": (tokens, hidden), "weights": (tokens, slots), "h wh h_made": (rows, intermediate),
        "pre d_pre pre_made": (rows, 2 * intermediate), "y_made": (rows, hidden),
        "w_gate_up d_w_gate_up": (experts, 2 * intermediate, hidden),
        "w_down d_w_down": (experts, hidden, intermediate),
        "b_gate_up": (experts, 2 * intermediate), "b_down": (experts, hidden),
    }  # fmt: skip
    return LayerTensors(shapes, make, routing=routing, pair=routing.pair, tile_expert=routing.tile_expert, **more)


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
    by_torch: Runnable | None = None
    """The same by PyTorch's products, where a kernel has that choice."""

    def describe(self, choice: Choice) -> Runnable:
        """What runs with a choice; all of them write the same outputs."""
        if choice == BY_TORCH:
            assert self.by_torch is not None, f"{self.kernel} is not made of PyTorch's products"
            return self.by_torch
        with forced(self.device, self.kernel, self.problem, choice):
            return self.describe_launch()


def workload(kernel: str, problem: TileProblem, device: torch.device, seed: int = 0) -> Workload:
    """Draw what a kernel of `candidates.KERNELS` reads, and allocate what it writes.

    Activations and gradients are standard normal, weights have variance 1 / in_features. Each token of a mixture has
    `top_k` different experts with equal probability.
    """
    device = torch.empty(0, device=device).device  # with its index, by which tensors are known
    source = torch.Generator(device=device).manual_seed(seed)
    sizes = problem.tokens, problem.hidden, problem.intermediate

    def make(name: str, shape: Shape) -> torch.Tensor | None:
        if name.startswith(("b_", "bias_")) or name == "pre_made":
            return None
        if name in WRITTEN:
            return torch.empty(shape, dtype=problem.dtype, device=device)
        drawn = torch.randn(shape, generator=source, device=device)
        return drawn.mul_(shape[-1] ** -0.5 if name.startswith("w_") else 1.0).to(problem.dtype)

    if kernel not in LAUNCHES:
        raise ValueError(f"kernel: expected a name of candidates.KERNELS, got {kernel!r}")
    if kernel in DENSE:
        at, used = LayerTensors(dense_shapes(*sizes), make), None
    else:
        index = torch.rand(problem.tokens, problem.experts, generator=source, device=device).topk(problem.top_k).indices
        routing = route(index, problem.experts, problem.kept_for)
        at, used = mixture(index, routing, (problem.experts, *sizes[1:]), make), int(routing.starts[-1])
    at.launch(kernel)
    outputs = tuple(made if made.dim() > 2 else made[:used] for made in at.written)  # what lies behind is not written
    by_torch = None
    if kernel in OF_TORCH:
        function, names = OF_TORCH[kernel]
        by_torch = ByTorch(function, at.call(lambda *arguments: arguments, names))
    return Workload(kernel, problem, device, outputs, partial(at.launch, kernel), by_torch)
