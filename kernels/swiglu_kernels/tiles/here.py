"""What a choice asks of the GPU that is here."""

from dataclasses import replace

import torch

from swiglu_kernels.hopper import shared
from swiglu_kernels.runtime.backend import capability_of, card_of, multiprocessors
from swiglu_kernels.runtime.internals import constant_in_graphs
from swiglu_kernels.tiles import cards
from swiglu_kernels.tiles.candidates import BY_TORCH, KERNELS, LINE, MEASURED, Choice, TileProblem
from swiglu_kernels.tiles.tuning import portable_tile


@constant_in_graphs  # a GPU does not change while a compiled function lives
def why_unmeasured(device: torch.device) -> str:
    """Say that the choices for a GPU rest on no measurement, or return "" where they do; "" without a GPU as well."""
    capability = capability_of(device)
    if capability is None or capability == MEASURED:
        return ""
    here, there = (".".join(map(str, numbers)) for numbers in (capability, MEASURED))
    return f"this is compute capability {here}, and only {there} was measured"


@constant_in_graphs
def hopper_multiprocessors(device: torch.device, kernel: str) -> int:
    """Return how many multiprocessors run a kernel of `admission.KERNELS` here, 0 for none."""
    if device.type != "cuda" or shared.why_off(kernel) is not None or capability_of(device) != (9, 0):
        return 0
    return multiprocessors(device)


def problem_of(like: torch.Tensor, sizes: tuple[int, ...]) -> TileProblem:
    """What a choice depends on: tokens, hidden and intermediate size, and a tensor's dtype and device."""
    (tokens, hidden, intermediate), device = sizes, like.device
    gpu, card = (capability_of(device), multiprocessors(device)), card_of(device) or cards.H200
    return TileProblem(tokens, hidden, intermediate, like.dtype, *gpu, card=card)


def why_slow_rows(hidden: int, intermediate: int) -> str:
    """Say that rows of so many elements of 16 bits are slow to read by tiles, or return ""."""
    slow = [f"{name} {size}" for name, size in (("hidden", hidden), ("intermediate", intermediate)) if size % LINE]
    return f"not a multiple of {LINE}: {' and '.join(slow)}" if slow else ""


def choose(name: str, at: TileProblem, tuned: Choice | None, aside: str | None = None, aligned: bool = True) -> Choice:
    """Return which kernel of `candidates.KERNELS` one launch takes: by hand where it can, in the tuned tile if any.

    `tuned` may be PyTorch's products, which are no launch: then the shipped one is taken. `aside` says why a kernel
    by hand cannot take the tensors, `aligned` whether the portable one may access them 16 bytes at a time.
    """
    kernel = KERNELS[name]
    tuned = None if tuned == BY_TORCH else tuned
    by_hand = None if aside is not None else tuned or kernel.shipped_by_hand(at)
    if by_hand is not None and by_hand.schedule != "portable":
        return replace(by_hand, why="tuned" if tuned else "")
    return Choice("portable", portable_tile(tuned, aligned) or kernel.tile(at, aligned), aside or "")
