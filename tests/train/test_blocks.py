import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from trained import BY_NAME, NANO, contender, decoder, images

from swiglu_bench.rows.training import PERMUTED
from swiglu_bench.spec.cases import Case, Dtype, Mode, Scope, Shape
from swiglu_bench.spec.implementation import Step, implementation
from swiglu_bench.spec.problem import Problem
from swiglu_bench.train.blocks import Contender, GradientMissing, blocks, trained, why_not
from swiglu_bench.train.loop import Training
from swiglu_bench.train.model import experiment as prepare
from swiglu_bench.train.model import sites

TRAINED = ["eager-packed", "unsloth", "silu-mul", "fused-dw-torch", "fused-auto", "fused-mlp", "fused-mlp-auto"]


def grads(training: Training) -> dict[str, torch.Tensor]:
    """Gradients of the first step, of blocks in the layout of eager."""
    loss, _ = training.experiment.loss(training.network, training.experiment.data.batch(0, 0))
    loss.backward()
    found: dict[str, torch.Tensor] = {}
    for number, block in enumerate(training.blocks):
        masters = dict(block.masters.items())
        if "w_gate_up" in masters:
            gradient = masters.pop("w_gate_up").grad
            assert gradient is not None
            found[f"{number} w_gate"], found[f"{number} w_up"] = gradient.chunk(2)
        found |= {f"{number} {name}": master.grad for name, master in masters.items() if master.grad is not None}
    return found


