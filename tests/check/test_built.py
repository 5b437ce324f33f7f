from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from judged import judge_here
from specimens import declared, small_case
from torch import Tensor

from swiglu_bench.cases.cases import DENSE, Dtype, Extras, Mode, Scope, Shape, tensors
from swiglu_bench.cases.costs import predicted_memory
from swiglu_bench.cases.implementation import Implementation, Step
from swiglu_bench.cases.problem import Problem
from swiglu_bench.check.built import Built, Produced
from swiglu_bench.check.inputs import Desk, Draw, make_problem
from swiglu_bench.check.judge import Judge
from swiglu_bench.contenders import fused, liger, pytorch
from swiglu_bench.worker.ahead import first_candidates

ONE, OTHER = Draw(1), Draw(11)


def glu(x: Tensor, weights: dict[str, Tensor]) -> Tensor:
    return torch.nn.functional.silu(x @ weights["w_gate"].T) * (x @ weights["w_up"].T)


def is_right(produced: Produced, problem: Problem, draw: Draw) -> bool:
    return all(check.ok for check in judge_here(Judge(problem), produced, draw))


def watched(events: list[Any], note: Callable[[Tensor], Any]) -> Implementation:
    """Right, and notes something of its input in each forward."""

    def build(problem: Problem) -> Step:
        def forward(x: Tensor) -> Tensor:
            events.append(note(x))
            return glu(x, problem.weights)

        return Step(forward)

    return declared(build)


# What is handed out


@pytest.mark.parametrize("scope", list(Scope))
def test_infer_yields_the_output_and_train_every_gradient(scope: Scope) -> None:
    problem = make_problem(small_case(scope=scope), "cpu", Extras(bias=True))
    built = Built(pytorch.eager, problem)
    for draw in (ONE, OTHER):
        produced = built.infer(draw)
        assert set(produced) == {"output"} == set(built.forward_to_train(draw))
        assert not produced["output"].requires_grad
        assert is_right(produced, problem, draw)
        produced = built.train(draw)
        assert list(produced) == ["output", *tensors(scope), *problem.biases]
        assert is_right(produced, problem, draw)


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("upstream_first", [True, False])
def test_calls_hand_out_what_they_made(mode: Mode, upstream_first: bool) -> None:
    problem = make_problem(small_case(mode=mode), "cpu")
    built = Built(pytorch.eager, problem)
    for draw in (ONE, OTHER, ONE):
        produced = built.call(mode, draw, upstream_first)()
        assert list(produced) == (["output"] if mode is Mode.FORWARD else ["output", "x", "w_gate", "w_up"])
        assert is_right(produced, problem, draw)
        assert not produced["output"].requires_grad


@pytest.mark.parametrize(
    ("value", "came"), [(None, "None"), ((torch.ones(1),), "a tuple"), (1.0, "a float")], ids=["None", "tuple", "float"]
)
@pytest.mark.parametrize("mode", list(Mode))
def test_a_forward_that_returns_anything_but_a_tensor_is_an_error(value: Any, came: str, mode: Mode) -> None:
    built = Built(declared(lambda problem: Step(lambda x: value)), make_problem(small_case(), "cpu"))
    with pytest.raises(TypeError, match=f"returned {came}; .* one tensor"):
        built.call(mode, ONE)()


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
    ("mode", "upstream_first", "known"),
    [(Mode.STEP, False, False), (Mode.BACKWARD, False, False), (Mode.STEP, True, True)],
)
def test_the_upstream_gradient_is_drawn_after_the_forward_has_returned(
    mode: Mode, upstream_first: bool, known: bool
) -> None:
    seen: list[bool] = []
    built = Built(watched(seen, lambda x: bool(desk.given["upstream"].ne(7).all())), make_problem(small_case(), "cpu"))
    desk = built.desk
    desk.given["upstream"].fill_(7)
    built.call(mode, ONE, upstream_first)()
    assert seen == [known]
    assert torch.equal(desk.given["upstream"], Desk(built.problem).upstream(ONE)), "by its end it was drawn"


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

    built = Built(watched(events, lambda x: "forward"), make_problem(small_case(), "cpu"))
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


@pytest.mark.parametrize("scope", list(Scope))
def test_weights_stay_and_gradients_do_not_add_up(scope: Scope) -> None:
    problem = make_problem(small_case(scope=scope), "cpu")
    before = [value.clone() for value in problem.weights.values()]
    built, other = Built(pytorch.eager, problem), Built(pytorch.eager, problem)
    first = _copied(built.train(ONE))
    for draw in (ONE, OTHER):
        built.infer(draw)
        for mode in Mode:
            built.call(mode, draw)()
    built.memory(ONE)
    assert all(torch.equal(value, first[name]) for name, value in built.train(ONE).items())
    assert all(torch.equal(one, now) for one, now in zip(before, problem.weights.values(), strict=True))
    assert all(value.grad is None and not value.requires_grad for value in problem.weights.values())
    assert all(value.grad is None for value in other.parameters.values()), "contenders share none"


