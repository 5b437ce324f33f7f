"""DDP and FSDP2 with two processes on the gloo backend, on CPUs: the same loss and gradients as in one process.

Run as a script, this file is one of the two processes: `python test_distributed.py RANK FOLDER`.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WORLD = 2
PATIENCE_S = 120
HIDDEN, INTERMEDIATE = 10, 14  # the packed matrix has 28 rows; 14 + 14 are two shards, 10 are 5 + 5

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed")


class TwoBlocks(nn.Module):
    """A residual stack of both MLPs, with a norm that belongs to the root's shard group."""

    def __init__(self) -> None:
        super().__init__()
        from swiglu_kernels import FusedSwiGLUMLP, FusedSwiGLUPackedMLP

        torch.manual_seed(0)
        self.norm = nn.LayerNorm(HIDDEN)
        self.first = FusedSwiGLUMLP(HIDDEN, INTERMEDIATE)
        self.second = FusedSwiGLUPackedMLP(HIDDEN, INTERMEDIATE, save="input")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.first(self.norm(x))
        return x + self.second(x)


def batch() -> torch.Tensor:
    return torch.randn(2 * WORLD, 3, HIDDEN, generator=torch.Generator().manual_seed(1))


def plain(model: nn.Module) -> nn.Module:
    return model


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp(model: nn.Module, **options: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model.first, **options)
    fully_shard(model.second, **options)
    return fully_shard(model, **options)


def fsdp_in_bf16(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fsdp(model, mp_policy=policy)


def fsdp_root_only(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": ddp,
    "fsdp": fsdp,
    "fsdp, root only": fsdp_root_only,
    "fsdp in bf16": fsdp_in_bf16,
}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor of a shard."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def train(model: nn.Module, x: torch.Tensor) -> dict[str, Any]:
    """Two SGD steps; the losses, the gradients of the first step, the weights after the second."""
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, gradients = [], {}
    for step in range(2):
        optimiser.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        losses.append(loss.detach().float())
        if step == 0:
            gradients = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
        optimiser.step()
    weights = {name: whole(tensor) for name, tensor in model.state_dict().items()}
    return {"losses": torch.stack(losses), "gradients": gradients, "weights": weights}


def errors_of_sharded_projections() -> dict[str, str]:
    """What happens where the shards do not follow the module: on a projection, and before patch_model."""
    from torch.distributed.fsdp import fully_shard

    from swiglu_kernels import FusedSwiGLUMLP, patch_model, unpatch

    module = FusedSwiGLUMLP(HIDDEN, INTERMEDIATE)
    fully_shard(module.gate_proj)
    with pytest.raises(TypeError) as on_a_projection:
        module(batch())

    def llama_mlp() -> nn.Module:
        mlp = nn.Module()
        mlp.gate_proj, mlp.up_proj = nn.Linear(4, 6, bias=False), nn.Linear(4, 6, bias=False)
        mlp.down_proj, mlp.act_fn = nn.Linear(6, 4, bias=False), nn.SiLU()
        mlp.__class__ = type("LlamaMLP", (nn.Module,), {})
        return mlp

    sharded_first = llama_mlp()
    fully_shard(sharded_first)
    patched_first = llama_mlp()
    patch_model(patched_first)
    fully_shard(patched_first)
    return {
        "on a projection": str(on_a_projection.value),
        "sharded, then patched": str(patch_model(sharded_first)),
        "patched, sharded, unpatched": str(unpatch(patched_first)),
        "patched, sharded, patched": str(patch_model(patched_first)),
    }


def one_of_two_processes(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=PATIENCE_S / 2),
    )
    x = batch().chunk(WORLD)[rank]
    results: dict[str, Any] = {name: train(wrap(TwoBlocks()), x) for name, wrap in WRAPPERS.items()}
    results["errors"] = errors_of_sharded_projections()
    results["backend"] = TwoBlocks().first.backend
    torch.save(results, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What both processes found, by rank."""
    folder = tmp_path_factory.mktemp("processes")
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"  # or gloo resolves the host's name, which not every sandbox can
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(folder)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        outputs = [process.communicate(timeout=PATIENCE_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return train(TwoBlocks(), batch())


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_losses_gradients_and_weights_are_those_of_one_process(results, alone, wrapper):
    # bf16 keeps eight bits: products of rounded operands differ from fp32 by a few 2^-8 of the largest value
    tolerance = 2**-6 if wrapper == "fsdp in bf16" else 1e-5
    losses = torch.stack([result[wrapper]["losses"] for result in results]).mean(0)
    torch.testing.assert_close(losses, alone["losses"], rtol=tolerance, atol=0)
    for result in results:
        for kind in ("gradients", "weights"):
            got = {name.removeprefix("module."): tensor for name, tensor in result[wrapper][kind].items()}
            assert list(got) == list(alone[kind])
            for name, expected in alone[kind].items():
                assert got[name].dtype == torch.float32
                largest = expected.abs().max().item()
                torch.testing.assert_close(got[name], expected, rtol=0, atol=tolerance * largest, msg=name)


def test_the_kernels_ran(results):
    assert {result["backend"] for result in results} == {"interpreter"}


def test_sharding_goes_on_the_module_and_after_patching(results):
    errors = results[0]["errors"]
    assert "gate_proj: expected a torch.nn.Linear" in errors["on a projection"]
    assert "sharding on the whole FusedSwiGLUMLP" in errors["on a projection"]
    assert "changed 0, left alone 1" in errors["sharded, then patched"]
    assert "gate_proj: its weight is a DTensor" in errors["sharded, then patched"]
    assert "it was LlamaMLP and got this class after patch_model" in errors["patched, sharded, unpatched"]
    assert "fused already" in errors["patched, sharded, patched"]


if __name__ == "__main__":
    one_of_two_processes(int(sys.argv[1]), Path(sys.argv[2]))
