"""The answer in fp64 on the same rounded inputs: the output and every gradient, written out by hand.

The derivation, for gate g = x Wg^T, up u = x Wu^T, s = sigmoid(g), h = g s u and upstream gradient dh:
d_up = dh g s, d_gate = dh u s (1 + g (1 - s)), dWg = d_gate^T x, dWu = d_up^T x, dx = d_gate Wg + d_up Wu.
With a bias b the projection is x Wg^T + b, and the bias's gradient the sum of d_gate over tokens; with a limit, gate
and up are bounded before the product and their gradients are zero beyond the bound. It uses no autograd and no code of
any contender, and works through tokens in chunks to bound its memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from swiglu_bench.spec.cases import ACTIVATIONS, Scope
from swiglu_bench.spec.costs import TRUTH_CHUNK
from swiglu_bench.spec.problem import Problem


def compute_truth(problem: Problem, activations: Sequence[Tensor], upstream: Tensor | None) -> dict[str, Tensor]:
    """fp64 tensors: `output` and, given the upstream gradient, the gradient of every activation and parameter."""
    case, backward = problem.case, upstream is not None
    weights = {name: value.detach().double() for name, value in problem.parameters.items()}
    limit = problem.extras.limit
    answer: dict[str, list[Tensor]] = {name: [] for name in ("output", *ACTIVATIONS[case.scope])}
    sums: dict[str, Tensor] = {name: torch.zeros_like(value) for name, value in weights.items()} if backward else {}
    for start in range(0, max(case.tokens, 1), TRUTH_CHUNK):
        rows = slice(start, start + TRUTH_CHUNK)
        inputs = [value[rows].double() for value in activations]
        if case.scope is Scope.ACTIVATION:
            gate, up = inputs
        else:
            gate, up = inputs[0] @ weights["w_gate"].T, inputs[0] @ weights["w_up"].T
        if problem.biases:
            gate, up = gate + weights["bias_gate"], up + weights["bias_up"]
        if limit is not None:
            passes = torch.le if torch.__version__ < "2.14" else torch.lt  # on a bound, as torch.clamp has it
            gate_passes, up_passes = passes(gate, limit), passes(up.abs(), limit)
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        hidden = silu * up
        output = hidden @ weights["w_down"].T if case.scope is Scope.MLP else hidden
        answer["output"].append(output + weights["bias_down"] if "bias_down" in weights else output)
        if upstream is None:
            continue
        d_hidden = upstream[rows].double()
        if case.scope is Scope.MLP:
            sums["w_down"].addmm_(d_hidden.T, hidden)
            if problem.biases:
                sums["bias_down"] += d_hidden.sum(0)
            d_hidden = d_hidden @ weights["w_down"]
        d_up = d_hidden * silu
        d_gate = d_hidden * up * (sigmoid * (1 + gate * (1 - sigmoid)))
        if limit is not None:
            d_gate, d_up = d_gate * gate_passes, d_up * up_passes
        if case.scope is Scope.ACTIVATION:
            answer["gate"].append(d_gate)
            answer["up"].append(d_up)
            continue
        answer["x"].append(d_gate @ weights["w_gate"] + d_up @ weights["w_up"])
        sums["w_gate"].addmm_(d_gate.T, inputs[0])
        sums["w_up"].addmm_(d_up.T, inputs[0])
        if problem.biases:
            sums["bias_gate"] += d_gate.sum(0)
            sums["bias_up"] += d_up.sum(0)
    names = ("output", *ACTIVATIONS[case.scope], *weights) if backward else ("output",)
    return {name: sums[name] if name in sums else torch.cat(answer[name]) for name in names}
