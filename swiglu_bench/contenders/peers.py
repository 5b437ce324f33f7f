"""Other projects' kernels, to compare with: liger-kernel, QuACK and flash-swiglu-mlp, as their own modules call them.

In a checkout, `pip install -c constraints.txt '.[peers]'` installs the last two. Without a package, or on another GPU
than it is made for, its rows are skipped with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from swiglu_bench.cases.cases import DENSE, Dtype, Scope
from swiglu_bench.cases.costs import Footprint
from swiglu_bench.cases.implementation import Implementation, Step, implementation
from swiglu_bench.contenders.around import around, joined, packed

if TYPE_CHECKING:
    from torch import Tensor

    from swiglu_bench.cases.problem import Problem


LIGER: dict[str, Any] = {
    "backend": "triton", "package": "liger_kernel",
    "interpretable": "liger-kernel passes a float where Triton's interpreter needs a tensor; it runs on a GPU only.",
}  # fmt: skip
QUACK: dict[str, Any] = {
    "weight_layout": "interleaved", "backend": "cutlass", "package": "quack", "imports": "quack.gemm_interface",
    "gpus": (9, 10, 11, 12), "dtypes": (Dtype.FLOAT16, Dtype.BFLOAT16),
    "multiple": 8,  # rows must step by 16 bytes
}  # fmt: skip
"""What all rows of a package declare."""


@implementation(
    "liger", scopes=DENSE,
    description="liger-kernel's SiLU-mul: LigerSiLUMulFunction between two nn.Linear",
    usage="from liger_kernel.ops.swiglu import LigerSiLUMulFunction; h = LigerSiLUMulFunction.apply(gate, up)",
    imports="liger_kernel.ops.swiglu", offers=("bias",), overwrites=("gate", "up"), **LIGER,
    footprints={Scope.ACTIVATION: Footprint(saved=0, phases=((1, 0, 0),)),
                Scope.GLU: Footprint(saved=2, phases=((3, 1, 1), (2, 2, 2))),
                Scope.MLP: Footprint(saved=3, phases=((4, 1, 1), (2, 2, 2), (1, 3, 3)))},
)  # fmt: skip
def liger(problem: Problem) -> Step:
    """As liger_kernel.transformers.LigerSwiGLUMLP calls it. Its backward overwrites gate and up."""
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return around(problem, LigerSiLUMulFunction.apply)


@implementation(
    "liger-mlp", scopes=(Scope.MLP,),
    description="liger-kernel's LigerMLPFunction: autotuned Triton kernels; w_down and the weight gradients by cuBLAS",
    usage="from liger_kernel.ops.mlp import LigerMLPFunction; "
    "out = LigerMLPFunction.apply(x, w_gate, w_up, w_down)  # x is [batch, tokens, hidden]",
    imports="liger_kernel.ops.mlp",
    **LIGER | {"interpretable": "liger-kernel's LigerMLPFunction takes CUDA tensors only; it runs on a GPU only."},
    multiple=8,  # rows must step by 16 bytes
    tf32=True,  # on an H100 output and gradients were 1.6e-3 to 2.3e-3 off, eager's 5e-7
    footprints={Scope.MLP: Footprint(saved=3, phases=((3, 2, 3),))},
)  # fmt: skip
def liger_mlp(problem: Problem) -> Step:
    """As liger_kernel.transformers.LigerMLP calls it. Its backward overwrites what it saved: no second one.

    It stores gate and up even under torch.no_grad as long as a weight requires a gradient, for it reads
    `ctx.needs_input_grad`.
    """
    from liger_kernel.ops.mlp import LigerMLPFunction

    return _of_batches(problem, LigerMLPFunction.apply)


def _of_batches(problem: Problem, mlp: Callable[..., Tensor]) -> Step:
    """Of `mlp(x [batch, tokens, hidden], w_gate, w_up, w_down)`."""
    weights = tuple(problem.weights[name] for name in ("w_gate", "w_up", "w_down"))
    return Step(lambda x: mlp(x.unsqueeze(0), *weights).squeeze(0))


def gate_gradient(dz: Tensor, preactivation: Tensor) -> Tensor:
    """The gradient of interleaved pre-activations [tokens, 2 * intermediate] from that of z [tokens, intermediate]."""
    import torch

    gate, up = preactivation.float().unflatten(-1, (-1, 2)).unbind(-1)
    sigmoid = torch.sigmoid(gate)
    d_gate = dz * up * sigmoid * (1 + gate * (1 - sigmoid))
    d_up = dz * gate * sigmoid
    return torch.stack((d_gate, d_up), -1).flatten(-2).to(preactivation.dtype)


def _quack_glu(w_gate_up: Tensor, tuned: bool) -> Callable[[Tensor], Tensor]:
    """x -> z. QuACK's function differentiates only to the pre-activations; the gate's backward is torch.compile's."""
    import torch
    from quack.gemm_interface import gemm_gated
    from quack.linear import linear_gated_func

    backward_of_gate = torch.compile(gate_gradient, fullgraph=True, dynamic=False)

    class Gate(torch.autograd.Function):
        """(preactivation, z that QuACK made of it) -> z"""

        @staticmethod
        def forward(ctx: Any, preactivation: Tensor, z: Tensor) -> Tensor:
            ctx.save_for_backward(preactivation)
            return z.view_as(z)

        @staticmethod
        def backward(ctx: Any, dz: Tensor) -> tuple[Tensor, None]:
            (preactivation,) = ctx.saved_tensors
            return backward_of_gate(dz, preactivation), None

    def glu(x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return gemm_gated(x, w_gate_up.T, activation="swiglu", store_preact=False, tuned=tuned)[1]
        return Gate.apply(*linear_gated_func(x, w_gate_up, "swiglu", tuned=tuned))

    return glu


def _quack(problem: Problem, tuned: bool) -> Step:
    own, to_canonical = joined(problem, interleaved=True)
    w_gate_up = own["w_gate_up"]
    if problem.case.scope is Scope.GLU:
        return Step(_quack_glu(w_gate_up, tuned), own, to_canonical)
    from quack.mlp import mlp_func

    w_down = own["w_down"]
    return Step(lambda x: mlp_func(x, w_gate_up, w_down, "swiglu", tuned=tuned), own, to_canonical)


def _quack_row(name: str, description: str, tuned: bool) -> Implementation:
    scopes = (Scope.GLU, Scope.MLP)
    usage = f"from quack.mlp import mlp_func; out = mlp_func(x, w_gate_up, w_down, 'swiglu', tuned={tuned})"
    declare = implementation(name, scopes=scopes, description=description, on_request=tuned, usage=usage, **QUACK)
    return declare(partial(_quack, tuned=tuned))


quack = _quack_row("quack", "QuACK's gated product (CuTe DSL) in its default configuration, interleaved weights", False)
quack_tuned = _quack_row("quack-tuned", "quack, its products tuned: each by QuACK's own tuner", True)


@implementation(
    "flash-swiglu-mlp", scopes=(Scope.MLP,),
    description="flash-swiglu-mlp's Triton kernels: autotuned; w_down and the weight gradients by cuBLAS",
    backend="triton", package="flash_swiglu_mlp", gpus=(9, 10, 12),
    multiple=8,  # rows must step by 16 bytes
    usage="from flash_swiglu_mlp import flash_swiglu; out = flash_swiglu(x, w_gate, w_up, w_down)",
)  # fmt: skip
def flash_swiglu_mlp(problem: Problem) -> Step:
    """As its FlashSwiGLUMLP calls it. Its backward overwrites what it saved: no second one."""
    from flash_swiglu_mlp import flash_swiglu

    return _of_batches(problem, flash_swiglu)


@implementation(
    "tile-kernels", scopes=(Scope.GLU, Scope.MLP),
    description="TileKernels' SwiGLU (TileLang), forward and backward: behind one nn.Linear for gate and up",
    usage="from tile_kernels.quant import swiglu_forward; h = swiglu_forward(F.linear(x, w_gate_up), 'bf16')",
    package="tile_kernels", imports="tile_kernels.quant", weight_layout="packed", gpus=(9, 10),
    dtypes=(Dtype.BFLOAT16,), multiple=64, offers=("bias", "packed"),
)  # fmt: skip
def tile_kernels(problem: Problem) -> Step:
    """Without the cast to fp8 that it can do on the way."""
    import torch
    from tile_kernels.quant import swiglu_backward, swiglu_forward
    from torch.nn.functional import linear

    class Gate(torch.autograd.Function):
        """[tokens, 2 * intermediate], the gate's first -> [tokens, intermediate]"""

        @staticmethod
        def forward(ctx: Any, both: Tensor) -> Tensor:
            ctx.save_for_backward(both)
            return swiglu_forward(both, "bf16")

        @staticmethod
        def backward(ctx: Any, d_hidden: Tensor) -> Tensor:
            return swiglu_backward(*ctx.saved_tensors, d_hidden.contiguous(), "bf16")[0]

    def glu(x: Tensor, w_gate_up: Tensor, bias: Tensor | None) -> Tensor:
        found: Tensor = Gate.apply(linear(x, w_gate_up, bias).flatten(0, -2))
        return found.unflatten(0, x.shape[:-1])

    return packed(problem, glu)
