"""What contenders are judged by: the fp64 truth of a call, and how far plain eager PyTorch is from it in that dtype.

A Judge lives in a process that never imports a contender. It draws inputs from the seeds that the contender gets.
"""

import functools
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from swiglu_bench.cases import definition
from swiglu_bench.cases.cases import BIASES, Case, Extras, Mode, Scope, tensors
from swiglu_bench.cases.costs import TRUTH_CHUNK
from swiglu_bench.cases.definition import by_expert
from swiglu_bench.cases.implementation import Step, implementation
from swiglu_bench.cases.problem import Problem
from swiglu_bench.check import tolerance
from swiglu_bench.check.built import Built, OwnLayout, Produced
from swiglu_bench.check.chain import GROUPS, Chain, Marks
from swiglu_bench.check.inputs import Draw, sizes, torch_dtype
from swiglu_bench.check.results import Fault
from swiglu_bench.measure.clock import Clock
from swiglu_bench.rows.record import TensorCheck

KEPT = 2
"""Truths kept at a time: those of the calls by which all contenders of a case are admitted."""
SLACK = 1.5
"""Of the comparison with eager's own result, beside the sum of both errors."""
MARK_SLACK, MARK_ROUNDING = 4.0, 1e-4
"""Of the comparison of marks of a chain's calls, in units of both errors; and of their own value, for a sum of many."""
RECORDED_CALLS = 32
"""Of a chain to follow on a GPU, for fewer of which a recording takes longer than it saves."""
SUM_SLACK, SPREAD = 4.0, 8.0
"""Of the comparison of sums of many calls, in units of what their rounding loses; for one element, times that."""


def _by_definition(problem: Problem) -> Step:
    scope, parameters, variant = problem.case.scope, problem.parameters, problem.extras.variant
    if scope is Scope.ACTIVATION:
        return Step(partial(definition.gate_mul, **variant))  # type: ignore[arg-type]
    define: Callable[..., Tensor] = definition.experts if scope is Scope.EXPERTS else definition.block
    return Step(lambda *activations: define(*activations, parameters, **variant))


REFERENCE = implementation(
    "reference", scopes=Scope, description="the definition of SwiGLU", offers=("bias", "limit", "packed")
)(_by_definition)
"""The definition as an implementation: eager PyTorch in the dtype of the case."""


def in_dtype(problem: Problem, dtype: torch.dtype, copy: bool = False) -> Problem:
    """The same problem with weights and biases in a dtype; a `copy` shares no memory."""
    return problem.mapped(lambda value: value.detach().to(dtype, copy=copy))


in_fp64 = partial(in_dtype, dtype=torch.float64)
"""The same problem with fp64 weights and biases."""


@functools.lru_cache(maxsize=4)
def library_spreads(case: Case, device: torch.device) -> bool:
    """Whether PyTorch's own products of these sizes let an Inf in one token reach another here, for some rows.

    On CPUs with AMX, bf16 products of sizes that are no multiple of 32 multiply the beginning of the next row by zero
    (oneDNN in PyTorch 2.13). Then a contender is not to blame for what eager escapes by another size.
    """
    hidden, intermediate = case.shape.hidden, case.shape.intermediate
    for rows in (2, 16, 48, case.tokens):
        for inner, outer in ((hidden, intermediate), (hidden, 2 * intermediate), (intermediate, hidden)):
            value = torch.ones(rows, inner, dtype=torch_dtype(case), device=device)
            value[1::2] = torch.inf
            if not torch.isfinite((value @ value.new_ones(outer, inner).T)[::2]).all():
                return True
    return False


@dataclass(frozen=True)
class Truth:
    """The fp64 answer to one call, and eager PyTorch's distance from it, per tensor."""

    expected: Mapping[str, tolerance.Expected]
    eager: Mapping[str, tolerance.TensorError]

    @property
    def values(self) -> dict[str, Tensor]:
        """The fp64 tensors without their sizes."""
        return {name: expected.truth for name, expected in self.expected.items()}


_Holding = Callable[[Mapping[str, Tensor]], str]
"""Holds results against others that they should be close to: what is wrong, or ""."""
_Allowances = tuple[Mapping[str, tolerance.Budget], Mapping[str, tolerance.TensorError]]


