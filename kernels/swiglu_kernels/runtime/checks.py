"""What the public functions accept; every refusal names the argument, what was expected and what came."""

import math
from collections.abc import Sequence

import torch
from torch.autograd import forward_ad

from swiglu_kernels.runtime.backend import backend_for
from swiglu_kernels.runtime.internals import tangents_possible

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DTYPES = (*KERNEL_DTYPES, torch.float64)
"""Of public functions; float64 is computed by the definition (`backend_for`)."""

# Tile numbers times tile sizes are 32-bit in the kernels; 1024 is more than any tile overhangs. Tensors may be larger.
MAX_AXIS = 2**31 - 1024


def check_tensor(name: str, value: object) -> torch.Tensor:
    """Return `value` if it is a tensor of a dtype that operations take."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")
    if value.dtype not in DTYPES:
        expected = ", ".join(str(dtype) for dtype in DTYPES)
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


def check_shape(name: str, tensor: torch.Tensor, expected: tuple[int, ...], meaning: str) -> None:
    """Raise unless the tensor has the expected shape; `meaning` says where that shape comes from."""
    if tensor.shape != expected:
        raise ValueError(f"{name}: expected shape {tuple(expected)} ({meaning}), got {tuple(tensor.shape)}")


def _check_x(x: object) -> torch.Tensor:
    tensor = check_tensor("x", x)
    if tensor.dim() == 0:
        raise ValueError("x: expected at least one dimension, [..., hidden], got a scalar")
    return tensor


def _check_axes(**tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        if max(tensor.shape) > MAX_AXIS:
            raise ValueError(f"{name}: expected every dimension up to {MAX_AXIS}, got {tuple(tensor.shape)}")


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
    refuse_tangents(gate_tensor, up_tensor)
    return gate_tensor, up_tensor


def check_glu(x: object, w_gate: object, w_up: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Check x [..., hidden] against w_gate and w_up [intermediate, hidden]."""
    x_tensor = _check_x(x)
    gate_tensor = check_like("w_gate", w_gate, "x", x_tensor)
    up_tensor = check_like("w_up", w_up, "x", x_tensor)
    if gate_tensor.dim() != 2:
        raise ValueError(f"w_gate: expected two dimensions, [intermediate, hidden], got {tuple(gate_tensor.shape)}")
    if gate_tensor.shape[1] != x_tensor.shape[-1]:
        expected = f"[intermediate, {x_tensor.shape[-1]}] to match the last dimension of x"
        raise ValueError(f"w_gate: expected {expected}, got {tuple(gate_tensor.shape)}")
    check_shape("w_up", up_tensor, gate_tensor.shape, "the shape of w_gate")
    _check_axes(x=x_tensor, w_gate=gate_tensor)
    refuse_tangents(x_tensor, gate_tensor, up_tensor)
    return x_tensor, gate_tensor, up_tensor


def check_scalar(name: str, value: object) -> float:
    """Return `value` as a float if it is a finite real number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    if not -math.inf < value < math.inf:
        raise ValueError(f"{name}: expected a finite number, got {value!r}")
    return float(value)


def check_vector(
    name: str, value: object, size: int, meaning: str, other_name: str, other: torch.Tensor
) -> torch.Tensor | None:
    """Return `value` if it is None or a tensor of shape [size] with the dtype and the device of `other`."""
    if value is None:
        return None
    tensor = check_like(name, value, other_name, other)
    check_shape(name, tensor, (size,), meaning)
    return tensor


def check_packed(x: object, w_gate_up: object, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Check x [..., hidden] against [2 * intermediate, hidden], or [hidden, 2 * intermediate] if transposed."""
    x_tensor = _check_x(x)
    weight = check_like("w_gate_up", w_gate_up, "x", x_tensor)
    hidden = x_tensor.shape[-1]
    transposed = layout == "transposed"
    expected = f"[{hidden}, 2 * intermediate]" if transposed else f"[2 * intermediate, {hidden}]"
    if weight.dim() != 2 or weight.shape[0 if transposed else 1] != hidden:
        matching = f"to match the last dimension of x and layout={layout!r}"
        raise ValueError(f"w_gate_up: expected {expected} {matching}, got {tuple(weight.shape)}")
    if weight.shape[1 if transposed else 0] % 2:
        raise ValueError(f"w_gate_up: expected {expected}, an even number of them, got {tuple(weight.shape)}")
    _check_axes(x=x_tensor, w_gate_up=weight)
    refuse_tangents(x_tensor, weight)
    return x_tensor, weight


