import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from trained import BY_NAME, SIZES, decoder, images, permuted, trainee

from swiglu_bench.cases.cases import Dtype, Scope
from swiglu_bench.cases.implementation import Step
from swiglu_bench.cases.problem import Problem
from swiglu_bench.tasks.train.blocks import SeedTraining, Trainee, why_not
from swiglu_bench.tasks.train.model import Experiment, sites

GLU = dataclasses.replace(BY_NAME["eager"], scopes=frozenset({Scope.GLU}))
TRAINED = ["eager-packed", "unsloth", "fused-dw-torch", "fused-mlp-auto"]


def gradients(experiment: Experiment, of: Trainee) -> dict[str, torch.Tensor]:
    """Those of the first step, of blocks in the layout of eager."""
    training = SeedTraining(experiment, of, 0)
    assert not sites(training.network), "every block is replaced"
    training.learn(experiment.data.batch(0, 0))
    found: dict[str, torch.Tensor] = {}
    for number, block in enumerate(training.blocks):
        grads = {name: master.grad for name, master in block.masters.items() if master.grad is not None}
        if "w_gate_up" in grads:
            grads["w_gate"], grads["w_up"] = grads.pop("w_gate_up").chunk(2)
        found |= {f"{number} {name}": grad for name, grad in grads.items()}
    return found


@pytest.mark.parametrize("name", ["decoder", *TRAINED])
def test_every_kind_of_implementation_yields_eager_s_gradients(name: str, tmp_path: Path) -> None:
    experiment = decoder(tmp_path) if name == "decoder" else images(tmp_path)
    wanted = gradients(experiment, trainee("eager"))
    found = gradients(experiment, trainee("eager-packed" if name == "decoder" else name))
    assert len(wanted) == (6 if name == "decoder" else 3)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["eager", "eager-packed", "unsloth", "fused-mlp-auto"])
def test_16_bits_are_autocast_s(name: str, tmp_path: Path) -> None:
    """fp32 weights, products of their bf16 copies, fp32 gradients: what torch.autocast makes of nn.Linear."""
    training = SeedTraining(images(tmp_path, dtype=Dtype.BFLOAT16), trainee(name), 0)
    block, x = training.blocks[0], torch.randn(16, 16)
    torch.manual_seed(0)
    (site,) = sites(training.experiment.make())
    mlp: Any = site.mlp
    with torch.autocast("cpu", torch.bfloat16):
        wanted = mlp.down_proj(functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x))
    found = block(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.02)
    wanted.sum().backward()
    found.sum().backward()
    block.check_gradients()
    assert all(master.dtype == master.grad.dtype == torch.float32 for master in block.masters.values())
    torch.testing.assert_close(block.masters["w_down"].grad, mlp.down_proj.weight.grad, rtol=0.05, atol=0.05)
    unrounded = next(iter(block.masters.values()))
    assert not torch.equal(unrounded, unrounded.bfloat16().float())
    training.advance()
    assert not torch.equal(found, block(x)), "the copies follow the weights"


def test_frozen_weights_stay_and_are_not_in_the_optimiser(tmp_path: Path) -> None:
    experiment = images(tmp_path)
    training, whole = SeedTraining(experiment, trainee("fused"), 0), SeedTraining(experiment, trainee("eager"), 0)
    before = {name: master.clone() for name, master in training.blocks[0].masters.items()}
    assert training.advance() == pytest.approx(whole.advance(), rel=1e-5)
    training.advance()
    assert all(torch.equal(master, before[name]) for name, master in training.blocks[0].masters.items())
    in_block = 3 * 16 * 24
    assert sum(p.numel() for p in whole.parameters) - sum(p.numel() for p in training.parameters) == in_block


@pytest.mark.parametrize(("same", "rel"), [(permuted(), 1e-4), (trainee("glu", GLU), 0.0)], ids=["permuted", "glu"])
def test_permuted_features_or_a_separate_down_projection_are_the_same_model(
    same: Trainee, rel: float, tmp_path: Path
) -> None:
    experiment = images(tmp_path)
    eager, other = SeedTraining(experiment, trainee("eager"), 0), SeedTraining(experiment, same, 0)
    same_order = torch.equal(eager.blocks[0].masters["w_gate"], other.blocks[0].masters["w_gate"])
    assert same_order is not same.permuted
    for _ in range(3):
        assert other.advance() == pytest.approx(eager.advance(), rel=rel, abs=0)


def test_the_model_s_warm_up_and_its_limit_of_gradients(tmp_path: Path) -> None:
    changed = SIZES.model_copy(update={"warm_up": 0.5, "max_gradient_norm": 0.01})
    training = SeedTraining(dataclasses.replace(images(tmp_path), workload=changed), trainee("eager-packed"), 0)
    norms: list[torch.Tensor] = []
    training.optimizer.register_step_pre_hook(
        lambda *_: norms.append(torch.stack([p.grad.norm() for p in training.parameters if p.grad is not None]).norm())
    )
    for _ in range(5):
        training.advance()
    assert training.row.series["learning_rate"] == pytest.approx([0.01 / 3, 0.02 / 3, 0.01, 0.01, 0.01])
    assert [float(norm) for norm in norms] == pytest.approx([0.01] * 5, rel=1e-3)


def test_a_missing_gradient_is_an_error(tmp_path: Path) -> None:
    def forgets_up(problem: Problem) -> Step:
        frozen = problem.weights | {"w_up": problem.weights["w_up"].detach()}
        return BY_NAME["eager"].build(dataclasses.replace(problem, weights=frozen))

    half = trainee("half", dataclasses.replace(BY_NAME["eager"], build=forgets_up))
    with pytest.raises(RuntimeError, match="no gradient for w_up"):
        SeedTraining(images(tmp_path), half, 0).advance()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["compile", "liger", "unsloth", "fused-dw-triton", "fused-auto", "fused-mlp-auto"])
def test_on_a_gpu_a_few_steps_are_eager_s(name: str, tmp_path: Path) -> None:
    sizes = {"hidden": 128, "intermediate": 256, "sequence": 64}
    experiment = decoder(tmp_path, torch.device("cuda"), Dtype.BFLOAT16, **sizes)
    if reason := why_not(BY_NAME[name], experiment.case, "cuda", False, ""):
        pytest.skip(reason)
    mine, eager = SeedTraining(experiment, trainee(name), 0), SeedTraining(experiment, trainee("eager"), 0)
    for _ in range(4):
        assert mine.advance() == pytest.approx(eager.advance(), rel=0.02)
