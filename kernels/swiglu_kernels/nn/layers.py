"""Layers for the package `kernels`, whose `kernelize` puts their forward into modules of a model.

    own = LayerRepository("NAME/swiglu-kernels", layer_name="SwiGLUMLP", version=1, trust_remote_code=True)
    replace_kernel_forward_from_hub(LlamaMLP, "MLP")
    with use_kernel_mapping({"MLP": {"cuda": own}}):
        kernelize(model, mode=Mode.TRAINING | Mode.TORCH_COMPILE)

Such a layer has no state: its forward runs on the module that it was put into, and reads projections, activation and
limit of that. The gate is found as `patch_model` finds it, by what the module's own forward does (`gates.py`).
"""

from typing import Any

import torch
from torch import nn

from swiglu_kernels.nn.gates import gate_of_mlp, once_for_a_module
from swiglu_kernels.nn.modules import why_not_plain
from swiglu_kernels.ops.gate.formula import PLAIN
from swiglu_kernels.ops.mlp.operation import swiglu_mlp


class SwiGLUMLP(nn.Module):
    """down_proj(act_fn(gate_proj(x)) * up_proj(x)), with the limits that the module has: Llama, Gemma, DeepSeek-V4."""

    can_torch_compile: bool = True
    has_backward: bool = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the module's own forward does: [..., hidden] -> [..., hidden]. Errors are those of `swiglu_mlp`.

        Raises:
            TypeError: a projection is not a plain torch.nn.Linear.
            ValueError: the gate is none of those that the kernels have.
        """
        gate, up, down = _projections(self, "gate_proj", "up_proj", "down_proj")
        biases = gate.bias, up.bias, down.bias
        return swiglu_mlp(x, gate.weight, up.weight, down.weight, *biases, **_gate(self))


class SwiGLUPackedMLP(nn.Module):
    """The same with one gate_up_proj, the gate's rows first: Phi-3, MiniMax-M3."""

    can_torch_compile: bool = True
    has_backward: bool = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the module's own forward does: [..., hidden] -> [..., hidden]; errors: as `SwiGLUMLP`'s."""
        both, down = _projections(self, "gate_up_proj", "down_proj")
        w_gate, w_up = both.weight.chunk(2)
        b_gate, b_up = (None, None) if both.bias is None else both.bias.chunk(2)
        return swiglu_mlp(x, w_gate, w_up, down.weight, b_gate, b_up, down.bias, **_gate(self))


def _projections(module: nn.Module, *names: str) -> list[Any]:
    linears = [getattr(module, name) for name in names]
    for name, linear in zip(names, linears, strict=True):
        if (reason := why_not_plain(linear)) is not None:
            raise TypeError(f"{name}: expected a torch.nn.Linear whose parameters are all there is to it, but {reason}")
    return linears


def _gate(module: nn.Module) -> dict[str, Any]:
    options = _options_of(module)
    if options is None:
        raise ValueError(f"{type(module).__name__}: its forward shows none of the gates that swiglu_kernels has")
    return dict(zip(PLAIN.options, options, strict=True))


@once_for_a_module
def _options_of(module: nn.Module) -> tuple[Any, ...] | None:
    gated = ("gate_up_proj",) if "gate_up_proj" in module._modules else ("gate_proj", "up_proj")
    formula = gate_of_mlp(module, gated, "down_proj")
    return None if formula is None else tuple(formula.options.values())
