"""What is measured: shapes, scopes, modes and the cases that a sweep expands to. No torch in here.

A *shape* is the pair of sizes of one model's feed-forward block, a *sweep* names shapes and token counts, and a *case*
is one combination of shape, token count, dtype, scope, mode and seed.
"""

from __future__ import annotations

import enum
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from swiglu_bench.spec.errors import BadInput


class Scope(enum.StrEnum):
    """Where the fusion boundary lies. A ratio never compares times of two scopes."""

    ACTIVATION = "activation"
    """gate, up -> silu(gate) * up"""
    GLU = "glu"
    """x -> silu(x Wg^T) * (x Wu^T)"""
    MLP = "mlp"
    """x -> (silu(x Wg^T) * (x Wu^T)) Wd^T"""


class Mode(enum.StrEnum):
    """Which part of a training step is timed; `step` is forward and backward together."""

    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"

    def results(self, gradients: Iterable[str]) -> tuple[str, ...]:
        """Names of what a call yields: its output and, where it has a backward, the gradients."""
        return ("output", *(gradients if self is not Mode.FORWARD else ()))


class Dtype(enum.StrEnum):
    """Data type of inputs, weights and output; each implementation chooses the type it accumulates in."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"

    @property
    def bytes(self) -> int:
        """Bytes of one element."""
        return 4 if self is Dtype.FLOAT32 else 2


DTYPE_ALIASES = {
    "fp32": Dtype.FLOAT32, "f32": Dtype.FLOAT32, "float": Dtype.FLOAT32, "float32": Dtype.FLOAT32,
    "fp16": Dtype.FLOAT16, "f16": Dtype.FLOAT16, "half": Dtype.FLOAT16, "float16": Dtype.FLOAT16,
    "bf16": Dtype.BFLOAT16, "bfloat16": Dtype.BFLOAT16,
}  # fmt: skip

ACTIVATIONS = {Scope.ACTIVATION: ("gate", "up"), Scope.GLU: ("x",), Scope.MLP: ("x",)}
"""The tensors that change from call to call, in the order in which an implementation's forward takes them."""

WEIGHTS = {Scope.ACTIVATION: (), Scope.GLU: ("w_gate", "w_up"), Scope.MLP: ("w_gate", "w_up", "w_down")}
"""The parameters of the block, each [out_features, in_features] as in nn.Linear."""

BIASES = {Scope.ACTIVATION: (), Scope.GLU: ("bias_gate", "bias_up"), Scope.MLP: ("bias_gate", "bias_up", "bias_down")}
"""The vectors added to each projection where a problem has biases: each [out_features]."""


def tensors(scope: Scope) -> tuple[str, ...]:
    """Names of everything that a complete backward yields a gradient for: activations first, then weights."""
    return ACTIVATIONS[scope] + WEIGHTS[scope]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one SwiGLU block: x is [tokens, hidden], gate and up are [tokens, intermediate]."""

    name: str
    hidden: int
    intermediate: int
    source: str
    tokens: tuple[int, ...]
    """Token counts that a sweep over this shape visits unless told otherwise."""


@dataclass(frozen=True, slots=True)
class Extras:
    """What a problem asks for beyond plain SwiGLU; an implementation supports those that it names in `offers`."""

    bias: bool = False
    limit: float | None = None
    """The gate is clamped from above to it and up to [-limit, limit] before the product, as in gpt-oss."""
    packed: bool = False
    """The gate and up weights are one [2 * intermediate, hidden] matrix, the gate's rows first."""


PLAIN = Extras()


@dataclass(frozen=True, slots=True)
class Case:
    """One unit of work. It is hashable and holds everything needed to draw the same tensors again."""

    shape: Shape
    tokens: int
    dtype: Dtype
    scope: Scope
    mode: Mode
    seed: int = 0

    @property
    def label(self) -> str:
        """Short text for a progress bar or a message."""
        return f"{self.mode} {self.scope} {self.shape.name} {self.tokens} tokens {self.dtype}"


def expand(
    shapes: Iterable[Shape],
    *,
    scopes: Sequence[Scope],
    modes: Sequence[Mode],
    dtypes: Sequence[Dtype],
    tokens: Sequence[int] | None = None,
    seed: int = 0,
) -> list[Case]:
    """All cases of a sweep, shape by shape, token counts ascending; `tokens` replaces the shapes' own lists."""
    return [
        Case(shape, count, dtype, scope, mode, seed)
        for shape in shapes
        for scope, mode, dtype in dict.fromkeys(itertools.product(scopes, modes, dtypes))
        for count in sorted(set(tokens if tokens is not None else shape.tokens))
    ]


def parse_tokens(text: str) -> list[int]:
    """Token counts from '1,128,1k,8k'; k is 1024. Raises BadInput for anything else, 0 and below included."""
    counts = []
    for part in (piece.strip() for piece in text.split(",")):
        match = re.fullmatch(r"(\d{1,12})([kK]?)", part)
        count = int(match[1]) * (1024 if match[2] else 1) if match else 0
        if count < 1:
            raise BadInput(f"--tokens: {part!r} is not a token count; give positive integers such as 1,128,1k,8k.")
        counts.append(count)
    return counts


def parse_dtypes(text: str) -> list[Dtype]:
    """Data types from 'bf16,fp32'. Raises BadInput naming the accepted spellings."""
    try:
        return [DTYPE_ALIASES[part.strip().lower()] for part in text.split(",")]
    except KeyError as error:
        raise BadInput(f"--dtype: {error.args[0]!r} is not one of bf16, fp16, fp32.") from None
