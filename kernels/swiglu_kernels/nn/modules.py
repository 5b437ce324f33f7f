"""Drop-in modules: SwiGLU and SwiGLU MLPs whose parameters lie where stock PyTorch modules have them.

    FusedSwiGLU            gate_proj, up_proj                x -> z = silu(gate_proj(x)) * up_proj(x)
    FusedSwiGLUMLP         gate_proj, up_proj, down_proj     x -> down_proj(z): Llama, Qwen, Mistral
    FusedSwiGLUPackedMLP   gate_up_proj, down_proj           the same with gate above up in one matrix: Phi-3
    FusedSwiGLUExperts     gate_up_proj, down_proj           such a block for each expert, stacked: Mixtral, Qwen3-MoE

The projections are ordinary `torch.nn.Linear` submodules, of which only the parameters are read. What needs their
forward (an adapter, a hook, a quantised weight) is refused with a TypeError, never passed over.

All of them work under autocast, activation checkpointing, torch.compile(fullgraph=True), CUDA graphs, DDP and FSDP2
(`fully_shard` on the module or around it, not on its projections), and split over the ranks of a tensor-parallel group
(`swiglu_kernels.nn.parallel`). From torch.func, `functional_call` and `vmap` work, including gradients by backward();
`grad`, `vjp` and `jvp` raise, because custom operators do not support them. Derivatives are first order.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from swiglu_kernels.hopper.shared import why_aside
from swiglu_kernels.ops.experts.operation import swiglu_experts
from swiglu_kernels.ops.fp8 import operation as fp8
from swiglu_kernels.ops.fp8.kept_codes import KeptCodes
from swiglu_kernels.ops.glu.choice import AUTO, INPUT_GRADS, SAVES, WEIGHT_GRADS
from swiglu_kernels.ops.glu.operation import swiglu_glu
from swiglu_kernels.ops.mlp.operation import swiglu_mlp
from swiglu_kernels.runtime import autocast
from swiglu_kernels.runtime.backend import backend_for
from swiglu_kernels.runtime.checks import check_like, check_option, check_tensor

if TYPE_CHECKING:
    from swiglu_kernels.nn.split import ExpertSplit, Split


@dataclasses.dataclass(frozen=True)
class Options:
    """How gradients are made; `swiglu_glu` says what each value means."""

    weight_grad: str = "auto"
    save: str = "auto"
    input_grad: str = "auto"
    precision: str = "bf16"
    """Of the operands of all products: as they are, or "fp8-rowwise" or "fp8-blockwise" (`swiglu_mlp_fp8`)."""
    accumulate_into_main_grad: bool = False

    def __post_init__(self) -> None:
        check_option("precision", self.precision, fp8.PRECISIONS)
        check_option("weight_grad", self.weight_grad, fp8.WEIGHT_GRADS if self.recipe else WEIGHT_GRADS)
        check_option("save", self.save, SAVES)
        check_option("input_grad", self.input_grad, (AUTO,) if self.recipe else INPUT_GRADS)

    @property
    def recipe(self) -> str | None:
        """How products are quantised, if they are."""
        return recipe_of(self.precision)


def recipe_of(precision: str) -> str | None:
    """Return how products of a precision are quantised, None for operands as they are."""
    return precision.removeprefix("fp8-") if precision.startswith("fp8-") else None


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def why_not_bare(module: nn.Module) -> str | None:
    """Say why calling a module does more than its class's forward does; None if it does not."""
    if "forward" in module.__dict__:
        return "its forward was replaced"
    if any(getattr(module, kind) for kind in _HOOKS):
        return "its hooks would no longer run"
    return None


def why_not_plain(linear: nn.Module) -> str | None:
    """Say why calling a module does more than `torch.nn.functional.linear` with its parameters; None if it does not."""
    # A subclass that keeps Linear's forward is as good: a parametrised one computes its weight when that is read.
    if getattr(type(linear), "forward", None) is not nn.Linear.forward:
        return f"{type(linear).__name__} is not a plain torch.nn.Linear"
    return why_not_bare(linear)


def _plain(owner: nn.Module, name: str) -> nn.Linear:
    linear = getattr(owner, name)
    if (reason := why_not_plain(linear)) is not None:
        advice = f"put hooks, adapters and sharding on the whole {type(owner).__name__}, or unpatch the model"
        raise TypeError(f"{name}: expected a plain torch.nn.Linear, but {reason}; {advice}")
    assert isinstance(linear, nn.Linear)
    return linear