# Layouts and what is trained


@pytest.mark.parametrize("scope", [Scope.GLU, Scope.MLP])
@pytest.mark.parametrize("dtype", list(Dtype))
def test_gradients_of_packed_weights_come_in_the_canonical_layout(scope: Scope, dtype: Dtype) -> None:
    problem = make_problem(small_case(scope=scope, dtype=dtype), "cpu")
    built = Built(pytorch.eager_packed, problem)
    packed = built.parameters["w_gate_up"]
    assert packed.data_ptr() not in {value.data_ptr() for value in problem.weights.values()}, "it is a copy"
    assert torch.equal(packed, torch.cat([problem.weights["w_gate"], problem.weights["w_up"]]))
    produced = built.train(ONE)
    assert list(produced) == ["output", *tensors(scope)]
    assert is_right(produced, problem, ONE)


@pytest.mark.parametrize("one", [pytorch.eager, pytorch.eager_packed], ids=lambda one: one.name)
def test_frozen_weights_get_no_gradient_and_what_never_trains_has_none(one: Implementation) -> None:
    problem = make_problem(small_case(), "cpu")
    for_inference = Built(declared(one.build, trains="nothing"), problem)
    assert (for_inference.gradients, list(for_inference.train(ONE))) == ((), ["output"])
    assert for_inference.memory(ONE).peak_bytes > 0
    built = Built(declared(one.build, trains="inputs", weight_layout=one.weight_layout), problem)
    produced = built.train(ONE)
    assert list(produced) == ["output", "x"]
    assert is_right(produced, problem, ONE)
    assert not any(value.requires_grad or value.grad is not None for value in built.parameters.values())


def test_a_gradient_that_was_promised_and_did_not_come_is_none() -> None:
    problem = make_problem(small_case(), "cpu")
    detached = {name: value.detach() for name, value in problem.weights.items()}
    produced = Built(declared(lambda problem: Step(lambda x: glu(x, detached))), problem).train(ONE)
    assert produced["x"] is not None
    failed = [check for check in judge_here(Judge(problem), produced, ONE) if not check.ok]
    assert [(check.tensor, check.check) for check in failed] == [("w_gate", "missing"), ("w_up", "missing")]


# Other calls


@pytest.mark.parametrize("mode", [Mode.FORWARD, Mode.STEP])
def test_a_recordable_call_works_on_tensors_that_stay_and_reads_what_lies_there(mode: Mode) -> None:
    built = Built(pytorch.eager_packed, make_problem(small_case(mode=mode), "cpu"))
    work = built.recordable(mode)
    for draw in (ONE, OTHER, ONE):
        built.desk.activations(draw)
        built.desk.upstream(draw)
        collect = work()
        kept = _copied(collect())
        expected = built.call(mode, draw)()
        assert kept.keys() == expected.keys()
        assert all(torch.allclose(kept[name], value, rtol=1e-5, atol=1e-6) for name, value in expected.items())
        assert all(torch.equal(value, kept[name]) for name, value in collect().items()), "they outlive other calls"


# Memory


@pytest.mark.parametrize(
    ("one", "scope"),
    [(one, scope) for one in (pytorch.eager, pytorch.eager_packed) for scope in DENSE if scope in one.scopes],
    ids=lambda value: getattr(value, "name", value),
)
@pytest.mark.parametrize("tokens", [3, 700])
def test_memory_is_what_arithmetic_predicts(one: Implementation, scope: Scope, tokens: int) -> None:
    """Few tokens: the weights' gradients are the peak. Many: the activations are."""
    case = small_case(scope=scope, tokens=tokens)
    built = Built(one, make_problem(case, "cpu"))
    built.train(ONE)
    use = built.memory(ONE)
    assert (use.saved_bytes, use.peak_bytes) == predicted_memory(case, one.footprints[scope])
    assert use.kept_bytes == 0
    assert all(parameter.grad is None for parameter in built.parameters.values())


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("one", "scope"),
    [
        (one, scope)
        for one in (*fused.ROWS.values(), liger.liger_mlp)
        for scope in one.footprints
        if scope is not Scope.ACTIVATION
    ],
    ids=lambda value: getattr(value, "name", value),
)
@pytest.mark.parametrize("tokens", [512, 8192])
def test_memory_of_the_kernels_is_what_arithmetic_predicts(one: Implementation, scope: Scope, tokens: int) -> None:
    """Within 1%: the allocator rounds up, and cuBLAS may keep a workspace."""
    case = small_case(
        scope=scope, tokens=tokens, dtype=Dtype.BFLOAT16, shape=Shape("medium", 2048, 8192, "made up", (tokens,))
    )
    built = Built(one, make_problem(case, "cuda"))
    with first_candidates():
        for _ in range(3):  # what is recorded in the first two calls gives some tensors back sooner
            built.train(ONE)
    use = built.memory(ONE)
    assert (use.saved_bytes, use.peak_bytes) == pytest.approx(predicted_memory(case, one.footprints[scope]), rel=0.01)
