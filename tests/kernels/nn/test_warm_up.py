import gc
import random
import time

import pytest
import torch
from torch import nn

from swiglu_kernels import FusedSwiGLU, FusedSwiGLUExperts, FusedSwiGLUMLP, FusedSwiGLUPackedMLP, backend_for, warm_up
from swiglu_kernels.runtime.launch import Launch
from swiglu_kernels.runtime.shortcuts import plan

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(backend_for(DEVICE) == "torch", reason="no GPU, and Triton's interpreter is off")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[tuple[object, ...]]:
    """The kernels that ran, by what they are compiled for."""
    seen: set[tuple[object, ...]] = set()
    run_alone = Launch.run_alone

    def noted(self: Launch) -> object:
        numbers = {name: value for name, value in self.arguments.items() if isinstance(value, (int, str))}
        seen.add((self.kernel, self.num_warps, self.num_stages, *sorted(map(str, numbers.items()))))
        return run_alone(self)

    monkeypatch.setattr(Launch, "run_alone", noted)
    plan.forget()
    return seen


def model() -> nn.Module:
    layers = [FusedSwiGLUMLP(32, 48), FusedSwiGLUMLP(32, 48), FusedSwiGLU(32, 48), FusedSwiGLUPackedMLP(32, 48)]
    return nn.ModuleList(layers).to(DEVICE)


@pytest.mark.parametrize("gradients", [False, True], ids=["", "gradients"])
def test_later_calls_need_no_other_kernel(launched: set[tuple[object, ...]], gradients: bool) -> None:
    layers = model()
    assert warm_up(layers, tokens=[1, 40, 40], gradients=gradients).calls == (12 if gradients else 6), "two are alike"
    assert all(parameter.grad is None for parameter in layers.parameters())
    before = set(launched)
    for layer in layers:
        for tokens in (1, 40):
            with torch.set_grad_enabled(gradients):
                out = layer(torch.randn(tokens, 32, device=DEVICE, requires_grad=gradients))
            if gradients:
                out.backward(torch.randn_like(out))
    assert launched == before


@pytest.mark.parametrize("gradients", [False, True], ids=["", "gradients"])
def test_experts(launched: set[tuple[object, ...]], gradients: bool) -> None:
    layer = FusedSwiGLUExperts(16, 16, 3, dtype=torch.bfloat16, device=DEVICE)
    with pytest.raises(ValueError, match="top_k: FusedSwiGLUExperts does not say"):
        warm_up(layer, tokens=[5])
    assert warm_up(nn.ModuleList([layer]), tokens=[5], top_k=2, gradients=gradients).calls == (4 if gradients else 2)
    before = set(launched)
    for dtype in (torch.float32, torch.bfloat16):
        x, weights = torch.randn(5, 16, device=DEVICE).bfloat16(), torch.rand(5, 2, device=DEVICE).to(dtype)
        with torch.set_grad_enabled(gradients):
            index = torch.randint(0, 3, (5, 2), device=DEVICE)
            out = layer(x.requires_grad_(gradients), index, weights.requires_grad_(gradients))
        if gradients:
            out.backward(torch.randn_like(out))
    assert launched == before


def test_shapes(launched: set[tuple[object, ...]]) -> None:
    assert warm_up([(32, 48), (16, 16)], tokens=[3], dtype=torch.float32, device=DEVICE).calls == 4
    assert launched


def test_what_cannot_be_warmed_up() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        warm_up(model(), tokens=[0, 4])
    with pytest.raises(ValueError, match="at least 1"):
        warm_up(model(), tokens=[])
    with pytest.raises(ValueError, match="Linear has no fused module"):
        warm_up(nn.Linear(2, 2), tokens=[1])


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: a compiler is waited for on no other device")
def test_no_length_waits_for_a_compiler_after_all_were_warmed_up(request: pytest.FixtureRequest) -> None:
    gc.disable()  # a collection of all that torch and triton hold takes 150 ms, whatever is called
    request.addfinalizer(gc.enable)
    layer = FusedSwiGLUMLP(1024, 2816, device="cuda", dtype=torch.bfloat16)
    done = warm_up(layer, gradients=True)
    assert done.variants > 20
    assert f"{done.variants} kernels compiled by {done.processes} processes" in str(done)

    def step(tokens: int) -> float:
        x = torch.randn(tokens, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        torch.cuda.synchronize()
        began = time.perf_counter()
        torch.autograd.grad(layer(x), [x, *layer.parameters()], torch.ones_like(x))
        torch.cuda.synchronize()
        return time.perf_counter() - began

    step(20_000)  # what PyTorch itself does for the first time, and memory for all that follow
    lengths = random.Random(0).sample(range(1, 16385), 40)
    longer_ms = {tokens: 1e3 * (step(tokens) - step(tokens)) for tokens in lengths}
    assert max(longer_ms.values()) < 50, longer_ms


def test_a_survey_runs_nothing_and_finds_what_runs(launched: set[tuple[object, ...]]) -> None:
    layer = FusedSwiGLUMLP(32, 48).to(DEVICE)
    seen: list[Launch] = []
    with plan.surveyed(seen.append):
        warm_up(layer, tokens=[1, 40], gradients=True)
    assert seen
    assert not launched
    warm_up(layer, tokens=[1, 40], gradients=True)
    names = {launch.kernel.fn.__name__ for launch in seen}
    assert names == {kernel.fn.__name__ for kernel, *_ in launched}  # type: ignore[attr-defined]
