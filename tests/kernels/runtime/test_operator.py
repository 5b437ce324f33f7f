"""The package's own way to register operators, and what a forward saves: overwritten where nobody else holds it.

opcheck of each operator is in the tests of its file.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accuracy import DEVICE, assert_equal
from torch.utils.checkpoint import checkpoint

from swiglu_kernels import FusedSwiGLU, FusedSwiGLUMLP, reference, silu_mul, swiglu_glu, swiglu_glu_packed, swiglu_mlp
from swiglu_kernels.ops.gate.formula import PLAIN
from swiglu_kernels.runtime import operator
from swiglu_kernels.runtime.shortcuts import door, plan


def test_vmap_works_and_functional_gradients_are_refused() -> None:
    gate, up = torch.randn(2, 3, device=DEVICE), torch.randn(3, device=DEVICE)

    def products(up: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda one: silu_mul(one, up))(gate)

    torch.testing.assert_close(products(up), reference.silu_mul(gate, up.expand(2, 3)))
    with pytest.raises(RuntimeError, match="functorch"):
        torch.func.grad(lambda up: products(up).sum())(up)


HIDDEN, INTERMEDIATE = 32, 48
OPERATIONS = {
    swiglu_glu: [(INTERMEDIATE, HIDDEN), (INTERMEDIATE, HIDDEN)],
    swiglu_glu_packed: [(2 * INTERMEDIATE, HIDDEN)],
    swiglu_mlp: [(INTERMEDIATE, HIDDEN), (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)],
}
BY_OPERATION = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)


def operands(operation, dtype=torch.float32):
    torch.manual_seed(0)
    shapes = [(20, HIDDEN), *OPERATIONS[operation]]
    return [torch.randn(shape, device=DEVICE, dtype=dtype).requires_grad_() for shape in shapes]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each backward may overwrite gate and up."""
    given: list[bool] = []
    may_overwrite = operator.may_overwrite

    def noted(*arguments: Any) -> bool:
        given.append(may_overwrite(*arguments))
        return given[-1]

    monkeypatch.setattr(operator, "may_overwrite", noted)
    return given


@pytest.fixture(params=[False, True], ids=["", "short way"])
def calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[range]:
    """Through the dispatcher, or past it from the second call on."""
    if request.param:
        monkeypatch.setattr(door, "_shut", False)
        monkeypatch.setattr(door, "on_gpu", lambda _: True)
    plan.forget()
    yield range(2)
    plan.forget()


@BY_OPERATION
def test_only_a_backward_that_frees_its_graph_overwrites(operation, calls: range, answers: list[bool]) -> None:
    for _ in calls:
        answers.clear()
        inputs = operands(operation)
        out = operation(*inputs, save="preact").sum()
        out.backward(retain_graph=True)
        torch.autograd.grad(out, inputs[0], retain_graph=True)
        out.backward()
        torch.autograd.grad(operation(*inputs, save="preact").sum(), inputs[0], create_graph=True)
        assert answers == [False, False, True, False]


def test_a_graph_break_elsewhere_changes_nothing(answers: list[bool]) -> None:
    """From then on Dynamo's own frames call functions, and hold their arguments."""

    @torch.compile(backend="eager")
    def broken(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1

    for _ in range(2):
        swiglu_glu(*operands(swiglu_glu), save="preact").sum().backward()
        broken(torch.ones(2))
    assert answers == [True, True]


def gate_and_up(out: torch.Tensor) -> list[torch.Tensor]:
    """As the graph holds them."""
    return [kept for kept in out.grad_fn.saved_tensors if kept is not None and kept.shape == (20, INTERMEDIATE)]


@pytest.mark.parametrize("kept", ["it", "a view"])
@pytest.mark.parametrize("handed_out", ["it", "a view"])
@BY_OPERATION
def test_what_a_hook_on_saved_tensors_keeps_is_left_alone(operation, kept: str, handed_out: str, calls: range) -> None:
    for _ in calls:
        held: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor, held: list[torch.Tensor] = held) -> torch.Tensor:
            held.append(tensor if kept == "it" else tensor.detach())
            return tensor if handed_out == "it" else tensor.view(tensor.shape)

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
            out = operation(*operands(operation), save="preact")
        before = [tensor.clone() for tensor in held]
        assert sum(tensor.shape == (20, INTERMEDIATE) for tensor in held) == 2, "gate and up"
        out.sum().backward()
        assert_equal(held, before)


@pytest.mark.parametrize("kind", ["tensor", "view"])
@BY_OPERATION
def test_what_was_asked_of_the_graph_is_left_alone(operation, kind: str, calls: range, answers: list[bool]) -> None:
    for _ in calls:
        out = operation(*operands(operation), save="preact")
        held = gate_and_up(out)
        if kind == "view":
            held = [tensor.detach() for tensor in held]
        before = [tensor.clone() for tensor in held]
        out.sum().backward()
        assert len(held) == 2
        assert_equal(held, before)
    assert not any(answers)


