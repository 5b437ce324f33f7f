"""How a model uses a layer: calls that share a graph, gradients that add up, weights that change, a second layer.

Many kernels are right when they are called once and wrong here: a workspace that two calls share, a gradient that is
assigned instead of added, weights packed once and stale after the optimiser's step, a cache by shape that serves two
layers. Each scenario is a function of an arrangement of layers and inputs; it runs with the contender in its process,
and with the reference in the judge's, in the case's dtype and in a wider one, whose result is the truth. Every scenario
begins anew and runs at two sizes: a small one, and the case's own, for kernels choose tiles and ways by size. There the
contender's layer is the one that is timed, and a case of a forward is asked for forwards only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from swiglu_bench.cases.cases import BIASES, WEIGHTS, Case, Experts, Extras, Mode, Precision, RoutingKind, Scope
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.cases.problem import Problem
from swiglu_bench.check import inputs, tolerance
from swiglu_bench.check.built import Built, take_apart
from swiglu_bench.check.inputs import Desk, Draw, Values, leaf, make_problem, new_seed, torch_dtype
from swiglu_bench.check.judge import Judge, in_dtype, library_spreads
from swiglu_bench.check.results import Fault
from swiglu_bench.rows.record import TensorCheck

TOKENS = 32
SIZES = {"cpu": (64, 96), "cuda": (256, 512)}
"""Hidden and intermediate of the small size."""
EXPERTS, TOP_K = 4, 2
FEW = 5 / 32
"""Of its tokens, those of a shorter call."""
CROWDED = 3 / 4
"""The share of the tokens that have one expert."""
TAIL = -9.0
"""Where the gates of the second layer are, times a token's depth: SiLU is next to nothing there, and still has to be
right, token by token."""
SLACK = 3.0
"""Eager's errors count this many times: in the tail and over 32 tokens the errors of a right implementation in fp16 are
up to three times eager's by chance, and what the scenarios look for is wrong by far more."""
CODE_SLACK = 3.0
"""The same, beside SLACK, for the largest element of what quantises: where rounding decides on the code of a large
value of h, one element moves by a step."""
CLEAR_LIMIT = 5.0
"""Gradients jump at a gate's limit: below this, values are near it for which rounding decides."""
ROWS_JUDGED, ROWS_SUSPECTED = 64, 4
"""Of results that are judged token by token: so many all of them, and of more the worst by each kind of error."""

Results = dict[str, Tensor]
Run = Callable[["Arrangement"], Results]


@dataclass(frozen=True)
class Seeds:
    """Everything that is drawn for the scenarios of one case, at one size."""

    weights: int
    tail_weights: int
    other_weights: int
    inputs: tuple[int, int, int]
    routing: int = 0

    @classmethod
    def new(cls) -> Seeds:
        """From seeds that nothing knows."""
        return cls(new_seed(), new_seed(), new_seed(), (new_seed(), new_seed(), new_seed()), new_seed())


@dataclass(frozen=True)
class Question:
    """One scenario at one case, as the judge and a contender's process are told it."""

    name: str
    case: Case
    extras: Extras
    seeds: Seeds
    train: bool
    """Whether it has its backward; else it is inference."""
    most_tokens: int | None = None
    """The most tokens that the implementation takes."""


