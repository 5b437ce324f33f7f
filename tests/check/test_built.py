from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from judged import judge_here
from specimens import declared, small_case
from torch import Tensor

from swiglu_bench.cases.cases import Dtype, Mode, Scope, Shape
from swiglu_bench.cases.costs import predicted_memory
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.cases.implementation import Implementation, Step
from swiglu_bench.cases.problem import Problem
from swiglu_bench.check.built import Built, Produced, find_views, take_apart
from swiglu_bench.check.inputs import Draw, make_problem
from swiglu_bench.check.judge import Judge
from swiglu_bench.contenders import experts, fused, peers, pytorch
from swiglu_bench.worker.ahead import first_candidates

ONE, OTHER = Draw(1), Draw(11)
Apart = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def glu(x: Tensor, weights: dict[str, Tensor]) -> Tensor:
    return torch.nn.functional.silu(x @ weights["w_gate"].T) * (x @ weights["w_up"].T)


def is_right(produced: Produced, problem: Problem, draw: Draw) -> bool:
    return all(check.ok for check in judge_here(Judge(problem), produced, draw))


@pytest.mark.parametrize(("value", "came"), [(None, "None"), ((torch.ones(1),), "a tuple"), (1.0, "a float")])
def test_a_forward_that_returns_anything_but_a_tensor_is_an_error(value: Any, came: str) -> None:
    built = Built(declared(lambda problem: Step(lambda x: value)), make_problem(small_case(), "cpu"))
    with pytest.raises(TypeError, match=f"returned {came}; .* one tensor"):
        built.call(Mode.BACKWARD, ONE)()


def test_a_build_has_to_return_a_step_with_leaves() -> None:
    problem = make_problem(small_case(), "cpu")
    with pytest.raises(TypeError, match="returned a function"):
        Built(declared(lambda problem: lambda x: x), problem)  # type: ignore[arg-type, return-value]
    for bad in (torch.ones(2, requires_grad=True) * 2, 3.0):
        with pytest.raises(TypeError, match=r"'w'.*leaf"):
            Built(declared(lambda problem: Step(lambda x: x, {"w": bad})), problem)  # type: ignore[dict-item]  # noqa: B023


def test_nothing_of_a_step_is_looked_up_after_the_build() -> None:
    steps: list[Step] = []

    def build(problem: Problem) -> Step:
        steps.append(pytorch.eager_packed.build(problem))
        return steps[-1]

    problem = make_problem(small_case(), "cpu")
    built = Built(declared(build, weight_layout="packed"), problem)
    steps[0].forward = steps[0].to_canonical = None  # type: ignore[assignment]
    steps[0].parameters = {}
    assert is_right(built.train(ONE), problem, ONE)


# When things happen


@pytest.mark.parametrize(
    ("mode", "prepared", "ran"),
    [(Mode.FORWARD, [], ["forward"]), (Mode.BACKWARD, ["forward"], []), (Mode.STEP, [], ["forward", "pause", "go on"])],
)
def test_what_is_timed_is_the_work_alone(mode: Mode, prepared: list[str], ran: list[str]) -> None:
    """The forward that a backward needs comes before; inputs are laid out before, or while the clock is paused."""
    events: list[str] = []
    drawn: list[str] = []

    @contextmanager
    def pause() -> Iterator[None]:
        events.append("pause")
        drawn.clear()
        yield
        assert drawn == ["upstream"]
        drawn.clear()
        events.append("go on")

    def build(problem: Problem) -> Step:
        return Step(lambda x: events.append("forward") or glu(x, problem.weights))  # type: ignore[func-returns-value]

    built = Built(declared(build), make_problem(small_case(), "cpu"))
    real = built.desk._draw
    built.desk._draw = lambda name, seed: drawn.append(name) or real(name, seed)  # type: ignore[func-returns-value, method-assign]
    call = built.call(mode, ONE)
    assert events == []
    call.begin()
    assert drawn == ([] if not prepared else ["x"]), "the upstream gradient may not be known yet"
    call.prepare()
    assert events == prepared
    events.clear()
    drawn.clear()
    call.run(pause)
    assert events == ran
    assert drawn == [], "while it ran"
    call.results()


# One call leaves nothing to the next


