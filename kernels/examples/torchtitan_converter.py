"""The MLPs of torchtitan's models on swiglu_mlp: a converter for a model, and an override for torchtitan 0.3.

torchtitan 0.3 replaces components by their configuration. With this file on the path of Python:

    torchtitan ... --override.imports torchtitan_converter.swiglu_kernels

Older versions take a converter: `register_model_converter(SwiGLUConverter, "swiglu_kernels")`, then `--model.converters
swiglu_kernels`; they call `convert` on a model that is on the meta device and not yet parallelised. Parameters stay
where they are, so checkpoints are the same. FSDP works; for tensor parallelism, whose weights are DTensors in the
forward, use `swiglu_kernels.nn.parallel`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from swiglu_kernels import swiglu_mlp
from swiglu_kernels.nn.gates import gate_of_mlp
from swiglu_kernels.nn.modules import why_not_plain
from swiglu_kernels.ops.gate.formula import PLAIN

PROJECTIONS = ("w1", "w3", "w2")
"""What torchtitan calls gate, up and down."""


class FusedForward:
    """The forward of a feed-forward with w1, w2 and w3; mixed into its class."""

    w1: nn.Linear
    w2: nn.Linear
    w3: nn.Linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return w2(silu(w1(x)) * w3(x)): [..., dim] -> [..., dim]."""
        gate, up, down = self.w1, self.w3, self.w2
        return swiglu_mlp(x, gate.weight, up.weight, down.weight, gate.bias, up.bias, down.bias)


class SwiGLUConverter:
    """torchtitan's protocol ModelConverter."""

    def __init__(self, *_: Any) -> None:
        """Take what torchtitan hands to converters, its configuration and parallel dimensions, which do not matter."""

    def convert(self, model: nn.Module) -> None:
        """Give every feed-forward whose forward is plain SwiGLU the fused one, in place."""
        for module in list(model.modules()):
            linears = [getattr(module, name, None) for name in PROJECTIONS]
            if isinstance(module, FusedForward) or not all(isinstance(linear, nn.Linear) for linear in linears):
                continue
            plain = all(why_not_plain(linear) is None for linear in linears if isinstance(linear, nn.Linear))
            if plain and gate_of_mlp(module, PROJECTIONS[:2], PROJECTIONS[2]) == PLAIN:
                module.__class__ = type(f"Fused{type(module).__name__}", (FusedForward, type(module)), {})

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Do nothing: the weights are used as they are."""


try:
    from torchtitan.config.override import derive, override
    from torchtitan.models.common.feed_forward import FeedForward
except ImportError:  # an older torchtitan, or none
    pass
else:

    class SwiGLUFeedForward(FusedForward, FeedForward):
        """torchtitan's FeedForward on swiglu_mlp."""

        @dataclass(kw_only=True, slots=True)
        class Config(FeedForward.Config):
            """As FeedForward's."""

    @override(target=FeedForward.Config, exact=True, description="SwiGLU by swiglu_kernels")
    def swiglu_kernels(config: FeedForward.Config) -> SwiGLUFeedForward.Config:
        """Return the configuration with the class replaced."""
        return derive(config, SwiGLUFeedForward.Config)
