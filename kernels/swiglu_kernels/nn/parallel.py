"""The fused modules split over the ranks of a group, by `parallelize_module`: MLPs by features, experts by expert.

    from torch.distributed.tensor.parallel import parallelize_module
    from swiglu_kernels.nn.parallel import SwiGLUParallel

    parallelize_module(model, mesh, {"layers.*.mlp": SwiGLUParallel()})  # or of experts SwiGLUExpertsParallel()

Tensor parallelism. Of n ranks each holds intermediate / n rows of gate and up, Shard(0), and the same columns of down,
Shard(1), as DTensor parameters. The kernels run on these alone; a call communicates where the ranks' parts meet:

                              forward before    forward after     backward before   backward after
    sequence_parallel=False   nothing           all-reduce out    nothing           all-reduce dX
    sequence_parallel=True    all-gather x      reduce-scatter    all-gather dOut   reduce-scatter dX

Each moves tokens x hidden elements, beside products where that pays (`overlap`). down_proj's bias is replicated and
added once, to the sum. Each DTensor states which rows it holds, so `full_tensor`, distributed checkpoints and loading
into another number of ranks work. For that, a packed module's matrix is split in two: in one DTensor, a rank's rows of
gate and of up would not be adjacent.

Expert parallelism: each rank holds experts / n whole experts, Shard(0), and calls with its own tokens
(`ops/experts/parallel.py`).
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from swiglu_kernels.nn import modules
from swiglu_kernels.nn.experts_interface import is_set
from swiglu_kernels.nn.split import ExpertSplit, Split


class SwiGLUParallel(ParallelStyle):
    """Split a fused module over the ranks of a mesh: gate and up by rows, down by columns.

    For `parallelize_module`, on FusedSwiGLU, FusedSwiGLUMLP and FusedSwiGLUPackedMLP, also where `patch_model` put
    them, and before fully_shard, activation checkpointing and torch.compile, all of which work on it.

    Parameters are replaced by DTensors. state_dict keys stay, except for a packed module: `gate_up_proj` becomes
    `gate_proj` and `up_proj`, the keys of FusedSwiGLUMLP. `torch.cat` of their full tensors is the packed matrix again.
    Load a packed checkpoint before splitting.

    Args:
        sequence_parallel: x and the result hold this rank's part of the sequence; else all of it, on every rank.
        sequence_dim: the sequence's dimension in x, [batch, sequence, hidden] by default. Plain tensors have to be of
            the same size on all ranks.
        use_local_output: return a plain tensor; else a DTensor.
        overlap: of a whole MLP, run communication beside the products (`ops/mlp/parallel.py`). True: raise where that
            cannot be; False: never; None: from some size on, where it can be. `module.overlap(x)` says how and why, or
            why not: fp8, `accumulate_into_main_grad` and what torch.compile traces have it not.

    x: a plain tensor, this rank's part or the whole as `sequence_parallel` has it, or a DTensor of any placement.
    FusedSwiGLU returns this rank's part of the last dimension, which RowwiseParallel takes.

    Raises (in parallelize_module):
        TypeError: the module is of another class, its projections are no plain Linears, or parameters are sharded.
        ValueError: intermediate is not divisible by the number of ranks, the mesh has several dimensions, or it was
            split before.
    """

    def __init__(
        self, *, sequence_parallel: bool = False, sequence_dim: int = 1, use_local_output: bool = True,
        overlap: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.sequence_dim = sequence_dim if sequence_parallel else None
        self.use_local_output, self.overlap = use_local_output, overlap

    def __repr__(self) -> str:
        options = f"use_local_output={self.use_local_output}, overlap={self.overlap}"
        return f"SwiGLUParallel(sequence_dim={self.sequence_dim}, {options})"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _check(module, device_mesh)
        assert isinstance(module, modules.FusedModule)
        if isinstance(module, modules.FusedSwiGLUPackedMLP):
            _part(module)
        for name in ("gate_proj", "up_proj", "down_proj"):
            if hasattr(module, name):
                weight, bias = (Shard(1), Replicate()) if name == "down_proj" else (Shard(0), Shard(0))
                _shard(self, getattr(module, name), "weight", device_mesh, weight)
                _shard(self, getattr(module, name), "bias", device_mesh, bias)
        module.tensor_parallel = Split(device_mesh, self.sequence_dim, self.use_local_output, self.overlap)
        return module


class SwiGLUExpertsParallel(ParallelStyle):
    """Split a module of stacked experts over the ranks of a mesh: each holds its part of them, and has its own tokens.

    For `parallelize_module`, on FusedSwiGLUExperts and on experts of transformers that `patch_model` has set to these
    kernels; before fully_shard on another dimension, activation checkpointing and torch.compile, whose graph breaks at
    each call. Parameters are replaced by DTensors, Shard(0); state_dict keys stay. Gradients are those of the sum of
    the ranks' losses.

    Args:
        tokens_per_rank, transport: see `swiglu_experts_parallel`.

    Raises (in parallelize_module):
        TypeError, ValueError: as SwiGLUParallel, of the number of experts.
    """

    def __init__(self, *, tokens_per_rank: int | None = None, transport: str | None = None) -> None:
        super().__init__()
        self._how = tokens_per_rank, transport

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        name = type(module).__name__
        if not (is_set(module) or isinstance(module, modules.FusedSwiGLUExperts)):
            expected = "experts that patch_model has set to its kernels"
            raise TypeError(f"SwiGLUExpertsParallel: expected {expected}, got {name}")
        _check_whole(module, device_mesh, getattr(module, "expert_parallel", None))
        _check_divides(name, "a number of experts", module.get_parameter("down_proj").shape[0], device_mesh)
        for path in [path for path, _ in module.named_parameters(recurse=False)]:
            _shard(self, module, path, device_mesh, Shard(0))
        module.expert_parallel = ExpertSplit(device_mesh, *self._how)  # type: ignore[assignment]
        return module


def _shard(style: ParallelStyle, owner: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    """Put a DTensor in the place of a module's parameter, where there is one."""
    if (parameter := getattr(owner, name)) is not None:
        shards = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=style.src_data_rank)
        setattr(owner, name, nn.Parameter(shards, requires_grad=parameter.requires_grad))


