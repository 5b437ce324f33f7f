"""An implementation of the registry as a module that trains, in place of a model's SwiGLU block.

Weights are fp32. In a 16-bit dtype an implementation is built on copies that are made anew before each forward, as
autocast casts what a product reads; their gradients are handed to the fp32 weights. It is thus built and called just as
it is to be measured, whether or not it knows of autocast.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from swiglu_bench.check.inputs import torch_dtype
from swiglu_bench.spec.cases import WEIGHTS, Case, Dtype, Scope
from swiglu_bench.spec.implementation import Implementation, Step
from swiglu_bench.spec.problem import Problem
from swiglu_bench.train.breakdown import Watch
from swiglu_bench.train.model import sites

PROJECTIONS = {"w_gate": "gate_proj", "w_up": "up_proj", "w_down": "down_proj"}


@dataclass(frozen=True)
class Contender:
    """An implementation under the name that it has in the tables."""

    name: str
    implementation: Implementation
    permuted: bool = False

    @property
    def trains_weights(self) -> bool:
        """Whether the block's weights learn."""
        return self.implementation.trains == "everything"


class GradientMissing(RuntimeError):
    """A weight that the implementation claims to train got no gradient."""


def why_not(
    implementation: Implementation, case: Case, device_type: str, interpreter: bool, capability: str = ""
) -> str | None:
    """Why it cannot be trained here in blocks as the case has them, in one sentence, or None if it can."""
    if not implementation.scopes & {Scope.MLP, Scope.GLU}:
        return "It computes the activation alone; a block needs the scope mlp or glu."
    if implementation.trains == "nothing":
        return "It has no backward."
    if implementation.backend == "triton" and device_type == "cpu" and not implementation.gpus and not interpreter:
        return "Its Triton kernels need a GPU; --interpret runs them on a CPU, some thousand times slower."
    refused = implementation.refuses(_scoped(implementation, case))
    return refused or implementation.unavailable(device_type, interpreter, capability)


class Block(nn.Module):
    """x -> down(silu(gate(x)) * up(x)) by an implementation; `weights` are the fp32 parameters it begins with.

    An implementation without a weight layout of its own trains these very parameters.
    """

    def __init__(self, contender: Contender, case: Case, weights: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self.watch: Watch | None = None
        self.trains_weights = contender.trains_weights
        self._dtype = torch_dtype(case)
        case = _scoped(contender.implementation, case)
        whole = case.scope is Scope.MLP
        weights = _permuted(weights) if contender.permuted else weights
        step, leaves = self._build(contender.implementation, case, weights)
        own = leaves if step.parameters is not None else {}
        if own and case.dtype is not Dtype.FLOAT32:  # in the same layout, but not rounded
            own = self._build(contender.implementation, dataclasses.replace(case, dtype=Dtype.FLOAT32), weights)[1]
        if "w_down" not in leaves:
            leaves["w_down"] = self._leaf(weights["w_down"])
        self._forward = step.forward if whole else lambda x: functional.linear(step.forward(x), leaves["w_down"])
        self.masters = nn.ParameterDict(
            {name: nn.Parameter(own[name].detach()) if name in own else weights[name] for name in leaves}
        )
        self._leaves = leaves
        for name, leaf in leaves.items():
            if leaf.requires_grad:
                leaf.register_post_accumulate_grad_hook(_hand_to(self.masters[name]))

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden], in the dtype of products."""
        flat = x.reshape(-1, x.shape[-1]).to(self._dtype)
        with torch.no_grad():
            for name, leaf in self._leaves.items():
                if leaf.dtype is not torch.float32:
                    leaf.copy_(self.masters[name])
        with torch.autocast(x.device.type, enabled=False):
            flat = self.watch.enter(flat) if self.watch else flat
            out = self._forward(flat)
            out = self.watch.leave(out) if self.watch else out
        return out.reshape(x.shape)

    def check_gradients(self) -> None:
        """After a backward: raise GradientMissing where a weight that is to learn has none."""
        missing = [name for name, master in self.masters.items() if self.trains_weights and master.grad is None]
        if missing:
            raise GradientMissing(f"it yields no gradient for {', '.join(missing)}")

    def _build(
        self, implementation: Implementation, case: Case, weights: Mapping[str, Tensor]
    ) -> tuple[Step, dict[str, Tensor]]:
        """The Step on leaves of the case's dtype, and its leaves: its own, or these."""
        leaves = {name: self._leaf(weights[name], torch_dtype(case)) for name in WEIGHTS[case.scope]}
        step = implementation.build(Problem(case, weights["w_gate"].device, leaves, (), ()))
        return step, dict(leaves if step.parameters is None else step.parameters)

    def _leaf(self, weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The same memory in fp32, a copy in another dtype."""
        return weight.detach().to(dtype or self._dtype).requires_grad_(self.trains_weights)


def blocks(contender: Contender, case: Case, network: nn.Module) -> list[Block]:
    """One for each block of a network that still has its own."""
    return [
        Block(contender, case, {name: getattr(site.mlp, attribute).weight for name, attribute in PROJECTIONS.items()})
        for site in sites(network)
    ]


def trained(network: nn.Module, those: list[Block]) -> list[nn.Parameter]:
    """The parameters that learn, with these blocks in the network: those around the blocks, and the blocks' own."""
    in_blocks = {id(parameter) for place in sites(network) for parameter in place.get_submodule("mlp").parameters()}
    around = [parameter for parameter in network.parameters() if id(parameter) not in in_blocks]
    return around + [master for block in those if block.trains_weights for master in block.masters.values()]


def _scoped(implementation: Implementation, case: Case) -> Case:
    """The case at the widest scope that the implementation has."""
    return dataclasses.replace(case, scope=Scope.MLP if Scope.MLP in implementation.scopes else Scope.GLU)


def _permuted(weights: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    intermediate = len(weights["w_gate"])
    order = torch.randperm(intermediate, generator=torch.Generator().manual_seed(1)).to(weights["w_gate"].device)
    rows = {name: weights[name].detach()[order] for name in ("w_gate", "w_up")}
    return {name: nn.Parameter(one) for name, one in (rows | {"w_down": weights["w_down"].detach()[:, order]}).items()}


def _hand_to(master: nn.Parameter) -> Callable[[Tensor], None]:
    def hand(leaf: Tensor) -> None:
        assert leaf.grad is not None
        gradient = leaf.grad.to(master.dtype)
        master.grad = gradient if master.grad is None else master.grad + gradient
        leaf.grad = None

    return hand
