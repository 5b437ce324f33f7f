"""The named choices of how gradients are made, and what "auto" stands for.

Measured on one H200 (bf16, hidden 4096, intermediate 11008). Forward + dX + dW of swiglu_glu, relative to eager:

    1024-8192 tokens   save="input" 1.30; save="preact" with dX and dW on the fly ("fused", "triton") 1.7-2.8
    16 tokens          portable kernel for dW 232 us, torch 208 us
    1 token            portable kernel for dW 212 us, torch 289 us

and products of d_gate and d_up once they are stored, by `hopper/products.py`, relative to torch:

    dW   0.79-0.97 at 64-16384 tokens
    dX   0.98-1.00 where its tiles fill their waves; 1.1-1.4 where they do not, as of 1100, 1280 or 2304 tokens

so "auto" is save="preact" wherever memory is not the point (`save_memory`), dX in two steps by Triton where its tiles
fill their waves (`products.sum_fills_waves`), and dW by Triton, an MLP's d_w_down where it fills its own. What the
portable kernels do instead is slower than PyTorch's products from two tokens on, but for narrow layers, and so are the
hand-scheduled ones where rows do not begin at multiples of 128 bytes and tokens are many
(`results/nvidia-h200/parts.csv`): "auto" then takes PyTorch's.

The forward of the portable kernel takes 1.16-1.22 of the bare product at 1024-8192 tokens, where eager takes 1.12-1.16
and two products by torch with one elementwise launch 1.06-1.11. So where no hand-scheduled kernel takes the tensors
(other GPUs, other versions of Triton, biases, other gates), the forward of more than PORTABLE_TOKENS is the latter,
unless a tile was tuned for it.

All of this was measured on compute capability 9.0 alone. On another GPU a product of ours may lose to PyTorch's, while
one elementwise launch between PyTorch's products moves fewer bytes than eager's several. So there "auto" takes that, in
both directions; only the forward of up to UNMEASURED_TOKENS tokens is one launch, which has little to do but to read
the weights once. A tile that `tune` keeps for a forward, or for an MLP's d_h, is taken.
"""

import torch

from swiglu_kernels.hopper import experts, products
from swiglu_kernels.hopper.forward import why_not
from swiglu_kernels.hopper.shared import why_off
from swiglu_kernels.launches.backend import INTERPRETING, capability_of, card_of, multiprocessors
from swiglu_kernels.launches.formula import PLAIN, Formula
from swiglu_kernels.launches.internals import constant_in_graphs
from swiglu_kernels.tiles import candidates, cards
from swiglu_kernels.tiles.candidates import BY_TORCH, LINE, MEASURED, Problem, portable_is_slower, rows_begin_at
from swiglu_kernels.tiles.tuning import lookup

AUTO = "auto"
WEIGHT_GRADS = ("triton", "torch", "none", AUTO)
SAVES = ("preact", "input", AUTO)
INPUT_GRADS = ("fused", "two_step", "torch", AUTO)


@constant_in_graphs  # a GPU does not change while a compiled function lives
def why_unmeasured(device: torch.device) -> str:
    """Say that the choices for a GPU rest on no measurement, or return "" where they do; "" without a GPU as well."""
    capability = capability_of(device)
    if capability is None or capability == MEASURED:
        return ""
    here, there = (".".join(map(str, one)) for one in (capability, MEASURED))
    return f"this is compute capability {here}, and only {there} was measured"


@constant_in_graphs
def _hopper_multiprocessors(device: torch.device, kernel: str) -> int:
    """Return how many multiprocessors run a kernel of `admission.KERNELS` here, 0 for none."""
    if device.type != "cuda" or why_off(kernel) is not None or capability_of(device) != (9, 0):
        return 0
    return multiprocessors(device)


def _problem(processors: int, device: torch.device, dtype: torch.dtype, *sizes: int) -> Problem:
    """What a choice depends on, on a GPU of so many multiprocessors; `sizes` are tokens, hidden, intermediate."""
    tokens, hidden, intermediate = sizes
    return Problem(
        tokens, hidden, intermediate, dtype, capability_of(device), processors,
        card=card_of(device) or cards.H200,
    )  # fmt: skip


def multiplied_by_torch(
    x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor, has_bias: bool, formula: Formula, stored: bool
) -> bool:
    """Whether the forward is two products by torch and one elementwise launch, not one launch.

    Args:
        x: [tokens, hidden].
        w_gate, w_up: [intermediate, hidden].
        has_bias: whether gate or up have biases.
        formula: the gate.
        stored: whether gate and up are kept.
    """
    (tokens, hidden), intermediate, plain = x.shape, w_gate.shape[0], formula == PLAIN and not has_bias
    if INTERPRETING or 0 in (tokens, hidden, intermediate):
        return False
    capability = capability_of(x.device)
    if plain:
        tuned = lookup("forward-preact" if stored else "forward", x, tokens, hidden, intermediate)
        if tuned is not None:
            return tuned == BY_TORCH
        if why_not(x, w_gate, w_up, capability) is None:
            return candidates.multiplied_by_torch(
                _problem(multiprocessors(x.device), x.device, x.dtype, tokens, hidden, intermediate)
            )
    return portable_is_slower(tokens, hidden, not why_unmeasured(x.device))


