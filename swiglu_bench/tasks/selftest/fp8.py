"""Contenders that quantise otherwise than the recipe that they name: coarser, by old scales, or without saturation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from swiglu_bench.cases.cases import Dtype, Mode, Precision, Scope
from swiglu_bench.cases.fp8 import BLOCK, E4M3, LARGEST, Quantised, defined, quantise, scale_size
from swiglu_bench.cases.implementation import Step
from swiglu_bench.cases.problem import Problem
from swiglu_bench.tasks.selftest.specimen import Specimen, specimen
from swiglu_bench.tasks.selftest.wrong import UNWRITTEN, VALUES

RECIPE = "recipe"


def _fault(
    name: str, description: str, caught_by: str | tuple[str, ...] = RECIPE, **where: Any
) -> Callable[[Callable[[Problem], Step]], Specimen]:
    given = {"mode": Mode.FORWARD, "task": "verify", "precision": Precision.FP8_ROWWISE} | where
    return specimen(name, description, caught_by, dtype=Dtype.BFLOAT16, **given)


def _by_scales(value: Tensor, scales: Tensor) -> Quantised:
    return (value.float() / scales).clamp(-LARGEST, LARGEST).to(E4M3), scales


def _coarse(value: Tensor, precision: Precision, name: str) -> Quantised:
    """One scale for the matrix, in the form of the recipe."""
    codes, scale = quantise(value, Precision.FP8_TENSORWISE, name)
    rows, columns = value.shape
    return codes, scale.expand(scale_size(precision, name, (rows, columns))).contiguous()


@_fault("one-scale-as-rows", "one scale for a matrix under the name of a scale for each row")
def one_scale(problem: Problem) -> Step:
    """Faster, and coarser."""
    return defined(problem, quantiser=_coarse)


@_fault("one-scale-silent", "the same, and hands over nothing", VALUES)
def one_scale_silent(problem: Problem) -> Step:
    """Results alone show it."""
    return Step(defined(problem, quantiser=_coarse).forward)


@_fault("one-scale-denied", "the same, and hands over the codes that it should have multiplied", VALUES)
def one_scale_denied(problem: Problem) -> Step:
    """It quantises twice, and shows the right ones."""
    coarse, shown = defined(problem, quantiser=_coarse), defined(problem)

    def forward(x: Tensor) -> Tensor:
        shown.forward(x)
        return coarse.forward(x)

    return Step(forward, hand_over=shown.hand_over)


@_fault("one-scale-of-h", "one scale for h under the name of a scale for each row", scope=Scope.MLP)
def one_scale_of_h(problem: Problem) -> Step:
    """Where the scale of a row is not known before the row is complete."""
    return defined(problem, quantiser=lambda v, p, name: _coarse(v, p, name) if name == "h" else quantise(v, p, name))


@_fault("one-scale-of-experts", "one scale for an expert's matrix as a scale for each row", scope=Scope.EXPERTS)
def one_scale_of_experts(problem: Problem) -> Step:
    """Of every expert, its rows and its weights."""
    return defined(problem, quantiser=_coarse)


@_fault("one-scale-of-experts-silent", "the same, and hands over nothing", VALUES, scope=Scope.EXPERTS)
def one_scale_of_experts_silent(problem: Problem) -> Step:
    """Results alone show it."""
    return Step(defined(problem, quantiser=_coarse).forward)


def _scales_of_first_expert(problem: Problem) -> Step:
    kept: dict[str, Tensor] = {}

    def first(value: Tensor, precision: Precision, name: str) -> Quantised:
        codes, scales = quantise(value, precision, name)
        if not name.startswith("w_"):
            return codes, scales
        return codes, kept.setdefault(name, scales)  # experts come in order

    return defined(problem, quantiser=first)


@_fault("scales-of-the-first-expert", "right codes, and the scales of the first expert for all", scope=Scope.EXPERTS)
def first_expert_scales(problem: Problem) -> Step:
    """An index without the expert's stride."""
    return _scales_of_first_expert(problem)


@_fault("scales-of-the-first-expert-silent", "the same, and hands over nothing", VALUES, scope=Scope.EXPERTS)
def first_expert_scales_silent(problem: Problem) -> Step:
    """Results alone show it."""
    return Step(_scales_of_first_expert(problem).forward)


@_fault("half-handed-over", "hands over the codes of x only, and not those of the weights")
def half_handed_over(problem: Problem) -> Step:
    """What is not handed over could be in any precision."""
    step, seen = defined(problem), dict[str, Quantised]()

    def hand_over(into: dict[str, Quantised] | None) -> None:
        assert step.hand_over
        step.hand_over(None if into is None else seen)
        shown.append(into)

    def forward(x: Tensor) -> Tensor:
        output = step.forward(x)
        if shown and shown[-1] is not None and seen:
            shown[-1]["x"] = seen["x"]
        return output

    shown: list[dict[str, Quantised] | None] = []
    return Step(forward, hand_over=hand_over)


@_fault("scales-of-the-first-call", "every call is quantised by the scales of the first one")
def first_scales(problem: Problem) -> Step:
    """Delayed scaling whose history never moves."""
    kept: dict[str, Tensor] = {}

    def stale(value: Tensor, precision: Precision, name: str) -> Quantised:
        return _by_scales(value, kept.setdefault(f"{name} {value.shape}", quantise(value, precision, name)[1]))

    return defined(problem, quantiser=stale)


@_fault("no-saturation", "scales of every other column, and codes that overflow to NaN", (RECIPE, *UNWRITTEN))
def no_saturation(problem: Problem) -> Step:
    """A scale by a sample, and a conversion that does not saturate."""

    def overflowing(value: Tensor, precision: Precision, name: str) -> Quantised:
        _, scales = quantise(value[:, ::2], precision, name)
        ratio = value.float() / scales
        return torch.where(ratio.abs() > LARGEST, torch.nan, ratio).to(E4M3), scales

    return defined(problem, quantiser=overflowing)


@_fault("powers-of-two", "scales are rounded up to powers of two")
def powers_of_two(problem: Problem) -> Step:
    """Another recipe, which wastes up to half of the range."""
    return defined(problem, quantiser=lambda v, p, name: _by_scales(v, quantise(v, p, name)[1].log2().ceil().exp2()))


@_fault("truncated-codes", "codes are rounded towards zero")
def truncated(problem: Problem) -> Step:
    """By dropping bits, which needs no arithmetic."""

    def towards_zero(value: Tensor, precision: Precision, name: str) -> Quantised:
        codes, scales = quantise(value, precision, name)
        above = codes.float().abs() > (value.float() / scales).abs()
        return (codes.view(torch.uint8) - above.to(torch.uint8)).view(E4M3), scales

    return defined(problem, quantiser=towards_zero)


@_fault("blocks-of-256", "a scale for 256 values in a row under the name of 128", precision=Precision.FP8_BLOCKWISE)
def wide_blocks(problem: Problem) -> Step:
    """Half as many scales."""

    def wide(value: Tensor, precision: Precision, name: str) -> Quantised:
        codes, scales = quantise(value, precision, name)
        if name != "x":
            return codes, scales
        pairs = torch.maximum(scales[:, ::2], scales[:, 1::2]).repeat_interleave(2, 1)
        return _by_scales(value, pairs.repeat_interleave(BLOCK, 1))[0], pairs

    return defined(problem, quantiser=wide)
