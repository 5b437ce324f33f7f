"""How a model uses a layer: calls that share a graph, gradients that add up, weights that change, a second layer.

Many kernels are right when they are called once and wrong here: a workspace that two calls share, a gradient that is
assigned instead of added, weights packed once and stale after the optimiser's step, a cache by shape that serves two
layers. Each scenario is a function of layers and inputs; it runs with the contender in its process, and with the
reference in the judge's, in the case's dtype and in fp64. Sizes are small, so that every implementation can be asked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from swiglu_bench.cases.cases import WEIGHTS, Case, Mode, Precision
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.check import tolerance
from swiglu_bench.check.built import Built, take_apart
from swiglu_bench.check.inputs import Desk, Draw, Values, depths, every_other_column, leaf, make_problem, torch_dtype
from swiglu_bench.check.judge import Judge, in_fp64
from swiglu_bench.check.results import Fault
from swiglu_bench.rows.record import TensorCheck

TOKENS, FEW_TOKENS = 32, 5
SIZES = {"cpu": (64, 96), "cuda": (256, 512)}
"""Hidden and intermediate."""
EXPERTS, TOP_K = 4, 2
TAIL = -9.0
"""Where the gates of the second layer are, times a token's depth: SiLU is next to nothing there, and still has to be
right, token by token."""
SLACK = 3.0
"""Eager's errors count this many times: in the tail and over 32 tokens the errors of a right implementation in fp16 are
up to three times eager's by chance, and what the scenarios look for is wrong by far more."""
VALUES = (Values.WIDE, Values.UNEVEN_UPSTREAM)
"""The kinds of values that a layer is asked for beside normal ones."""


@dataclass(frozen=True)
class Seeds:
    """Everything that is drawn for the scenarios of one implementation."""

    weights: int
    tail_weights: int
    other_weights: int
    inputs: tuple[int, int, int]


Results = dict[str, Tensor]


class UsedLayer(Built):
    """One layer of a model: a contender's, or the reference's in any dtype."""

    def gathered(self) -> Results:
        """Copies of the gradients that have gathered in the weights, by their names."""
        own = {name: value.grad for name, value in self.parameters.items() if value.grad is not None}
        return {f"d {name}": value.clone() for name, value in take_apart(self.views, own).items()}

    def use(self, activations: Sequence[Tensor], upstream: Tensor) -> Results:
        """A forward and a backward: the output, and gradients of the activations that require them."""
        output = self.forward(*activations)
        torch.autograd.backward(output, upstream)
        return {"output": output.detach(), **_gradients(activations)}


@dataclass(frozen=True)
class Arrangement:
    """What every scenario is given: two layers, other weights for the first, and three sets of inputs."""

    layer: UsedLayer
    tail: UsedLayer
    """Its gates are around TAIL for `tail_inputs`."""
    other_weights: Mapping[str, Tensor]
    inputs: Sequence[Sequence[Tensor]]
    tail_inputs: Sequence[Tensor]
    upstream: Sequence[Tensor]

    def leaves(self, number: int) -> list[Tensor]:
        """A set of inputs as fresh leaves."""
        return [leaf(value.clone()) for value in self.inputs[number]]


def two_calls(given: Arrangement) -> Results:
    """Two forwards, then one backward through both."""
    given.layer.drop_gradients()
    first, second = given.leaves(0), given.leaves(1)
    outputs = [given.layer.forward(*first), given.layer.forward(*second)]
    torch.autograd.backward(outputs, list(given.upstream[:2]))
    return {
        "output 1": outputs[0].detach(), "output 2": outputs[1].detach(), **_gradients(first, " 1"),
        **_gradients(second, " 2"), **given.layer.gathered(),
    }  # fmt: skip


def accumulated(given: Arrangement) -> Results:
    """A backward into gradients that are there already: they add up."""
    found = given.layer.use(given.leaves(2), given.upstream[2])
    return _without_output(found) | given.layer.gathered()


def changed_weights(given: Arrangement) -> Results:
    """Weights changed in place between two calls, as by an optimiser."""
    given.layer.drop_gradients()
    given.layer.set_weights(given.other_weights)
    return given.layer.use(given.leaves(0), given.upstream[0]) | given.layer.gathered()


