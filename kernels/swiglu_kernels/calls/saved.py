"""What a forward saves for its backward, and whether that may overwrite it: if nobody else holds it.

Weights and biases are saved as aliases. A parameter whose `.data` is replaced before the backward (`module.to(dtype)`)
then has the gradients that the forward's values give, as with PyTorch's own linear; one that is written in place is
found out by its version, as ever.

Gate and up are the backward's own where the call was made by `call_and_keep` or `Operator.first_output`, and it may
write d_gate and d_up over them when autograd frees the graph. Hooks on saved tensors, and `grad_fn.saved_tensors`, may
have handed them to others (offloading, checkpointing, debuggers): whoever holds a tensor or its memory is counted.
Their versions are raised, so that what slips through is an error and no wrong number.
"""

import threading
from collections.abc import Sequence
from typing import Any

import torch

from swiglu_kernels.calls.operator import Operator
from swiglu_kernels.launches import internals, plan


class _Call(threading.local):
    keeps_to_itself = False


_call = _Call()


def call_and_keep(operator: Operator, *arguments: Any) -> Any:
    """Call an operator and return its first output; what else it returns is seen by nobody but its backward."""
    if torch.compiler.is_compiling():
        return operator(*arguments)[0]
    _call.keeps_to_itself = True
    try:
        return operator(*arguments)[0]
    finally:
        _call.keeps_to_itself = False


def save(
    ctx: Any,
    x: torch.Tensor | None,
    weights: Sequence[torch.Tensor],
    preactivations: Sequence[torch.Tensor],
    others: Sequence[torch.Tensor | None],
) -> None:
    """Save these in setup_context, in this order, for `load`; x may be None."""
    ctx.keeps_to_itself = _call.keeps_to_itself
    ctx.preactivations = len(preactivations)
    ctx.shape_of_x = None if x is None else x.shape
    # What is no leaf is no parameter: the graph alone holds it.
    ctx.leaves = [one if one is not None and one.is_leaf else None for one in (*weights, *others)]
    kept = [one.detach() if one is not None and one.is_leaf else one for one in (*weights, *others)]
    ctx.save_for_backward(x, *kept[: len(weights)], *preactivations, *kept[len(weights) :])


def load(ctx: Any, gradient: torch.Tensor, weights: int) -> tuple[list[Any], bool]:
    """Return what was saved, and whether the backward that is running may overwrite gate and up.

    Where a graph of the gradients is asked for (create_graph), parameters come as themselves, which carry its edges.

    Args:
        ctx: as `save` left it.
        gradient: of the forward's first output.
        weights: how many were saved.

    Raises:
        RuntimeError: data of another kind was put into x since, or with create_graph any into a parameter.
    """
    saved = ctx.saved_tensors
    free = ctx.keeps_to_itself and internals.graph_is_freed() and _are_free(saved, 1 + weights, ctx.preactivations)
    x = saved[0]
    if x is not None and (x.shape != ctx.shape_of_x or x.dtype != gradient.dtype):
        raise RuntimeError(
            f"x was {tuple(ctx.shape_of_x)}, {gradient.dtype} in the forward; since then its .data became "
            f"{tuple(x.shape)}, {x.dtype}"
        )
    if not torch.is_grad_enabled():  # autograd enables gradients in a backward for create_graph alone
        return list(saved), free
    tensors = list(saved)
    for number, leaf in enumerate(ctx.leaves, start=1):
        position = number if number <= weights else number + ctx.preactivations
        if leaf is None:
            continue
        if leaf.data_ptr() != saved[position].data_ptr() or leaf.dtype != saved[position].dtype:
            raise RuntimeError(
                "a parameter's .data was replaced after the forward: create_graph=True has no graph of it"
            )
        tensors[position] = leaf
    return tensors, False


def _are_free(saved: tuple[Any, ...], first: int, count: int) -> bool:
    """Tell whether nobody else holds `count` tensors from `first` on, and they are ordinary ones.

    One that belongs to a trace, a transform or a mode may be asked for again.
    """
    return (
        type(saved[first]) is torch.Tensor
        and not torch.compiler.is_compiling()
        and all(internals.held_by_no_more(saved, number, _ALONE) for number in range(first, first + count))
    )


class _Probe(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x.clone(), x.clone())
        return x.clone()


def _alone() -> tuple[int, int, int]:
    """Return what is counted where nobody but a node of the graph holds a tensor."""
    with torch.inference_mode(False), torch.enable_grad():
        output = _Probe.apply(torch.zeros(1, device="cpu", requires_grad=True))
    try:
        saved = output.grad_fn.saved_tensors  # some releases of PyTorch free them with the output
    except RuntimeError:
        return 0, 0, 0  # nobody holds so few: nothing is overwritten
    return internals.references(saved, 0)


_ALONE = _alone() if internals.can_count else (0, 0, 0)


def backward_with(
    ctx: Any, free: bool, operator: Operator, preactivations: Sequence[torch.Tensor], *arguments: Any
) -> Any:
    """Call the operator of a backward, or its function with `in_place=True` where its preactivations are free.

    What the forward was known by settles most of the backward's kind; hooks on saved tensors may have changed the rest.
    """
    if not free:
        return operator(*arguments)
    torch.autograd.graph.increment_version(preactivations)
    followers = getattr(ctx, "followers", None)
    if followers is None or internals.watched():
        return operator.function(*arguments, in_place=True)
    tensors = [one for one in arguments if isinstance(one, torch.Tensor)]
    kind = ctx.needs_input_grad, *plan.kind_of(tensors)
    series = followers.get(kind)
    if series is None:
        series = followers[kind] = plan.Series()
    return series.call(operator.function, *arguments, in_place=True)
