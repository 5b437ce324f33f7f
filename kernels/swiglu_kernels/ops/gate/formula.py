"""Which gate the kernels apply: the activation and its numbers, as the public functions take them and as kernels do.

    scaled = gate_multiplier * gate
    g = min(scaled, limit),  u = clamp(up, -limit, limit)            limit=None: no bound
    z = g * sigmoid(v(g)) * (u + up_offset)

    activation="silu"        v(g) = alpha * g
    activation="gelu_tanh"   v(g) = 2 sqrt(2/pi) (g + 0.044715 g^3), since (1 + tanh(a)) / 2 = sigmoid(2 a)

The numbers reach the kernels as run-time arguments, so that a changed number never meets a kernel compiled for another;
only the choice of the formula is compiled in. With every number at its default nothing is passed: plain SiLU stays as
short as it can be.
"""

import dataclasses
import functools
import math
from typing import Any

import torch

from swiglu_kernels.runtime import backend
from swiglu_kernels.runtime.backend import tl, triton
from swiglu_kernels.runtime.checks import check_option, check_scalar

# Until torch 2.13 clamp passes the gradient of a value on a bound, later it does not; and so do the kernels.
BOUNDS_PASS = tl.constexpr(torch.__version__ < "2.14") if backend.TRITON_AVAILABLE else False
ACTIVATIONS = ("silu", "gelu_tanh")


@dataclasses.dataclass(frozen=True)
class Formula:
    """One gate; the defaults are plain SwiGLU."""

    activation: str = "silu"
    gate_multiplier: float = 1.0
    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0

    def arguments(self) -> dict[str, float | str | None]:
        """Return the kernel arguments `multiplier`, `alpha`, `limit`, `up_offset` and the constexpr FORMULA."""
        if self == Formula():
            return {"multiplier": None, "alpha": None, "limit": None, "up_offset": None, "FORMULA": "silu"}
        return {
            "multiplier": float(self.gate_multiplier),
            "alpha": float(self.alpha),
            "limit": math.inf if self.limit is None else float(self.limit),
            "up_offset": float(self.up_offset),
            "FORMULA": "gelu_tanh" if self.activation == "gelu_tanh" else "scaled_silu",
        }


PLAIN = Formula()


def check_formula(
    activation: object, gate_multiplier: object, alpha: object, limit: object, up_offset: object
) -> dict[str, Any]:
    """Return the options of the gate by name, numbers as floats."""
    check_option("activation", activation, ACTIVATIONS)
    numbers = {
        "gate_multiplier": check_scalar("gate_multiplier", gate_multiplier),
        "alpha": check_scalar("alpha", alpha),
        "limit": None if limit is None else check_scalar("limit", limit),
        "up_offset": check_scalar("up_offset", up_offset),
    }
    if numbers["limit"] is not None and numbers["limit"] < 0:
        raise ValueError(f"limit: expected a number of at least 0, or None, got {limit!r}")
    if activation != "silu" and numbers["alpha"] != 1.0:
        raise ValueError(f"alpha: expected 1.0 with activation={activation!r} (it belongs to 'silu'), got {alpha!r}")
    return {"activation": activation, **numbers}


formula_of = functools.lru_cache(Formula)
"""The same object for the same numbers: keys of plans compare it in no time."""


@triton.jit
def bounded(gate, up, limit):
    """Return (min(gate, limit), clamp(up, -limit, limit)); NaN stays NaN. For kernels in Gluon and in Triton."""
    gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
    return gate, tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def passes(value, limit):
    """Tell where a bound from above lets the gradient pass."""
    return value <= limit if BOUNDS_PASS else (value < limit) | (limit == float("inf"))  # which stands for none