def _backend(module: nn.Module) -> str:
    """What runs where the parameters are: "triton", "interpreter", or "torch" (the reference, no kernel at all).

    "triton, portable kernels only: ..." where the hand-scheduled ones for this GPU step aside, with the reason.
    """
    weight = next(module.parameters())
    backend, reason = backend_for(weight), why_aside(weight.device)
    return backend if reason is None or backend == "torch" else f"{backend}, portable kernels only: {reason}"


class KeepsCodes:
    """A module whose weights may be quantised once for many calls."""

    _recipe: str | None
    """How products are quantised, if they are."""
    _codes: KeptCodes | None = None

    def keep_codes(self, keep: bool = True) -> Self:
        """Quantise the weights once until they change, not in each call: for fp8, in inference and in training.

        In training that is once for all micro-batches of an optimiser's step, with recomputation and backward. The
        codes take as much memory as the weights, in inference half as much. Writes through `.data` are not noticed,
        unless a torch.optim.Optimizer makes them: call this again after them. `KeptCodes` says where weights are
        quantised in every call nevertheless.

        Raises:
            ValueError: precision is "bf16".
        """
        if self._recipe is None:
            expected = "a module with precision='fp8-rowwise' or 'fp8-blockwise'"
            raise ValueError(f"keep_codes: expected {expected}, got 'bf16'")
        if self._codes is not None:
            self._codes.clear()
        self._codes = KeptCodes() if keep else None
        return self