def _copied(produced: Produced) -> Produced:
    return {name: value.clone() for name, value in produced.items()}


def test_weights_stay_and_gradients_do_not_add_up() -> None:
    problem = make_problem(small_case(), "cpu")
    before = [value.clone() for value in problem.weights.values()]
    built, other = Built(pytorch.eager, problem), Built(pytorch.eager, problem)
    first = _copied(built.train(ONE))
    for draw in (ONE, OTHER):
        built.infer(draw)
        for mode in Mode:
            built.call(mode, draw)()
    built.memory(ONE)
    assert all(torch.equal(value, first[name]) for name, value in built.train(ONE).items())
    assert all(map(torch.equal, before, problem.weights.values()))
    assert all(value.grad is None and not value.requires_grad for value in problem.weights.values())
    assert all(value.grad is None for value in other.parameters.values()), "contenders share none"


# Several micro-batches


EVERY = [
    (pytorch.eager, Scope.GLU), (pytorch.eager, Scope.MLP), (pytorch.eager_packed, Scope.GLU),
    (pytorch.eager_packed, Scope.MLP), (experts.grouped, Scope.EXPERTS),
]  # fmt: skip


@pytest.mark.parametrize(("entry", "scope"), EVERY)
@pytest.mark.parametrize("own", [False, True])
def test_a_step_of_several_micro_batches(entry: Implementation, scope: Scope, own: bool) -> None:
    """They add up, and come out as one of them, whatever the sign of the weights; what is kept must follow these."""
    case = replace(small_case(scope=scope, tokens=150, shape=Shape("s", 32, 48, "", ())), accumulate=3)
    problem = make_problem(case, "cpu")
    built, judge = Built(entry, problem), Judge(problem)
    built.as_they_lie = own
    before = [value.clone() for value in built.parameters.values()]
    for draw in (ONE, Draw(2), Draw(-3)):
        versions = [value._version for value in built.parameters.values()]
        call = built.call(Mode.STEP, draw)
        call.prepare()
        assert all(map(torch.equal, before, built.parameters.values())) is (draw.seed % 2 == 0)
        assert all(v < w._version for v, w in zip(versions, built.parameters.values(), strict=True))
        call.run(nullcontext)
        assert len(call._outputs) == 3
        produced = call.results()
        if own and built.layout:
            produced = built.layout.canonical(produced)
        assert all(check.ok for check in judge_here(judge, produced, draw))
        assert judge.compare(Mode.STEP, [draw])(produced) == ""
        assert all(map(torch.equal, before, built.parameters.values())), "put back"


def test_what_an_implementation_keeps_of_the_weights_has_to_follow_them() -> None:
    kept: dict[str, Tensor] = {}

    def by_version(problem: Problem) -> Step:
        def weight(name: str) -> Tensor:
            value = problem.weights[name]
            key = f"{name} {value._version}" if follows else name
            return kept.setdefault(key, value.detach().clone()) + (value - value.detach())

        return Step(lambda x: glu(x, {name: weight(name) for name in problem.weights}))

    problem = make_problem(replace(small_case(), accumulate=2), "cpu")
    for follows in (True, False):
        kept.clear()
        built, judge = Built(declared(by_version), problem), Judge(problem)
        judge.truth(ONE, backward=True)
        said = [
            judge.compare(Mode.STEP, [draw])(built.call(Mode.STEP, draw)()) for draw in (Draw(2), ONE, Draw(4), OTHER)
        ]
        assert [not reason for reason in said] == [True, follows, True, follows]
        assert built.train(ONE).keys() == {"output", "x", "w_gate", "w_up"}


# Layouts and what is trained


def packed(given: dict[str, Tensor]) -> dict[str, Tensor]:
    gate, up = given["w_gate_up"].chunk(2)
    return {"w_gate": gate, "w_up": up, "w_down": given["w_down"]}


def interleaved(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"w_gate": given["w_gate_up"][0::2], "w_up": given["w_gate_up"][1::2], "w_down": given["w_down"]}


def transposed(given: dict[str, Tensor]) -> dict[str, Tensor]:
    gate, up = given["w_gate_up"].view(8, 3).T.unbind(0)[0:2]
    return {"w_gate": gate, "w_up": up, "w_down": given["w_down"].T}