class Arrangement:
    """What every scenario is given: a layer, what is needed to build a second one, and inputs."""

    def __init__(self, layer: Built, asked: Question, dtype: torch.dtype | None = None) -> None:
        """`dtype` is what everything is widened to, if anything, after it was drawn in the case's own."""
        self.layer, self.asked, self._dtype = layer, asked, dtype
        self.tokens, self.experts = asked.case.tokens, asked.case.shape.experts or Experts(1, 1)
        self.trained = {name: value for name, value in layer.parameters.items() if value.requires_grad}

    def run(self) -> Results:
        """The results of the scenario, by name."""
        self.layer.drop_gradients()
        try:
            with torch.set_grad_enabled(self.asked.train):
                found = SCENARIOS[self.asked.name].run(self)
            return {f"{self.asked.name}: {name}": value.detach() for name, value in found.items()}
        finally:
            self.layer.drop_gradients()

    def inputs(self, number: int, values: Values = Values.NORMAL) -> list[Tensor]:
        """One of three sets of activations."""
        return self._widened(self.layer.desk.activations(Draw(self.asked.seeds.inputs[number], values)))

    def leaves(self, number: int, values: Values = Values.NORMAL) -> list[Tensor]:
        """A set of activations that collect gradients, in training."""
        return self.as_leaves(self.inputs(number, values))

    def as_leaves(self, values: Sequence[Tensor]) -> list[Tensor]:
        """These tensors, which collect gradients from now on, in training."""
        return [leaf(value, self.asked.train) for value in values]

    def upstream(self, number: int, values: Values = Values.NORMAL) -> Tensor:
        """The upstream gradient to a set of activations."""
        return self._widened([self.layer.desk.upstream(Draw(self.asked.seeds.inputs[number], values))])[0]

    def backward(self, outputs: Sequence[Tensor], upstream: Sequence[Tensor]) -> None:
        """A backward through the outputs, in training."""
        if self.asked.train:
            torch.autograd.backward(list(outputs), list(upstream))

    def use(self, activations: Sequence[Tensor], upstream: Tensor) -> Results:
        """A forward and a backward: the output, and gradients of the activations that require them."""
        output = self.layer.forward(*activations)
        self.backward([output], [upstream])
        return {"output": output.detach(), **_gradients(activations)}

    def gathered(self, layer: Built | None = None) -> Results:
        """Copies of the gradients that have gathered in the weights, by their names."""
        layer = layer or self.layer
        return self.taken_apart({n: value.grad for n, value in layer.parameters.items() if value.grad is not None})

    def taken_apart(self, own: Mapping[str, Tensor]) -> Results:
        """Copies of gradients of the layer's own parameters as those of the weights."""
        return {f"d {name}": value.clone() for name, value in take_apart(self.layer.views, own).items()}

    def problem(self, seed: int, gate_offset: float = 0.0) -> Problem:
        """The layer's problem with other weights."""
        asked = self.asked
        found = make_problem(asked.case, self.layer.problem.device, asked.extras, seed, gate_offset=gate_offset)
        return found if self._dtype is None else in_dtype(found, self._dtype)

    def in_tail(self) -> tuple[Built, list[Tensor]]:
        """A second layer and inputs for it, for which its gates are around TAIL."""
        layer = Built(self.layer.implementation, self.problem(self.asked.seeds.tail_weights, TAIL))
        drawn = Desk(layer.problem, TAIL).activations(Draw(self.asked.seeds.inputs[0]))
        return layer, self.as_leaves(self._widened(drawn))

    def routed(self, index: Tensor) -> Results:
        """A call and its backward with another routing, maybe of fewer tokens."""
        x, _, weights = (value[: len(index)] for value in self.inputs(0))
        activations = [x, index, weights.nan_to_num(nan=0.5)]
        return self.use(self.as_leaves(activations), self.upstream(0)[: len(index)]) | self.gathered()

    def index(self, routing: RoutingKind, experts: int | None = None, tokens: int | None = None) -> Tensor:
        """A top_k_index by a kind of routing, of the case's tokens and experts or of fewer."""
        known = self.experts
        device = self.layer.problem.device
        source = torch.Generator(device=device).manual_seed(self.asked.seeds.routing)
        place = torch.empty(tokens or self.tokens, known.top_k, dtype=torch.int64, device=device)
        inputs.draw_experts(Experts(experts or known.count, known.top_k, routing), place, source)
        return torch.rand(known.count, device=device, generator=source).argsort()[place] if experts else place

    def _widened(self, values: Sequence[Tensor]) -> list[Tensor]:
        return [
            value.to(self._dtype) if self._dtype is not None and value.is_floating_point() else value.clone()
            for value in values
        ]


@dataclass(frozen=True)
class Scenario:
    """A scenario and whom it is asked of."""

    run: Run
    about: str
    required: bool
    """Whether an error is a failure; else an implementation may refuse, and only a wrong result is one."""
    trains: bool
    """Whether there is nothing to ask without a backward."""
    weights: bool
    """Whether there is nothing to ask without gradients of weights."""
    compiles: bool
    """Whether it has other sizes, strides or gradients than the others, for which torch.compile compiles again."""
    scopes: Sequence[Scope]