def two_layers(given: Arrangement) -> Results:
    """A second layer of the same shape with other weights, called in between."""
    given.layer.drop_gradients()
    first, second = given.leaves(0), [leaf(value.clone()) for value in given.tail_inputs]
    outputs = [given.layer.forward(*first), given.tail.forward(*second)]
    torch.autograd.backward(outputs[0], given.upstream[0])
    torch.autograd.backward(outputs[1], given.upstream[1])
    own = {f"{name} of the first": value for name, value in given.layer.gathered().items()}
    return {
        "output of the second": outputs[1].detach(), **_gradients(first, " of the first"),
        **_gradients(second, " of the second"), **own, **given.tail.gathered(),
    }  # fmt: skip


def inputs_without_gradient(given: Arrangement) -> Results:
    """Activations that need no gradient, as in the first layer of a model."""
    given.layer.drop_gradients()
    given.layer.use([value.clone() for value in given.inputs[0]], given.upstream[0])
    return given.layer.gathered()


def frozen_weights(given: Arrangement) -> Results:
    """Weights that need no gradient: the activations' are the same."""
    parameters = given.layer.parameters.values()
    for value in parameters:
        value.requires_grad_(False)
    try:
        return _without_output(given.layer.use(given.leaves(0), given.upstream[0]))
    finally:
        for value in parameters:
            value.requires_grad_()


def batches(given: Arrangement) -> Results:
    """[batch, sequence, features] instead of [tokens, features]."""
    leaves = [leaf(value.clone().unflatten(0, (2, -1))) for value in given.inputs[0]]
    found = given.layer.use(leaves, given.upstream[0].unflatten(0, (2, -1)))
    return {name: value.flatten(0, 1) for name, value in found.items()}


def strided(given: Arrangement) -> Results:
    """Activations and an upstream gradient that are not contiguous."""
    leaves = [leaf(every_other_column(value)) for value in given.inputs[0]]
    return given.layer.use(leaves, every_other_column(given.upstream[0]))


def other_lengths(given: Arrangement) -> Results:
    """Fewer tokens and more, in inference between a forward and its backward."""
    given.layer.drop_gradients()
    leaves = given.leaves(0)
    output = given.layer.forward(*leaves)
    with torch.no_grad():
        few = given.layer.forward(*(value[:FEW_TOKENS].clone() for value in given.inputs[1]))
        many = given.layer.forward(*map(torch.cat, zip(*given.inputs[1:], strict=True)))
    torch.autograd.backward(output, given.upstream[0])
    return {
        "output": output.detach(), "output of fewer": few, "output of more": many, **_gradients(leaves),
        **given.layer.gathered(),
    }  # fmt: skip


def changed_output(given: Arrangement) -> Results:
    """An output that the model changes in place before the backward."""
    leaves = given.leaves(1)
    output = given.layer.forward(*leaves)
    output.mul_(2.0)
    torch.autograd.backward(output, given.upstream[1])
    return {"output": output.detach(), **_gradients(leaves)}


def nan_and_inf(given: Arrangement) -> Results:
    """A token with a NaN and one with an Inf: they reach what they reach in eager, and no other token."""
    inputs = [value.clone() for value in given.inputs[0]]
    inputs[0][3, 5], inputs[0][7, 11] = torch.nan, torch.inf
    with torch.no_grad():
        return {"output": given.layer.forward(*inputs)}


def nan_and_inf_upstream(given: Arrangement) -> Results:
    """An upstream gradient with a NaN and an Inf, which a loss scaler has to find."""
    upstream = given.upstream[0].clone()
    upstream[3, 5], upstream[7, 11] = torch.nan, torch.inf
    return _without_output(given.layer.use(given.leaves(0), upstream))


Scenario = Callable[[Arrangement], Results]
REQUIRED: tuple[Scenario, ...] = (two_calls, accumulated, changed_weights, two_layers)
"""In this order: each goes on where the one before has left the layer."""
TOLERATED: tuple[Scenario, ...] = (
    nan_and_inf, inputs_without_gradient, frozen_weights, batches, strided, other_lengths, changed_output,
    nan_and_inf_upstream,
)  # fmt: skip
"""What an implementation may refuse with an error; a wrong result is one here, too."""
WEIGHTS_ONLY = (changed_weights, two_layers, inputs_without_gradient, frozen_weights)
"""Those that make no sense without weights that learn."""
IN_TAIL = frozenset({"two_layers: output of the second", "two_layers: d input 0 of the second"})
"""Results of gates far below zero."""
ROUTING_WEIGHTS = f"{Values.UNEVEN_UPSTREAM}: top_k_weights"
"""Of which a token has too few to be judged by itself."""
OF_UNEVEN_UPSTREAM = {*(f"{Values.UNEVEN_UPSTREAM}: {name}" for name in ("x", "gate", "up")), ROUTING_WEIGHTS}
BY_TOKEN = IN_TAIL | OF_UNEVEN_UPSTREAM
"""Results whose tokens are of very different sizes: each is judged by itself, or all at one size, unless they share a
scale."""
BUILD = "build"
"""What is said to have raised where the layers could not be built."""