def shuffled(given: dict[str, Tensor]) -> dict[str, Tensor]:
    order = torch.tensor([4, 0, 5, 2, 1, 3])
    gate, up = given["w_gate_up"][order].chunk(2)
    return {"w_gate": gate, "w_up": up.contiguous(), "w_down": given["w_down"].T.flip(1)}


def by_columns(given: dict[str, Tensor]) -> dict[str, Tensor]:
    gate, up = given["w_gate_up"].flip(1).mT.chunk(2)
    return {"w_gate": gate, "w_up": up.clone(), "w_down": given["w_down"].flip(1), "bias": given["bias"].flip(0)}


def parameters() -> dict[str, Tensor]:
    return {"w_gate_up": torch.randn(6, 4), "w_down": torch.randn(4, 3), "bias": torch.randn(5)}


@pytest.mark.parametrize("apart", [packed, interleaved, transposed, shuffled, by_columns])
def test_gradients_are_taken_apart_as_to_canonical_would_without_calling_it_again(apart: Apart) -> None:
    views, gradients = find_views(parameters(), apart), parameters()
    expected = apart(gradients)
    odd = {name: torch.randn(9, *value.t().shape)[4].copy_(value.t()).t() for name, value in gradients.items()}
    for given in (gradients, odd):  # in other strides or amid other memory
        found = take_apart(views, given)
        assert found.keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in found.items())
    new = {name: torch.randn(value.shape) for name, value in expected.items()}
    for name, view in views.items():
        view.write(gradients[view.parameter], new[name])
    written = apart(gradients)
    assert all(torch.equal(value, new[name]) for name, value in written.items()), "weights are written by them, too"


def test_odd_gradients_and_a_to_canonical_that_does_more_than_look() -> None:
    views, sparse = find_views(parameters(), packed), torch.ones(6, 4).to_sparse()
    assert set(take_apart(views, {"w_down": torch.ones(4, 3)})) == {"w_down"}
    found = take_apart(views, {"w_gate_up": sparse})
    assert found["w_gate"] is found["w_up"] is sparse
    for value, kind in ((torch.ones(3, 4), "Tensor"), (None, "NoneType")):
        with pytest.raises(TypeError, match=f"'w_up' a {kind}"):
            find_views(parameters(), lambda given: packed(given) | {"w_up": value})  # type: ignore[dict-item]  # noqa: B023


