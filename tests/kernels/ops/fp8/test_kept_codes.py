"""Codes of weights that serve many calls, in inference and in training, and never those of a weight that changed."""

import copy
import functools

import pytest
import torch
from accuracy import DEVICE, random_tensor
from torch.utils.checkpoint import checkpoint

import swiglu_kernels
from swiglu_kernels.ops.fp8 import kept_codes, operation
from swiglu_kernels.ops.fp8.kept_codes import KeptCodes
from swiglu_kernels.runtime import internals

BFLOAT16 = torch.bfloat16
MODULES = {"FusedSwiGLU": 2, "FusedSwiGLUMLP": 3, "FusedSwiGLUPackedMLP": 3}
"""And how many weights they quantise."""
by_recipe = pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
by_module = pytest.mark.parametrize(
    ("name", "recipe"), [*zip(MODULES, ["rowwise", "rowwise", "blockwise"], strict=True)]
)


@pytest.fixture
def made(monkeypatch) -> list[str]:
    """Which weights are quantised, each time that one is: for a forward, or along for a backward."""
    found: list[str] = []

    def noting(function, kind):
        def quantise(tensor, recipe, weight, *others):
            if weight:
                found.append(kind)
            return function(tensor, recipe, weight, *others)

        return quantise

    for name in ("quantise_rows", "quantise_both"):
        monkeypatch.setattr(operation, name, noting(getattr(operation, name), name.removeprefix("quantise_")))
    return found


def layer(name: str = "FusedSwiGLUMLP", recipe: str = "rowwise", **options):
    torch.manual_seed(0)
    return getattr(swiglu_kernels, name)(16, 32, precision=f"fp8-{recipe}", device=DEVICE, dtype=BFLOAT16, **options)


def x(seed: int = 0) -> torch.Tensor:
    return random_tensor(3, 16, dtype=BFLOAT16, seed=seed)


def step(module, given: torch.Tensor, call=None) -> list[torch.Tensor]:
    """What a forward and backward yield: the output, the gradient of x, and those of weights, added up."""
    given = given.clone().requires_grad_()
    out = (module if call is None else call)(given)
    out.backward(torch.ones_like(out))
    return [out.detach(), given.grad, *(weight.grad.clone() for weight in module.parameters())]


def same(found, expected) -> bool:
    return all(torch.equal(own, other) for own, other in zip(found, expected, strict=True))


@by_module
def test_a_module_keeps_codes_until_a_weight_changes(name, recipe, made):
    module, count = layer(name, recipe), MODULES[name]
    plain = copy.deepcopy(module.keep_codes()).keep_codes(False)

    def call() -> int:
        """Check a call against a module that keeps none; how many weights it quantised."""
        with torch.no_grad():
            expected = plain(x())
            made.clear()
            assert torch.equal(module(x()), expected)
        return len(made)

    assert [call(), call()] == [count, 0]
    for each in (module, plain):
        with torch.no_grad():
            next(each.parameters()).mul_(1.5)
    assert [call(), call()] == [1 if name != "FusedSwiGLUPackedMLP" else 2, 0]
    for each in (module, plain):
        next(each.parameters()).data = next(each.parameters()).data * 0.5  # memory of its own
    assert call() > 0
    for each in (module, plain):
        next(each.parameters()).data.mul_(2)  # not noticed
    module.keep_codes()
    assert [call(), call()] == [count, 0]


@by_module
def test_in_training_once_for_all_micro_batches(name, recipe, made):
    module, plain = layer(name, recipe).keep_codes(), layer(name, recipe)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (module, plain)]
    for _ in range(2):
        for micro in range(3):
            expected = step(plain, x(micro))
            made.clear()
            assert same(step(module, x(micro)), expected)
            # forward, and the same weights along another axis for the gradients of h and x
            assert len(made) == (0 if micro else 2 * MODULES[name])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():  # codes of training serve an evaluation
        module(x())
        made.clear()
        module(x())
    assert not made