def wanted(implementation: Implementation, case: Case) -> list[str]:
    """Names of all that an implementation is asked for: kinds of values, and scenarios; none without gradients."""
    asked = scenarios(implementation, case)
    return [*(values.value for values in VALUES), *(scenario.__name__ for scenario in asked)] if asked else []


def scenarios(implementation: Implementation, case: Case) -> tuple[Scenario, ...]:
    """The scenarios for an implementation at a scope; rows of the suite's compiler are spared the tolerated."""
    if not implementation.gradients(case.scope):
        return ()
    weights = set(implementation.gradients(case.scope)) & {"w_gate"}
    asked = REQUIRED if of_suites_compiler(implementation) else REQUIRED + TOLERATED
    spared = {changed_output} if implementation.precision_of(case) else set()  # its definition's output is a view
    return tuple(scenario for scenario in asked if (weights or scenario not in WEIGHTS_ONLY) and scenario not in spared)


def small_case(case: Case, device_type: str) -> Case:
    """The case at the scenarios' sizes."""
    hidden, intermediate = SIZES[device_type]
    experts = case.shape.experts and replace(case.shape.experts, count=EXPERTS, top_k=TOP_K)
    shape = replace(
        case.shape, name=f"{hidden}x{intermediate}", hidden=hidden, intermediate=intermediate, experts=experts
    )
    return replace(case, shape=shape, tokens=TOKENS, mode=Mode.STEP)


def of_suites_compiler(implementation: Implementation) -> bool:
    """Whether it is the suite's own row of torch.compile, which compiles anew for each kind of call."""
    return implementation.backend == "inductor" and implementation.source.startswith("swiglu_bench.")


def arrange(implementation: Implementation, case: Case, device: torch.device, seeds: Seeds) -> Arrangement:
    """Build the layers and draw the inputs, in the case's dtype."""
    problem = make_problem(case, device, seed=seeds.weights)
    tail = make_problem(case, device, seed=seeds.tail_weights, gate_offset=TAIL)
    desk, tail_desk = Desk(problem), Desk(tail, TAIL)
    draws = [Draw(seed) for seed in seeds.inputs]
    return Arrangement(
        layer=UsedLayer(implementation, problem),
        tail=UsedLayer(implementation, tail),
        other_weights=make_problem(case, device, seed=seeds.other_weights).parameters,
        inputs=[[value.clone() for value in desk.activations(draw)] for draw in draws],
        tail_inputs=[value.clone() for value in tail_desk.activations(draws[0])],
        upstream=[desk.upstream(draw).clone() for draw in draws],
    )


def exact(given: Arrangement) -> Arrangement:
    """The same arrangement with weights, inputs and upstream gradients in fp64."""

    def double(value: Tensor) -> Tensor:
        return value.detach().double() if value.is_floating_point() else value

    layer, tail = (UsedLayer(used.implementation, in_fp64(used.problem)) for used in (given.layer, given.tail))
    return Arrangement(
        layer, tail, {name: double(value) for name, value in given.other_weights.items()},
        [list(map(double, values)) for values in given.inputs], list(map(double, given.tail_inputs)),
        list(map(double, given.upstream)),
    )  # fmt: skip


