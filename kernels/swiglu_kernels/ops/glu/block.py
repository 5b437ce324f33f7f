"""What the operations of x with gate and up weights share: operators, autograd, checks and calls.

`swiglu_glu`, `swiglu_glu_packed`, `swiglu_mlp` and those in fp8 are one operation of `Operands` and `Chosen`. A
`GatedOperation` is one of them: it adds what writes the outputs and the gradients.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import linear

from swiglu_kernels.ops.gate.formula import Formula, check_formula, formula_of
from swiglu_kernels.ops.glu import definition
from swiglu_kernels.ops.glu.choice import AUTO, INPUT_GRADS, SAVES, WEIGHT_GRADS, resolve
from swiglu_kernels.ops.glu.portable_forward import Biases, Pair
from swiglu_kernels.runtime import autocast, internals
from swiglu_kernels.runtime.backend import backend_for
from swiglu_kernels.runtime.checks import check_chunk, check_down, check_glu, check_option, check_packed, check_vector
from swiglu_kernels.runtime.main_grad import HALF, MARK, main_grad_of, stand_in
from swiglu_kernels.runtime.operator import Operator, call_and_keep, keeping, operator, register
from swiglu_kernels.runtime.shortcuts import door
from swiglu_kernels.runtime.shortcuts.door import as_matrix, like_leading, of_matrix
from swiglu_kernels.runtime.shortcuts.series import Series

SEPARATE = "separate"
"""The layout of two weights; those of one that holds both are `packed.LAYOUTS`."""


class Operands(NamedTuple):
    """The tensors of an operation; a backward that does not read x has None there."""

    x: torch.Tensor
    w_gate: torch.Tensor
    """Both halves in a packed layout, as bias_gate; w_up and bias_up are None then."""
    w_up: torch.Tensor | None
    bias_gate: torch.Tensor | None = None
    bias_up: torch.Tensor | None = None
    w_down: torch.Tensor | None = None
    bias_down: torch.Tensor | None = None
    s_x: torch.Tensor | None = None
    """Scales of an operand that was given in fp8."""
    s_gate: torch.Tensor | None = None
    s_up: torch.Tensor | None = None
    s_down: torch.Tensor | None = None


NAMES = Operands._fields[:7]
"""Of what has a gradient."""
SAVED = 6
"""Operands that a backward takes: all up to w_down."""


class Chosen(NamedTuple):
    """What else an operator takes: no "auto" for `save`; the gate's numbers; `recipe` of fp8."""

    weight_grad: str
    save: str
    input_grad: str
    numbers: Sequence[float]
    layout: str = SEPARATE
    chunk_tokens: int = 0
    recipe: str = ""

    @property
    def formula(self) -> Formula:
        """The gate."""
        return formula_of(self.numbers)


def new(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Allocate an output of the dtype and on the device of another tensor."""
    return like.new_empty(shape)


def needs_backward(*tensors: torch.Tensor | None) -> bool:
    """Tell whether autograd will ask for the gradient of any of these."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def in_pairs(
    w_gate: torch.Tensor, w_up: torch.Tensor | None, bias_gate: torch.Tensor | None, bias_up: torch.Tensor | None,
    layout: str,
) -> tuple[Pair, Biases]:  # fmt: skip
    """Return both weights and both biases: as they are, or as views of packed ones, which come as the gate's."""
    if layout != SEPARATE or w_up is None:
        return definition.split_packed(w_gate, bias_gate, layout)
    return (w_gate, w_up), (bias_gate, bias_up)


def _intermediate(w_gate: torch.Tensor, layout: str) -> int:
    return w_gate.shape[0] if layout == SEPARATE else w_gate.shape[1 if layout == "transposed" else 0] // 2


