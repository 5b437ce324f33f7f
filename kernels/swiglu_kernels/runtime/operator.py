"""Custom operators with little between the call and the kernel.

`torch.library.custom_op` costs 19 us a call where nothing needs a gradient and 72 us where something does (thirteen
arguments, one CPU core, torch 2.13), much of it for filling in default values and for checks of what an author may get
wrong. This decorator registers the same things and costs 10 and 25 us. It offers what the package needs: functional
operators without default values.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from swiglu_kernels.runtime import internals
from swiglu_kernels.runtime.shortcuts.series import Series

NAMESPACE = "swiglu_kernels"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def operator(name: str) -> "Callable[[Callable[..., Any]], Operator]":
    """Make a custom operator of the decorated function, whose annotations give the schema."""
    return lambda function: Operator(name, function)


class Operator:
    """A custom operator, called like the function that it was made from, with positional arguments only.

    Keyword-only parameters of the function are no arguments of the operator, which leaves them at their defaults;
    `function` takes them.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name = f"{NAMESPACE}::{name}"
        self.function = function
        signature = inspect.signature(function)
        parameters = [
            parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.KEYWORD_ONLY
        ]
        self._parameters = [parameter.name for parameter in parameters]

        def functional(*arguments: Any) -> Any:
            return function(*arguments)

        functional.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        schema = name + torch.library.infer_schema(functional, mutates_args=())
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, _not_for_dynamo(function), "CompositeExplicitAutograd")
        self._name = name
        self._overload = getattr(getattr(torch.ops, NAMESPACE), name).default

    def __call__(self, *arguments: Any) -> Any:
        """Call the operator."""
        if (
            torch.compiler.is_compiling()
            or not internals.has_operators
            or internals.transforms_active()
            or (torch.is_grad_enabled() and internals.any_requires_grad(*arguments))
        ):
            return self._overload(*arguments)
        with internals.below_autograd():  # past a kernel in Python that would find nothing to do
            return self._overload(*arguments)

    def register_fake(self, function: Callable[..., Any]) -> None:
        """Register the function that allocates the outputs for tensors without data.

        Its parameters are those of the operator's that it needs, by name.
        """
        positions = [self._parameters.index(name) for name in inspect.signature(function).parameters]

        def fake(*arguments: Any) -> Any:
            return function(*(arguments[position] for position in positions))

        torch.library.register_fake(self.name, fake, lib=_LIBRARY)

    def register_autograd(
        self, backward: Callable[..., Any], setup_context: Callable[..., None] | None = None,
        keep: Callable[..., None] | None = None,
    ) -> None:  # fmt: skip
        """Register backward(ctx, *gradients) and setup_context(ctx, inputs, output), as torch.library has them.

        With `first_output`, which needs it, keep(ctx, tensors, others, output) takes the place of the latter.
        """
        if not internals.has_operators:
            torch.library.register_autograd(self.name, backward, setup_context=setup_context, lib=_LIBRARY)
            return

        def below(keyset: Any, *arguments: Any) -> Any:
            with internals.below_autograd():
                return self._overload.redispatch(keyset & internals.after_autograd, *arguments)

        def forward(ctx: Any, *arguments_and_keyset: Any) -> Any:
            *arguments, keyset = arguments_and_keyset
            output = below(keyset, *arguments)
            if setup_context is not None:
                setup_context(ctx, arguments, output)
            return output

        methods = {
            "forward": staticmethod(forward),
            "backward": staticmethod(lambda ctx, *gradients: (*backward(ctx, *gradients), None)),
        }
        differentiable: Any = type(self._name, (torch.autograd.Function,), methods)

        def autograd(keyset: Any, *arguments: Any) -> Any:
            if torch.is_grad_enabled() and internals.any_requires_grad(*arguments):
                return differentiable.apply(*arguments, keyset)
            return below(keyset, *arguments)

        _LIBRARY.impl(self._name, autograd, "Autograd", with_keyset=True)

        if keep is None:
            return

        def first(ctx: Any, *tensors_and_call: Any) -> Any:
            tensors, (series, others) = tensors_and_call[:-1], tensors_and_call[-1]
            output = series.call(self.function, tensors, others)
            keep(ctx, tensors, others, output)
            ctx.set_materialize_grads(False)
            ctx.followers, ctx.keeps_to_itself = series.followers, True
            return output[0]

        methods = {"forward": staticmethod(first), "backward": staticmethod(backward)}
        function: Any = type(f"{self._name}_first", (torch.autograd.Function,), methods)
        # What `Function.apply` itself looks for, transforms, `repeat.py` has looked for.
        past: Any = super(torch.autograd.Function, function)
        self._first = past.apply

    def first_output(self, series: Series, tensors: Sequence[Any], others: Sequence[Any]) -> Any:
        """Return the first output, with its gradient, past PyTorch's dispatcher; for several outputs.

        Only where nobody watches the dispatcher (`repeat.py`); what else the operator returns is its backward's alone.

        Args:
            series: of the calls with arguments of this kind.
            tensors: the operator's first arguments, all that may be tensors; None where there is none.
            others: its other arguments.
        """
        return self._first(*tensors, (series, others))


def _not_for_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, as Dynamo must not trace it when it is called outside of its graphs.

    Unlike what PyTorch has for that, it does not import Dynamo, which takes two seconds: where nobody else has, nothing
    is traced.
    """
    disabled = internals.disabled_in_dynamo(function)

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        return (disabled if "torch._dynamo" in sys.modules else function)(*arguments)

    return call
