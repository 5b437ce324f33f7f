"""Judges contenders that quantise, by the recipe that they name: codes, scales, and results of what those stand for.

A contender that hands over codes and scales is held to all of them: those of inputs, weights and the upstream gradient
are the definition's bit for bit; those of h, d_gate and d_up, which depend on how sums were rounded, use the whole
range of codes in every group and stand for the right values; and results are within the usual budget of the fp64 result
of exactly those values. Without them, results are held against the fp64 result of the definition's own codes. There,
and in the timed loop, the budget comes from what the definition itself loses in the case's dtype: a sum rounded
otherwise may give h another code.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from swiglu_bench.cases import fp8
from swiglu_bench.cases.cases import Scope
from swiglu_bench.cases.implementation import implementation
from swiglu_bench.check import tolerance
from swiglu_bench.check.built import Produced
from swiglu_bench.check.inputs import Draw
from swiglu_bench.check.judge import Judge, Truth
from swiglu_bench.check.results import Fault, same_bits
from swiglu_bench.rows.record import CODES, TensorCheck

RECIPE = "recipe"
CODE_STEP, NOISE = 8.0, 0.125
"""An element of what the contender computed itself may be off by a step of its code, twice what rounding to the nearest
code loses, and by as much of the rms, for gradients whose terms cancel."""
INTERMEDIATE = ("h", "d_gate", "d_up", "d_gate_up")
OF_EXPERTS = (*INTERMEDIATE, "upstream")
"""The upstream gradient of an expert's block is a product with a routing weight."""


class QuantisedJudge(Judge):
    """Judges the results of contenders that quantise; `judge_of` makes the classes."""

    joint: bool
    quantised_dx: bool
    quantised_dw: bool

    def answer(self, activations: Sequence[Tensor], upstream: Tensor | None) -> dict[str, Tensor]:
        """The fp64 answer on operands that are quantised by the definition."""
        precision = self.problem.case.precision

        def operand(name: str, value: Tensor) -> Tensor:
            quantised = fp8.is_quantised(name, self.quantised_dx, self.quantised_dw)
            return fp8.dequantise(*fp8.quantise(value, precision, name)) if quantised else value

        return self._answer(activations, upstream, lambda rows: operand)

    def judge_handed(
        self, produced: Produced, draw: Draw, handed: Mapping[str, fp8.Quantised], *, label: str = "{}",
        faults: Mapping[str, Fault] | None = None, distribution: bool = False,
    ) -> tuple[TensorCheck, ...]:  # fmt: skip
        """One verdict for each result, by the operands that were handed over, and one for each of these."""
        activations = [value.clone() for value in self.desk.activations(draw)]
        backward = produced.keys() != {"output"}
        upstream = self.desk.upstream(draw).clone() if backward else None
        self.truth(draw, backward)  # for `compare`
        missing = [name for name in fp8.required(self.problem.case, self.joint) if name not in handed]
        checks = [_verdict(name, "were not handed over") for name in missing]
        noted = _operands(handed, torch.float64, lambda *given: checks.append(_verdict(given[0], self._wrong(*given))))
        answer = self._answer(activations, upstream, noted)
        expected = {name: tolerance.Expected.of(value) for name, value in answer.items()}
        again = _operands(handed, torch.float32, lambda *operand: None)
        plain = fp8.compute(activations, self.problem.weights, upstream, again, self.joint)
        losses = {name: tolerance.tensor_error(plain[name], truth) for name, truth in expected.items()}
        results = self._verdicts(produced, Truth(expected, losses), label, faults or {}, distribution)
        unique = {check.tensor: check for check in sorted(checks, key=lambda check: not check.ok)}
        return (*results, *(replace(check, tensor=label.format(check.tensor)) for check in unique.values()))

    def _answer(
        self, activations: Sequence[Tensor], upstream: Tensor | None, operand_of: fp8.OperandOf
    ) -> dict[str, Tensor]:
        exact = [value.detach().double() if value.is_floating_point() else value for value in activations]
        weights = {name: value.detach() for name, value in self.problem.weights.items()}
        if self.problem.case.scope is not Scope.EXPERTS:  # whose weights become fp64 one expert at a time
            weights = {name: value.double() for name, value in weights.items()}
        return fp8.compute(exact, weights, None if upstream is None else upstream.double(), operand_of, self.joint)

    def _wrong(self, name: str, value: Tensor, handed: fp8.Quantised) -> str:
        """What is wrong with the codes and scales of one operand, or ""; `value` is what they should stand for."""
        codes, scales = handed
        right_codes, right_scales = fp8.quantise(value, self.problem.case.precision, name)
        if not value.numel():
            return ""
        computed = OF_EXPERTS if self.problem.case.scope is Scope.EXPERTS else INTERMEDIATE
        if name.removesuffix(".T") not in computed:
            if not same_bits(scales, right_scales):
                return f"{int((scales != right_scales).sum())} of {scales.numel()} scales are not those of the recipe"
            if not same_bits(codes, right_codes):
                wrong = int((codes.view(torch.uint8) != right_codes.view(torch.uint8)).sum())
                return f"{wrong} of {codes.numel()} codes are not those of the recipe"
            return ""
        largest = fp8.largest(codes, self.problem.case.precision, name)
        if unused := int(((largest != fp8.LARGEST) & (largest != 0)).sum()):
            return f"in {unused} of {largest.numel()} groups the largest code is not {fp8.LARGEST:g}"
        rounding = 4 * tolerance.unit_roundoff(self.dtype)
        allowed = tolerance.MARGIN * _distance((right_codes, right_scales), value) + rounding
        found = _distance(handed, value)
        if not found <= allowed:
            return f"they represent values with a relative error of {found:.2e}, more than {allowed:.2e}"
        off = (fp8.dequantise(*handed) - value).abs_().sub_(value.abs() / CODE_STEP).max().item()
        if not off <= NOISE * value.norm().item() / value.numel() ** 0.5:
            return "one of them represents a value that is further off than rounding explains"
        return ""