class Gradients:
    """The gradients of operands by name, each allocated when it is first asked for, empty where it is not wanted."""

    def __init__(
        self, d_out: torch.Tensor, given: Operands, needs: Sequence[bool], options: Chosen, into_main_grad: bool
    ) -> None:
        """`needs` says which operands want one; `into_main_grad`: weights that have such add it there."""
        (tokens, features), (w_gate, layout) = d_out.shape, (given.w_gate, options.layout)
        size, hidden = _intermediate(w_gate, layout), w_gate.shape[0 if layout == "transposed" else 1]
        self._like, self._given, self._layout = d_out, given, layout
        self._wanted = set(wanted_of(needs, options.weight_grad))
        weights = {"w_gate", "w_up", "w_down"} & self._wanted if into_main_grad else ()
        found = {name: main_grad_of(getattr(given, name)) for name in weights}
        self._main = {name: main for name, main in found.items() if main is not None}
        self._fused = set(self._main) if d_out.dtype in HALF and options.weight_grad != "fp8" else set()
        if options.layout == SEPARATE and not {"w_gate", "w_up"} <= self._fused:  # one kernel adds both
            self._fused -= {"w_gate", "w_up"}
        for pair in ({"w_gate", "w_up"}, {"bias_gate", "bias_up"}):  # one kernel makes both
            self._wanted |= pair if pair & self._wanted else set()
        of_pairs = ((2 * size,), (0, 0), (0,)) if layout != SEPARATE else ((size,), (size, hidden), (size,))
        self._shapes: dict[str, tuple[int, ...]] = {"x": (tokens, hidden), "w_gate": tuple(w_gate.shape)}
        self._shapes |= zip(("bias_gate", "w_up", "bias_up"), of_pairs, strict=True)
        self._shapes |= {"w_down": (features, size), "bias_down": (features,)}
        self._made: dict[str, torch.Tensor] = {}

    def wants(self, name: str) -> bool:
        """Whether one is wanted, and has elements."""
        return name in self._wanted and 0 not in self._shapes[name]

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self._fused:
            return self._main[name]
        if name not in self._made:
            wanted, shape = name in self._wanted, self._shapes[name]
            if wanted and name == "w_gate" and self._layout != SEPARATE:
                self._made[name] = torch.empty_like(self._given.w_gate)  # with its strides
            else:
                self._made[name] = new(self._like, *(shape if wanted else (0,) * len(shape)))
        return self._made[name]

    def __setitem__(self, name: str, gradient: torch.Tensor) -> None:
        self._made[name] = gradient

    def pairs(self) -> tuple[Pair | None, Pair | None]:
        """Those of gate and up: of the weights and of the biases, views of packed ones; None where not wanted."""
        of_weights, of_biases = self.wants("w_gate"), self.wants("bias_gate")
        like: Any = (self["w_gate"], self["w_up"]) if of_weights else self._given[1:3]
        made = in_pairs(like[0], like[1], self["bias_gate"], self["bias_up"], self._layout)
        return made[0] if of_weights else None, made[1] if of_biases else None  # type: ignore[return-value]

    def of(self, names: Sequence[str]) -> tuple[torch.Tensor, ...]:
        """Return those of some operands, as autograd gets them."""
        for name in self._main.keys() - self._fused:
            self._main.pop(name).add_(self[name])
            self._made[name] = stand_in(getattr(self._given, name))
        return tuple(stand_in(getattr(self._given, n)) if n in self._fused else self[n] for n in names)


def wanted_of(needs: Sequence[bool], weight_grad: str) -> list[str]:
    """Name the operands whose gradients are made: not those of frozen weights."""
    without = ("w_gate", "w_up", "w_down") if weight_grad == "none" else ()
    return [name for name, need in zip(NAMES, needs, strict=False) if need and name not in without]