class Judge:
    """Judges the results of calls on one problem."""

    definition = REFERENCE
    """What the budgets come from."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.dtype = torch_dtype(problem.case)
        self._reference = Built(self.definition, problem)
        self.desk = self._reference.desk
        self._truths: OrderedDict[tuple[Draw, bool], Truth] = OrderedDict()
        self.arithmetic = tolerance.arithmetic_of(problem.case, self.dtype)

    def truth(self, draw: Draw, backward: bool) -> Truth:
        """Compute the truth of a call, or find it among the last few."""
        key = (draw, backward or (draw, True) in self._truths)
        if key not in self._truths:
            while len(self._truths) >= KEPT:
                self._truths.popitem(last=False)
            mode = Mode.FORWARD if not backward else Mode.STEP if self.problem.case.accumulate > 1 else Mode.BACKWARD
            produced = self._reference.call(mode, draw)()
            activations = [value.clone() for value in self.desk.activations(draw)]
            values = self.answer(activations, self.desk.upstream(draw) if backward else None)
            expected = {name: tolerance.Expected.of(value) for name, value in values.items()}
            eager = {name: tolerance.tensor_error(produced[name], truth) for name, truth in expected.items()}
            self._truths[key] = Truth(expected, eager)
        return self._truths[key]

    def answer(self, activations: Sequence[Tensor], upstream: Tensor | None) -> dict[str, Tensor]:
        """The fp64 answer by `compute_truth`; judges of other arithmetic override it."""
        return compute_truth(self.problem, activations, upstream)

    def judge(
        self, produced: Produced, draw: Draw, *, label: str = "{}", faults: Mapping[str, Fault] | None = None,
        distribution: bool = False,
    ) -> tuple[TensorCheck, ...]:  # fmt: skip
        """One verdict for each produced tensor; `label` words its name, as in "{} (inference)".

        `faults` says what is wrong with tensors whose values do not count; the others have the right form.
        """
        truth = self.truth(draw, backward=produced.keys() != {"output"})
        return self._verdicts(produced, truth, label, faults or {}, distribution)

    def _verdicts(
        self, produced: Produced, truth: Truth, label: str, faults: Mapping[str, Fault], distribution: bool
    ) -> tuple[TensorCheck, ...]:
        return tuple(
            tolerance.check(
                label.format(name), value, truth.expected[name], truth.eager[name], self._arithmetic_of(name),
                faults.get(name), distribution,
            )
            for name, value in produced.items()
        )  # fmt: skip

    def _arithmetic_of(self, name: str) -> tolerance.Arithmetic:
        """The arithmetic behind a tensor: a bias of experts is often indexed, and gets its gradient token by token."""
        if name in BIASES[Scope.EXPERTS] and self.problem.case.shape.experts and self.problem.device.type == "cpu":
            return replace(self.arithmetic, additions=self.problem.case.tokens)
        return self.arithmetic

    def glue_ms(self, mode: Mode, draw: Draw, calls: int, names: Sequence[str], clock: Clock, recorded: bool) -> float:
        """Milliseconds a call that a `Chain` takes for anything but the call: inputs, cache, sums and marks."""
        results, sums = self._places(names), self._places(names)
        chain = Chain(self._reference, mode, draw, calls, sums, clock.flush, lambda: results)
        if recorded:
            chain.record(self.problem.device)
        clock.synchronize()
        began = time.perf_counter()
        chain.run(draw.seed)
        return (time.perf_counter() - began) * 1e3 / calls

    def _places(self, names: Sequence[str]) -> dict[str, Tensor]:
        found = sizes(self.problem.case)
        found["output"] = found["upstream"]
        return {name: torch.zeros(found[name], dtype=self.dtype, device=self.problem.device) for name in names}

    def follow(
        self, mode: Mode, draw: Draw, key: int, told: Marks, names: Sequence[str], layout: OwnLayout | None = None
    ) -> _Holding:
        """Make the reference's calls on the inputs of a chain with these marks, and hold each mark against its own.

        Marks are those of gradients as they lie in a `layout`. What is returned holds the sums in the same way as that
        of `compare` does.
        """
        parts = [layout.parts(name) for name in layout.own(names)] if layout else [[name] for name in names]
        if not told or any(len(marks) != GROUPS * len(parts) for marks in told):
            return lambda _: "the number of marks is wrong"
        sums = self._places(names)
        if layout:
            sums = layout.as_they_lie(sums)
        chain = Chain(self._reference, mode, draw, len(told), sums, lambda: None, told=told, layout=layout)
        case, long = self.problem.case, len(told) >= RECORDED_CALLS
        waits = case.scope is Scope.EXPERTS or bool(case.precision)  # for the host: it cannot be recorded
        if self.problem.device.type == "cuda" and mode is not Mode.BACKWARD and long and not waits:
            chain.record(self.problem.device)
        own = chain.run(key)
        budgets, eager = allowances = self._allowances(mode)
        wrong = self._holding(layout.canonical(sums) if layout else sums, allowances, len(told))
        right, found = (torch.tensor(marks, dtype=torch.int32).view(torch.float32) for marks in (own, told))
        errors = [max(SLACK * (budgets[n].relative + eager[n].relative) for n in each) for each in parts]
        allowed = MARK_SLACK * torch.tensor(errors).repeat_interleave(GROUPS) * chain.reaches.cpu()
        off = (found - right).abs() > allowed + MARK_ROUNDING * right.abs()
        off |= ~torch.isfinite(found) & torch.isfinite(right)
        if off.any():
            call, result = off.nonzero()[0].tolist()
            what = " and ".join(parts[result // GROUPS])
            return lambda _: f"{what}: call {call + 1} did not return what the inputs of the next followed from"
        return wrong

    def compare(self, mode: Mode, draws: Sequence[Draw]) -> _Holding:
        """Run the reference on draws; what is returned holds the sum of a contender's results against the reference's.

        It says what is wrong, or "". Far cheaper than a truth: a result may be as far from eager's as the budgets of
        both allow, by the errors of the calls that admitted the contenders.
        """
        expected = self._reference.call(mode, draws[0])()
        for draw in draws[1:]:
            for name, value in self._reference.call(mode, draw)().items():
                expected[name] += value
        return self._holding(expected, self._allowances(mode), len(draws))

    def _allowances(self, mode: Mode) -> _Allowances:
        """Budgets and eager's errors by result; not the truth itself, which is large, and may be forgotten earlier."""
        truth = next(truth for (_, backward), truth in self._truths.items() if backward or mode is Mode.FORWARD)
        budgets = {
            name: tolerance.budget_of(exact, truth.eager[name], self._arithmetic_of(name))
            for name, exact in truth.expected.items()
        }
        return budgets, truth.eager

    def _holding(self, expected: Produced, allowances: _Allowances, calls: int) -> _Holding:
        rounding = 0.0 if calls == 1 else SUM_SLACK * tolerance.unit_roundoff(self.dtype) * calls**0.5
        budgets, errors = allowances

        def wrong(found: Mapping[str, Tensor]) -> str:
            for name, value in found.items():
                right, budget, eager = expected[name], budgets[name], errors[name]
                if not value.numel():
                    continue
                difference = torch.sub(value, right)
                of = ((difference, 2), (right, 2), (difference, torch.inf))
                norms = [torch.linalg.vector_norm(part, order, dtype=torch.float32) for part, order in of]
                off, size, most = torch.stack(norms).tolist()
                scale = size / value.numel() ** 0.5
                if not off <= (SLACK * (budget.relative + eager.relative) + rounding) * size:
                    return f"{name}: relative difference {off / size if size else off:.2e} from eager's result"
                if not most <= (SLACK * (budget.maximum + eager.maximum) + SPREAD * rounding) * scale:
                    return f"{name}: one element differs from eager's by {most / scale if scale else most:.2e} x rms"
            return ""

        return wrong


