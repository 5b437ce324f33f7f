"""DDP, FSDP2 and tensor parallelism in two processes: the same loss and gradients as in one process.

On CPUs with gloo, and on two GPUs with NCCL. Run as a script, this file is one of the two processes:
`python test_parallel.py RANK FOLDER DEVICE`, with `tests/support` on PYTHONPATH.
"""

import dataclasses
import re
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from quick_interpreter import quicken
from rank_processes import launched
from stock_mlp import LlamaMLP
from torch import nn
from torch.nn.parallel import DistributedDataParallel

IMPORTED = "torch._dynamo", "functorch.compile", "torch.distributed.fsdp", "swiglu_kernels.nn.parallel"
WORLD = 2
PATIENCE_S = 240


@dataclasses.dataclass(frozen=True)
class Setting:
    """Where the processes run, and sizes for it."""

    backend: str
    dtype: torch.dtype
    hidden: int
    intermediate: int
    sequence: int


SETTINGS = {
    # the packed matrix has 28 rows; 14 + 14 are two shards, 10 are 5 + 5
    "cpu": Setting("gloo", torch.float32, 10, 14, 4),
    "cuda": Setting("nccl", torch.bfloat16, 1024, 2816, 256),
}
HIDDEN, INTERMEDIATE = SETTINGS["cpu"].hidden, SETTINGS["cpu"].intermediate

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed")