def check_down(w_down: object, w_gate: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Check w_down [hidden_out, intermediate] against w_gate [intermediate, hidden]."""
    tensor = check_like("w_down", w_down, "x", x)
    if tensor.dim() != 2 or tensor.shape[1] != w_gate.shape[0]:
        expected = f"[hidden_out, {w_gate.shape[0]}] to match the first dimension of w_gate"
        raise ValueError(f"w_down: expected {expected}, got {tuple(tensor.shape)}")
    _check_axes(w_down=tensor)
    return tensor


def check_experts(
    x: object, w_gate_up: object, w_down: object, index: object, weights: object, b_gate_up: object, b_down: object
) -> None:
    """Check the operands of a mixture of experts, as `swiglu_experts` describes them."""
    x_tensor = _check_x(x)
    gate_up = check_like("w_gate_up", w_gate_up, "x", x_tensor)
    down = check_like("w_down", w_down, "x", x_tensor)
    hidden = x_tensor.shape[-1]
    if gate_up.dim() != 3 or gate_up.shape[2] != hidden or gate_up.shape[1] % 2:
        raise ValueError(f"w_gate_up: expected [experts, 2 * intermediate, {hidden}], got {tuple(gate_up.shape)}")
    experts, both, _ = gate_up.shape
    if down.dim() != 3 or (down.shape[0], 2 * down.shape[2]) != (experts, both):
        raise ValueError(f"w_down: expected [{experts}, hidden_out, {both // 2}], got {tuple(down.shape)}")
    for name, bias, size in (("b_gate_up", b_gate_up, both), ("b_down", b_down, down.shape[1])):
        if bias is not None:
            check_shape(name, check_like(name, bias, "x", x_tensor), (experts, size), "a row for each expert")
    if not isinstance(index, torch.Tensor) or index.is_floating_point() or index.is_complex():
        got = getattr(index, "dtype", type(index).__name__)
        raise TypeError(f"top_k_index: expected a tensor of integers, got {got}")
    routing = check_tensor("top_k_weights", weights)
    if routing.dtype is torch.float64 and x_tensor.dtype is not torch.float64:
        raise TypeError(f"top_k_weights: expected float32 or 16 bits with x in {x_tensor.dtype}, got {routing.dtype}")
    if index.shape[:-1] != x_tensor.shape[:-1] or index.dim() != x_tensor.dim():
        lead = "".join(f"{size}, " for size in x_tensor.shape[:-1])
        raise ValueError(f"top_k_index: expected [{lead}k] to match x, got {tuple(index.shape)}")
    check_shape("top_k_weights", routing, tuple(index.shape), "the shape of top_k_index")
    for name, tensor in (("top_k_index", index), ("top_k_weights", routing)):
        if tensor.device != x_tensor.device:
            raise ValueError(f"{name}: expected device {x_tensor.device} as x has, got {tensor.device}")
    _check_axes(x=x_tensor, w_gate_up=gate_up, w_down=down)
    if index.numel() + 128 * experts > MAX_AXIS:
        raise ValueError(f"top_k_index: expected up to {MAX_AXIS} rows with padding, got {index.numel()} pairs")
    refuse_tangents(x_tensor, gate_up, down, routing)


def check_chunk(value: object) -> int:
    """Return `chunk_tokens` as an int, 0 for None."""
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"chunk_tokens: expected an int or None, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"chunk_tokens: expected at least 1, or None, got {value}")
    return value


def refuse_tangents(*operands: torch.Tensor) -> None:
    """Raise under forward-mode differentiation: a custom operator would drop the tangents and say nothing."""
    if not tangents_possible() or backend_for(operands[0]) == "torch":
        return  # the reference is PyTorch's own, and differentiable either way
    if any(forward_ad.unpack_dual(operand).tangent is not None for operand in operands):
        raise RuntimeError(
            "forward-mode differentiation (torch.func.jvp, jacfwd) is not available: the kernels compute reverse-mode "
            "derivatives only; use the functions of swiglu_kernels.reference where it is needed"
        )
