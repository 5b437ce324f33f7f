"""The MLP of Llama, Qwen and Mistral in plain PyTorch, as transformers has it."""

from typing import Any

import torch
from torch import nn


class LlamaMLP(nn.Module):
    """Three projections without biases around SiLU."""

    def __init__(self, hidden: int, intermediate: int, **of_tensors: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False, **of_tensors)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False, **of_tensors)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False, **of_tensors)
        self.act_fn = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden] to [..., hidden]."""
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
