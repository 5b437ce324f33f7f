"""What a forward saves for its backward, and whether that may overwrite it: if nobody else holds it.

Weights and biases are saved as aliases. A parameter whose `.data` is replaced before the backward (`module.to(dtype)`)
then has the gradients that the forward's values give, as with PyTorch's own linear; one that is written in place is
found out by its version, as ever.

Gate and up are the backward's own where the call was made by `call_and_keep` or `Operator.first_output`, and it may
write d_gate and d_up over them when autograd frees the graph. Hooks on saved tensors, and `grad_fn.saved_tensors`, may
have handed them to others (offloading, checkpointing, debuggers): whoever holds a tensor or its memory is counted.
Their versions are raised, so that what slips through is an error and no wrong number.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version

from swiglu_kernels.runtime import internals
from swiglu_kernels.runtime.double_backward import refuse_create_graph, refuse_double_backward
from swiglu_kernels.runtime.operator import Operator
from swiglu_kernels.runtime.shortcuts.series import Series


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


def register(
    operator: Operator, backward: Operator, keep: Callable[..., None], gradients: Callable[..., Any],
    *, tensors: int, preactivations: int,
) -> None:  # fmt: skip
    """Let an operator's first output be differentiated; what else it returns is for the backward alone.

    Args:
        operator: its first arguments are tensors or None, the others values.
        backward: computes gradients; its function takes `in_place`, that it may overwrite gate and up.
        keep: keep(ctx, tensors, others, output) of the operator's arguments and outputs calls `save`.
        gradients: gradients(backward, gradient, saved, needs, others) calls `backward`, and returns a gradient or None
            for each tensor; `saved` is what was saved, `needs` says of each tensor whether it wants a gradient.
        tensors: how many there are.
        preactivations: how many of those that are saved, the last, are gate and up.
    """

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)  # or autograd fills tensors of zeros for all other outputs
        ctx.followers, ctx.keeps_to_itself = None, _call.keeps_to_itself
        keep(ctx, inputs[:tensors], inputs[tensors:], output)

    def padded(backward: Callable[..., Any], gradient: torch.Tensor, *others: Any) -> Any:
        *saved, needs, options = others
        made = gradients(backward, gradient, saved, needs[:tensors], options)
        return *made, *(None,) * (len(needs) - tensors)

    in_place = functools.partial(padded, functools.partial(backward.function, in_place=True))

    def differentiate(ctx: Any, gradient: torch.Tensor | None, *_: Any) -> Any:
        needs = ctx.needs_input_grad
        if gradient is None:  # undefined, since gradients are not materialised
            return (None,) * len(needs)
        saved = ctx.saved_tensors
        free = may_overwrite(ctx, saved, preactivations)
        repeats = free and ctx.followers is not None and not internals.watched()
        if free:
            increment_version(saved[-preactivations:])
        if repeats:
            # What the forward was known by settles most of it; hooks on saved tensors may have changed the rest.
            given = [gradient, *[tensor for tensor in saved if tensor is not None]]
            series = ctx.followers.get(needs, given)
            if series is not None:
                return series.call(in_place, (gradient, *saved), (needs, ctx.options))
        check(ctx, saved[0], gradient)
        if not all(tensor.is_contiguous() for tensor in saved[-preactivations:]):  # as only a hook makes them
            saved = *saved[:-preactivations], *(tensor.contiguous() for tensor in saved[-preactivations:])
        elif repeats:
            series = Series()
            ctx.followers.add(needs, given, series)
            return series.call(in_place, (gradient, *saved), (needs, ctx.options))
        if free:
            return in_place(gradient, *saved, needs, ctx.options)
        refuse_create_graph(backward, saved[0])
        return padded(backward, gradient, *with_leaves(ctx, saved), needs, ctx.options)

    operator.register_autograd(differentiate, setup_context, keep)
    refuse_double_backward(backward)


def save(
    ctx: Any, x: torch.Tensor | None, parameters: Sequence[torch.Tensor | None], preactivations: Sequence[torch.Tensor],
    options: Sequence[Any],
) -> None:  # fmt: skip
    """Save these for the backward, in this order; x may be None."""
    ctx.options, ctx.shape_of_x = options, None if x is None else x.shape
    leaves: list[torch.Tensor | None] = []
    kept: list[torch.Tensor | None] = []
    for parameter in parameters:
        if parameter is not None and parameter.is_leaf:
            leaves.append(parameter)
            kept.append(parameter.detach())
        else:  # what is no leaf is no parameter: the graph alone holds it
            leaves.append(None)
            kept.append(parameter)
    ctx.leaves = leaves
    ctx.save_for_backward(x, *kept, *preactivations)


def check(ctx: Any, x: torch.Tensor | None, gradient: torch.Tensor) -> None:
    """Raise RuntimeError where data of another kind was put into x since the forward."""
    if x is not None and (x.shape != ctx.shape_of_x or x.dtype != gradient.dtype):
        raise RuntimeError(
            f"x was {tuple(ctx.shape_of_x)}, {gradient.dtype} in the forward; since then its .data became "
            f"{tuple(x.shape)}, {x.dtype}"
        )


def with_leaves(ctx: Any, saved: tuple[Any, ...]) -> list[Any]:
    """Return what was saved; for a graph of the gradients, parameters as themselves, which carry its edges.

    Raises:
        RuntimeError: other data was put into a parameter since, and there is no graph of what it was.
    """
    tensors = list(saved)
    if not torch.is_grad_enabled():  # autograd enables gradients in a backward for create_graph alone
        return tensors
    for position, leaf in enumerate(ctx.leaves, start=1):
        if leaf is None:
            continue
        if leaf.data_ptr() != saved[position].data_ptr() or leaf.dtype != saved[position].dtype:
            raise RuntimeError(
                "a parameter's .data was replaced after the forward: create_graph=True has no graph of it"
            )
        tensors[position] = leaf
    return tensors


def may_overwrite(ctx: Any, saved: tuple[Any, ...], count: int) -> bool:
    """Tell whether the backward that is running may overwrite the last `count` saved tensors.

    That is where nobody else holds them, and they are ordinary ones: one that belongs to a trace, a transform or a mode
    may be asked for again.
    """
    if not ctx.keeps_to_itself or torch.is_grad_enabled() or not internals.graph_is_freed():
        return False
    if type(saved[-1]) is not torch.Tensor or torch.compiler.is_compiling():
        return False
    for number in range(-count, 0):  # noqa: SIM110  (a generator takes longer)
        if not internals.held_by_no_more(saved, number, _ALONE):
            return False
    return True


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
