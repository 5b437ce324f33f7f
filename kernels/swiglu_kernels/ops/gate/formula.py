"""Which gate the kernels apply: the activation and its numbers, as the public functions take them and as kernels do.

    scaled = gate_multiplier * gate
    g = min(scaled, limit),  u = clamp(up, -limit, limit)            limit=None: no bound
    z = g * sigmoid(v(g)) * (u + up_offset)

    activation="silu"        v(g) = alpha * g
    activation="gelu_tanh"   v(g) = 2 sqrt(2/pi) (g + 0.044715 g^3), since (1 + tanh(a)) / 2 = sigmoid(2 a)

Two activations bound what SiLU yields, not the gate within its sigmoid:

    activation="silu_clamp"    z = min(silu(scaled), limit) * (u + up_offset)
    activation="silu_softcap"  z = c tanh(scaled / c) sigmoid(scaled) * (d tanh(up / d) + up_offset), limit=(c, d)

The numbers reach the kernels as run-time arguments, so that a changed number never meets a kernel compiled for another;
only the choice of the formula is compiled in. "silu_softcap" passes c as limit and d as alpha, which it does not have.
With every number at its default nothing is passed: plain SiLU stays as short as it can be.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from swiglu_kernels.runtime import backend
from swiglu_kernels.runtime.backend import tl, triton
from swiglu_kernels.runtime.checks import check_option, check_scalar

# Until torch 2.13 clamp passes the gradient of a value on a bound, later it does not; and so do the kernels.
BOUNDS_PASS = tl.constexpr(torch.__version__ < "2.14") if backend.TRITON_AVAILABLE else False
ACTIVATIONS = ("silu", "gelu_tanh", "silu_clamp", "silu_softcap")
Limit = float | tuple[float, float] | None


@dataclasses.dataclass(frozen=True)
class Formula:
    """One gate; the defaults are plain SwiGLU."""

    activation: str = "silu"
    gate_multiplier: float = 1.0
    alpha: float = 1.0
    limit: Limit = None
    up_offset: float = 0.0

    @property
    def options(self) -> dict[str, Any]:
        """It by the names that public functions and definitions have."""
        return dict(vars(self))

    @property
    def numbers(self) -> tuple[float, float, float, float, float]:
        """It as numbers, for the schema of an operator; `formula_of` makes it again."""
        limit, alpha = self.limit if isinstance(self.limit, tuple) else (self.limit, self.alpha)
        bound = math.inf if limit is None else limit
        return float(ACTIVATIONS.index(self.activation)), self.gate_multiplier, alpha, bound, self.up_offset

    def arguments(self) -> dict[str, float | str | None]:
        """Return the kernel arguments `multiplier`, `alpha`, `limit`, `up_offset` and the constexpr FORMULA."""
        names = ("multiplier", "alpha", "limit", "up_offset")
        if self == PLAIN:
            return dict.fromkeys(names) | {"FORMULA": "silu"}
        numbers = dict(zip(names, map(float, self.numbers[1:]), strict=True))
        return numbers | {"FORMULA": "scaled_silu" if self.activation == "silu" else self.activation}


PLAIN = Formula()


def check_formula(
    activation: object, gate_multiplier: object, alpha: object, limit: object, up_offset: object
) -> Formula:
    """Return the gate of the options as a public function takes them."""
    check_option("activation", activation, ACTIVATIONS)
    bound = _check_limit(activation, limit)
    multiplier, alpha = check_scalar("gate_multiplier", gate_multiplier), check_scalar("alpha", alpha)
    formula = Formula(str(activation), multiplier, alpha, bound, check_scalar("up_offset", up_offset))
    if activation != "silu" and formula.alpha != 1.0:
        raise ValueError(f"alpha: expected 1.0 with activation={activation!r} (it belongs to 'silu'), got {alpha!r}")
    clamps_nothing = bound is None and activation == "silu_clamp"
    return dataclasses.replace(formula, activation="silu") if clamps_nothing else formula


def _check_limit(activation: object, limit: object) -> Limit:
    if activation == "silu_softcap":
        if not isinstance(limit, tuple) or len(limit) != 2:
            expected = "two numbers, of gate and up, with activation='silu_softcap'"
            raise ValueError(f"limit: expected {expected}, got {limit!r}")
        caps = check_scalar("limit[0]", limit[0]), check_scalar("limit[1]", limit[1])
        if min(caps) <= 0:
            raise ValueError(f"limit: expected numbers above 0 with activation='silu_softcap', got {limit!r}")
        return caps
    bound = None if limit is None else check_scalar("limit", limit)
    if bound is not None and bound < 0:
        raise ValueError(f"limit: expected a number of at least 0, or None, got {limit!r}")
    return bound


def formula_of(numbers: Sequence[float]) -> Formula:
    """Return the gate of `Formula.numbers`: the same object for the same numbers, which keys of plans compare fast."""
    return _formula_of(*numbers)


@functools.lru_cache
def _formula_of(activation: float, gate_multiplier: float, alpha: float, limit: float, up_offset: float) -> Formula:
    name = ACTIVATIONS[int(activation)]
    if name == "silu_softcap":
        return Formula(name, gate_multiplier, 1.0, (limit, alpha), up_offset)
    return Formula(name, gate_multiplier, alpha, None if limit == math.inf else limit, up_offset)


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
