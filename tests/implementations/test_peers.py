"""The rows of other projects, on packages of the same names and signatures written in plain torch."""

import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from specimens import small_case
from torch import Tensor
from torch.nn.functional import silu

from swiglu_bench.check.admission import admit
from swiglu_bench.check.inputs import make_problem
from swiglu_bench.check.judge import make_judge
from swiglu_bench.implementations import peers
from swiglu_bench.spec import registry
from swiglu_bench.spec.cases import VARIANTS, Case, Dtype, Mode, Scope, Shape
from swiglu_bench.spec.implementation import Implementation

CPU = torch.device("cpu")
ALL = (peers.quack, peers.quack_tuned, peers.flash_swiglu_mlp)


def gated(product: Tensor) -> Tensor:
    return silu(product[..., ::2]) * product[..., 1::2]


class Quack:
    """QuACK's functions as far as the rows call them; the weights are interleaved."""

    def __init__(self) -> None:
        self.tuned: list[bool] = []

    def gemm_gated(
        self, A: Tensor, B: Tensor, *, activation: str, store_preact: bool, tuned: bool
    ) -> tuple[Tensor | None, Tensor]:
        assert (activation, store_preact, torch.is_grad_enabled()) == ("swiglu", False, False)
        self.tuned.append(tuned)
        return None, gated(A @ B)

    def linear_gated_func(self, x: Tensor, weight: Tensor, activation: str, *, tuned: bool) -> tuple[Tensor, Tensor]:
        assert activation == "swiglu"
        self.tuned.append(tuned)
        preactivation = x @ weight.T
        return preactivation, gated(preactivation).detach()  # its post-activations carry no gradient

    def mlp_func(self, x: Tensor, weight1: Tensor, weight2: Tensor, activation: str, *, tuned: bool) -> Tensor:
        assert activation == "swiglu"
        self.tuned.append(tuned)
        return gated(x @ weight1.T) @ weight2.T


def flash_swiglu(input: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor) -> Tensor:
    assert input.dim() == 3
    return (silu(input @ gate_weight.T) * (input @ up_weight.T)) @ down_weight.T


def module(name: str, **contents: Any) -> types.ModuleType:
    made = types.ModuleType(name)
    vars(made).update(contents)
    return made


@pytest.fixture
def quack(monkeypatch: pytest.MonkeyPatch) -> Quack:
    """A package `quack`; what the row gives to torch.compile runs as it is."""
    fake = Quack()
    for name, functions in {
        "quack": {},
        "quack.gemm_interface": {"gemm_gated": fake.gemm_gated},
        "quack.linear": {"linear_gated_func": fake.linear_gated_func},
        "quack.mlp": {"mlp_func": fake.mlp_func},
    }.items():
        monkeypatch.setitem(sys.modules, name, module(name, **functions))
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setitem(sys.modules, "flash_swiglu_mlp", module("flash_swiglu_mlp", flash_swiglu=flash_swiglu))
    return fake


def failures(one: Implementation, case: Case) -> list[str]:
    """What admission has against it, with every check that it knows."""
    problem = make_problem(case, CPU)
    judges = [make_judge(problem, variant) for variant in range(VARIANTS)]
    checks = admit(one, problem, judges, thorough=True).checks
    if case.mode is Mode.STEP:
        assert {check.tensor for check in checks} >= set(one.gradients(case.scope))
    return [f"{check.tensor}: {check.reason}" for check in checks if not check.ok]


# The layout


def test_rows_of_gate_and_up_alternate() -> None:
    gate, up = torch.arange(6.0).reshape(3, 2), -torch.arange(6.0).reshape(3, 2)
    joined = peers.interleave(gate, up)
    assert joined.tolist() == [[0, 1], [0, -1], [2, 3], [-2, -3], [4, 5], [-4, -5]]
    again = peers.deinterleave(joined)
    assert torch.equal(again[0], gate)
    assert torch.equal(again[1], up)


