"""What the public functions accept; every refusal names the argument, what was expected and what came."""

from collections.abc import Sequence

import torch

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# Tile numbers times tile sizes are 32-bit in the kernels; 1024 is more than any tile overhangs. Tensors may be larger.
MAX_AXIS = 2**31 - 1024


def check_tensor(name: str, value: object) -> torch.Tensor:
    """Return `value` if it is a tensor of a dtype that the kernels compute in."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")
    if value.dtype not in KERNEL_DTYPES:
        expected = ", ".join(str(dtype) for dtype in KERNEL_DTYPES)
        raise TypeError(f"{name}: expected one of {expected}, got {value.dtype}")
    return value


def check_like(name: str, value: object, other_name: str, other: torch.Tensor) -> torch.Tensor:
    """Return `value` if it is a tensor with the dtype and the device of `other`."""
    tensor = check_tensor(name, value)
    if tensor.dtype != other.dtype:
        raise TypeError(f"{name}: expected {other.dtype} as {other_name} has, got {tensor.dtype}")
    if tensor.device != other.device:
        raise ValueError(f"{name}: expected device {other.device} as {other_name} has, got {tensor.device}")
    return tensor


def check_shape(name: str, tensor: torch.Tensor, expected: Sequence[int], meaning: str) -> None:
    """Raise unless the tensor has the expected shape; `meaning` says where that shape comes from."""
    if tuple(tensor.shape) != tuple(expected):
        raise ValueError(f"{name}: expected shape {tuple(expected)} ({meaning}), got {tuple(tensor.shape)}")


def check_option(name: str, value: object, allowed: Sequence[str]) -> None:
    """Raise unless an option has one of its allowed values."""
    if value not in allowed:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, allowed))}, got {value!r}")


def check_gate_up(gate: object, up: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Check the two operands of an elementwise gate: same shape, dtype and device, at least one dimension."""
    gate_tensor = check_tensor("gate", gate)
    up_tensor = check_like("up", up, "gate", gate_tensor)
    if gate_tensor.dim() == 0:
        raise ValueError("gate: expected at least one dimension, got a scalar")
    check_shape("up", up_tensor, gate_tensor.shape, "the shape of gate")
    return gate_tensor, up_tensor


def check_glu(x: object, w_gate: object, w_up: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Check x [..., hidden] against w_gate and w_up [intermediate, hidden]."""
    x_tensor = check_tensor("x", x)
    gate_tensor = check_like("w_gate", w_gate, "x", x_tensor)
    up_tensor = check_like("w_up", w_up, "x", x_tensor)
    if x_tensor.dim() == 0:
        raise ValueError("x: expected at least one dimension, [..., hidden], got a scalar")
    if gate_tensor.dim() != 2:
        raise ValueError(f"w_gate: expected two dimensions, [intermediate, hidden], got {tuple(gate_tensor.shape)}")
    if gate_tensor.shape[1] != x_tensor.shape[-1]:
        raise ValueError(
            f"w_gate: expected [intermediate, {x_tensor.shape[-1]}] to match the last dimension of x, "
            f"got {tuple(gate_tensor.shape)}"
        )
    check_shape("w_up", up_tensor, gate_tensor.shape, "the shape of w_gate")
    for name, tensor in (("x", x_tensor), ("w_gate", gate_tensor)):
        if max(tensor.shape) > MAX_AXIS:
            raise ValueError(f"{name}: expected every dimension up to {MAX_AXIS}, got {tuple(tensor.shape)}")
    return x_tensor, gate_tensor, up_tensor