class FusedModule(KeepsCodes, nn.Module):
    """What the modules of this file share: their options, the backend, the way from projections to operands."""

    options: Options
    gate_options: Mapping[str, Any] = MappingProxyType({})
    """Of the gate of an MLP, as `swiglu_mlp` takes them, such as activation="gelu_tanh"; `patch_model` finds them."""
    tensor_parallel: "Split | None" = None
    """How its parameters and its calls are shared among ranks; `parallel.SwiGLUParallel` sets it."""

    def __init__(
        self, layers: dict[str, tuple[int, int]], *, bias: bool = False, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None, **options: Any,
    ) -> None:  # fmt: skip
        """Take the options of the gradients, and make layers of so many features in and out."""
        super().__init__()
        self.options = Options(**options)
        for name, (in_features, out_features) in layers.items():
            setattr(self, name, nn.Linear(in_features, out_features, bias=bias, device=device, dtype=dtype))

    @classmethod
    def _around(cls, options: dict[str, Any], **linears: nn.Linear) -> Self:
        """Build the module around existing layers, once their sizes fit to those of the first."""
        (first, gated), *others = linears.items()
        _check_linear(first, gated, None, None)
        if first == "gate_up_proj" and gated.out_features % 2:
            raise ValueError(f"{first}: expected an even number of out_features, got {gated.out_features}")
        sizes = gated.in_features, gated.out_features // (2 if first == "gate_up_proj" else 1)
        for name, linear in others:
            _check_linear(name, linear, *((sizes[1], None) if name == "down_proj" else sizes))
        module = cls(*sizes, device="meta", **options)  # type: ignore[call-arg, arg-type]
        for name, linear in linears.items():
            setattr(module, name, linear)
        return module

    backend = property(_backend)

    @property
    def _recipe(self) -> str | None:  # type: ignore[override]
        return self.options.recipe

    def extra_repr(self) -> str:
        """Return the options and the backend."""
        options = ", ".join(f"{name}={value!r}" for name, value in dataclasses.asdict(self.options).items())
        options += "".join(f", {name}={value!r}" for name, value in self.gate_options.items())
        split = "" if self.tensor_parallel is None else f", tensor_parallel={self.tensor_parallel}"
        return f"{options}, backend={self.backend!r}{split}"

    def _operands(self, x: object, *names: str) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor | None]]:
        """Return x, and weights and biases of the named projections; cast where autocast is on, then checked.

        Of a split module, this rank's part of each parameter.
        """
        linears = [_plain(self, name) for name in names]
        weights: list[torch.Tensor] = [linear.weight for linear in linears]
        biases: list[torch.Tensor | None] = [linear.bias for linear in linears]
        if self.tensor_parallel is not None:
            weights, biases = (list(map(self.tensor_parallel.own, those)) for those in (weights, biases))
        x, *cast = autocast.operands(x, *weights, *biases)
        weights, biases = cast[: len(names)], cast[len(names) :]
        first = f"{names[0]}.weight"
        tensor = check_like("x", x, first, check_tensor(first, weights[0]))
        for name, weight in zip(names[1:], weights[1:], strict=True):
            check_like(f"{name}.weight", weight, first, weights[0])
        in_features = weights[0].shape[1]  # as nn.Linear, which reads its own in_features for its name alone
        if tensor.dim() == 0 or tensor.shape[-1] != in_features:
            expected = f"[..., {in_features}], the in_features of {names[0]}"
            raise ValueError(f"x: expected {expected}, got {tuple(tensor.shape)}")
        return tensor, weights, biases

    def _mlp(self, x: object) -> torch.Tensor:
        """Run the whole block from gate_proj, up_proj and down_proj."""
        split = self.tensor_parallel

        def run(x: object, mlp: Callable[..., torch.Tensor] | None = None) -> torch.Tensor:
            tensor, weights, biases = self._operands(x, "gate_proj", "up_proj", "down_proj")
            return self._block(tensor, weights, biases if split is None else [*biases[:2], None], mlp)

        if split is None:
            return run(x)
        return split.mlp(x, run, split.own(_plain(self, "down_proj").bias), self._no_overlap)

    @property
    def _no_overlap(self) -> str | None:
        """Why communication cannot run beside its products, if it cannot."""
        if self.options.recipe or not hasattr(self, "down_proj"):
            return "fp8" if self.options.recipe else "there is no down_proj"
        return "accumulate_into_main_grad" if self.options.accumulate_into_main_grad else None

    def overlap(self, x: torch.Tensor) -> tuple[str | None, str]:
        """Return how communication runs beside the products of x, None if it does not, and why.

        Of a split module; all ranks ask together. `ops/mlp/parallel.py` says what "pieces" and "beside" are.
        """
        return (None, "not split") if self.tensor_parallel is None else self.tensor_parallel.way(x, self._no_overlap)

    def _block(
        self, x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None],
        mlp: Callable[..., torch.Tensor] | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Run `swiglu_mlp`, or `mlp` in its place, as the options say; weights and biases are of gate, up and down."""
        weight_grad = self.options.weight_grad
        if weight_grad == "none":  # which leaves down_proj to be trained
            weights = [*(weight.detach() for weight in weights[:2]), weights[2]]
            biases = [*(None if bias is None else bias.detach() for bias in biases[:2]), biases[2]]
            weight_grad = AUTO
        how = {**self.gate_options, "weight_grad": weight_grad}
        return self._call(mlp or swiglu_mlp, fp8.swiglu_mlp_fp8, x, weights, biases, **how)

    def _call(
        self, plain: Callable[..., torch.Tensor], of_codes: Callable[..., torch.Tensor], x: torch.Tensor,
        weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None], **how: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Call one of two operations, by the precision, with the options."""
        recipe, save = self.options.recipe, self.options.save
        if self.options.accumulate_into_main_grad:
            how["accumulate_into_main_grad"] = True
        if recipe:
            return of_codes(x, *weights, *biases, recipe=recipe, save=save, kept=self._codes, **how)
        return plain(x, *weights, *biases, input_grad=self.options.input_grad, save=save, **how)


def _check_linear(name: str, linear: object, in_features: int | None, out_features: int | None) -> None:
    """Check a linear layer that is to become a projection; None stands for any size."""
    if not isinstance(linear, nn.Linear):
        raise TypeError(f"{name}: expected a torch.nn.Linear, got {type(linear).__name__}")
    for size_name, expected in (("in_features", in_features), ("out_features", out_features)):
        size = getattr(linear, size_name)
        if expected is not None and size != expected:
            raise ValueError(f"{name}: expected {expected} {size_name}, got {size}")


