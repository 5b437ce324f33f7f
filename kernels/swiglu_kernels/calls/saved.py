"""Whether a backward may overwrite what the forward saved: if nobody else sees it and autograd is done with it."""

import threading
from collections.abc import Callable
from typing import Any

import torch

from swiglu_kernels.calls.operator import Operator


class _Call(threading.local):
    keeps_to_itself = False


_call = _Call()


def call_and_keep(operator: Operator, *arguments: Any) -> Any:
    """Call an operator and return its first output; what else it returns is seen by nobody but its backward."""
    if torch.compiler.is_compiling():
        return operator(*arguments)[0]
    return _keeping(operator, *arguments)[0]


def call_past_dispatcher(operator: Operator, *arguments: Any) -> Any:
    """As `call_and_keep`, past the dispatcher (`Operator.first_output`)."""
    return _keeping(operator.first_output, *arguments)


def _keeping(call: Callable[..., Any], *arguments: Any) -> Any:
    _call.keeps_to_itself = True
    try:
        return call(*arguments)
    finally:
        _call.keeps_to_itself = False


def note_call(ctx: Any) -> None:
    """Note in setup_context which kind of call this is, for `may_overwrite`."""
    ctx.keeps_to_itself = _call.keeps_to_itself


def backward_with(ctx: Any, operator: Operator, saved: torch.Tensor, *arguments: Any) -> Any:
    """Call the operator of a backward, or its function with `in_place=True` where `saved` may be overwritten."""
    if may_overwrite(ctx, saved):
        return operator.function(*arguments, in_place=True)
    return operator(*arguments)


def may_overwrite(ctx: Any, saved: torch.Tensor) -> bool:
    """Tell whether the backward that is running may overwrite an output that its forward saved.

    It may where the call was made by `call_and_keep`, the graph is freed afterwards (no retain_graph), and the tensor
    is an ordinary one: one that belongs to a trace, a transform or a mode may be asked for again.
    """
    if not ctx.keeps_to_itself or type(saved) is not torch.Tensor or torch.compiler.is_compiling():
        return False
    return torch._C._current_graph_task_id() != -1 and not torch._C._autograd._get_current_graph_task_keep_graph()
