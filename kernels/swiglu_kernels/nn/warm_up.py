"""warm_up: compile before the first request what it would wait for."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from swiglu_kernels.nn.experts_interface import is_set
from swiglu_kernels.nn.modules import FusedModule, FusedSwiGLUExperts
from swiglu_kernels.ops.glu.operation import swiglu_glu
from swiglu_kernels.ops.mlp.operation import swiglu_mlp
from swiglu_kernels.runtime.backend import backend_for, capability_of
from swiglu_kernels.runtime.compiling import Plain, compile_side_by_side, kind_of, portable_form
from swiglu_kernels.runtime.launch import Launch
from swiglu_kernels.runtime.shortcuts import plan

MOST_TOKENS = 16384
FEW, STEP = 160, 16
"""Up to FEW tokens each count is looked at. Beyond, what is chosen changes at multiples of STEP alone, and what is
compiled depends on whether a count is such a multiple."""


@dataclass(frozen=True)
class WarmUp:
    """What was done; printed, one sentence."""

    calls: int
    variants: int
    """Kernels in all the forms that the calls launch; 0 where token counts were given."""
    processes: int
    """That compiled side by side."""
    seconds: float

    def __str__(self) -> str:
        compiled = f"{self.variants} kernels compiled by {self.processes} processes, " if self.variants else ""
        return f"{compiled}{self.calls} calls made in {self.seconds:.1f} s"


def warm_up(
    module_or_shapes: nn.Module | Iterable[tuple[int, int]], tokens: Iterable[int] | None = None, *,
    top_k: int | None = None, gradients: bool = False, dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
) -> WarmUp:  # fmt: skip
    """Compile and choose kernels ahead, so that the first calls are as quick as the next ones.

    With token counts, one call is made for each, on zeros. Without, everything that any count from 1 to 16384 can
    choose is compiled first, side by side in as many processes as there are CPUs, and the calls are those that launch
    all of it: then no new length waits for a compiler.

    Args:
        module_or_shapes: a model, whose FusedSwiGLU, FusedSwiGLUMLP, FusedSwiGLUPackedMLP, FusedSwiGLUExperts and
            experts that transformers runs on `swiglu_experts` are called, one of each kind; or (hidden, intermediate)
            of `swiglu_glu` and `swiglu_mlp` with contiguous weights.
        tokens: counts that calls will have, each at least 1; None: all of them.
        top_k: experts of a token; None: as the model's configuration says. Routing weights of the module's dtype and
            of fp32 are both tried.
        gradients: call with gradients and run the backward, too. No `.grad` is touched.
        dtype, device: of x and weights, for shapes.

    Returns:
        How many kernels were compiled, how many calls made and how long it took; `print` it. Modules are called under
        the autocast that is on, with x in the dtype of their weights.

    Raises:
        ValueError: a token count is below 1; the model has none of these modules; or nothing says top_k.
    """
    began = time.monotonic()
    counts = None if tokens is None else sorted(set(tokens))
    if counts is not None and (not counts or counts[0] < 1):
        raise ValueError(f"tokens: expected counts of at least 1, got {counts}")
    if isinstance(module_or_shapes, nn.Module):
        calls = _of_modules(module_or_shapes, top_k)
    else:
        calls = [call for shape in module_or_shapes for call in _of_shape(*shape, dtype, device)]
    found: dict[tuple[Any, ...], Plain] = {}
    planned = [(call, _every_variant(call, gradients, found) if counts is None else counts) for call in calls]
    capability = capability_of(calls[0][1](1).device) if found else None
    processes = compile_side_by_side(list(found.values()), capability) if capability else 0
    made = sum(_make(call, count, gradients) for call, of_call in planned for count in of_call)
    return WarmUp(made, len(found), processes, time.monotonic() - began)


def _make(of_call: "Call", count: int, gradients: bool) -> int:
    """Call with so many tokens, and again with gradients; return how many calls that were."""
    call, x_of, operands = of_call
    with torch.no_grad():
        call(x_of(count))
    if not gradients:
        return 1
    with torch.enable_grad():
        x = x_of(count).requires_grad_()
        wanted = [x, *(operand for operand in operands if operand.requires_grad)]
        out = call(x)
        torch.autograd.grad(out, wanted, torch.zeros_like(out), allow_unused=True)
    return 2


def _every_variant(of_call: "Call", gradients: bool, found: dict[tuple[Any, ...], Plain]) -> list[int]:
    """Return token counts whose calls launch everything that calls with any count do; enter new kernels in `found`."""
    if backend_for(of_call[1](1)) == "torch":
        return [1]
    mine: set[tuple[Any, ...]] = set()

    def see(launch: Launch) -> None:
        kind = kind_of(launch)
        if kind not in mine:
            mine.add(kind)
            found.setdefault(kind, portable_form(launch))

    chosen = []
    for count in _counts():
        known = len(mine)
        with plan.surveyed(see):
            _make(of_call, count, gradients)
        if len(mine) > known:
            chosen.append(count)
    return chosen


def _counts() -> Iterator[int]:
    yield from range(1, FEW + 1)
    for multiple in range(FEW, MOST_TOKENS, STEP):
        yield multiple + 1
        yield multiple + STEP // 2
        yield multiple + STEP


Call = tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[int], torch.Tensor], list[torch.Tensor]]
"""What is called, what makes its x of a token count, and its other operands."""


def _of_modules(model: nn.Module, top_k: int | None) -> list[Call]:
    found: dict[object, list[Call]] = {}
    for module in model.modules():
        own: list[torch.Tensor] = list(module.parameters())
        alike: list[object] = [type(module)]
        alike += [(leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad) for leaf in own]
        if isinstance(module, FusedModule):
            kind = *alike, module.options, *module.gate_options.items()
            found[kind] = [(module, partial(_zeros_like, own[0]), own)]
        elif isinstance(module, FusedSwiGLUExperts) or is_set(module):
            found[(*alike, str(getattr(module, "options", "")))] = _of_experts(module, own, top_k)
    if not found:
        raise ValueError(f"{type(model).__name__} has no fused module: patch_model puts them in")
    return [call for calls in found.values() for call in calls]


def _of_experts(module: Any, own: list[torch.Tensor], top_k: int | None) -> list[Call]:
    slots = top_k or getattr(getattr(module, "config", None), "num_experts_per_tok", None)
    if not slots:
        raise ValueError(f"top_k: {type(module).__name__} does not say how many experts a token has; give it")
    weight, count = module.gate_up_proj, module.gate_up_proj.shape[0]
    hidden = weight.shape[1 if getattr(module, "is_transposed", False) else 2]

    def call(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        index = torch.arange(x.shape[0] * slots, device=x.device).view(-1, slots) % count
        out: torch.Tensor = module(x, index, torch.ones_like(index, dtype=dtype).requires_grad_(x.requires_grad))
        return out

    dtypes = dict.fromkeys((weight.dtype, torch.float32))
    return [(partial(call, dtype=dtype), lambda tokens: weight.new_zeros(tokens, hidden), own) for dtype in dtypes]


def _zeros_like(weight: torch.Tensor, count: int) -> torch.Tensor:
    return weight.new_zeros(count, weight.shape[1])


def _of_shape(hidden: int, intermediate: int, dtype: torch.dtype, device: torch.device | str) -> list[Call]:
    def zeros(rows: int, columns: int) -> torch.Tensor:
        return torch.zeros(rows, columns, dtype=dtype, device=device, requires_grad=True)

    gate, up, down = zeros(intermediate, hidden), zeros(intermediate, hidden), zeros(hidden, intermediate)
    x_of = partial(_zeros_like, gate)
    return [
        (lambda x: swiglu_glu(x, gate, up), x_of, [gate, up]),
        (lambda x: swiglu_mlp(x, gate, up, down), x_of, [gate, up, down]),
    ]