@pytest.mark.parametrize("mend", [
    lambda value: value * 2, lambda value: value * 1.0, lambda value: value.flip(0) + 1, lambda value: value.cumsum(0),
    lambda value: value[[0, 0, 1]], lambda value: value.sort(1, descending=True).values + value, torch.zeros_like,
])  # fmt: skip
def test_a_to_canonical_that_computes_is_refused(mend: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(TypeError, match=r"'w_up' a Tensor that is not a part .*rows in the weight's order"):
        find_views(parameters(), lambda given: packed(given) | {"w_up": mend(packed(given)["w_up"])})
    with pytest.raises(TypeError, match="'w_gate_up' in place"):
        find_views(parameters(), lambda given: packed({**given, "w_gate_up": given["w_gate_up"].mul_(2)}))


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("block", [8, 16, 32])
def test_weights_in_blocks_of_rows(block: int, experts: bool) -> None:
    """Gate and up by turns of some rows, down transposed with its columns in an order of their own."""
    lead, dim = ((3,), 1) if experts else ((), 0)
    weights = {name: torch.randn(*lead, 64, 5) for name in ("w_gate", "w_up")} | {"w_down": torch.randn(*lead, 5, 64)}
    turns = [weights[name].unflatten(dim, (-1, block)) for name in ("w_gate", "w_up")]
    order = torch.randperm(64)
    own = {
        "w_gate_up": torch.stack(turns, dim + 1).flatten(dim, dim + 2),
        "w_down": weights["w_down"].mT.index_select(dim, order).contiguous(),
    }

    def apart(given: dict[str, Tensor]) -> dict[str, Tensor]:
        pair = given["w_gate_up"].unflatten(dim, (-1, 2, block)).unbind(dim + 1)
        gate, up = (value.flatten(dim, dim + 1) for value in pair)
        return {"w_gate": gate, "w_up": up, "w_down": given["w_down"].index_select(dim, order.argsort()).mT}

    views = find_views(own, apart)
    found = take_apart(views, own)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    for name, view in views.items():
        view.write(own[view.parameter], weights[name] + 1)
    assert all(torch.equal(value, weights[name] + 1) for name, value in take_apart(views, own).items())


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("wrong", [False, True])
def test_gradients_of_weights_in_blocks_are_judged(wrong: bool, by_name: bool) -> None:
    def build(problem: Problem) -> Step:
        pair = [problem.weights[name].detach().unflatten(0, (-1, 8)) for name in ("w_gate", "w_up")]
        both = torch.stack(pair, 1).flatten(0, 2).requires_grad_()
        if wrong:  # the gradient of one block of rows
            both.register_hook(lambda gradient: gradient.index_fill(0, torch.arange(8, 16), 0.0))

        def apart(given: dict[str, Tensor]) -> dict[str, Tensor]:
            gate, up = given["w_gate_up"].unflatten(0, (-1, 2, 8)).unbind(1)
            return {"w_gate": gate.flatten(0, 1), "w_up": up.flatten(0, 1)}

        return Step(lambda x: glu(x, apart({"w_gate_up": both})), {"w_gate_up": both}, None if by_name else apart)

    problem = make_problem(small_case(), "cpu")
    built = Built(declared(build, weight_layout="interleaved:8"), problem)
    assert is_right(built.train(ONE), problem, ONE) is not wrong
    built.set_weights({name: value + 0.5 for name, value in problem.weights.items()})
    assert not is_right(built.infer(ONE), problem, ONE), "new weights arrive"


def test_a_layout_that_there_is_not() -> None:
    with pytest.raises(BadInput, match="weight layout 'interleaved:0'; there are"):
        declared(lambda problem: Step(glu), weight_layout="interleaved:0")  # type: ignore[arg-type]


# Memory


@pytest.mark.parametrize(
    ("entry", "scope", "tokens"),
    [
        (pytorch.eager, Scope.ACTIVATION, 700),
        (pytorch.eager, Scope.MLP, 3),
        (pytorch.eager, Scope.MLP, 700),
        (pytorch.eager_packed, Scope.GLU, 700),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_memory_is_what_arithmetic_predicts(entry: Implementation, scope: Scope, tokens: int) -> None:
    """Few tokens: the weights' gradients are the peak. Many: the activations are."""
    case = small_case(scope=scope, tokens=tokens)
    built = Built(entry, make_problem(case, "cpu"))
    built.train(ONE)
    use = built.memory(ONE)
    assert (use.saved_bytes, use.peak_bytes) == predicted_memory(case, entry.footprints[scope])
    assert use.kept_bytes == 0
    assert all(parameter.grad is None for parameter in built.parameters.values())


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("entry", "scope"),
    [
        (entry, scope)
        for entry in (*fused.ROWS.values(), peers.liger_mlp)
        for scope in entry.footprints
        if scope is not Scope.ACTIVATION
    ],
    ids=lambda value: getattr(value, "name", value),
)
@pytest.mark.parametrize("tokens", [512, 8192])
def test_memory_of_the_kernels_is_what_arithmetic_predicts(entry: Implementation, scope: Scope, tokens: int) -> None:
    """Within 1%: the allocator rounds up, and cuBLAS may keep a workspace. Where `auto` has PyTorch make the weights'
    gradients one after the other, as on an H100, h may be gone before the last of them."""
    case = small_case(
        scope=scope, tokens=tokens, dtype=Dtype.BFLOAT16, shape=Shape("medium", 2048, 8192, "made up", (tokens,))
    )
    built = Built(entry, make_problem(case, "cuda"))
    with first_candidates():
        for _ in range(3):  # what is recorded in the first two calls gives some tensors back sooner
            built.train(ONE)
    use = built.memory(ONE)
    saved, peak = predicted_memory(case, entry.footprints[scope])
    in_turn = peak - tokens * 8192 * 2 if entry.name == "fused-mlp-recompute" else peak
    assert use.saved_bytes == pytest.approx(saved, rel=0.01)
    assert use.peak_bytes in (pytest.approx(peak, rel=0.01), pytest.approx(in_turn, rel=0.01))
