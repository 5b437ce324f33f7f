"""The kernels of swiglu_kernels: the gate alone, and one launch for both projections and the gate.

The fused rows differ in what backward does: whether weights get gradients, who computes them, and whether gate and up
were kept (`-preact`) or are computed again from x.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from swiglu_bench.implementations.around import around, packed
from swiglu_bench.spec.cases import Scope
from swiglu_bench.spec.costs import Footprint
from swiglu_bench.spec.implementation import Implementation, Step, Trains, implementation

if TYPE_CHECKING:
    from torch import Tensor

    from swiglu_bench.spec.problem import Problem


def _build(problem: Problem, **choices: Any) -> Step:
    """x -> z by swiglu_glu, and torch's product with w_down behind it in the mlp scope."""
    from torch.nn.functional import linear

    from swiglu_kernels import swiglu_glu, swiglu_glu_packed

    weights, biases = problem.weights, problem.biases
    bias_gate, bias_up, bias_down = (biases.get(f"bias_{name}") for name in ("gate", "up", "down"))
    choices = {"limit": problem.extras.limit, **choices}
    if problem.extras.packed:
        return packed(problem, partial(swiglu_glu_packed, **choices))

    def glu(x: Tensor) -> Tensor:
        return swiglu_glu(x, weights["w_gate"], weights["w_up"], bias_gate, bias_up, **choices)

    if problem.case.scope is Scope.GLU:
        return Step(glu)
    return Step(lambda x: linear(glu(x), weights["w_down"], bias_down))


def _build_mlp(problem: Problem, **choices: Any) -> Step:
    """The whole block by swiglu_mlp."""
    from swiglu_kernels import swiglu_mlp

    tensors, choices = (*problem.weights.values(), *problem.biases.values()), {"limit": problem.extras.limit, **choices}
    return Step(lambda x: swiglu_mlp(x, *tensors, **choices))


def _usage(call: str, **choices: Any) -> str:
    """The import and the call, with the choices that are not left to it."""
    arguments = [f", {name}={value!r}" for name, value in choices.items() if value != "auto"]
    result = "" if call.startswith("patch") else "out = "
    return f"from swiglu_kernels import {call.partition('(')[0]}; {result}{call}{''.join(arguments)})"


def _row(
    name: str,
    description: str,
    *,
    weight_grad: Literal["none", "torch", "triton", "auto"],
    save: Literal["input", "preact", "auto"],
    input_grad: Literal["fused", "two_step", "auto"] = "two_step",
    glu: Footprint,
    mlp: Footprint,
) -> Implementation:
    trains: Trains = "inputs" if weight_grad == "none" else "everything"
    declare = implementation(
        name,
        scopes=(Scope.GLU, Scope.MLP),
        description=description,
        backend="triton",
        trains=trains,
        offers=("bias", "limit", "packed"),
        footprints={Scope.GLU: glu, Scope.MLP: mlp},
        usage=_usage("swiglu_glu(x, w_gate, w_up", weight_grad=weight_grad, save=save, input_grad=input_grad),
    )
    return declare(partial(_build, weight_grad=weight_grad, save=save, input_grad=input_grad))


def _mlp_row(name: str, description: str, footprint: Footprint | None = None, **choices: Any) -> Implementation:
    declare = implementation(
        name,
        scopes=(Scope.MLP,),
        description=description,
        backend="triton",
        offers=("bias", "limit"),
        footprints={Scope.MLP: footprint} if footprint else {},
        usage=_usage(
            "swiglu_mlp(x, w_gate, w_up, w_down" if "chunk_tokens" in choices else "patch_model(model", **choices
        ),
    )
    return declare(partial(_build_mlp, **choices))


@implementation(
    "silu-mul",
    scopes=Scope,
    description="silu_mul: one elementwise launch in each direction between two nn.Linear; nothing is overwritten",
    usage="from swiglu_kernels import silu_mul; h = silu_mul(gate, up)",
    backend="triton",
    offers=("bias",),
    footprints={
        Scope.ACTIVATION: Footprint(saved=0, phases=((3, 0, 0),)),
        Scope.GLU: Footprint(saved=2, phases=((5, 0, 0), (3, 1, 1), (2, 2, 2))),
        Scope.MLP: Footprint(saved=3, phases=((4, 1, 1), (5, 1, 1), (2, 2, 2), (1, 3, 3))),
    },
)
def silu_mul(problem: Problem) -> Step:
    """The gate alone; every tensor that the backward reads stays as it was."""
    from swiglu_kernels import silu_mul

    return around(problem, silu_mul)


