"""A plugin of SGLang that computes gate_up_proj and the gate of its MLPs in one launch.

Put this file into a package of yours, and name it in that package's pyproject.toml:

    [project.entry-points."sglang.srt.plugins"]
    swiglu_kernels = "my_package.sglang_plugin:register"

SGLang calls `register` in each of its processes, before it loads a model. The hook stands around the forward of MLPs;
`down_proj`, which adds up the results of the ranks, stays SGLang's. Quantised layers, adapters and calls with options
that are not known here run as they did.
"""

from collections.abc import Callable
from typing import Any

import torch

from swiglu_kernels import swiglu_glu_packed
from swiglu_kernels.runtime.checks import KERNEL_DTYPES

MLPS = ("sglang.srt.models.llama.LlamaMLP", "sglang.srt.models.qwen2.Qwen2MLP", "sglang.srt.models.qwen3.Qwen3MLP")
"""Whose forward is down_proj(silu(gate) * up) with gate above up in gate_up_proj."""


def register() -> None:
    """Register the hooks; SGLang applies them."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for mlp in MLPS:
        HookRegistry.register(f"{mlp}.forward", around_forward, HookType.AROUND)


def around_forward(original: Callable[..., Any], mlp: Any, x: torch.Tensor, *more: Any, **options: Any) -> Any:
    """Return what `original(mlp, x, ...)` returns: [tokens, hidden] -> [tokens, hidden]."""
    if not is_plain(mlp, x) or any(more) or any(value for name, value in options.items() if name != "forward_batch"):
        return original(mlp, x, *more, **options)
    h = swiglu_glu_packed(x, mlp.gate_up_proj.weight, getattr(mlp.gate_up_proj, "bias", None))
    out, _ = mlp.down_proj(h)
    return out


def is_plain(mlp: Any, x: torch.Tensor) -> bool:
    """Tell whether gate_up_proj is a product with its own weight, and nothing else."""
    projection = mlp.gate_up_proj
    method = type(getattr(projection, "quant_method", None)).__name__
    plain = (type(projection).__name__, method) == ("MergedColumnParallelLinear", "UnquantizedLinearMethod")
    return plain and projection.weight.dtype == x.dtype and x.dtype in KERNEL_DTYPES