def test_with_recomputation_compiled_and_by_value(made):
    module, plain = layer(save="input").keep_codes(), layer(save="input")
    expected = step(plain, x())
    made.clear()
    assert same(step(module, x(), lambda given: checkpoint(module, given, use_reentrant=False)), expected)
    assert made == ["rows"] * 3 + ["both"] * 3
    made.clear()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    module.zero_grad()
    assert same(step(module, x(), compiled), expected)
    assert len(made) > 6  # in every call: forward, recomputation and backward
    weights, kept = [weight.detach() for weight in module.parameters()], KeptCodes()
    call = functools.partial(swiglu_kernels.swiglu_mlp_fp8, x(), *weights, recipe="rowwise", kept=kept)
    call()
    made.clear()
    assert torch.equal(call(), expected[0])
    assert not made
    kept.clear()
    call()
    assert made == ["rows"] * 3


def test_an_optimizer_that_writes_through_data(made):
    """Versions say nothing then; compiled steps raise them."""

    class Bypassing(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for weight in self.param_groups[0]["params"]:
                weight.data.add_(weight.grad, alpha=-0.1)

    module, plain = layer().keep_codes(), layer()
    for kind in (Bypassing, torch.optim.SGD):
        for each in (module, plain):
            step(each, x())
            optimizer = kind(each.parameters(), lr=0.1)
            torch.compile(optimizer.step, backend="aot_eager")() if kind is torch.optim.SGD else optimizer.step()
            each.zero_grad()
        assert same(step(module, x()), step(plain, x()))


def test_weights_that_are_gathered_or_cast_are_not_kept(monkeypatch, made):
    module, plain = layer().keep_codes(), layer()
    with torch.autocast(DEVICE.type, torch.bfloat16), monkeypatch.context() as patch:
        patch.setattr(kept_codes.internals, "fsdp_is_used", lambda: True)
        assert same(step(module, x()), step(plain, x()))
    assert module._codes._held == []
    for each in (module, plain):
        each.float()
        with torch.autocast(DEVICE.type, torch.bfloat16):
            each.zero_grad()
            step(each, x())
    assert module._codes._held == []
    assert same([weight.grad for weight in module.parameters()], [weight.grad for weight in plain.parameters()])


def test_fully_shard_is_seen(monkeypatch):
    assert not internals.fsdp_is_used()
    from torch.distributed import _composable_state

    owner = torch.nn.Linear(1, 1)
    monkeypatch.setattr(_composable_state, "_module_state_mapping", {owner: object()})
    assert internals.fsdp_is_used()
    assert not KeptCodes().take(torch.zeros(2, 2))


def test_captured_graphs(monkeypatch, made):
    """A capture quantises what it may not keep: a replay reads the weights as they are then."""
    module = layer().keep_codes()
    with torch.no_grad():
        module(x())
        monkeypatch.setattr(kept_codes, "_capturing", lambda weight: True)
        for frozen in (False, True):
            made.clear()
            module.requires_grad_(not frozen).keep_codes()
            monkeypatch.setattr(kept_codes, "_capturing", lambda weight: False)
            module(x())
            monkeypatch.setattr(kept_codes, "_capturing", lambda weight: True)
            module(x())
            assert len(made) == (3 if frozen else 6)
        pinned = module._codes._pinned
        assert len(pinned) == 3
        monkeypatch.setattr(kept_codes, "_capturing", lambda weight: False)
        for weight in module.parameters():
            weight.mul_(2)
        module(x())
        assert all(entry.codes for entry in pinned)  # the graph reads them
    module.requires_grad_()
    monkeypatch.setattr(kept_codes, "_capturing", lambda weight: True)
    module(x())  # replays of a step may write the weights
    monkeypatch.setattr(kept_codes, "_capturing", lambda weight: False)
    made.clear()
    module(x())
    module(x())
    assert len(made) == 6


@pytest.mark.gpu
@by_recipe
def test_a_captured_step_on_a_gpu(recipe):
    module, plain = layer(recipe=recipe).keep_codes(), layer(recipe=recipe)
    step(module, x()), step(plain, x())
    graph, given = torch.cuda.CUDAGraph(), x().requires_grad_()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = module(given)
        gradients = torch.autograd.grad(out.sum(), [given, *module.parameters()])
    for each in (module, plain):
        with torch.no_grad():
            for weight in each.parameters():
                weight.mul_(-1.5)
        each.zero_grad()
    graph.replay()
    expected = step(plain, x())
    assert same([out, *gradients], expected)
    assert same(step(module, x()), expected)
