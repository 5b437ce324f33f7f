"""How products of float32 operands are computed: as torch's own setting says."""

import torch


def float32_dot_precision() -> str:
    """Return "tf32" where torch.backends.cuda.matmul allows TensorFloat-32, else "ieee"."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"