# The truth


def compute_truth(problem: Problem, activations: Sequence[Tensor], upstream: Tensor | None) -> dict[str, Tensor]:
    """fp64 tensors: `output` and, given the upstream gradient, the gradient of every activation and parameter.

    The derivation, for gate g = x Wg^T, up u = x Wu^T, s = sigmoid(g), h = g s u and upstream gradient dh:
    d_up = dh g s, d_gate = dh u s (1 + g (1 - s)), dWg = d_gate^T x, dWu = d_up^T x, dx = d_gate Wg + d_up Wu.
    With a bias b the projection is x Wg^T + b, and the bias's gradient the sum of d_gate over tokens; with a limit,
    gate and up are bounded before the product and their gradients are zero beyond the bound; as gpt-oss has it, s is
    sigmoid(alpha g), for which d_gate has s (1 + alpha g (1 - s)), and h is g s (u + 1).

    Experts: with y the output of an expert's block for a token and w its routing weight, the token's output is the sum
    of w y over its experts; dw = dout y, and the block's upstream gradient is w dout.

    It uses no autograd and no code of any contender, and works through tokens in chunks to bound its memory.
    """
    if problem.case.scope is Scope.EXPERTS:
        return _of_experts(problem, activations, upstream)
    answer = _places(problem, upstream is not None)
    weights = {name: value.detach().double() for name, value in problem.parameters.items()}
    for rows in _chunks(problem.case.tokens):
        inputs = [value[rows].double() for value in activations]
        found = _block(weights, problem.extras, inputs, None if upstream is None else upstream[rows].double())
        for name, value in found.items():
            if name in weights:
                answer[name] += value
            else:
                answer[name][rows] = value
    return answer


