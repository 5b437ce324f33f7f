"""Where the ranks of a group meet in a call: gathers before an MLP and sums after it; experts on several ranks."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from swiglu_kernels.ops.experts.parallel import swiglu_experts_parallel
from swiglu_kernels.ops.mlp.parallel import Ranks, swiglu_mlp_parallel, way_of
from swiglu_kernels.runtime.checks import check_tensor


def own(parameter: Any) -> Any:
    """Return this rank's part of a parameter, None for none; its gradient is this rank's part of the gradient."""
    if parameter is None:
        return None
    if not isinstance(parameter, DTensor):
        raise TypeError(f"expected the DTensor that a ParallelStyle made, got {type(parameter).__name__}")
    return parameter.to_local()


@dataclasses.dataclass(frozen=True)
class Split:
    """How a module's calls are shared among the ranks of a one-dimensional mesh; autograd goes through all of it."""

    mesh: DeviceMesh
    sequence_dim: int | None = None
    """The dimension of x and of the result of which each rank holds its part; None: each holds all."""
    use_local_output: bool = True
    """Whether results are plain tensors, or DTensors."""
    overlap: bool | None = None
    """Whether an MLP's communication runs beside its products; None: where that is faster."""
    own = staticmethod(own)

    def __str__(self) -> str:
        sequence = "" if self.sequence_dim is None else f", sequence in dimension {self.sequence_dim}"
        overlap = "" if self.overlap is None else f", overlap={self.overlap}"
        return f"({self.mesh.size()} ranks{sequence}{overlap})"

    def way(self, x: object, aside: str | None = None) -> tuple[str | None, str]:
        """Return how an MLP's communication runs beside its products, None if it does not, and why: see `way_of`."""
        tensor, by_rows = check_tensor("x", x), self.sequence_dim is not None
        if isinstance(tensor, DTensor):
            if (tensor.device_mesh, *tensor.placements) != (self.mesh, self._placement(tensor)):
                aside = aside or f"x is a DTensor that is placed as {tensor.placements}"
            elif by_rows and tensor.shape[self._sequence_dim(tensor) or 0] % self.mesh.size():
                aside = aside or "x does not divide by the ranks"
            tensor = tensor.to_local()
        self._placement(tensor)
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):  # as a collective's that may be under way
            aside = aside or f"x is a {type(tensor).__name__}"
        return way_of(tensor, self.mesh.get_group(), by_rows, self.overlap, aside)

    def mlp(
        self, x: object, run: Callable[..., torch.Tensor], bias: torch.Tensor | None = None, aside: str | None = None
    ) -> torch.Tensor:
        """Return the sum of all ranks' MLPs, or this rank's tokens of it, plus a bias that every rank has.

        run(x) calls `swiglu_mlp` with this rank's weights, run(x, mlp) what takes its place. `aside` says why
        communication cannot run beside its products, if it cannot.
        """
        way, _ = self.way(x, aside)
        if way is None:
            return self.sum(run(self.whole(x)), bias)
        assert isinstance(x, torch.Tensor)
        local = x.to_local() if isinstance(x, DTensor) else x
        ranks = Ranks(self.mesh.get_group(), self.sequence_dim is not None, way)
        return self._finished(run(local, partial(swiglu_mlp_parallel, ranks=ranks)), bias)

    def whole(self, x: object) -> torch.Tensor:
        """Return all of x from this rank's part of it, or from a DTensor; the ranks' gradients of it are summed.

        Raises:
            TypeError: x is not a tensor.
            ValueError: a DTensor is on another mesh, or its sequence does not divide by the number of ranks.
        """
        tensor = check_tensor("x", x)
        if isinstance(tensor, DTensor):
            if tensor.device_mesh != self.mesh:
                raise ValueError(f"x: expected a DTensor on {self.mesh}, got one on {tensor.device_mesh}")
            dim = self._sequence_dim(tensor)
            if dim is not None and tensor.shape[dim] % self.mesh.size():
                expected = f"a multiple of {self.mesh.size()} (the ranks) in dimension {dim}"
                raise ValueError(f"x: expected {expected}, got {tuple(tensor.shape)}")
        else:
            tensor = DTensor.from_local(tensor, self.mesh, [self._placement(tensor)], run_check=False)
        return tensor.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

    def sum(self, part: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the sum of all ranks' parts, or this rank's tokens of it, plus a bias that every rank has."""
        placement = self._placement(part)
        summed = DTensor.from_local(part, self.mesh, [Partial()], run_check=False).redistribute(placements=[placement])
        return summed if bias is None and not self.use_local_output else self._finished(summed.to_local(), bias)

    def _finished(self, out: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return a sum, which this rank has or has its tokens of, with the bias."""
        if bias is not None:
            if self.sequence_dim is not None:  # each rank's gradient is of its own tokens
                bias = DTensor.from_local(bias, self.mesh, [Replicate()], run_check=False)
                bias = bias.to_local(grad_placements=[Partial()])
            out = out + bias.to(out.dtype)
        if self.use_local_output:
            return out
        return DTensor.from_local(out, self.mesh, [self._placement(out)], run_check=False)

    def columns(self, z: torch.Tensor) -> torch.Tensor:
        """Return this rank's columns of a result without a down projection, as RowwiseParallel takes them."""
        return z if self.use_local_output else DTensor.from_local(z, self.mesh, [Shard(-1)], run_check=False)

    def _placement(self, tensor: torch.Tensor) -> Placement:
        dim = self._sequence_dim(tensor)
        return Replicate() if dim is None else Shard(dim)

    def _sequence_dim(self, tensor: torch.Tensor) -> int | None:
        if self.sequence_dim is None:
            return None
        if self.sequence_dim not in range(-tensor.dim(), tensor.dim() - 1) or self.sequence_dim == -1:
            expected = f"the sequence in dimension {self.sequence_dim}, before the last"
            raise ValueError(f"x: expected {expected}, got {tuple(tensor.shape)}")
        return self.sequence_dim % tensor.dim()


@dataclasses.dataclass(frozen=True)
class ExpertSplit:
    """Whose ranks hold the experts of a module, and how tokens travel to them."""

    mesh: DeviceMesh
    tokens_per_rank: int | None = None
    transport: str | None = None
    own = staticmethod(own)

    def __str__(self) -> str:
        return f"({self.mesh.size()} ranks)"

    def __call__(self, *operands: Any, **options: Any) -> torch.Tensor:
        """As `swiglu_experts`, of this rank's tokens and experts."""
        options |= {"group": self.mesh, "tokens_per_rank": self.tokens_per_rank, "transport": self.transport}
        return swiglu_experts_parallel(*operands, **options)
