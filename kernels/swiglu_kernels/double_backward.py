"""The answer to a second differentiation: an error, since the kernels compute first derivatives only."""

from typing import Any, NoReturn

import torch


def refuse_double_backward(op: Any) -> None:
    """Register an autograd formula for a backward op that raises when its result is differentiated again."""
    name = op._qualname

    def backward(ctx: Any, *gradients: torch.Tensor) -> NoReturn:
        raise RuntimeError(
            f"{name} cannot be differentiated (create_graph=True): the kernels compute first derivatives only; "
            "use the functions of swiglu_kernels.reference where higher derivatives are needed"
        )

    op.register_autograd(backward)