class FusedSwiGLU(FusedModule):
    """silu(gate_proj(x)) * up_proj(x), both products and the gate in one launch.

    It takes the place of two `torch.nn.Linear` and the gate between them. state_dict: `gate_proj.weight` and
    `up_proj.weight`, each [hidden_features, in_features].

    Args:
        in_features, hidden_features: sizes of the last dimension of x and of the result.
        bias: give the projections biases.
        device, dtype: of the parameters; float32, float16, bfloat16 or float64 (slowly, by the definition).
        options: how gradients are made, as in `swiglu_glu`.
            weight_grad: "auto", "triton", "torch" or "none", which treats the weights as frozen.
            save: "auto", "preact" (keep gate and up for the backward) or "input" (recompute them).
            input_grad: "auto", "fused", "two_step" or "torch".
            precision: "bf16" (operands as they are), "fp8-rowwise" or "fp8-blockwise" (`swiglu_mlp_fp8`; weights stay
                in 16 bits, and are quantised in every call unless `keep_codes()`; weight_grad="fp8" is "auto" there).
            accumulate_into_main_grad: False, or True for weights with a `main_grad`.

    Raises:
        ValueError: an option has an unknown value.

    x: [..., in_features] in the parameters' dtype (any under autocast) and on their device -> [..., hidden_features].
    """

    gate_proj: nn.Linear
    up_proj: nn.Linear

    def __init__(self, in_features: int, hidden_features: int, **how: Any) -> None:
        super().__init__(dict.fromkeys(("gate_proj", "up_proj"), (in_features, hidden_features)), **how)

    @classmethod
    def from_linears(cls, gate_proj: nn.Linear, up_proj: nn.Linear, **options: Any) -> Self:
        """Build the module around existing layers, which it shares: nothing is copied. `options` are the class's.

        Raises:
            TypeError: one of the layers is not a torch.nn.Linear.
            ValueError: sizes do not fit together, or an option has an unknown value.
        """
        return cls._around(options, gate_proj=gate_proj, up_proj=up_proj)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return silu(gate_proj(x)) * up_proj(x): [..., in_features] -> [..., hidden_features].

        Raises:
            TypeError: x is not a tensor of the parameters' dtype, or a projection is no longer a plain Linear.
            ValueError: x is on another device or its last dimension is not in_features.
        """
        split = self.tensor_parallel
        x, weights, biases = self._operands(x if split is None else split.whole(x), "gate_proj", "up_proj")
        weight_grad = self.options.weight_grad
        z = self._call(swiglu_glu, fp8.swiglu_glu_fp8, x, weights, biases, weight_grad=weight_grad)
        return z if split is None else split.columns(z)


class FusedSwiGLUMLP(FusedModule):
    """down_proj(silu(gate_proj(x)) * up_proj(x)), with the state_dict of a Llama, Qwen or Mistral MLP.

    state_dict: `gate_proj.weight` and `up_proj.weight`, [intermediate_size, hidden_size], and `down_proj.weight`,
    [hidden_size, intermediate_size].

    Args:
        hidden_size: size of the last dimension of x and of the result.
        intermediate_size: size of the last dimension of what the gate yields.
        how: bias, device, dtype and options, as for `FusedSwiGLU`; weight_grad="none" treats gate_proj and up_proj as
            frozen.

    x: [..., hidden_size] in the parameters' dtype (any under autocast) and on their device -> [..., hidden_size].
    """

    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear

    def __init__(self, hidden_size: int, intermediate_size: int, **how: Any) -> None:
        gated = dict.fromkeys(("gate_proj", "up_proj"), (hidden_size, intermediate_size))
        super().__init__({**gated, "down_proj": (intermediate_size, hidden_size)}, **how)

    @classmethod
    def from_linears(cls, gate_proj: nn.Linear, up_proj: nn.Linear, down_proj: nn.Linear, **options: Any) -> Self:
        """Build the module around existing layers, as `FusedSwiGLU.from_linears`; down_proj yields any size."""
        return cls._around(options, gate_proj=gate_proj, up_proj=up_proj, down_proj=down_proj)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return down_proj(silu(gate_proj(x)) * up_proj(x)): [..., hidden_size] -> [..., hidden_size].

        Errors are those of `FusedSwiGLU.forward`.
        """
        return self._mlp(x)


