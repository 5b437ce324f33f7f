"""The answer in fp64 on the same rounded inputs: the output and every gradient, written out by hand.

The derivation, for gate g = x Wg^T, up u = x Wu^T, s = sigmoid(g), h = g s u and upstream gradient dh:
d_up = dh g s, d_gate = dh u s (1 + g (1 - s)), dWg = d_gate^T x, dWu = d_up^T x, dx = d_gate Wg + d_up Wu.
With a bias b the projection is x Wg^T + b, and the bias's gradient the sum of d_gate over tokens; with a limit, gate
and up are bounded before the product and their gradients are zero beyond the bound; as gpt-oss has it, s is
sigmoid(alpha g), for which d_gate has s (1 + alpha g (1 - s)), and h is g s (u + 1).

Experts: with y the output of an expert's block for a token and w its routing weight, the token's output is the sum of
w y over its experts; dw = dout y, and the block's upstream gradient is w dout.

It uses no autograd and no code of any contender, and works through tokens in chunks to bound its memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from swiglu_bench.cases.cases import Extras, Scope, tensors
from swiglu_bench.cases.costs import TRUTH_CHUNK
from swiglu_bench.cases.definition import by_expert
from swiglu_bench.cases.problem import Problem
from swiglu_bench.check.inputs import sizes


def compute_truth(problem: Problem, activations: Sequence[Tensor], upstream: Tensor | None) -> dict[str, Tensor]:
    """fp64 tensors: `output` and, given the upstream gradient, the gradient of every activation and parameter."""
    if problem.case.scope is Scope.EXPERTS:
        return _of_experts(problem, activations, upstream)
    answer = _zeros(problem, upstream is not None)
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
    answer = _zeros(problem, upstream is not None)
    for number, (tokens, slots) in enumerate(by_expert(index, len(problem.weights["w_gate"]))):
        weights = {name: value[number].detach().double() for name, value in problem.parameters.items()}
        for rows in _chunks(len(tokens)):
            token, slot = tokens[rows], slots[rows]
            weight = routing_weights[token, slot].double()[:, None]
            d_output = None if upstream is None else upstream[token].double()
            found = _block(
                weights, problem.extras, [x[token].double()], None if d_output is None else weight * d_output
            )
            output = found.pop("output")
            answer["output"].index_add_(0, token, weight * output)
            if d_output is None:
                continue
            answer["x"].index_add_(0, token, found.pop("x"))
            answer["top_k_weights"][token, slot] = (output * d_output).sum(1)
            for name, value in found.items():
                answer[name][number] += value
    return answer


def _zeros(problem: Problem, backward: bool) -> dict[str, Tensor]:
    """A place for everything that is asked for."""
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
    if "w_gate" in weights:
        gate, up = inputs[0] @ weights["w_gate"].T, inputs[0] @ weights["w_up"].T
    else:
        gate, up = inputs
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