def _of_experts(problem: Problem, activations: Sequence[Tensor], upstream: Tensor | None) -> dict[str, Tensor]:
    x, index, routing_weights = activations
    answer = _places(problem, upstream is not None)
    for number, (tokens, slots) in enumerate(by_expert(index, len(problem.weights["w_gate"]))):
        weights = {name: value[number].detach().double() for name, value in problem.parameters.items()}
        for rows in _chunks(len(tokens)):
            token, slot = tokens[rows], slots[rows]
            weight = routing_weights[token, slot].double()[:, None]
            d_output = None if upstream is None else upstream[token].double()
            d_block = None if d_output is None else weight * d_output
            found = _block(weights, problem.extras, [x[token].double()], d_block)
            output = found.pop("output")
            answer["output"].index_add_(0, token, weight * output)
            if d_output is None:
                continue
            answer["x"].index_add_(0, token, found.pop("x"))
            answer["top_k_weights"][token, slot] = (output * d_output).sum(1)
            for name, value in found.items():
                answer[name][number] += value
    return answer


def _places(problem: Problem, backward: bool) -> dict[str, Tensor]:
    found = sizes(problem.case)
    names = (*tensors(problem.case.scope), *problem.biases) if backward else ()
    wanted = {"output": found["upstream"]} | {name: found[name] for name in names}
    return {name: torch.zeros(size, dtype=torch.float64, device=problem.device) for name, size in wanted.items()}


def _chunks(rows: int) -> list[slice]:
    return [slice(start, start + TRUTH_CHUNK) for start in range(0, max(rows, 1), TRUTH_CHUNK)]


def _block(
    weights: Mapping[str, Tensor], extras: Extras, inputs: Sequence[Tensor], d_hidden: Tensor | None
) -> dict[str, Tensor]:
    """The answer of one dense block to fp64 inputs: gate and up or, with weights, x; without `d_hidden` the output."""
    alpha, limit = extras.alpha, extras.limit
    gate, up = [inputs[0] @ weights[name].T for name in ("w_gate", "w_up")] if "w_gate" in weights else inputs
    if "bias_gate" in weights:
        gate, up = gate + weights["bias_gate"], up + weights["bias_up"]
    if limit is not None:
        passes = torch.le if torch.__version__ < "2.14" else torch.lt  # on a bound, as torch.clamp has it
        gate_passes, up_passes = passes(gate, limit), passes(up.abs(), limit)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    up = up + (extras.variant.get("up_offset") or 0.0)
    sigmoid = torch.sigmoid(alpha * gate)
    silu = gate * sigmoid
    hidden = silu * up
    output = hidden @ weights["w_down"].T if "w_down" in weights else hidden
    answer = {"output": output + weights["bias_down"] if "bias_down" in weights else output}
    if d_hidden is None:
        return answer
    if "w_down" in weights:
        answer["w_down"] = d_hidden.T @ hidden
        if "bias_down" in weights:
            answer["bias_down"] = d_hidden.sum(0)
        d_hidden = d_hidden @ weights["w_down"]
    d_up = d_hidden * silu
    d_gate = d_hidden * up * (sigmoid * (1 + alpha * gate * (1 - sigmoid)))
    if limit is not None:
        d_gate, d_up = d_gate * gate_passes, d_up * up_passes
    if "w_gate" not in weights:
        return answer | {"gate": d_gate, "up": d_up}
    answer["x"] = d_gate @ weights["w_gate"] + d_up @ weights["w_up"]
    answer |= {"w_gate": d_gate.T @ inputs[0], "w_up": d_up.T @ inputs[0]}
    if "bias_gate" in weights:
        answer |= {"bias_gate": d_gate.sum(0), "bias_up": d_up.sum(0)}
    return answer