def _check_whole(module: nn.Module, mesh: DeviceMesh, split: object) -> None:
    """Raise where a module was split or sharded before, or a mesh has several dimensions."""
    name = type(module).__name__
    if split is not None:
        raise ValueError(f"{name}: it is split over ranks already, {split}")
    if mesh.ndim != 1:
        raise ValueError(f"{name}: expected a mesh of one dimension, as mesh['tp'] is, got {mesh.ndim}")
    for path, parameter in module.named_parameters():
        if type(parameter) is not nn.Parameter:
            got = f"{type(parameter).__name__}; parallelize first, then fully_shard"
            raise TypeError(f"{path}: expected a plain torch.nn.Parameter, got a {got}")


def _check_divides(name: str, what: str, size: int, mesh: DeviceMesh) -> None:
    if size % mesh.size():
        raise ValueError(f"{name}: expected {what} that is divisible by the {mesh.size()} ranks, got {size}")


def _check(module: nn.Module, mesh: DeviceMesh) -> None:
    """Raise where a module cannot be split over a mesh."""
    if not isinstance(module, (modules.FusedSwiGLU, modules.FusedSwiGLUMLP, modules.FusedSwiGLUPackedMLP)):
        name = type(module).__name__
        raise TypeError(f"SwiGLUParallel: expected a module of swiglu_kernels (patch_model makes them), got {name}")
    _check_whole(module, mesh, module.tensor_parallel)
    packed = isinstance(module, modules.FusedSwiGLUPackedMLP)
    first = "gate_up_proj" if packed else "gate_proj"
    for path in (first, "up_proj", "down_proj"):
        if hasattr(module, path) and (reason := modules.why_not_plain(getattr(module, path))) is not None:
            raise TypeError(f"{path}: expected a plain torch.nn.Linear, but {reason}")
    intermediate = getattr(module, first).out_features // (2 if packed else 1)
    _check_divides(first, "an intermediate size", intermediate, mesh)


def _part(module: modules.FusedSwiGLUPackedMLP) -> None:
    """Put gate_proj and up_proj in the place of gate_up_proj."""
    packed, down = module.gate_up_proj, module.down_proj
    del module.gate_up_proj, module.down_proj
    for number, name in enumerate(("gate_proj", "up_proj")):
        linear = nn.Linear(packed.in_features, packed.out_features // 2, bias=packed.bias is not None, device="meta")
        for kind in ("weight", "bias"):
            if (both := getattr(packed, kind)) is not None:
                half = both.detach().chunk(2)[number].clone()
                setattr(linear, kind, nn.Parameter(half, requires_grad=both.requires_grad))
        setattr(module, name, linear)
    module.down_proj = down  # behind the others, as in FusedSwiGLUMLP
