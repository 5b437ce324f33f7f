"""What is measured: shapes, scopes, modes and the cases that a sweep expands to. No torch in here.

A *shape* is the pair of sizes of one model's feed-forward block, a *sweep* names shapes and token counts, and a *case*
is one combination of shape, token count, dtype, scope, mode and seed.
"""

from __future__ import annotations

import enum
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from swiglu_bench.cases.errors import BadInput

T = TypeVar("T")


class Scope(enum.StrEnum):
    """Where the fusion boundary lies. A ratio never compares times of two scopes."""

    ACTIVATION = "activation"
    """gate, up -> silu(gate) * up"""
    GLU = "glu"
    """x -> silu(x Wg^T) * (x Wu^T)"""
    MLP = "mlp"
    """x -> (silu(x Wg^T) * (x Wu^T)) Wd^T"""
    EXPERTS = "experts"
    """x, and the experts chosen for each token with their weights -> the weighted sum of their mlps"""


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


class Precision(enum.StrEnum):
    """What the operands of a case's products are quantised to; `cases.fp8` defines each recipe."""

    UNQUANTISED = ""
    """Nothing: they are in the case's dtype. Called bf16 by the option."""
    FP8_TENSORWISE = "fp8-tensorwise"
    """fp8 with one scale for a matrix."""
    FP8_ROWWISE = "fp8-rowwise"
    """fp8 with a scale for each row."""
    FP8_BLOCKWISE = "fp8-blockwise"
    """fp8 with a scale for each 128 activations in a row, and for each 128 x 128 weights."""


DTYPE_ALIASES = {
    "fp32": Dtype.FLOAT32, "f32": Dtype.FLOAT32, "float": Dtype.FLOAT32, "float32": Dtype.FLOAT32,
    "fp16": Dtype.FLOAT16, "f16": Dtype.FLOAT16, "half": Dtype.FLOAT16, "float16": Dtype.FLOAT16,
    "bf16": Dtype.BFLOAT16, "bfloat16": Dtype.BFLOAT16,
}  # fmt: skip
FOR_EXPERTS = (Precision.UNQUANTISED, Precision.FP8_ROWWISE)
"""The precisions of a mixture of experts: what grouped products are made for."""
DENSE = (Scope.ACTIVATION, Scope.GLU, Scope.MLP)
"""The scopes of a single block; a mixture of experts has the scope `experts` alone."""
INDEX = "top_k_index"
"""The activation that has no gradient: int64 [tokens, top_k], the experts of each token, none of them twice."""
ACTIVATIONS = {
    Scope.ACTIVATION: ("gate", "up"), Scope.GLU: ("x",), Scope.MLP: ("x",),
    Scope.EXPERTS: ("x", INDEX, "top_k_weights"),
}  # fmt: skip
"""The tensors that change from call to call, in the order in which an implementation's forward takes them."""
WEIGHTS = {
    Scope.ACTIVATION: (), Scope.GLU: ("w_gate", "w_up"),
    **dict.fromkeys((Scope.MLP, Scope.EXPERTS), ("w_gate", "w_up", "w_down")),
}  # fmt: skip
"""The parameters of the block, each [out_features, in_features] as in nn.Linear; experts': [experts, ...]."""
BIASES = {scope: tuple(name.replace("w_", "bias_") for name in names) for scope, names in WEIGHTS.items()}
"""The vectors added to each projection where a problem has biases: each [out_features]; experts': [experts, ...]."""


def differentiable(scope: Scope) -> tuple[str, ...]:
    """Names of the activations that have a gradient."""
    return tuple(name for name in ACTIVATIONS[scope] if name != INDEX)


def tensors(scope: Scope) -> tuple[str, ...]:
    """Names of everything that a complete backward yields a gradient for: activations first, then weights."""
    return differentiable(scope) + WEIGHTS[scope]


class RoutingKind(enum.StrEnum):
    """How the experts of each token are drawn; which of them are popular is new in every call."""

    BALANCED = "balanced"
    """Every expert has the same number of tokens, or one fewer."""
    UNIFORM = "uniform"
    """Any of the sets of top_k experts with equal probability."""
    ZIPF = "zipf"
    """The r-th most popular expert is chosen 1 / r times as often as the most popular one."""
    SINGLE = "single"
    """All tokens have the same experts."""
    LOCAL = "local"
    """As one of two expert-parallel ranks sees it: of all pairs of a token and a slot half, rounded down, have experts
    of other ranks, -1 or beyond the last, and NaN as weights. They add nothing to results and gradients."""


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: how many there are, and how many of them each token has."""

    count: int
    top_k: int
    routing: RoutingKind = RoutingKind.UNIFORM


@dataclass(frozen=True, slots=True)
class Extras:
    """What a problem asks for beyond plain SwiGLU; an implementation supports those that it names in `offers`."""

    bias: bool = False
    limit: float | None = None
    """The gate is clamped from above to it and up to [-limit, limit] before the product, as in gpt-oss."""
    packed: bool = False
    """The gate and up weights are one [2 * intermediate, hidden] matrix, the gate's rows first."""
    alpha: float = 1.0
    """Experts with a limit: the gate's SiLU is gate * sigmoid(alpha * gate), and 1 is added to up, as in gpt-oss."""
    interleaved: bool = False
    """Experts: the model keeps the rows of gate and up in turn; else the gate's come first."""

    @property
    def offers(self) -> tuple[str, ...]:
        """What an implementation must offer to serve them."""
        return tuple(name for name in ("bias", "limit", "packed") if getattr(self, name) not in (False, None))

    @property
    def variant(self) -> dict[str, float | None]:
        """The options of `cases.definition` for the gate."""
        if self.alpha == 1.0:
            return {"limit": self.limit}
        return {"limit": self.limit, "alpha": self.alpha, "up_offset": 1.0}


