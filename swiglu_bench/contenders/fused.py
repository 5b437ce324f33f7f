"""The kernels of swiglu_kernels: the gate alone, as Unsloth has it too, and projections and gate together.

The fused rows differ in their backward: whether weights get gradients, who computes them, and whether gate and up were
kept (`-preact`) or are computed again from x.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from swiglu_bench.cases.cases import DENSE, Scope
from swiglu_bench.cases.costs import Footprint
from swiglu_bench.cases.implementation import Implementation, Step, implementation
from swiglu_bench.contenders.around import around, packed

if TYPE_CHECKING:
    from torch import Tensor

    from swiglu_bench.cases.problem import Problem


_row = partial(implementation, backend="triton", imports="swiglu_kernels")


@_row(
    "silu-mul", scopes=DENSE,
    description="elementwise launches by swiglu_kernels: silu_mul, one in each direction; nothing is overwritten",
    usage="from swiglu_kernels import silu_mul; h = silu_mul(gate, up)",
    offers=("bias",), variant=(Scope.GLU, Scope.MLP),
    footprints={Scope.ACTIVATION: Footprint(saved=0, phases=((3, 0, 0),)),
                Scope.GLU: Footprint(saved=2, phases=((5, 0, 0), (3, 1, 1), (2, 2, 2))),
                Scope.MLP: Footprint(saved=3, phases=((4, 1, 1), (5, 1, 1), (2, 2, 2), (1, 3, 3)))},
)  # fmt: skip
def silu_mul(problem: Problem) -> Step:
    """The gate alone; every tensor that the backward reads stays as it was."""
    from swiglu_kernels import silu_mul

    return around(problem, silu_mul)


@_row(
    "unsloth", scopes=DENSE,
    description="Unsloth-style SiLU-mul: one pass forward, one in-place pass backward, between two nn.Linear",
    usage="from swiglu_kernels import unsloth_silu_mul; h = unsloth_silu_mul(gate, up, overwrite=True)",
    offers=("bias",), overwrites=("gate", "up"),
    footprints={Scope.ACTIVATION: Footprint(saved=0, phases=((2, 0, 0),)),
                Scope.GLU: Footprint(saved=2, phases=((4, 0, 0), (3, 1, 1), (2, 2, 2))),
                Scope.MLP: Footprint(saved=3, phases=((4, 1, 1), (2, 2, 2), (1, 3, 3)))},
)  # fmt: skip
def unsloth(problem: Problem) -> Step:
    """Its backward overwrites gate and up."""
    from swiglu_kernels import unsloth_silu_mul

    return around(problem, partial(unsloth_silu_mul, overwrite=True))


def _build_glu(problem: Problem, **choices: Any) -> Step:
    """x -> z by swiglu_glu, and in the mlp scope torch's product with w_down behind it."""
    from torch.nn.functional import linear

    from swiglu_kernels import swiglu_glu, swiglu_glu_packed

    weights = problem.weights
    bias_gate, bias_up, bias_down = (problem.biases.get(f"bias_{name}") for name in ("gate", "up", "down"))
    choices["limit"] = problem.extras.limit
    if problem.extras.packed:
        return packed(problem, partial(swiglu_glu_packed, **choices))

    def glu(x: Tensor) -> Tensor:
        return swiglu_glu(x, weights["w_gate"], weights["w_up"], bias_gate, bias_up, **choices)

    if problem.case.scope is Scope.GLU:
        return Step(glu)
    return Step(lambda x: linear(glu(x), weights["w_down"], bias_down))


MLP: dict[str, dict[str, Any]] = {}
"""Options of `swiglu_mlp`, by the names of the rows that call it."""


def build_mlp(problem: Problem, split: Any = None, **choices: Any) -> Step:
    """The whole block by swiglu_mlp; of a rank, with its part of the weights, by what a `Split` makes of it."""
    from swiglu_kernels import swiglu_mlp

    tensors = tuple(problem.parameters.values())

    def run(x: Tensor, mlp: Any = swiglu_mlp) -> Tensor:
        return mlp(x, *tensors, limit=problem.extras.limit, **choices)

    aside = "chunk_tokens" if "chunk_tokens" in choices else None
    return Step(run if split is None else partial(split.mlp, run=run, aside=aside))


def _usage(call: str, choices: dict[str, Any]) -> str:
    """The import and the call, with the choices that are not left to it."""
    arguments = [f", {name}={value!r}" for name, value in choices.items() if value != "auto"]
    return f"from swiglu_kernels import {call.removeprefix('out = ').partition('(')[0]}; {call}{''.join(arguments)})"