class UseJudge:
    """Judges what scenarios yield, by the reference: by their truth in fp64, and by eager's results and errors."""

    def __init__(
        self, case: Case, device: torch.device, seeds: Seeds, wanted: Sequence[str], gradients: Sequence[str],
        judge: type[Judge] = Judge,
    ) -> None:  # fmt: skip
        """`wanted` names the scenarios, `gradients` those that the implementation yields."""
        given = arrange(judge.definition, case, device, seeds)
        precise = exact(given)
        self._case, self._quantised = case, judge is not Judge
        self.truth: Results = {}
        self._eager: Results = {}
        built = given.layer
        answer = judge(built.problem).answer
        for values in (values for values in VALUES if values in wanted):
            draw = Draw(seeds.inputs[0], values)
            eager = built.train(draw)
            truth = answer(built.desk.activations(draw), built.desk.upstream(draw))
            if values is Values.WIDE and built.problem.extras.limit is not None:
                truth = {"output": truth["output"]}  # gradients jump at the limit: for values near it, rounding decides
            if values is Values.UNEVEN_UPSTREAM:  # a weight's gradient is that of a token or two, whose errors are few
                truth = {name: value for name, value in truth.items() if name not in built.parameters}
            self.truth |= {f"{values}: {name}": value for name, value in truth.items()}
            self._eager |= {f"{values}: {name}": eager[name] for name in truth}
        for scenario in (scenario for scenario in REQUIRED + TOLERATED if scenario.__name__ in wanted):
            for store, results in ((self.truth, scenario(precise)), (self._eager, scenario(given))):
                store.update({f"{scenario.__name__}: {name}": value for name, value in results.items()})
        frozen = set(WEIGHTS[case.scope]) - set(gradients)
        self.truth = {n: value for n, value in self.truth.items() if not frozen & set(n.split())}

    def judge(self, results: Mapping[str, Tensor]) -> list[TensorCheck]:
        """One verdict for each result."""
        return [self._judge(name, value) for name, value in results.items()]

    def _judge(self, name: str, value: Tensor) -> TensorCheck:
        """A result must not be finite where neither eager nor the truth is, and has to be right where both are."""
        truth, eager = self.truth[name], self._eager[name]
        lost = ~torch.isfinite(truth) & ~torch.isfinite(eager)
        counts = torch.isfinite(truth) & torch.isfinite(eager)
        fault = Fault("finite", "is finite where eager has NaN or Inf") if torch.isfinite(value[lost]).any() else None
        if not counts.all():
            value, truth, eager = value[counts], truth[counts], eager[counts]
        shared = self._quantised and (name in IN_TAIL or self._case.precision is Precision.FP8_TENSORWISE)
        if fault or name not in BY_TOKEN or shared:
            return self._check(name, value, truth, eager, fault, of_one_token=shared and name in OF_UNEVEN_UPSTREAM)
        if (self._quantised or name == ROUTING_WEIGHTS) and counts.all():
            return self._check(name, *_evened(value, truth, eager))
        tails = [0.0] * len(value)
        if name in IN_TAIL and counts.all():
            tails = [-self._case.shape.extras.alpha * TAIL * depth for depth in depths(self._case)]
        tokens = [
            self._check(name, mine, true, theirs, tail=tail)
            for mine, true, theirs, tail in zip(value.split(1), truth.split(1), eager.split(1), tails, strict=True)
        ]
        return max(tokens, key=lambda check: (not check.ok, check.used))

    def _check(
        self, name: str, value: Tensor, truth: Tensor, eager: Tensor, fault: Fault | None = None, tail: float = 0.0,
        of_one_token: bool = False,
    ) -> TensorCheck:  # fmt: skip
        """Judge one result; `of_one_token`: its large values come from the h of a single token."""
        arithmetic = replace(tolerance.arithmetic_of(self._case, torch_dtype(self._case), 3), tail=tail)
        if of_one_token:
            arithmetic = replace(arithmetic, hidden_elements=arithmetic.hidden_elements // TOKENS)
        error = tolerance.tensor_error(eager, truth)
        error = replace(error, relative=SLACK * error.relative, maximum=SLACK * error.maximum)
        return tolerance.check(name, value, truth, error, arithmetic, fault)


def _gradients(leaves: Sequence[Tensor], suffix: str = "") -> Results:
    return {f"d input {number}{suffix}": leaf.grad for number, leaf in enumerate(leaves) if leaf.grad is not None}


def _without_output(found: Results) -> Results:
    return {name: value for name, value in found.items() if name != "output"}


def _evened(value: Tensor, truth: Tensor, eager: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scale every token to the same size: else the errors are those of one or two, and eager's small by chance."""
    sizes = torch.linalg.vector_norm(truth.flatten(1), dim=1).view(-1, *[1] * (truth.dim() - 1))
    sizes = torch.where(sizes == 0, 1.0, sizes)
    return value.double() / sizes, truth / sizes, eager.double() / sizes