@BY_OPERATION
def test_libraries_that_let_go_cost_no_memory(operation, answers: list[bool]) -> None:
    """Checkpoints and offloading make gate and up anew for the backward alone; its values are right either way."""
    inputs = operands(operation)
    expected = torch.autograd.grad(operation(*inputs, save="preact").sum(), inputs)
    answers.clear()
    for reentrant in (True, False):
        out = checkpoint(lambda *given: operation(*given, save="preact"), *inputs, use_reentrant=reentrant)
        out.sum().backward()
        assert_equal([tensor.grad for tensor in inputs], expected)
        for tensor in inputs:
            tensor.grad = None
    with torch.autograd.graph.save_on_cpu():
        out = operation(*inputs, save="preact")
    assert_equal(torch.autograd.grad(out.sum(), inputs), expected)
    assert answers[0], "a checkpoint that runs a backward of its own"


def test_whoever_escapes_the_count_meets_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The versions say that gate and up changed."""
    monkeypatch.setattr(operator, "_ALONE", (99, 99, 99))
    factor = torch.ones((), device=DEVICE, requires_grad=True)
    out = swiglu_glu(*operands(swiglu_glu), save="preact")
    other = (gate_and_up(out)[0] * factor).sum()
    out.sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


MODULES = {"glu": lambda: FusedSwiGLU(HIDDEN, INTERMEDIATE), "mlp": lambda: FusedSwiGLUMLP(HIDDEN, INTERMEDIATE)}


def eager(module: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """The same by PyTorch's own linear."""

    def call(x: torch.Tensor) -> torch.Tensor:
        z = torch.nn.functional.silu(module.gate_proj(x)) * module.up_proj(x)
        return module.down_proj(z) if hasattr(module, "down_proj") else z

    return call


def swapped_values(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = torch.full_like(parameter.data, 3.0)


CHANGES = {"values": swapped_values, "dtype": lambda module: module.to(torch.bfloat16)}


@pytest.mark.parametrize("save", ["preact", "input"])
@pytest.mark.parametrize(("name", "change"), zip(MODULES, CHANGES, strict=True))
def test_the_backward_uses_what_the_forward_saw(name: str, change: str, save: str, calls: range) -> None:
    for _ in calls:
        gradients = []
        for way in (eager, lambda module: module):
            torch.manual_seed(0)
            module = MODULES[name]().to(DEVICE)
            module.options = type(module.options)(save=save)
            x = torch.randn(20, HIDDEN, device=DEVICE, requires_grad=True)
            out = way(module)(x)
            CHANGES[change](module)
            gradients.append(torch.autograd.grad(out.sum(), x)[0])
        torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3)


@BY_OPERATION
def test_other_data_in_x_is_an_error(operation) -> None:
    for other in (lambda x: x.half(), lambda x: x[:7]):
        x, *weights = operands(operation)
        out = operation(x, *weights)
        x.data = other(x.data)
        with pytest.raises(RuntimeError, match=r"since then its \.data became"):
            out.sum().backward()


@BY_OPERATION
def test_a_graph_of_gradients_needs_the_parameters_as_they_were(operation) -> None:
    inputs = operands(operation)
    out = operation(*inputs)
    inputs[1].data = inputs[1].data.clone()
    with pytest.raises(RuntimeError, match=r"\.data was replaced after the forward"):
        torch.autograd.grad(out.sum(), inputs, create_graph=True)


@pytest.mark.parametrize("name", MODULES)
def test_weights_of_another_shape_are_taken_as_they_are(name: str) -> None:
    """As nn.Linear does: `in_features` is a name."""
    module = MODULES[name]().to(DEVICE)
    for projection in (module.gate_proj, module.up_proj):
        projection.weight.data = torch.randn(INTERMEDIATE, 2 * HIDDEN, device=DEVICE)
    x = torch.randn(4, 2 * HIDDEN, device=DEVICE)
    torch.testing.assert_close(module(x), eager(module)(x), rtol=1e-3, atol=1e-3)
    with pytest.raises(ValueError, match=rf"\[\.\.\., {2 * HIDDEN}\]"):
        module(x[:, :HIDDEN])


def test_what_somebody_else_holds_is_left_alone():
    """The operator itself returns gate and up, as torch.library.opcheck sees them."""
    x, w_gate, w_up = operands(swiglu_glu)
    options = (None, None, "torch", "preact", "torch", PLAIN.numbers, "separate", 0, "")
    z, gate, up = torch.ops.swiglu_kernels.glu(x, w_gate, w_up, *options)
    before = gate.clone(), up.clone()
    z.sum().backward()
    assert_equal((gate, up), before)