@functools.cache
def judge_of(joint: bool, quantised_dx: bool, quantised_dw: bool) -> type[QuantisedJudge]:
    """The judge of contenders with one product for gate and up or two, by which gradients' products are quantised."""
    way: dict[str, Any] = {"joint": joint, "quantised_dx": quantised_dx, "quantised_dw": quantised_dw}
    scopes = (Scope.GLU, Scope.MLP, Scope.EXPERTS)
    declare = implementation("quantised-reference", scopes=scopes, description="SwiGLU on quantised operands")
    return type("QuantisedJudge", (QuantisedJudge,), {**way, "definition": declare(partial(fp8.defined, **way))})


def _operands(
    handed: Mapping[str, fp8.Quantised], dtype: torch.dtype, note: Callable[[str, Tensor, fp8.Quantised], None]
) -> fp8.OperandOf:
    """Operands by what was handed over for them, the others as they are; `note` gets each with its right values."""

    def operand_of(rows: fp8.Rows | None) -> fp8.Operand:
        def operand(name: str, value: Tensor) -> Tensor:
            if name not in handed:
                return value.to(dtype)
            own = handed[name] if rows is None else rows.of(name, handed[name])
            note(name, value, own)
            return fp8.dequantise(*own, dtype)

        return operand

    return operand_of


def _distance(quantised: fp8.Quantised, value: Tensor) -> float:
    size = value.norm().item()
    return (fp8.dequantise(*quantised) - value).norm().item() / size if size else 0.0


def _verdict(operand: str, wrong: str) -> TensorCheck:
    return TensorCheck(f"{CODES}{operand}", not wrong, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, wrong, RECIPE if wrong else "")


def with_loss(checks: Sequence[TensorCheck], produced: Produced, judge: Judge, draw: Draw) -> tuple[TensorCheck, ...]:
    """The verdicts with each result's distance from the unquantised truth, and eager's, which `judge` has."""
    truth = judge.truth(draw, backward=produced.keys() != {"output"})
    return tuple(
        replace(
            check, loss=tolerance.tensor_error(produced[name], truth.expected[name]).relative,
            eager_loss=truth.eager[name].relative,
        )
        if produced.get(name := check.tensor.partition(" (")[0]) is not None else check
        for check in checks
    )  # fmt: skip
