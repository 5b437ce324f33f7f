"""transformers' experts interface: `swiglu_experts` as an implementation that every model of it can be set to.

    register_experts()
    model.set_experts_implementation("swiglu_kernels")

Model files of transformers 5 hand their experts' modules to the function that the model's configuration names. Such a
module declares the layout of its weights. Its gate is found by a test: `gate_of` calls its `_apply_gate` on a few
numbers and looks which of the kernels' gates gives the same results. Nothing here imports transformers before it is
asked to.
"""

import functools
import importlib
from typing import Any

import torch
from torch import nn

from swiglu_kernels.nn.gates import gate_shown, once_for_a_module
from swiglu_kernels.ops.experts.operation import swiglu_experts
from swiglu_kernels.ops.gate.formula import Formula, Limit

NAMES = {
    ("bf16", False): "swiglu_kernels",
    ("bf16", True): "swiglu_kernels_recompute",
    ("fp8-rowwise", False): "swiglu_kernels_fp8_rowwise",
    ("fp8-rowwise", True): "swiglu_kernels_fp8_rowwise_recompute",
}
"""What the implementation is called, by its precision and by whether gate and up are made again in the backward."""


def register_experts() -> None:
    """Make "swiglu_kernels" and "swiglu_kernels_recompute" known to transformers' `set_experts_implementation`.

    The second does not keep gate and up for the backward but recomputes them. "swiglu_kernels_fp8_rowwise" and
    "swiglu_kernels_fp8_rowwise_recompute" are the same with precision="fp8-rowwise" of `swiglu_experts`. A model whose
    experts the kernels cannot compute raises a ValueError in its forward.

    Raises:
        ImportError: transformers is missing, or older than 5 and without that interface.
    """
    functions = importlib.import_module("transformers.integrations.moe").ALL_EXPERTS_FUNCTIONS
    for (precision, recompute), name in NAMES.items():
        functions.register(name, functools.partial(_forward, precision=precision, recompute=recompute))


def takes_part(module: nn.Module) -> bool:
    """Tell whether a module is one of experts that an implementation can be set for."""
    return all(hasattr(module, name) for name in ("_apply_gate", "has_gate", "is_transposed", "is_concatenated"))


def is_set(module: Any) -> bool:
    """Tell whether one of these implementations is set for a module."""
    return takes_part(module) and getattr(module.config, "_experts_implementation", None) in NAMES.values()


Gate = tuple[str, float, Limit, float]


@once_for_a_module
def gate_of(module: Any) -> Gate | str:
    """Return activation, alpha, limit and up_offset of a module that takes part, or why the kernels cannot have it."""
    if not module.has_gate:
        return "its experts have no gate"
    if getattr(module, "has_post_expert_norm", False):
        return "its experts' results are normalised before they are added up"
    try:  # with gate and up of one feature each, the two orders of their columns are one
        found = gate_shown(module, lambda gate, up: module._apply_gate(torch.cat((gate, up), -1)))
    except Exception as error:
        return f"its _apply_gate: {type(error).__name__}: {error}"
    if found is None:
        return f"its _apply_gate is none of the gates that {Formula.__name__} describes"
    return found.activation, found.alpha, found.limit, found.up_offset


def _forward(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor,
    recompute: bool = False, precision: str = "bf16",
) -> torch.Tensor:  # fmt: skip
    """Return what the experts of a module add up to, as transformers calls it."""
    gate = gate_of(module)
    if isinstance(gate, str):
        raise ValueError(f"{type(module).__name__}: swiglu_kernels cannot take the place of its experts, {gate}")
    activation, alpha, limit, up_offset = gate
    parameters = [module.gate_up_proj, module.down_proj, None, None]
    if module.has_bias:
        parameters[2:] = module.gate_up_proj_bias, module.down_proj_bias
    split = getattr(module, "expert_parallel", None)
    w_gate_up, w_down, *biases = parameters if split is None else map(split.own, parameters)
    if module.is_transposed:
        w_gate_up, w_down = w_gate_up.mT, w_down.mT
    return (split or swiglu_experts)(
        hidden_states, w_gate_up, w_down, top_k_index, top_k_weights, b_gate_up=biases[0], b_down=biases[1],
        activation=activation, alpha=alpha, limit=limit, up_offset=up_offset, interleaved=not module.is_concatenated,
        recompute=recompute, precision=precision, kept=module.__dict__.get("_codes"),
    )  # fmt: skip