@pytest.mark.parametrize("name", TRAINED)
def test_every_kind_of_implementation_yields_eager_s_gradients(name: str, tmp_path: Path) -> None:
    experiment = decoder(tmp_path)
    wanted = grads(Training(experiment, contender("eager"), 0))
    found = grads(Training(experiment, contender(name), 0))
    assert len(wanted) == 6
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["eager", "eager-packed", "unsloth", "fused-mlp-auto"])
def test_16_bits_are_autocast_s(name: str, tmp_path: Path) -> None:
    """fp32 weights, products of their bf16 copies, fp32 gradients: what torch.autocast makes of nn.Linear."""
    experiment = images(tmp_path, dtype=Dtype.BFLOAT16)
    training = Training(experiment, contender(name), 0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = experiment.make()
    place, x = sites(network)[0], torch.randn(16, 16)
    weights = [getattr(place.mlp, f"{one}_proj").weight for one in ("gate", "up", "down")]
    with torch.autocast("cpu", torch.bfloat16):
        gate, up = functional.linear(x, weights[0]), functional.linear(x, weights[1])
        wanted = functional.linear(functional.silu(gate) * up, weights[2])
    found = training.blocks[0](x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.02)
    wanted.sum().backward()
    found.sum().backward()
    masters = dict(training.blocks[0].masters.items())
    assert all(master.dtype == torch.float32 and master.grad is not None for master in masters.values())
    for block in training.blocks:
        block.check_gradients()
    torch.testing.assert_close(masters["w_down"].grad, weights[2].grad, rtol=0.05, atol=0.05)


def test_packed_weights_begin_unrounded(tmp_path: Path) -> None:
    training = Training(images(tmp_path, dtype=Dtype.BFLOAT16), contender("eager-packed"), 0)
    packed = training.blocks[0].masters["w_gate_up"]
    assert packed.dtype == torch.float32
    assert not torch.equal(packed, packed.bfloat16().float())


def test_after_a_step_the_next_forward_has_the_new_weights(tmp_path: Path) -> None:
    training = Training(images(tmp_path, dtype=Dtype.BFLOAT16), contender("eager"), 0)
    x = torch.randn(16, 16)
    before = training.blocks[0](x).detach()
    training.advance()
    assert not torch.equal(before, training.blocks[0](x))


def test_frozen_weights_stay_and_are_not_in_the_optimiser(tmp_path: Path) -> None:
    experiment = images(tmp_path)
    training, whole = Training(experiment, contender("fused"), 0), Training(experiment, contender("eager"), 0)
    before = {name: master.clone() for name, master in training.blocks[0].masters.items()}
    assert training.advance().loss == pytest.approx(whole.advance().loss, rel=1e-5)
    training.advance()
    for name, master in training.blocks[0].masters.items():
        assert torch.equal(master, before[name])
    in_block = 3 * 16 * 24
    assert sum(p.numel() for p in whole.parameters) - sum(p.numel() for p in training.parameters) == in_block


def test_permuted_is_the_same_model(tmp_path: Path) -> None:
    experiment = images(tmp_path)
    eager = Training(experiment, contender("eager"), 0)
    permuted = Training(experiment, Contender(PERMUTED, BY_NAME["eager"], permuted=True), 0)
    assert not torch.equal(eager.blocks[0].masters["w_gate"], permuted.blocks[0].masters["w_gate"])
    for _ in range(3):
        assert permuted.advance().loss == pytest.approx(eager.advance().loss, rel=1e-4)


def test_an_implementation_of_the_scope_glu_gets_its_down_projection(tmp_path: Path) -> None:
    only_glu = dataclasses.replace(BY_NAME["eager"], scopes=frozenset({Scope.GLU}))
    experiment = images(tmp_path)
    one, other = Training(experiment, Contender("glu", only_glu), 0), Training(experiment, contender("eager"), 0)
    for _ in range(3):
        assert one.advance().loss == other.advance().loss


def test_a_gradient_that_never_comes_is_told(tmp_path: Path) -> None:
    @implementation("half", scopes=("mlp",), description="forgets w_up")
    def half(problem: Problem) -> Step:
        weights: dict[str, Any] = problem.weights

        def forward(x: torch.Tensor) -> torch.Tensor:
            gate, up = functional.linear(x, weights["w_gate"]), functional.linear(x, weights["w_up"].detach())
            return functional.linear(functional.silu(gate) * up, weights["w_down"])

        return Step(forward)

    with pytest.raises(GradientMissing, match="no gradient for w_up"):
        Training(images(tmp_path), Contender("half", half), 0).advance()


def test_why_some_cannot_be_trained() -> None:
    def scoped(**changes: Any) -> Any:
        return dataclasses.replace(BY_NAME["eager"], **changes)

    case = Case(Shape("s", 16, 20, "", ()), 16, Dtype.FLOAT32, Scope.MLP, Mode.STEP)

    def why(one: Any, device_type: str, interpreter: bool, capability: str = "") -> str:
        return why_not(one, case, device_type, interpreter, capability) or "it can"

    assert why(BY_NAME["eager"], "cpu", False) == "it can"
    assert "activation alone" in why(scoped(scopes=frozenset({Scope.ACTIVATION})), "cpu", False)
    assert "no backward" in why(scoped(trains="nothing"), "cpu", False)
    assert "--interpret" in why(BY_NAME["fused"], "cpu", False)
    assert why(BY_NAME["fused"], "cpu", True) == "it can"
    assert "compute capability 9.x" in why(scoped(gpus=(9,)), "cuda", False, "8.0")
    assert "does not take float32" in why(scoped(dtypes=frozenset({Dtype.BFLOAT16})), "cuda", False)
    assert "multiples of 8" in why(scoped(multiple=8), "cuda", False)
    assert why(scoped(scopes=frozenset({Scope.GLU})), "cpu", False) == "it can"
    assert "runs on a GPU only" in why(BY_NAME["liger"], "cpu", True)
    assert "not installed" in why(scoped(package="no_such_package"), "cuda", False)


def test_contenders_of_one_network_share_its_parameters(tmp_path: Path) -> None:
    experiment = images(tmp_path)
    network = experiment.make()
    own = {name: blocks(contender(name), experiment.case(), network) for name in ("eager", "unsloth", "eager-packed")}
    ids = {name: [id(parameter) for parameter in trained(network, those)] for name, those in own.items()}
    assert ids["eager"] == ids["unsloth"]
    assert ids["eager"] != ids["eager-packed"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["compile", "liger", "unsloth", "fused-dw-triton", "fused-auto", "fused-mlp-auto"])
def test_on_a_gpu_a_few_steps_are_eager_s(name: str, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"a rose is a rose is a rose. " * 400)
    sizes = NANO.model_copy(update={"hidden": 128, "intermediate": 256, "sequence": 64})
    experiment = prepare(sizes, text, torch.device("cuda"), Dtype.BFLOAT16, None, 4)
    reason = why_not(BY_NAME[name], experiment.case(), "cuda", False)
    if reason:
        pytest.skip(reason)
    one, other = Training(experiment, contender(name), 0), Training(experiment, contender("eager"), 0)
    for _ in range(4):
        assert one.advance().loss == pytest.approx(other.advance().loss, rel=0.02)