def test_gradients_go_back_the_way_the_weights_came() -> None:
    gate, up = torch.randn(5, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    joined = peers.interleave(gate, up)
    own = joined.detach().requires_grad_()
    factor = torch.randn(10, 3)
    (joined * factor).sum().backward()
    (own * factor).sum().backward()
    assert own.grad is not None
    for expected, found in zip((gate.grad, up.grad), peers.deinterleave(own.grad), strict=True):
        assert expected is not None
        assert torch.equal(expected, found)


def test_the_gradient_of_the_gate() -> None:
    preactivation = torch.randn(7, 12, dtype=torch.float64, requires_grad=True)
    dz = torch.randn(7, 6, dtype=torch.float64)
    gated(preactivation).backward(dz)
    found = peers.gate_gradient(dz, preactivation.detach())
    torch.testing.assert_close(found, preactivation.grad, atol=1e-6, rtol=1e-5)
    assert peers.gate_gradient(dz.half(), preactivation.detach().half()).dtype == torch.float16


# The rows


ROWS = [(one, scope) for one in ALL for scope in sorted(one.scopes)]


@pytest.mark.parametrize("mode", [Mode.FORWARD, Mode.STEP])
@pytest.mark.parametrize(("one", "scope"), ROWS, ids=lambda part: getattr(part, "name", part))
def test_a_row_is_right_if_its_package_is(quack: Quack, one: Implementation, scope: Scope, mode: Mode) -> None:
    assert failures(one, small_case(scope=scope, mode=mode)) == []
    if one is not peers.flash_swiglu_mlp:
        assert set(quack.tuned) == {one is peers.quack_tuned}


def test_gate_and_up_in_the_wrong_order_are_noticed(quack: Quack, monkeypatch: pytest.MonkeyPatch) -> None:
    straight = peers.interleave
    monkeypatch.setattr(peers, "interleave", lambda gate, up: straight(up, gate))
    assert failures(peers.quack, small_case(scope=Scope.GLU, mode=Mode.STEP))


# Where they do not run


@pytest.fixture
def everything_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda name: types.SimpleNamespace())


@pytest.mark.usefixtures("everything_installed")
@pytest.mark.parametrize("one", ALL, ids=lambda one: one.name)
@pytest.mark.parametrize(
    ("device", "capability", "words"),
    [("cuda", "8.0", "this GPU has 8.0."), ("cpu", "", "there is none here."), ("cuda", "9.0", ""), ("cuda", "", "")],
)
def test_only_on_the_gpus_they_are_made_for(one: Implementation, device: str, capability: str, words: str) -> None:
    for interpreter in (False, True):
        reason = one.unavailable(device, interpreter, capability)
        if words:
            assert reason is not None
            assert reason.startswith("It needs a GPU of compute capability 9.x or 10.x")
            assert reason.endswith(words)
        else:
            assert reason is None


def absent(name: str) -> Callable[[str], object]:
    return lambda asked: None if asked == name else types.SimpleNamespace()


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.name)
def test_without_the_package(one: Implementation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.importlib.util, "find_spec", absent(one.package))
    assert one.unavailable("cuda", capability="9.0") == f"The package {one.package} is not installed."


def test_what_they_refuse() -> None:
    def case(dtype: Dtype = Dtype.BFLOAT16, hidden: int = 64, scope: Scope = Scope.MLP) -> Case:
        return Case(Shape("s", hidden, 48, "a test", (16,)), 16, dtype, scope, Mode.STEP)

    assert peers.quack.refuses(case()) is None
    assert peers.quack.refuses(case(Dtype.FLOAT32)) == "It does not take float32; it takes bfloat16, float16."
    assert peers.quack.refuses(case(hidden=65)) == "It takes hidden and intermediate sizes that are multiples of 8."
    assert peers.flash_swiglu_mlp.refuses(case(Dtype.FLOAT32)) is None
    assert peers.flash_swiglu_mlp.refuses(case(scope=Scope.GLU)) == "It has no glu scope; it has mlp."


# On a GPU, with the real packages


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("one", "scope"), [row for row in ROWS if not row[0].on_request], ids=lambda part: getattr(part, "name", part)
)
def test_the_real_package(one: Implementation, scope: Scope) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    capability = "{}.{}".format(*torch.cuda.get_device_capability())
    case = Case(Shape("s", 256, 384, "a test", (130,)), 130, Dtype.BFLOAT16, scope, Mode.STEP)
    reason = one.refuses(case) or one.unavailable("cuda", capability=capability)
    if reason:
        pytest.skip(reason)
    importlib.import_module(one.package)
    problem = make_problem(case, "cuda")
    judges = [make_judge(problem, variant) for variant in range(VARIANTS)]
    assert [check for check in admit(one, problem, judges).checks if not check.ok] == []