class FusedSwiGLUPackedMLP(FusedModule):
    """down_proj(silu(gate) * up) with [gate, up] = gate_up_proj(x), with the state_dict of a Phi-3 MLP.

    state_dict: `gate_up_proj.weight`, [2 * intermediate_size, hidden_size] with the gate's rows first, and
    `down_proj.weight`, [hidden_size, intermediate_size]. The forward reads the two halves where they lie; the backward
    joins their two gradients, which costs one copy of the packed gradient.

    Args, errors and shapes: as for `FusedSwiGLUMLP`.
    """

    gate_up_proj: nn.Linear
    down_proj: nn.Linear

    def __init__(self, hidden_size: int, intermediate_size: int, **how: Any) -> None:
        layers = {"gate_up_proj": (hidden_size, 2 * intermediate_size), "down_proj": (intermediate_size, hidden_size)}
        super().__init__(layers, **how)

    @classmethod
    def from_linears(cls, gate_up_proj: nn.Linear, down_proj: nn.Linear, **options: Any) -> Self:
        """Build the module around existing layers, as `FusedSwiGLU.from_linears`; the gate's rows come first."""
        return cls._around(options, gate_up_proj=gate_up_proj, down_proj=down_proj)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return down_proj(silu(gate) * up): [..., hidden_size] -> [..., hidden_size]; errors: as FusedSwiGLUMLP's."""
        if self.tensor_parallel is not None:  # its matrix is parted
            return self._mlp(x)
        x, (packed, w_down), (packed_bias, bias_down) = self._operands(x, "gate_up_proj", "down_proj")
        gated: Sequence[torch.Tensor | None] = (None, None) if packed_bias is None else packed_bias.chunk(2)
        return self._block(x, [*packed.chunk(2), w_down], [*gated, bias_down])


class FusedSwiGLUExperts(KeepsCodes, nn.Module):
    """A mixture of experts without its router, with the state_dict of transformers' Mixtral and Qwen3-MoE experts.

    state_dict: `gate_up_proj`, [num_experts, 2 * intermediate_size, hidden_size], and `down_proj`, [num_experts,
    hidden_size, intermediate_size]; with a bias `gate_up_proj_bias` and `down_proj_bias`. A model of transformers needs
    no such module: `patch_model` sets its own experts to the same kernels.

    Args:
        hidden_size, intermediate_size, num_experts: the sizes.
        bias: give both projections of each expert a bias.
        options: `activation`, `alpha`, `limit`, `up_offset`, `interleaved`, `recompute`, `backend` and `precision` of
            `swiglu_experts`; with "fp8-rowwise" weights are quantised in every call unless `keep_codes()`.
        device: of the parameters.
        dtype: of the parameters; float32, float16, bfloat16 or float64 (slowly, by the definition).

    x: [..., hidden_size] in the parameters' dtype (any under autocast) and on their device -> [..., hidden_size].
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, num_experts: int, *, bias: bool = False,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.options = options

        def drawn(*shape: int, scale: float) -> nn.Parameter:
            """As torch.nn.Linear draws its parameters."""
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype).uniform_(-scale, scale))

        up_scale, down_scale = max(hidden_size, 1) ** -0.5, max(intermediate_size, 1) ** -0.5
        self.gate_up_proj = drawn(num_experts, 2 * intermediate_size, hidden_size, scale=up_scale)
        self.down_proj = drawn(num_experts, hidden_size, intermediate_size, scale=down_scale)
        self.gate_up_proj_bias = drawn(num_experts, 2 * intermediate_size, scale=up_scale) if bias else None
        self.down_proj_bias = drawn(num_experts, hidden_size, scale=down_scale) if bias else None

    backend = property(_backend)
    expert_parallel: "ExpertSplit | None" = None
    """How its experts are shared among ranks; `parallel.SwiGLUExpertsParallel` sets it."""

    @property
    def _recipe(self) -> str | None:  # type: ignore[override]
        return recipe_of(str(self.options.get("precision", "bf16")))

    def extra_repr(self) -> str:
        """Return the sizes, the options and the backend."""
        options = [f"{name}={value!r}" for name, value in self.options.items()]
        return ", ".join([f"gate_up_proj={list(self.gate_up_proj.shape)}", *options, f"backend={self.backend!r}"])

    def forward(
        self, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor,
        shared: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Return each token's sum over its experts by their weights; as `swiglu_experts`, errors included.

        shared: a shared expert, whose result for x is added; on several ranks it runs while rows travel.
        """
        split = self.expert_parallel
        parameters: Any = self.gate_up_proj, self.down_proj, self.gate_up_proj_bias, self.down_proj_bias
        w_gate_up, w_down, b_gate_up, b_down = parameters if split is None else map(split.own, parameters)
        options = {"b_gate_up": b_gate_up, "b_down": b_down, "kept": self._codes, **self.options}
        operands = x, w_gate_up, w_down, top_k_index, top_k_weights
        if split is not None:
            return split(*operands, shared=shared, **options)
        out = swiglu_experts(*operands, **options)
        return out if shared is None else out + shared(x)