def resolve(
    weight_grad: str, save: str, input_grad: str, x: torch.Tensor, intermediate: int, chunk_tokens: int = 0
) -> tuple[str, str, str]:
    """Return (weight_grad, save, input_grad) with every "auto" replaced by what is fastest.

    Args:
        weight_grad, save, input_grad: as asked for.
        x: [tokens, hidden].
        intermediate: the other dimension of the weights.
        chunk_tokens: tokens that are worked on at a time, so that memory is the point; 0 for all.
    """
    tokens, hidden = chunk_tokens or x.shape[0], x.shape[1]
    fits = x.dtype in (torch.float16, torch.bfloat16) and hidden % 8 == 0 and intermediate % 8 == 0
    if save == AUTO:
        save = "input" if chunk_tokens else "preact"
    if input_grad == AUTO:
        hopper = _hopper_multiprocessors(x.device, "dX") if fits and rows_begin_at(LINE, hidden, intermediate) else 0
        by_hand = hopper and products.sum_fills_waves(tokens, hidden, intermediate, hopper)
        input_grad = "two_step" if by_hand else "torch"
    if weight_grad == AUTO:
        tuned = lookup("weight-grad", x, tokens, hidden, intermediate) if fits else None
        if tuned is not None:
            by_triton = tuned != BY_TORCH
        elif tokens == 1:
            by_triton = not why_unmeasured(x.device)
        else:
            hopper = _hopper_multiprocessors(x.device, "dW") if fits else 0
            sizes = tokens, hidden, intermediate
            by_triton = hopper > 0 and not candidates.weight_grad_by_torch(_problem(hopper, x.device, x.dtype, *sizes))
        weight_grad = "triton" if by_triton else "torch"
    return weight_grad, save, input_grad


def why_weight_grad(x: torch.Tensor, intermediate: int) -> str:
    """Say on what "auto" bases its choice for weight gradients: a tuned choice, or the card on which it was measured.

    Args:
        x: [tokens, hidden].
        intermediate: rows of w_gate.
    """
    card, (tokens, hidden) = card_of(x.device), x.shape
    if lookup("weight-grad", x, tokens, hidden, intermediate) is not None:
        return f"tuned on this {card}"
    if capability_of(x.device) != MEASURED:
        return why_unmeasured(x.device)
    return cards.measured_on(card)


def down_grad_by_torch(d_out: torch.Tensor, intermediate: int) -> bool:
    """Whether "auto" makes an MLP's d_w_down by torch, where the other two weight gradients are by Triton.

    Args:
        d_out: [tokens, hidden].
        intermediate: columns of w_down.
    """
    tokens, hidden = d_out.shape
    tuned = lookup("mlp-weight-grad", d_out, tokens, hidden, intermediate)
    if tuned is not None:
        return tuned == BY_TORCH
    hopper = _hopper_multiprocessors(d_out.device, "dW")
    return bool(hopper) and candidates.down_weight_grad_by_torch(
        _problem(multiprocessors(d_out.device), d_out.device, d_out.dtype, tokens, hidden, intermediate)
    )


def why_slow_rows(hidden: int, intermediate: int) -> str:
    """Say that rows of so many elements of 16 bits are slow to read by tiles, or return ""."""
    slow = [f"{name} {size}" for name, size in (("hidden", hidden), ("intermediate", intermediate)) if size % LINE]
    return f"not a multiple of {LINE}: {' and '.join(slow)}" if slow else ""


def hidden_grad_by_torch(d_out: torch.Tensor, w_down: torch.Tensor, formula: Formula) -> bool:
    """Whether an MLP's d_h is a product by torch with an elementwise launch behind it, not one launch.

    Args:
        d_out: [tokens, hidden].
        w_down: [hidden, intermediate].
        formula: the gate.
    """
    if INTERPRETING:
        return False
    (tokens, hidden), intermediate, capability = d_out.shape, w_down.shape[1], capability_of(d_out.device)
    tuned = lookup("mlp-hidden-grad", d_out, tokens, hidden, intermediate)
    if tuned is not None and (formula == PLAIN or tuned.schedule == "portable"):
        return tuned == BY_TORCH
    if formula != PLAIN or products.why_not("hidden gradient", [(d_out, w_down)], [], capability) is not None:
        return True
    return candidates.hidden_grad_by_torch(
        _problem(multiprocessors(d_out.device), d_out.device, d_out.dtype, tokens, hidden, intermediate)
    )


def why_not_hopper(
    x: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor, activation: str, in_fp8: bool = False
) -> str | None:
    """Say why experts cannot take the hand-scheduled kernels, or return None where they can."""
    for kernel in ("fp8 experts", "experts") if in_fp8 else ("experts",):
        if off := why_off(kernel):
            return off
        if not _hopper_multiprocessors(x.device, kernel):
            return f"the kernels are for compute capability 9.0, and x is on {x.device}"
    return experts.why_not(x, w_gate_up, w_down, activation)


def why_portable(
    pairs: int,
    x: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    activation: str,
    with_grad: bool,
    in_fp8: bool = False,
) -> str | None:
    """Say why the portable kernels are the fastest for experts, or return None where the hand-scheduled ones are."""
    least = experts.LEAST_ROWS[with_grad]
    few = f"an expert has fewer than {least} rows on average" if pairs < least * w_gate_up.shape[0] else None
    return why_not_hopper(x, w_gate_up, w_down, activation, in_fp8) or few