def outputs(given: Operands, options: Chosen) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocate the result, gate and up; gate and up are empty unless they are kept."""
    x, size = given.x, _intermediate(given.w_gate, options.layout)
    dtype = x.dtype if given.s_x is None else torch.bfloat16
    kept = (x.shape[0], size) if options.save == "preact" else (0, 0)
    out = x.shape[0], size if given.w_down is None else given.w_down.shape[0]
    return x.new_empty(out, dtype=dtype), x.new_empty(kept, dtype=dtype), x.new_empty(kept, dtype=dtype)


def check_operands(tensors: Sequence[Any], layout: str, with_down: bool) -> Operands:
    """Return what a public function was given as tensors, in the order of `Operands`, checked."""
    x, w_gate, w_up, bias_gate, bias_up, *down = tensors
    if layout != SEPARATE:
        x, w_gate = check_packed(x, w_gate, layout)
        bias = check_vector("bias_gate_up", bias_gate, 2 * _intermediate(w_gate, layout), "2 * intermediate", "x", x)
        return Operands(x, w_gate, None, bias)
    x, w_gate, w_up = check_glu(x, w_gate, w_up)
    w_down = bias_down = None
    if with_down:
        w_down = check_down(down[0], w_gate, x)
        bias_down = check_vector("bias_down", down[1], w_down.shape[0], "the first dimension of w_down", "x", x)
    bias_gate = check_vector("bias_gate", bias_gate, w_gate.shape[0], "the first dimension of w_gate", "x", x)
    bias_up = check_vector("bias_up", bias_up, w_gate.shape[0], "the first dimension of w_gate", "x", x)
    return Operands(x, w_gate, w_up, bias_gate, bias_up, w_down, bias_down)


def frozen(given: Operands) -> Operands:
    """Return the operands with weights and biases that want no gradient."""
    parameters: Any = (None if tensor is None else tensor.detach() for tensor in given[1:])
    return Operands(given.x, *parameters)


def trains(given: Operands) -> bool:
    """Whether a weight wants a gradient."""
    return any(weight is not None and weight.requires_grad for weight in (given.w_gate, given.w_up, given.w_down))


class GatedOperation:
    """An operation: its operator, whose first output is differentiable, and that of its backward."""

    def __init__(self, name: str, tensors: int, forward: Callable[..., None], backward: Callable[..., None]) -> None:
        """Register both.

        Args:
            name: of the operator; its backward has "_backward" behind it.
            tensors: how many of `Operands` it has, the first ones.
            forward: forward(given, options, out, gate, up) writes the outputs; gate and up are empty unless kept.
            backward: backward(d_out, given, preactivations, results, options, in_place) writes the `Gradients` that are
                wanted; with `in_place` it may overwrite gate and up, which the operator, being functional, must not.
        """
        self.name, self.tensors = name, tensors
        of_operands = list(Operands.__annotations__.items())
        of_backward = {"d_out": torch.Tensor} | dict(of_operands[:SAVED]) | {"x": torch.Tensor | None}
        of_backward |= {"gate": torch.Tensor, "up": torch.Tensor, "needs": Sequence[bool]}
        names = NAMES[:tensors]

        def begun(*arguments: Any) -> tuple[Any, ...]:
            given, options = Operands(*arguments[:tensors]), Chosen(*arguments[tensors:])
            return given, options, outputs(given, options)

        def run(*arguments: Any) -> tuple[torch.Tensor, ...]:
            given, options, made = begun(*arguments)
            forward(given, options, *made)
            return made

        def begun_backward(d_out: torch.Tensor, *arguments: Any) -> tuple[Any, ...]:
            given, (gate, up, needs, *others) = Operands(*arguments[:SAVED]), arguments[SAVED:]
            options = Chosen(others[0].removeprefix(MARK), *others[1:])
            return given, (gate, up), Gradients(d_out, given, needs, options, others[0].startswith(MARK)), options

        def run_backward(d_out: torch.Tensor, *arguments: Any, in_place: bool = False) -> tuple[torch.Tensor, ...]:
            given, preactivations, results, options = begun_backward(d_out, *arguments)
            backward(d_out, given, preactivations, results, options, in_place)
            return results.of(names)

        def fake_backward(*arguments: Any) -> tuple[torch.Tensor, ...]:
            return begun_backward(*arguments)[2].of(names)

        self.forward = _operator(name, dict(of_operands[:tensors]), 3, run, lambda *arguments: begun(*arguments)[2])
        self.backward = _operator(f"{name}_backward", of_backward, len(names), run_backward, fake_backward)
        register(self.forward, self.backward, keeping(_saved), _gradients, tensors=tensors, preactivations=2)

    def first_call(
        self, kind: door.Kind | None, tensors: tuple[Any, ...], gate: tuple[Any, ...], asked: tuple[str, str, str],
        chunk_tokens: int | None = None, layout: str = SEPARATE, into_main_grad: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """Check the arguments, call the operator, and let calls of this kind be made again.

        Args:
            kind: what `door.find` said of the call.
            tensors: in the order of `Operands`, unchecked, as is all else.
            gate: activation, gate_multiplier, alpha, limit and up_offset.
            asked: weight_grad, save and input_grad.
            chunk_tokens: as of `swiglu_mlp`.
            layout: of the weights.
            into_main_grad: `accumulate_into_main_grad` of `swiglu_glu`, with a `kind` of None.
        """
        weight_grad, save, input_grad = asked
        check_option("weight_grad", weight_grad, WEIGHT_GRADS)
        check_option("save", save, SAVES)
        check_option("input_grad", input_grad, INPUT_GRADS)
        chunk = check_chunk(chunk_tokens)
        if chunk and save == "preact":
            raise ValueError(f"save: expected 'input' or 'auto' with chunk_tokens={chunk_tokens}, got {save!r}")
        formula = check_formula(*gate)
        given = check_operands(autocast.operands(*tensors), layout, self.tensors > SAVED)
        if weight_grad == "none":
            given = frozen(given)
        x, rows, w_down = given.x, as_matrix(given.x), given.w_down
        if backend_for(x) == "torch":
            weights, biases = in_pairs(*given[1:5], layout)
            h = definition.swiglu_glu(x, *weights, *biases, **formula.options)
            return h if w_down is None else linear(h, w_down, given.bias_down)
        intermediate = _intermediate(given.w_gate, layout)
        weight_grad, save, input_grad = resolve(weight_grad, save, input_grad, rows, intermediate, chunk)
        if w_down is not None and asked[0] == AUTO and weight_grad == "triton" and not chunk:
            weight_grad = AUTO  # d_w_down is chosen for itself
        detached = weight_grad == "none"  # and so weights and biases are not those that were given
        if not trains(given):
            weight_grad = "none"
        elif into_main_grad:
            by_torch = asked[0] == AUTO and x.is_cuda and internals.adds_in_float32
            weight_grad = MARK + ("torch" if by_torch else weight_grad)
        with_grad = needs_backward(*given)
        options = weight_grad, save if with_grad else "input", input_grad, formula.numbers, layout, chunk, ""
        out = call_and_keep(self.forward, rows, *given[1 : self.tensors], *options)
        if not (detached and with_grad) and (with_grad or not chunk):
            self.remember(kind, x, options, with_grad)
        return like_leading(out, x)

    def remember(self, kind: door.Kind | None, x: torch.Tensor, options: Sequence[Any], with_grad: bool) -> None:
        """Let calls of a kind, which `door.find` may have said, be made again with these options; x is their first."""
        if kind is not None:
            series = Series()
            again = self.forward.again(series, options) if with_grad else series.again(self._out_alone, options)
            door.remember(kind, of_matrix(x, again))

    def _out_alone(self, *arguments: Any) -> torch.Tensor:
        return self.forward.function(*arguments)[0]


def _operator(
    name: str, tensors: dict[str, Any], results: int, function: Callable[..., Any], fake: Callable[..., Any]
) -> Operator:
    """Make an operator of these tensors and of `Chosen`."""
    kind, every = inspect.Parameter.POSITIONAL_OR_KEYWORD, (tensors | Chosen.__annotations__).items()
    parameters = [inspect.Parameter(parameter, kind, annotation=annotation) for parameter, annotation in every]
    returned: Any = tuple[(torch.Tensor,) * results]  # type: ignore[misc]
    signature = inspect.Signature(parameters, return_annotation=returned)
    for declared in (function, fake):
        declared.__signature__ = signature  # type: ignore[attr-defined]
    made = operator(name)(function)
    made.register_fake(fake)
    return made


@functools.cache
def _saved(weight_grad: str, kept: str) -> tuple[int | None, ...]:
    """Say which operands a backward takes: x, weights, biases and w_down."""
    x = None if (weight_grad, kept) == ("none", "preact") else 0
    return x, 1, 2, *((3, 4) if kept == "input" else (None, None)), 5


def _gradients(backward, d_out, saved, needs, options):
    made, wanted = backward(d_out, *saved, needs[: len(NAMES)], *options), wanted_of(needs, options[0])
    found = dict(zip(NAMES, made, strict=False))
    return [found[name] if name in wanted else None for name in Operands._fields[: len(needs)]]