PLAIN = Extras()


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one SwiGLU block: x is [tokens, hidden], gate and up are [tokens, intermediate]."""

    name: str
    hidden: int
    intermediate: int
    source: str
    tokens: tuple[int, ...]
    """Token counts that a sweep over this shape visits unless told otherwise."""
    experts: Experts | None = None
    """Of a mixture of experts; None: a dense block."""
    extras: Extras = PLAIN
    """What every problem of this shape asks for."""

    @property
    def is_local(self) -> bool:
        """Whether some of a token's experts lie on other ranks."""
        return self.experts is not None and self.experts.routing is RoutingKind.LOCAL

    def routed(self, routing: RoutingKind) -> Shape:
        """The same mixture of experts with another routing, which is part of the name unless it is uniform."""
        assert self.experts
        name = self.name if routing is RoutingKind.UNIFORM else f"{self.name}@{routing}"
        return replace(self, name=name, experts=replace(self.experts, routing=routing))


@dataclass(frozen=True, slots=True)
class Case:
    """One unit of work. It is hashable and holds everything needed to draw the same tensors again."""

    shape: Shape
    tokens: int
    dtype: Dtype
    scope: Scope
    mode: Mode
    seed: int = 0
    precision: Precision = Precision.UNQUANTISED
    accumulate: int = 1
    """Micro-batches in a step, of `tokens` each."""

    @property
    def name(self) -> str:
        """What its rows call the shape: with the precision, if anything is quantised, and several micro-batches."""
        batches = f"accumulate-{self.accumulate}" if self.accumulate > 1 else ""
        return "@".join(filter(None, (self.shape.name, self.precision, batches)))

    @property
    def pairs(self) -> int:
        """One for each token or, of experts, for each of a token's experts."""
        return self.tokens * (self.shape.experts.top_k if self.shape.experts else 1)

    @property
    def rows(self) -> int:
        """Rows that pass through the products: the pairs whose expert lies here."""
        return self.pairs - self.pairs // 2 if self.shape.is_local else self.pairs

    @property
    def how_many(self) -> str:
        """Its tokens in words: "1 token", "16 tokens"."""
        return f"{self.tokens} token{'' if self.tokens == 1 else 's'}"

    @property
    def label(self) -> str:
        """Short text for a progress bar or a message."""
        return f"{self.mode} {self.scope} {self.name} {self.how_many} {self.dtype}"


def expand(
    shapes: Iterable[Shape],
    *,
    scopes: Sequence[Scope],
    modes: Sequence[Mode],
    dtypes: Sequence[Dtype],
    tokens: Sequence[int] | None = None,
    seed: int = 0,
    precisions: Sequence[Precision] = (Precision.UNQUANTISED,),
    accumulate: int = 1,
) -> list[Case]:
    """All cases of a sweep, shape by shape, token counts ascending; `tokens` replaces the shapes' own lists.

    A shape has those of the scopes that fit it.
    """
    return [
        Case(shape, count, dtype, scope, mode, seed, precision, accumulate)
        for shape in shapes
        for scope, mode, dtype, precision in dict.fromkeys(itertools.product(scopes, modes, dtypes, precisions))
        if (scope is Scope.EXPERTS) == (shape.experts is not None)
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


def parse_precisions(text: str) -> list[Precision]:
    """Precisions from 'bf16,fp8-rowwise'. Raises BadInput naming the accepted ones."""
    known = {precision.value or "bf16": precision for precision in Precision}
    return _parsed("--precision", text, known, ", ".join(known))


def parse_dtypes(text: str) -> list[Dtype]:
    """Data types from 'bf16,fp32'. Raises BadInput naming the accepted spellings."""
    return _parsed("--dtype", text.lower(), DTYPE_ALIASES, "bf16, fp16, fp32")


def _parsed(option: str, text: str, known: Mapping[str, T], accepted: str) -> list[T]:
    try:
        return [known[part.strip()] for part in text.split(",")]
    except KeyError as error:
        raise BadInput(f"{option}: {error.args[0]!r} is not one of {accepted}.") from None
