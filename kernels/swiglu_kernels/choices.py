"""The named choices of how gradients are made, and what "auto" stands for.

Measured on one H200 (bf16, hidden 4096, intermediate 11008), forward + dX + dW of swiglu_glu, relative to eager:

    1024-8192 tokens   save="input" 1.30; save="preact" with dX and dW on the fly ("fused", "triton") 1.7-2.8
                       save="preact", dX "two_step": dW by torch 0.97-1.00, dW by Triton 1.00-1.06
    16 tokens          dW by torch 208 us, by Triton 232 us
    1 token            dW by torch 289 us, by Triton 212 us

so "auto" is save="preact" wherever memory is not the point (`chunk_tokens` says that it is), dX in two steps, and dW by
Triton for up to MOST_TOKENS_FOR_TRITON_DW tokens, half way between the two measurements. On other GPUs than compute
capability 9.0 nothing was measured: there the large products are left to torch, whose library knows those GPUs.
"""

import torch

from swiglu_kernels.backend import capability_of

AUTO = "auto"
WEIGHT_GRADS = ("triton", "torch", "none", AUTO)
SAVES = ("preact", "input", AUTO)
INPUT_GRADS = ("fused", "two_step", "torch", AUTO)

MEASURED_CAPABILITY = (9, 0)
MOST_TOKENS_FOR_TRITON_DW = 8


@torch.compiler.assume_constant_result  # a GPU does not change while a compiled function lives
def _is_measured(device: torch.device) -> bool:
    return capability_of(device) == MEASURED_CAPABILITY


def resolve(
    weight_grad: str, save: str, input_grad: str, tokens: int, device: torch.device, save_memory: bool = False
) -> tuple[str, str, str]:
    """Return (weight_grad, save, input_grad) with every "auto" replaced by what is fastest for `tokens` on `device`."""
    if save == AUTO:
        save = "input" if save_memory else "preact"
    if input_grad == AUTO:
        input_grad = "two_step" if _is_measured(device) or tokens <= MOST_TOKENS_FOR_TRITON_DW else "torch"
    if weight_grad == AUTO:
        weight_grad = "triton" if tokens <= MOST_TOKENS_FOR_TRITON_DW else "torch"
    return weight_grad, save, input_grad