fused = _row(
    "fused",
    "one Triton launch from x to z; backward computes gate and up again and yields dX only (frozen weights)",
    weight_grad="none",
    save="input",
    glu=Footprint(saved=0, phases=((3, 1, 0),)),
    mlp=Footprint(saved=0, phases=((3, 2, 0),)),
)
fused_dw_torch = _row(
    "fused-dw-torch",
    "fused, with weight gradients by torch products",
    weight_grad="torch",
    save="input",
    glu=Footprint(saved=0, phases=((3, 1, 2),)),
    mlp=Footprint(saved=1, phases=((3, 2, 3), (2, 1, 1))),
)
fused_dw_triton = _row(
    "fused-dw-triton",
    "fused, with weight gradients by one Triton launch",
    weight_grad="triton",
    save="input",
    glu=Footprint(saved=0, phases=((3, 1, 2),)),
    mlp=Footprint(saved=1, phases=((3, 2, 3), (2, 1, 1))),
)
fused_preact = _row(
    "fused-preact",
    "as fused, but the forward launch also stores gate and up for backward",
    weight_grad="none",
    save="preact",
    glu=Footprint(saved=2, phases=((3, 1, 0),)),
    mlp=Footprint(saved=2, phases=((3, 2, 0),)),
)
fused_dw_torch_preact = _row(
    "fused-dw-torch-preact",
    "fused-preact, with weight gradients by torch products",
    weight_grad="torch",
    save="preact",
    glu=Footprint(saved=2, phases=((3, 1, 2),)),
    mlp=Footprint(saved=3, phases=((3, 2, 3), (4, 1, 1))),
)
fused_dw_triton_preact = _row(
    "fused-dw-triton-preact",
    "fused-preact, with weight gradients by one Triton launch",
    weight_grad="triton",
    save="preact",
    glu=Footprint(saved=2, phases=((3, 1, 2),)),
    mlp=Footprint(saved=3, phases=((3, 2, 3), (4, 1, 1))),
)
fused_on_the_fly = _row(
    "fused-on-the-fly",
    "fused-preact, with dX and weight gradients by one launch each that form d_gate and d_up in the main loop",
    weight_grad="triton",
    save="preact",
    input_grad="fused",
    glu=Footprint(saved=2, phases=((3, 1, 2),)),
    mlp=Footprint(saved=3, phases=((3, 2, 3), (4, 1, 1))),
)
fused_auto = _row(
    "fused-auto",
    "swiglu_glu with every choice left to it",
    weight_grad="auto",
    save="auto",
    input_grad="auto",
    glu=Footprint(saved=2, phases=((3, 1, 2),)),
    mlp=Footprint(saved=3, phases=((3, 2, 3), (4, 1, 1))),
)
fused_mlp = _mlp_row(
    "fused-mlp",
    "swiglu_mlp: the product dOut x W_down yields d_gate, d_up and h in its epilogue; dX and dW by torch products",
    Footprint(saved=2, phases=((3, 1, 1), (2, 2, 3))),
    weight_grad="torch",
    save="preact",
    input_grad="torch",
)
fused_mlp_recompute = _mlp_row(
    "fused-mlp-recompute",
    "swiglu_mlp keeping x only: the backward makes gate, up and h again",
    Footprint(saved=0, phases=((3, 1, 1), (2, 2, 3))),
    weight_grad="auto",
    save="input",
    input_grad="auto",
)
fused_mlp_chunked = _mlp_row(
    "fused-mlp-chunked",
    "swiglu_mlp keeping x only, as much at a time as 1024 tokens take, dX summed in fp32",
    weight_grad="auto",
    save="input",
    input_grad="auto",
    chunk_tokens=1024,
)
fused_mlp_auto = _mlp_row(
    "fused-mlp-auto",
    "swiglu_mlp with every choice left to it",
    Footprint(saved=2, phases=((3, 1, 1), (2, 2, 3))),
    weight_grad="auto",
    save="auto",
    input_grad="auto",
)
