"""The answer to a second differentiation: an error, since the kernels compute first derivatives only."""

from typing import Any, NoReturn

import torch

from swiglu_kernels.runtime.operator import Operator


def refuse_double_backward(op: Operator) -> None:
    """Register an autograd formula for a backward op that raises when its result is differentiated again."""

    def backward(ctx: Any, *gradients: torch.Tensor) -> NoReturn:
        _refuse(op)

    op.register_autograd(backward)


def refuse_create_graph(op: Operator, saved_x: torch.Tensor | None) -> None:
    """Raise at once where a graph of the gradients is asked for and x was not saved.

    With frozen weights and gate and up saved, no input of the backward op has a graph behind it: autograd would take
    its results for constants, and the second derivative would be silently wrong.
    """
    if saved_x is None and torch.is_grad_enabled():  # autograd enables gradients in a backward for create_graph alone
        _refuse(op)


def _refuse(op: Operator) -> NoReturn:
    raise RuntimeError(
        f"{op.name} cannot be differentiated (create_graph=True): the kernels compute first derivatives only; "
        "use the functions of swiglu_kernels.reference where higher derivatives are needed"
    )