COMPARED = ("fused", "fused-auto")
"""Rows of swiglu_glu that a command compares unasked at that scope; at mlp, fused-mlp-auto stands for all."""


def _glu_row(name: str, weight_grad: str, save: str, input_grad: str, description: str) -> Implementation:
    """swiglu_glu with its choices. One that trains weights keeps h as well in the mlp scope, for w_down's gradient."""
    frozen, kept = weight_grad == "none", 0 if save == "input" else 2
    if frozen:
        footprints = {Scope.GLU: Footprint(kept, ((3, 1, 0),)), Scope.MLP: Footprint(kept, ((3, 2, 0),))}
    else:
        # PyTorch's products of weights come one after the other, and d_gate goes before d_w_up comes.
        in_turn = (weight_grad, save) == ("torch", "input")
        at_glu = ((3, 1, 1), (2, 1, 2)) if in_turn else ((3, 1, 2),)
        at_mlp = ((3, 2, 2), (2, 2, 3)) if in_turn else ((3, 2, 3),)
        footprints = {Scope.GLU: Footprint(kept, at_glu), Scope.MLP: Footprint(kept + 1, (*at_mlp, (kept + 2, 1, 1)))}
    choices: dict[str, Any] = {"weight_grad": weight_grad, "save": save, "input_grad": input_grad}
    return _row(
        name, scopes=(Scope.GLU, Scope.MLP), description=description, trains="inputs" if frozen else "everything",
        offers=("bias", "limit", "packed"), variant=(Scope.MLP,) if name in COMPARED else (Scope.GLU, Scope.MLP),
        footprints=footprints, usage=_usage("out = swiglu_glu(x, w_gate, w_up", choices),
    )(partial(_build_glu, **choices))  # fmt: skip


def _mlp_row(name: str, call: str, choices: dict[str, Any], description: str) -> Implementation:
    """swiglu_mlp with its choices. The peak of one in chunks is no fixed number of whole tensors: none is predicted."""
    MLP[name] = choices
    footprint = Footprint(0 if choices["save"] == "input" else 2, ((3, 1, 1), (2, 2, 3)))
    return _row(
        name, scopes=(Scope.MLP,), description=description, offers=("bias", "limit"),
        variant=() if name == "fused-mlp-auto" else (Scope.MLP,),
        footprints={} if "chunk_tokens" in choices else {Scope.MLP: footprint}, usage=_usage(call, choices),
    )(partial(build_mlp, **choices))  # fmt: skip


_GLU_ROWS = (  # name, weight_grad, save, input_grad, description
    ("fused", "none", "input", "two_step",
     "swiglu_glu, on Hopper one launch from x to z; backward recomputes gate and up, yields dX only (frozen weights)"),
    ("fused-dw-torch", "torch", "input", "two_step", "fused, weight gradients by torch"),
    ("fused-dw-triton", "triton", "input", "two_step", "fused, weight gradients by one launch"),
    ("fused-preact", "none", "preact", "two_step",
     "fused, with gate and up stored: by the forward launch, for the backward"),
    ("fused-dw-torch-preact", "torch", "preact", "two_step", "fused-preact, dW by torch"),
    ("fused-dw-triton-preact", "triton", "preact", "two_step", "fused-preact, dW by one Triton launch"),
    ("fused-on-the-fly", "triton", "preact", "fused",
     "fused-preact, d_gate, d_up on the fly: in the launches of dX and of the weight gradients"),
    ("fused-auto", "auto", "auto", "auto", "swiglu_glu with every option on auto"),
)  # fmt: skip
_MLP_ROWS = (  # name, usage, choices, description
    ("fused-mlp", "patch_model(model", {"weight_grad": "torch", "save": "preact", "input_grad": "torch"},
     "swiglu_mlp with gate and up stored: dOut x W_down yields d_gate, d_up and h in its epilogue; dX, dW by torch"),
    ("fused-mlp-recompute", "patch_model(model", {"save": "input"},
     "swiglu_mlp saving x only: the backward recomputes gate, up and h"),
    ("fused-mlp-chunked", "out = swiglu_mlp(x, w_gate, w_up, w_down", {"save": "input", "chunk_tokens": 1024},
     "swiglu_mlp saving x only, in chunks: of the size of 1024 tokens, dX summed in fp32"),
    ("fused-mlp-auto", "patch_model(model", {"save": "auto"}, "swiglu_mlp with every option on auto"),
)  # fmt: skip
_FAMILY = (silu_mul, *(_glu_row(*row) for row in _GLU_ROWS), *(_mlp_row(*row) for row in _MLP_ROWS))
ROWS = {row.name: row for row in _FAMILY}
"""The family by name, in the order in which tables show it."""
