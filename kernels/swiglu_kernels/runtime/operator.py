"""Custom operators with little between the call and the kernel, and what a forward saves for its backward.

`torch.library.custom_op` costs 19 us a call where nothing needs a gradient and 72 us where something does (thirteen
arguments, one CPU core, torch 2.13), `operator` 10 and 25 us. It makes functional operators without default values.

Weights and biases are saved as aliases. A parameter whose `.data` is replaced before the backward (`module.to(dtype)`)
then has the gradients that the forward's values give, as with PyTorch's own linear; one that is written in place is
found out by its version, as ever.

Gate and up are the backward's own where the call was made by `call_and_keep` or `Operator.first_output`, and it may
write d_gate and d_up over them when autograd frees the graph. Hooks on saved tensors, and `grad_fn.saved_tensors`, may
have handed them to others (offloading, checkpointing, debuggers): whoever holds a tensor or its memory is counted.
Their versions are raised, so that what slips through is an error and no wrong number.
"""

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch.autograd.graph import increment_version

from swiglu_kernels.runtime import internals
from swiglu_kernels.runtime.main_grad import MARK
from swiglu_kernels.runtime.shortcuts import door
from swiglu_kernels.runtime.shortcuts.series import Series

NAMESPACE = "swiglu_kernels"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
Function = TypeVar("Function", bound=Callable[..., Any])


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
        every = signature.parameters.values()
        parameters = [parameter for parameter in every if parameter.kind is not parameter.KEYWORD_ONLY]
        self._parameters = [parameter.name for parameter in parameters]

        def functional(*arguments: Any) -> Any:
            return function(*arguments)

        functional.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        schema = name + torch.library.infer_schema(functional, mutates_args=())
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, not_for_dynamo(function), "CompositeExplicitAutograd")
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
        # What `Function.apply` itself looks for, transforms, `door.py` has looked for.
        past: Any = super(torch.autograd.Function, function)
        self._first = past.apply

    def first_output(self, series: Series, tensors: Sequence[Any], others: Sequence[Any]) -> Any:
        """Return the first output, with its gradient, past PyTorch's dispatcher; for several outputs.

        Only where nobody watches the dispatcher (`door.py`); what else the operator returns is its backward's alone.
        `series` is that of the calls with arguments of this kind, `tensors` are the operator's first arguments, all
        that may be tensors.
        """
        return self._first(*tensors, (series, others))

    def again(self, series: Series, others: Sequence[Any]) -> Callable[..., Any]:
        """Return what does `first_output` for the tensors that it is given."""
        return lambda *tensors: self.first_output(series, tensors, others)


def not_for_dynamo(function: Function) -> Function:
    """The function, as Dynamo must not trace it: an operator's outside of graphs, or one that breaks them.

    Unlike what PyTorch has for that, it does not import Dynamo, which takes two seconds: where nobody else has, nothing
    is traced.
    """
    disabled = internals.disabled_in_dynamo(function)

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        return (disabled if "torch._dynamo" in sys.modules else function)(*arguments, **options)

    return call  # type: ignore[return-value]


def refuse_double_backward(op: Operator) -> None:
    """Register an autograd formula for a backward op that raises when its result is differentiated again."""
    op.register_autograd(lambda ctx, *gradients: _refuse(op))


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
        if getattr(ctx, "into_main_grad", False):
            own = {at: leaf for at, leaf in enumerate(ctx.leaves, start=1) if leaf is not None}
            saved = tuple(own.get(at, tensor) for at, tensor in enumerate(saved))  # a hook may have made others
        free = may_overwrite(ctx, saved, preactivations)
        repeats = free and ctx.followers is not None and not door.watched()
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
    options: Sequence[Any], into_main_grad: bool = False,
) -> None:  # fmt: skip
    """Save these for the backward, in this order; x may be None.

    `into_main_grad`: the backward gets parameters as themselves, and views of them.
    """
    ctx.options, ctx.shape_of_x = options, None if x is None else x.shape
    kept = [own.detach() if own is not None and own.is_leaf else own for own in parameters]
    if into_main_grad:
        ctx.into_main_grad = True
    # What is no leaf is no parameter: the graph alone holds it.
    ctx.leaves = [own if into_main_grad or (own is not None and own.is_leaf) else None for own in parameters]
    ctx.save_for_backward(x, *kept, *preactivations)


def keeping(positions: Callable[[str, str], Sequence[int | None]]) -> Callable[..., None]:
    """Return a `keep` that saves x, parameters and all outputs but the first.

    Args:
        positions: of the first two options, where among the tensors x and the parameters are; None: not saved.
    """

    def keep(ctx: Any, tensors: Sequence[Any], options: Sequence[Any], output: Sequence[torch.Tensor]) -> None:
        places = positions(options[0], options[1])
        x, *parameters = (None if at is None or at >= len(tensors) else tensors[at] for at in places)
        save(ctx, x, parameters, output[1:], options, options[0].startswith(MARK))

    return keep


def check(ctx: Any, x: torch.Tensor | None, gradient: torch.Tensor) -> None:
    """Raise RuntimeError where data of another kind was put into x since the forward."""
    if x is not None and (x.shape != ctx.shape_of_x or x.dtype != gradient.dtype):
        before = f"{tuple(ctx.shape_of_x)}, {gradient.dtype} in the forward"
        raise RuntimeError(f"x was {before}; since then its .data became {tuple(x.shape)}, {x.dtype}")


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
            replaced = "a parameter's .data was replaced after the forward"
            raise RuntimeError(f"{replaced}: create_graph=True has no graph of it")
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
