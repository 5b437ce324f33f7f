"""What `tp` measures: cases, ways of splitting, numbers of ranks. No torch in here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from swiglu_bench.cases.cases import Case, Dtype, Mode, Scope, Shape, expand
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.cases.implementation import Implementation

ASYNC = "compile-async-tp"
ALONE = {ASYNC: "compile"}
"""Without collectives, this one is that one."""
Kind = bool | str
"""How an implementation is run: split, False with all tokens on every rank, True with its part of them; else:"""
LOCAL, SINGLE = "local", "single"
"""Without collectives, on a rank's part of the weights; whole, on each GPU by itself."""
WAYS = {"no": (False,), "yes": (True,), "both": (False, True)}
"""Values of --sequence-parallel, and whether tokens are split between the collectives."""


@dataclass(frozen=True)
class Plan:
    """What a command is to measure with each number of ranks."""

    run_id: str
    cases: tuple[Case, ...]
    implementations: tuple[Implementation, ...]
    """Without their code."""
    ways: tuple[bool, ...]
    budget_s: float
    timeout_s: float
    beside: tuple[Implementation, ...] = ()
    """What some of these are timed as without collectives, and takes no part itself."""
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)
    """Implementations that take no part, and why."""
    asked: frozenset[str] = frozenset()
    """The implementations that --impl names."""
    command: str = "swiglu-bench tp"

    @property
    def everybody(self) -> tuple[Implementation, ...]:
        """Whose code a rank has to have."""
        return (*self.implementations, *self.beside)

    @property
    def names(self) -> list[str]:
        """Of all implementations, in the catalogue's order."""
        return [one.name for one in self.implementations]


def cases_of(
    shapes: Sequence[Shape],
    modes: Sequence[Mode],
    dtypes: Sequence[Dtype],
    tokens: Sequence[int] | None,
    seed: int,
    sizes: Sequence[int],
    by_sequence: bool,
) -> tuple[Case, ...]:
    """The cases, all of which divide by every number of ranks; raises BadInput for what does not.

    Shapes are dense ones, or all of them mixtures of experts.

    Of the shapes' own token counts those are left out that do not divide; of those asked for none may be.
    """
    for size in sizes:
        for shape in shapes:
            what, number = "intermediate size", shape.intermediate
            if shape.experts:
                what, number = "number of experts", shape.experts.count
            if number % size:
                raise BadInput(
                    f"--gpus: {shape.name}'s {what} {number} is not divisible by {size}; give one of "
                    f"{_listed(_divisors(number))}."
                )
        wrong = [count for count in tokens or () if by_sequence and count % size]
        if wrong:
            raise BadInput(
                f"--tokens: {wrong[0]} tokens are not divisible by {size} ranks, which sequence parallelism needs; "
                f"give multiples of {size}, or --sequence-parallel no."
            )
    cases = expand(shapes, scopes=[Scope.MLP, Scope.EXPERTS], modes=modes, dtypes=dtypes, tokens=tokens, seed=seed)
    kept = tuple(one for one in cases if not by_sequence or all(one.tokens % size == 0 for size in sizes))
    if not kept:
        raise BadInput(f"--tokens: none of the shapes' own token counts is divisible by {_listed(sizes)}; give some.")
    return tuple(sorted(kept, key=lambda one: (shapes.index(one.shape), one.mode != Mode.FORWARD, one.mode)))


def local(case: Case, size: int) -> Case:
    """The case as one rank of a group computes it: with its part of the intermediate dimension, or of the experts."""
    if case.shape.experts:
        mine = dataclasses.replace(case.shape.experts, count=case.shape.experts.count // size)
        return dataclasses.replace(case, shape=dataclasses.replace(case.shape, experts=mine))
    return dataclasses.replace(
        case, shape=dataclasses.replace(case.shape, intermediate=case.shape.intermediate // size)
    )


def parse_gpus(text: str) -> list[int]:
    """Numbers of ranks from '1,2,4', each once. Raises BadInput for anything else."""
    counts = []
    for part in (piece.strip() for piece in text.split(",")):
        if not part.isascii() or not part.isdecimal() or not 1 <= int(part) <= 4096:
            raise BadInput(f"--gpus: {part!r} is not a number of GPUs; give positive integers such as 2 or 1,2,4.")
        counts.append(int(part))
    return list(dict.fromkeys(counts))


def _divisors(number: int) -> list[int]:
    return [size for size in (2, 4, 8, 16, 32, 64) if number % size == 0] or [1]


def _listed(values: Iterable[int]) -> str:
    return ", ".join(map(str, values))