class TwoBlocks(nn.Module):
    """A residual stack of both MLPs, with a norm that belongs to the root's shard group."""

    def __init__(self, device: str) -> None:
        super().__init__()
        from swiglu_kernels import FusedSwiGLUMLP, FusedSwiGLUPackedMLP

        torch.manual_seed(0)  # on the CPU, so that GPUs draw the same
        setting = SETTINGS[device]
        self.norm = nn.LayerNorm(setting.hidden)
        self.first = FusedSwiGLUMLP(setting.hidden, setting.intermediate, bias=True)
        self.second = FusedSwiGLUPackedMLP(setting.hidden, setting.intermediate, bias=True, save="input")
        self.to(device, setting.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.first(self.norm(x))
        return x + self.second(x)


def batch(device: str = "cpu") -> torch.Tensor:
    setting = SETTINGS[device]
    x = torch.randn(2 * WORLD, setting.sequence, setting.hidden, generator=torch.Generator().manual_seed(1))
    return x.to(device, setting.dtype)


def fsdp(model: nn.Module, **options: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model.first, **options)
    fully_shard(model.second, **options)
    return fully_shard(model, **options)


def fsdp_in_bf16(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fsdp(model, mp_policy=policy)


def mesh_of(model: nn.Module, **sizes: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    sizes = sizes or {"tp": WORLD}
    device = next(model.parameters()).device.type
    return init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def tp(model: nn.Module, mesh: Any = None, **options: Any) -> nn.Module:
    from torch.distributed.tensor.parallel import parallelize_module

    from swiglu_kernels.nn.parallel import SwiGLUParallel

    plan = {"first": SwiGLUParallel(**options), "second": SwiGLUParallel(**options)}
    return parallelize_module(model, mesh or mesh_of(model), plan)


def tp_by_sequence(model: nn.Module, **options: Any) -> nn.Module:
    from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

    mesh = mesh_of(model)
    parallelize_module(model, mesh, {"norm": SequenceParallel(use_local_output=True)})
    return tp(model, mesh, sequence_parallel=True, **options)


def tp_of_recomputed(model: nn.Module, **options: Any) -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    tp(model, sequence_parallel=False, **options)
    model.first, model.second = checkpoint_wrapper(model.first), checkpoint_wrapper(model.second)
    return model


def tp_compiled(model: nn.Module) -> nn.Module:
    model.compile(backend="aot_eager", fullgraph=True)
    return tp(model)


def tp_in_fsdp(model: nn.Module) -> nn.Module:
    mesh = mesh_of(model, dp=1, tp=WORLD)
    return fsdp(tp(model, mesh["tp"]), mesh=mesh["dp"])


BATCH, SEQUENCE = 0, 1


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to share the work: who gets which part of the batch, and what a rank's loss is of the whole."""

    wrap: Callable[[nn.Module], nn.Module]
    cut: int | None = None
    """The dimension of the batch that is shared out; None: every rank gets all of it."""
    share: float = 1.0
    """Gradients of the ranks' losses are averaged (DDP, FSDP) or summed; then each is that share of the whole loss."""


WAYS = {
    "ddp": Way(DistributedDataParallel, BATCH),
    "fsdp": Way(fsdp, BATCH),
    "fsdp in bf16": Way(fsdp_in_bf16, BATCH),
    "tp": Way(tp),
    "tp by sequence": Way(tp_by_sequence, SEQUENCE, 1 / WORLD),
    "tp, recomputed": Way(tp_of_recomputed),
    "tp, compiled": Way(tp_compiled),
    "tp in fsdp": Way(tp_in_fsdp),
    "tp, recomputed and overlapped": Way(partial(tp_of_recomputed, overlap=True)),
    "tp by sequence, overlapped": Way(partial(tp_by_sequence, overlap=True), SEQUENCE, 1 / WORLD),
}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor of a shard, on the CPU."""
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.detach().cpu()


def train(model: nn.Module, x: torch.Tensor, share: float = 1.0) -> dict[str, Any]:
    """Two SGD steps; the losses, the gradients of the first step, the weights after the second."""
    # foreach, which GPUs have by default, does not take DTensors and the plain tensors of what is not split together.
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    losses, gradients = [], {}
    for step in range(2):
        optimiser.zero_grad()
        loss = model(x).float().square().mean() * share
        loss.backward()
        losses.append(loss.detach().cpu() / share)
        if step == 0:
            gradients = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
        optimiser.step()
    weights = {name: whole(tensor) for name, tensor in model.state_dict().items()}
    return {"losses": torch.stack(losses), "gradients": gradients, "weights": weights}


def as_alone(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By the names that they have in one process: what wrappers add is taken away, what was parted is joined."""
    named = {name.replace("module.", "").replace("_checkpoint_wrapped_", ""): tensors[name] for name in tensors}
    for name in [name for name in named if name.startswith("second.gate_proj")]:
        both = torch.cat([named.pop(name), named.pop(name.replace("gate", "up"))])
        named[name.replace("gate_proj", "gate_up_proj")] = both
    return named


def shards_go_on_the_module_after_patching() -> None:
    """On a projection, or before patch_model, they are refused."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from swiglu_kernels import FusedSwiGLUMLP, patch_model, unpatch
    from swiglu_kernels.nn.parallel import SwiGLUParallel

    module = FusedSwiGLUMLP(HIDDEN, INTERMEDIATE)
    fully_shard(module.gate_proj)
    with pytest.raises(TypeError, match=r"gate_proj: expected a plain torch.nn.Linear.*sharding on the whole"):
        module(batch())
    sharded_first, patched_first = LlamaMLP(4, 6), LlamaMLP(4, 6)
    fully_shard(sharded_first)
    assert "gate_proj: its weight is a DTensor" in str(patch_model(sharded_first))
    patch_model(patched_first)
    fully_shard(patched_first)
    assert "it was LlamaMLP and got this class after patch_model" in str(unpatch(patched_first))
    assert "already fused" in str(patch_model(patched_first))
    sharded = fully_shard(FusedSwiGLUMLP(HIDDEN, INTERMEDIATE))
    with pytest.raises(TypeError, match="parallelize first, then fully_shard"):
        SwiGLUParallel()._apply(sharded, init_device_mesh("cpu", (WORLD,)))


def what_can_be_split_and_what_cannot() -> None:
    """DTensors in and out, frozen weights, gate and up alone, sizes that do not divide, unpatching."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

    from swiglu_kernels import FusedSwiGLU, FusedSwiGLUMLP, FusedSwiGLUPackedMLP, patch_model, unpatch
    from swiglu_kernels.nn.parallel import SwiGLUParallel

    mesh = init_device_mesh("cpu", (WORLD,))
    x = batch().requires_grad_()

    def made(kind: type[nn.Module], **options: Any) -> nn.Module:
        torch.manual_seed(3)
        return kind(HIDDEN, INTERMEDIATE, **options)

    def split_over(module: nn.Module, style: SwiGLUParallel | None = None) -> nn.Module:
        return parallelize_module(module, mesh, style or SwiGLUParallel())

    expected = made(FusedSwiGLUMLP, weight_grad="none")(x)
    split = split_over(made(FusedSwiGLUMLP, weight_grad="none"), SwiGLUParallel(use_local_output=False))
    out = split(distribute_tensor(x.detach(), mesh, [Shard(0)])).full_tensor()  # of a DTensor
    torch.testing.assert_close(out, expected)
    out.square().sum().backward()
    frozen = [name for name, parameter in split.named_parameters() if parameter.grad is None]
    assert frozen == ["gate_proj.weight", "up_proj.weight"]

    pair = nn.Sequential(made(FusedSwiGLU), nn.Linear(INTERMEDIATE, HIDDEN))
    expected = pair(x)
    parallelize_module(pair, mesh, {"0": SwiGLUParallel(), "1": RowwiseParallel()})
    assert pair[0](x).shape == (2 * WORLD, 4, INTERMEDIATE // WORLD)
    torch.testing.assert_close(pair(x), expected)

    model = LlamaMLP(4, 6)
    patch_model(model)
    expected = model(torch.ones(1, 2, 4))
    torch.testing.assert_close(split_over(model)(torch.ones(1, 2, 4)), expected)
    assert "split over them" in str(unpatch(model))

    hooked = made(FusedSwiGLUMLP)
    hooked.up_proj.register_forward_hook(lambda *_: None)
    in_sequence = split_over(made(FusedSwiGLUMLP), SwiGLUParallel(sequence_parallel=True))
    grid, uneven = init_device_mesh("cpu", (1, WORLD)), distribute_tensor(x.detach()[:, :3], mesh, [Shard(0)])
    not_divisible = "_proj: expected an intermediate size that is divisible by the 2 ranks, got 15"
    for sentence, call in {
        f"gate{not_divisible}": lambda: split_over(FusedSwiGLUMLP(HIDDEN, 15)),
        f"gate_up{not_divisible}": lambda: split_over(FusedSwiGLUPackedMLP(HIDDEN, 15)),
        "it is split over ranks already, (2 ranks)": lambda: split_over(split),
        "expected a module of swiglu_kernels (patch_model makes them)": lambda: split_over(nn.Linear(2, 2)),
        "up_proj: expected a plain torch.nn.Linear": lambda: split_over(hooked),
        "expected a mesh of one dimension, as mesh['tp'] is, got 2": lambda: SwiGLUParallel()._apply(
            made(FusedSwiGLUMLP), grid
        ),
        "x: expected the sequence in dimension 1, before the last, got (4, 10)": lambda: in_sequence(x[0, :, :]),
        "x: expected a multiple of 2 (the ranks) in dimension 1, got (4, 3, 10)": lambda: in_sequence(uneven),
        "x: expected a torch.Tensor, got NoneType": lambda: in_sequence(None),
    }.items():
        with pytest.raises((TypeError, ValueError), match=re.escape(sentence)):
            call()


def one_of_two_processes(rank: int, folder: Path, device: str) -> None:
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        quicken()
    where, patience = f"file://{folder / 'rendezvous'}", timedelta(seconds=PATIENCE_S / 2)
    torch.distributed.init_process_group(
        SETTINGS[device].backend, init_method=where, rank=rank, world_size=WORLD, timeout=patience
    )

    def tried(way: Way) -> dict[str, Any]:
        x = batch(device)
        part = x if way.cut is None else x.chunk(WORLD, way.cut)[rank]
        return train(way.wrap(TwoBlocks(device)), part, way.share)

    results: dict[str, Any] = {name: tried(way) for name, way in WAYS.items()}
    if device == "cpu":
        shards_go_on_the_module_after_patching()
        what_can_be_split_and_what_cannot()
    assert TwoBlocks(device).first.backend == ("interpreter" if device == "cpu" else "triton")
    torch.save(results, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


TWO_GPUS = pytest.mark.skipif(
    torch.cuda.device_count() < WORLD, reason=f"needs {WORLD} GPUs; there are {torch.cuda.device_count()}"
)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, TWO_GPUS])])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def results(device: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What both processes found, by rank; what they ask themselves ends them."""
    folder = tmp_path_factory.mktemp("processes")
    interpreted = {"TRITON_INTERPRET": "1"} if device == "cpu" else {}
    for status, output in launched(__file__, WORLD, (folder, device), device, PATIENCE_S, interpreted, IMPORTED):
        assert status == 0, output
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


@pytest.fixture(scope="module")
def alone(device: str) -> dict[str, Any]:
    return train(TwoBlocks(device), batch(device))


@pytest.fixture(scope="module")
def truth(device: str, alone: dict[str, Any]) -> dict[str, Any]:
    """One process once more, in fp32 from the same rounded weights."""
    return alone if device == "cpu" else train(TwoBlocks(device).float(), batch(device).float())


def error(got: torch.Tensor, truth: torch.Tensor) -> float:
    return ((got.double() - truth.double()).norm() / truth.double().norm()).item()


@pytest.mark.parametrize("way", WAYS)
def test_losses_gradients_and_weights_are_those_of_one_process(device, results, alone, truth, way):
    # in bf16 twice what one process loses, and a few 2^-8 for sums of rounded parts
    tolerance = 2**-6 if device == "cuda" else 2**-5 if way == "fsdp in bf16" else 1e-5
    losses = torch.stack([result[way]["losses"] for result in results]).mean(0)
    torch.testing.assert_close(losses, truth["losses"], rtol=tolerance, atol=0)
    for result in results:
        for kind in ("gradients", "weights"):
            got = as_alone(result[way][kind])
            assert set(got) == set(alone[kind])
            for name, expected in truth[kind].items():
                assert got[name].dtype == SETTINGS[device].dtype
                allowed = 2 * error(alone[kind][name], expected) + tolerance
                assert error(got[name], expected) <= allowed, f"{kind}: {name}"


if __name__ == "__main__":
    one_of_two_processes(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
