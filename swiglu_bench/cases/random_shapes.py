"""Layers drawn from a seed, for sizes and token counts that nobody has tuned a kernel for. No torch."""

from __future__ import annotations

import math
import random
import re

from swiglu_bench.cases.cases import Shape
from swiglu_bench.cases.errors import BadInput

HIDDEN, INTERMEDIATE, TOKENS = (2048, 8192), (768, 28672), (1, 16384)
"""The smallest and the largest; of sizes, those of the models in configs/, of whose mixtures a single expert counts."""
MOST = 10_000
SOURCE = "drawn at random"


def random_shapes(word: str, seed: int) -> list[Shape]:
    """Draw the layers that `random:N` names, each with one token count. Raises BadInput for another N.

    Sizes and token counts are log-uniform. Every other layer has multiples of 64, as models have; the rest have odd
    multiples of 8, whose rows begin inside a sector of the L2 cache. The first layers of a seed are the same for all N.
    """
    number = re.fullmatch(r"random:(\d{1,5})", word)
    count = int(number[1]) if number else 0
    if not 1 <= count <= MOST:
        raise BadInput(
            f"--shapes: {word!r} does not say how many layers to draw; give random:N, with N of 1 to {MOST}."
        )
    source = random.Random(seed)
    drawn: dict[str, Shape] = {}
    while len(drawn) < count:
        step, offset = (64, 0) if len(drawn) % 2 == 0 else (16, 8)
        hidden, intermediate = (
            step * int(_log_uniform(source, *bounds) / step) + offset for bounds in (HIDDEN, INTERMEDIATE)
        )
        tokens = round(_log_uniform(source, *TOKENS))
        name = f"{hidden}x{intermediate}"
        drawn.setdefault(name, Shape(name, hidden, intermediate, SOURCE, (tokens,)))
    return list(drawn.values())


def _log_uniform(source: random.Random, low: float, high: float) -> float:
    return math.exp(source.uniform(math.log(low), math.log(high)))