SCENARIOS: dict[str, Scenario] = {}
"""All of them by name, in order."""


def _scenario(
    required: bool = False, trains: bool = False, weights: bool = False, compiles: bool = False,
    scopes: Sequence[Scope] = tuple(Scope),
) -> Callable[[Run], Run]:  # fmt: skip
    """Declare a function as a scenario; its docstring says what it is about. The fields are those of `Scenario`."""

    def note(run: Run) -> Run:
        about = (run.__doc__ or "").split("\n")[0].rstrip(".")
        SCENARIOS[run.__name__] = Scenario(run, about, required, trains or weights, weights, compiles, scopes)
        return run

    return note


@_scenario(required=True)
def two_calls(given: Arrangement) -> Results:
    """Two forwards, then one backward through both."""
    first, second = given.leaves(0), given.leaves(1)
    outputs = [given.layer.forward(*first), given.layer.forward(*second)]
    given.backward(outputs, [given.upstream(0), given.upstream(1)])
    return {
        "output 1": outputs[0].detach(), "output 2": outputs[1].detach(), **_gradients(first, " 1"),
        **_gradients(second, " 2"), **given.gathered(),
    }  # fmt: skip


@_scenario(required=True, trains=True)
def accumulated(given: Arrangement) -> Results:
    """A backward into gradients that are there already: they add up."""
    given.use(given.leaves(1), given.upstream(1))
    return _without_output(given.use(given.leaves(2), given.upstream(2))) | given.gathered()


@_scenario(required=True)
def changed_weights(given: Arrangement) -> Results:
    """Weights changed in place between two calls, as by an optimiser."""
    given.layer.set_weights(given.problem(given.asked.seeds.other_weights).parameters)
    return given.use(given.leaves(0), given.upstream(0)) | given.gathered()


@_scenario(required=True)
def two_layers(given: Arrangement) -> Results:
    """A second layer of the same shape with other weights, called in between."""
    first, (tail, second) = given.leaves(0), given.in_tail()
    outputs = [given.layer.forward(*first), tail.forward(*second)]
    for output in outputs:
        given.backward([output], [given.upstream(0)])
    own = {f"{name} of the first": value for name, value in given.gathered().items()}
    return {
        "output of the first": outputs[0].detach(), "output of the second": outputs[1].detach(),
        **_gradients(first, " of the first"), **_gradients(second, " of the second"), **own, **given.gathered(tail),
    }  # fmt: skip


@_scenario(required=True)
def wide_values(given: Arrangement) -> Results:
    """Tokens and channels of very different sizes, with gates beyond 30."""
    return given.use(given.leaves(0, Values.WIDE), given.upstream(0)) | given.gathered()


@_scenario(required=True, trains=True)
def uneven_upstream(given: Arrangement) -> Results:
    """Upstream gradients of very different sizes, from token to token."""
    return _without_output(given.use(given.leaves(0), given.upstream(0, Values.UNEVEN_UPSTREAM)))


@_scenario(required=True)
def padding(given: Arrangement) -> Results:
    """Tokens of zeros beside others."""
    activations = given.inputs(2)
    for value in activations[: 2 if given.asked.case.scope is Scope.ACTIVATION else 1]:
        value[1::2] = 0.0
    return given.use(given.as_leaves(activations), given.upstream(2)) | given.gathered()


@_scenario()
def nan_and_inf(given: Arrangement) -> Results:
    """A token with a NaN and one with an Inf: they reach what they reach in eager, and no other token."""
    activations = given.inputs(0)
    _spoil(activations[0])
    with torch.no_grad():
        return {"output": given.layer.forward(*activations)}


@_scenario(weights=True, compiles=True)
def inputs_without_gradient(given: Arrangement) -> Results:
    """Activations that need no gradient, as in the first layer of a model."""
    given.use(given.inputs(0), given.upstream(0))
    return given.gathered()


@_scenario(weights=True, compiles=True)
def frozen_weights(given: Arrangement) -> Results:
    """Weights that need no gradient: the activations' are the same."""
    return _without_output(_frozen(given, list(given.trained.values())))


