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

formula_of = functools.lru_cache(Formula)
"""The same object for the same numbers: keys of plans compare it in no time."""