@_scenario(weights=True, compiles=True)
def one_frozen(given: Arrangement) -> Results:
    """Some weights that need no gradient, as beside an adapter: first one of them, then all others."""
    found: Results = {}
    parameters = list(given.trained.values())
    for number, frozen in enumerate((parameters[:1], parameters[1:])):
        given.layer.drop_gradients()
        for name, value in _without_output(_frozen(given, frozen)).items():
            found[f"{name} {number}"] = value
        found |= given.gathered()
    return found


@_scenario(weights=True)
def gradients_by_autograd(given: Arrangement) -> Results:
    """Gradients asked of autograd, not gathered in the weights."""
    leaves, own = given.leaves(1), given.trained
    wanted = [value for value in leaves if value.requires_grad]
    output = given.layer.forward(*leaves)
    found = torch.autograd.grad(output, [*wanted, *own.values()], given.upstream(1), allow_unused=True)
    gradients = {name: value for name, value in zip(own, found[len(wanted) :], strict=True) if value is not None}
    for name, value in own.items():
        if value.grad is not None and name in gradients:  # what is added to both is counted twice by a model
            gradients[name] = gradients[name] + value.grad
    named = (f"d input {number}" for number, value in enumerate(leaves) if value.requires_grad)
    activations = {name: value for name, value in zip(named, found, strict=False) if value is not None}
    return activations | given.taken_apart(gradients)


@_scenario(weights=True)
def hooks_of_weights(given: Arrangement) -> Results:
    """Hooks of the weights, as DDP and FSDP use them: each is called once, with the whole gradient."""
    seen: dict[str, Tensor] = {}

    def hook(name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        seen[name] = torch.full_like(parameter.grad, torch.nan) if name in seen else parameter.grad.clone()

    handles = [value.register_post_accumulate_grad_hook(partial(hook, name)) for name, value in given.trained.items()]
    try:
        given.use(given.leaves(1), given.upstream(1))
    finally:
        for handle in handles:
            handle.remove()
    return given.taken_apart(seen)


@_scenario(compiles=True)
def batches(given: Arrangement) -> Results:
    """[batch, sequence, features] instead of [tokens, features]."""
    parts = next((n for n in range(2, given.tokens + 1) if given.tokens % n == 0), 1)
    leaves = given.as_leaves([value.unflatten(0, (parts, -1)) for value in given.inputs(0)])
    found = given.use(leaves, given.upstream(0).unflatten(0, (parts, -1)))
    return {name: value.flatten(0, 1) for name, value in found.items()} | given.gathered()


@_scenario(compiles=True)
def strided(given: Arrangement) -> Results:
    """Activations and an upstream gradient that are not contiguous."""
    leaves = given.as_leaves([inputs.every_other_column(value) for value in given.inputs(0)])
    return given.use(leaves, inputs.every_other_column(given.upstream(0))) | given.gathered()


@_scenario(compiles=True)
def other_lengths(given: Arrangement) -> Results:
    """Fewer tokens and more, in inference between a forward and its backward."""
    few, leaves = max(1, int(given.tokens * FEW)), given.leaves(0)
    output = given.layer.forward(*leaves)
    both = map(torch.cat, zip(given.inputs(1), given.inputs(2), strict=True))
    with torch.no_grad():
        fewer = given.layer.forward(*(value[:few].clone() for value in given.inputs(1)))
        more = given.layer.forward(*(value[: given.asked.most_tokens].clone() for value in both))
    given.backward([output], [given.upstream(0)])
    return {
        "output": output.detach(), "output of fewer": fewer, "output of more": more, **_gradients(leaves),
        **given.gathered(),
    }  # fmt: skip


@_scenario(trains=True)
def changed_output(given: Arrangement) -> Results:
    """An output that the model changes in place before the backward."""
    leaves = given.leaves(1)
    output = given.layer.forward(*leaves)
    output.mul_(2.0)
    given.backward([output], [given.upstream(1)])
    return {"output": output.detach(), **_gradients(leaves)}


@_scenario(trains=True)
def nan_and_inf_upstream(given: Arrangement) -> Results:
    """An upstream gradient with a NaN and an Inf, which a loss scaler has to find."""
    upstream = given.upstream(0)
    _spoil(upstream)
    return _without_output(given.use(given.leaves(0), upstream))


_of_experts = partial(_scenario, scopes=(Scope.EXPERTS,))


def _by_routing(kind: RoutingKind) -> None:
    def run(given: Arrangement) -> Results:
        return given.routed(given.index(kind))

    run.__name__, run.__doc__ = f"{kind}_routing", f"With {kind} routing."
    _of_experts()(run)


for _kind in set(RoutingKind) - {RoutingKind.LOCAL}:
    _by_routing(_kind)


@_of_experts()
def crowded_expert(given: Arrangement) -> Results:
    """One expert has more than half of the tokens."""
    index = given.index(RoutingKind.UNIFORM)
    crowd, favourite = index[: int(len(index) * CROWDED) + 1], index[0, 0].clone()
    crowd[:, 0] = torch.where((crowd == favourite).any(1), crowd[:, 0], favourite)
    return given.routed(index)


@_of_experts()
def idle_experts(given: Arrangement) -> Results:
    """Half of the experts have no token."""
    return given.routed(given.index(RoutingKind.UNIFORM, experts=max(given.experts.top_k, given.experts.count // 2)))


@_of_experts(compiles=True)
def fewer_tokens_than_experts(given: Arrangement) -> Results:
    """Fewer tokens than there are experts."""
    return given.routed(given.index(RoutingKind.UNIFORM, tokens=min(given.tokens, max(1, given.experts.count // 2))))


@_of_experts(required=True, compiles=True)
def other_ranks(given: Arrangement) -> Results:
    """Half of the experts lie on other ranks: -1, or a number beyond the last, and NaN as weights."""
    return given.use(given.leaves(0), given.upstream(0)) | given.gathered()


def case_of(name: str, case: Case) -> Case:
    """The case that a scenario asks about."""
    local = name == other_ranks.__name__ and not case.shape.is_local
    return replace(case, shape=case.shape.routed(RoutingKind.LOCAL)) if local else case


LENGTHS = frozenset({"other_lengths", "fewer_tokens_than_experts"})
SECOND = " of the second"
IN_TAIL = frozenset({f"two_layers: output{SECOND}", f"two_layers: d input 0{SECOND}"})
"""Results of gates far below zero."""
ROUTING_WEIGHTS = "uneven_upstream: d input 2"
"""Of which a token has too few to be judged by itself."""
OF_UNEVEN_UPSTREAM = {"uneven_upstream: d input 0", "uneven_upstream: d input 1", ROUTING_WEIGHTS}
BY_TOKEN = IN_TAIL | OF_UNEVEN_UPSTREAM
"""Results whose tokens are of very different sizes: each is judged by itself, or all at one size, unless they share a
scale."""


def wanted(implementation: Implementation, case: Case) -> list[str]:
    """Names of the scenarios that an implementation is asked for at a case of either size.

    What it does not train it is not asked to: no gradients of weights, or none, as in a case of a forward.
    """
    train, weights = trains(implementation, case), "w_gate" in implementation.gradients(case.scope)
    spared = set(LENGTHS) if implementation.backend == "inductor" else set()
    if implementation.backend == "inductor" and implementation.source.startswith("swiglu_bench."):
        spared |= {name for name, asked in SCENARIOS.items() if asked.compiles}
    if implementation.precision_of(case):
        spared.add("changed_output")  # its definition's output is a view
        if not train and implementation.quantises_weights_before:
            spared.add("changed_weights")
    if "other_ranks" not in implementation.offers:
        spared.add("other_ranks")
    if not WEIGHTS[case.scope]:
        spared.add("changed_weights")
    spared |= {n for n, asked in SCENARIOS.items() if (asked.trains and not train) or (asked.weights and not weights)}
    return [name for name, asked in SCENARIOS.items() if case.scope in asked.scopes and name not in spared]


def trains(implementation: Implementation, case: Case) -> bool:
    """Whether the scenarios of a case have backwards."""
    return case.mode is not Mode.FORWARD and bool(implementation.gradients(case.scope))


def small_case(case: Case, device_type: str) -> Case:
    """The case at the small size."""
    hidden, intermediate = SIZES[device_type]
    shape = replace(case.shape, name=f"{hidden}x{intermediate}", hidden=hidden, intermediate=intermediate)
    return replace(with_few_experts(replace(case, shape=shape)), tokens=TOKENS, mode=Mode.STEP)


def with_few_experts(case: Case) -> Case:
    """The case with no more experts than the small size has."""
    known = case.shape.experts
    few = known and replace(known, count=min(known.count, EXPERTS), top_k=min(known.top_k, TOP_K))
    return replace(case, shape=replace(case.shape, experts=few))


def size_of(case: Case) -> str:
    """What a row calls the size of a case at which its use was checked."""
    experts = f" of {case.shape.experts.count} experts" if case.shape.experts else ""
    return f"{case.shape.hidden}x{case.shape.intermediate}{experts} with {case.how_many}"


class UseJudge:
    """Judges what a scenario yields, by the reference: by its truth, and by eager's results and errors."""

    def __init__(self, problem: Problem, asked: Question, judge: type[Judge] = Judge) -> None:
        """The truth of fp32 is computed in fp64, and that of 16 bits in fp32, whose errors are nothing beside theirs.

        No more than one layer of either is kept at a time, and none of them afterwards.
        """
        self._asked, self._quantised, self._device = asked, judge is not Judge, problem.device
        wide = torch.float64 if torch_dtype(asked.case) is torch.float32 else torch.float32

        def results(dtype: torch.dtype | None) -> Results:
            own = problem if dtype is None else in_dtype(problem, dtype)
            if asked.name == "changed_weights" and dtype is None:
                own = in_dtype(problem, torch_dtype(asked.case), copy=True)
            return Arrangement(Built(judge.definition, own), asked, dtype).run()

        self._eager = results(None)
        self.truth = {name: value for name, value in results(wide).items() if self._counts(name)}

    @property
    def bytes(self) -> int:
        """The memory that it takes."""
        return sum(value.nbytes for results in (self.truth, self._eager) for value in results.values())

    def _counts(self, name: str) -> bool:
        """Whether a result is compared, which a gradient is not where rounding decides on it."""
        limit, gradient = self._asked.extras.limit, ": d " in name
        return not gradient or limit is None or (limit >= CLEAR_LIMIT and self._asked.name != "wide_values")

    def names(self, gradients: Sequence[str]) -> list[str]:
        """The results that an implementation which yields these gradients has to hand over."""
        frozen = {*WEIGHTS[self._asked.case.scope], *BIASES[self._asked.case.scope]} - set(gradients)
        return [name for name in self.truth if not frozen & set(name.split())]

    def judge(self, results: Mapping[str, Tensor]) -> list[TensorCheck]:
        """One verdict for each result."""
        return [self._judge(name, value) for name, value in results.items()]

    def _judge(self, name: str, value: Tensor) -> TensorCheck:
        """A result must not be finite where neither eager nor the truth is, and has to be right where both are."""
        truth, eager, case = self.truth[name].double(), self._eager[name], self._asked.case
        fault, largest = None, torch.finfo(eager.dtype).max / 2  # beyond, rounding decides whether it overflows
        most = torch.linalg.vector_norm(truth, torch.inf)
        whole = bool(torch.isfinite(eager.sum(dtype=torch.float32)) & (most <= largest))
        if not whole:
            lost = ~torch.isfinite(truth) & ~torch.isfinite(eager)
            counts = torch.isfinite(truth) & torch.isfinite(eager) & (truth.abs() <= largest)
            if torch.isfinite(value[lost]).any():
                fault = Fault("finite", "is finite where eager has NaN or Inf")
            if lost.any() and library_spreads(case, self._device):
                counts &= torch.isfinite(value)
            value, truth, eager = value[counts], truth[counts], eager[counts]
        shared = self._quantised and (name in IN_TAIL or case.precision is Precision.FP8_TENSORWISE)
        if fault or name not in BY_TOKEN or shared or not whole:
            large = 1 if shared and name in OF_UNEVEN_UPSTREAM else case.tokens
            return self._check(name, value, truth, eager, fault, tokens=large)
        if self._quantised or name == ROUTING_WEIGHTS:
            return self._check(name, *_evened(value, truth, eager), tokens=case.tokens)
        tails = [0.0] * len(value)
        if name in IN_TAIL:
            tails = [-self._asked.extras.alpha * TAIL * depth for depth in inputs.depths(case)]
        tokens = [
            self._check(
                name, value[row : row + 1], truth[row : row + 1], eager[row : row + 1], tail=tails[row], tokens=TOKENS
            )
            for row in _suspects(value, truth, eager, tolerance.unit_roundoff(torch_dtype(case)), tails)
        ]  # fmt: skip
        return max(tokens, key=lambda check: (not check.ok, check.used))

    def _check(
        self, name: str, value: Tensor, truth: Tensor, eager: Tensor, fault: Fault | None = None, *, tokens: int,
        tail: float = 0.0,
    ) -> TensorCheck:  # fmt: skip
        """Judge one result whose large values come from the h of so many tokens."""
        case = self._asked.case
        arithmetic = replace(tolerance.arithmetic_of(case, torch_dtype(case), 3), tail=tail)
        if tokens < case.tokens:
            arithmetic = replace(arithmetic, hidden_elements=arithmetic.hidden_elements * tokens // case.tokens)
        if "bias" in name and case.scope is Scope.EXPERTS and self._device.type == "cpu":
            arithmetic = replace(arithmetic, additions=2 * case.tokens)
        expected = tolerance.Expected.of(truth)
        error = tolerance.tensor_error(eager, expected)
        largest = SLACK * (CODE_SLACK if self._quantised else 1.0) * error.maximum
        error = replace(error, relative=SLACK * error.relative, maximum=largest)
        return tolerance.check(name, value, expected, error, arithmetic, fault)


def _suspects(value: Tensor, truth: Tensor, eager: Tensor, roundoff: float, tails: Sequence[float]) -> list[int]:
    """The rows to judge: all of few, and of many those that are worst beside eager's, by each kind of error."""
    if len(value) <= ROWS_JUDGED:
        return list(range(len(value)))
    rows, off, usual = truth.flatten(1), (value - truth).flatten(1), (eager - truth).flatten(1)
    floor = roundoff * (1.0 + torch.tensor(tails, device=truth.device, dtype=torch.float64))
    size, typical = torch.linalg.vector_norm(rows, dim=1), torch.linalg.vector_norm(usual, dim=1)
    kinds = (
        (torch.linalg.vector_norm(off, dim=1), typical),
        (off.abs().amax(1), usual.abs().amax(1)),
        ((rows.sign() * off).sum(1).abs() / rows.shape[1] ** 0.5, typical),
    )
    scores = [(mine / (theirs + floor * size)).nan_to_num(nan=0.0, posinf=torch.inf) for mine, theirs in kinds]
    scores[0][~torch.isfinite(off).all(1)] = torch.inf
    return sorted({row for score in scores for row in score.topk(ROWS_SUSPECTED).indices.tolist()})


def _frozen(given: Arrangement, parameters: Sequence[Tensor]) -> Results:
    """A call and its backward while some parameters need no gradient."""
    for value in parameters:
        value.requires_grad_(False)
    try:
        return given.use(given.leaves(0), given.upstream(0))
    finally:
        for value in parameters:
            value.requires_grad_()


def _spoil(value: Tensor) -> None:
    rows, columns = value.shape
    value[3 % rows, 5 % columns], value[7 % rows, 11 % columns] = torch.nan, torch.inf


def _gradients(leaves: Sequence[Tensor], suffix: str = "") -> Results:
    return {f"d input {number}{suffix}": leaf.grad for number, leaf in enumerate(leaves) if leaf.grad is not None}


def _without_output(found: Results) -> Results:
    return {name: value for name, value in found.items() if name != "output"}


def _evened(value: Tensor, truth: Tensor, eager: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scale every token to the same size: else the errors are those of one or two, and eager's small by chance."""
    sizes = torch.linalg.vector_norm(truth.flatten(1), dim=1).view(-1, *[1] * (truth.dim() - 1))
    sizes = torch.where(sizes == 0, 1.0, sizes)
    return value.double() / sizes, truth / sizes, eager.double() / sizes
