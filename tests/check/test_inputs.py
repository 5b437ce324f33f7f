import dataclasses
import itertools
import math

import pytest
import torch
from specimens import small_case
from torch import Tensor

from swiglu_bench.cases.cases import ACTIVATIONS, Dtype, Experts, Extras, RoutingKind, Scope, Shape
from swiglu_bench.cases.problem import Problem
from swiglu_bench.check.inputs import (
    DEPTHS,
    Desk,
    Draw,
    Values,
    draw_experts,
    load_of,
    make_problem,
    new_seed,
    of_other_ranks,
)

WIDE_SHAPE = Shape("wide", 512, 300, "made up", (1,))


def drawn(problem: Problem, draw: Draw) -> dict[str, Tensor]:
    """Copies of what a draw lays out on a new desk."""
    desk = Desk(problem)
    values = dict(zip(desk.names, desk.activations(draw), strict=True)) | {"upstream": desk.upstream(draw)}
    return {name: value.clone() for name, value in values.items()}


def alike(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


# Weights


@pytest.mark.parametrize("scope", list(Scope))
def test_the_same_seed_gives_the_same_tensors_whatever_the_global_generator(scope: Scope) -> None:
    case = small_case(scope=scope, dtype=Dtype.BFLOAT16)
    torch.manual_seed(1)
    first = make_problem(case, "cpu", Extras(bias=True), 3)
    values = drawn(first, Draw(5))
    torch.manual_seed(2)
    before = torch.random.get_rng_state()
    second = make_problem(case, "cpu", Extras(bias=True), 3)
    assert alike(first.parameters, second.parameters)
    assert alike(values, drawn(second, Draw(5)))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_weights_without_a_seed_are_new_each_time_whatever_the_case_s_seed() -> None:
    first, second = (make_problem(small_case(seed=3), "cpu") for _ in range(2))
    assert not any(torch.equal(value, second.weights[name]) for name, value in first.weights.items())
    assert new_seed() != new_seed()


@pytest.mark.parametrize("offset", [0.0, -9.0])
def test_gate_and_up_are_of_unit_size_and_gates_are_where_the_offset_moves_them(offset: float) -> None:
    problem = make_problem(small_case(shape=WIDE_SHAPE, tokens=200), "cpu", gate_offset=offset)
    (x,) = Desk(problem, offset).activations(Draw(1))
    rows = {0.0: x} if not offset else {DEPTHS[0]: x[:10], DEPTHS[1]: x[-1:]}
    for depth, tokens in rows.items():
        for name, middle in (("w_gate", offset * depth), ("w_up", 0.0)):
            projected = tokens @ problem.weights[name].T
            assert math.isclose(projected.mean().item(), middle, abs_tol=1.5 + 0.7 * depth)
            assert offset or math.isclose(projected.std().item(), 1.0, abs_tol=0.1)


# Draws


@pytest.mark.parametrize("scope", list(Scope))
def test_no_two_tensors_are_alike(scope: Scope) -> None:
    """Gate and up that are equal, or draws that are, would let a wrong kernel pass."""
    problem = make_problem(small_case(scope=scope), "cpu", seed=0)
    found = [*problem.weights.values(), *drawn(problem, Draw(0)).values(), *drawn(problem, Draw(10)).values()]
    for first, second in itertools.combinations(found, 2):
        assert first.shape != second.shape or not torch.equal(first, second)


@pytest.mark.parametrize("scope", [Scope.ACTIVATION, Scope.GLU])
def test_wide_values_have_gates_beyond_30_and_sizes_of_channels_far_apart(scope: Scope) -> None:
    problem = make_problem(small_case(scope=scope, shape=WIDE_SHAPE, tokens=64), "cpu", seed=0)
    wide, normal = (drawn(problem, Draw(1, values)) for values in (Values.WIDE, Values.NORMAL))
    gate = wide["gate"] if scope is Scope.ACTIVATION else wide["x"] @ problem.weights["w_gate"].T
    assert gate.abs().max() > 30
    for name in ACTIVATIONS[scope]:
        channels = wide[name].abs().amax(0)
        assert channels.max() > 3.5 * channels.median()
    assert torch.equal(wide["upstream"], normal["upstream"])


@pytest.mark.parametrize(("dtype", "first", "last"), [(Dtype.FLOAT32, 20, -70), (Dtype.FLOAT16, 3, -8)])
def test_other_kinds_of_values_differ_from_normal_ones_as_they_say(dtype: Dtype, first: int, last: int) -> None:
    problem = make_problem(small_case(dtype=dtype), "cpu", seed=0)
    found = {values: drawn(problem, Draw(1, values)) for values in Values}
    normal, uneven = (found[kind] for kind in (Values.NORMAL, Values.UNEVEN_UPSTREAM))
    for token, exponent in ((0, first), (-1, last)):
        assert torch.equal(uneven["upstream"][token], normal["upstream"][token] * 2.0**exponent)
    assert torch.equal(uneven["x"], normal["x"])
    assert not found[Values.ZEROS]["x"].any()
    assert found[Values.ZEROS]["upstream"].all()
    other = drawn(problem, Draw(1, upstream=2))
    assert torch.equal(normal["x"], other["x"])
    assert not torch.equal(normal["upstream"], other["upstream"])


# Routing


@pytest.mark.parametrize("routing", RoutingKind)
@pytest.mark.parametrize(("tokens", "count", "top_k"), [(0, 4, 2), (1, 4, 4), (50, 6, 4), (400, 16, 3)])
def test_a_token_has_different_experts_and_every_draw_is_another(
    routing: RoutingKind, tokens: int, count: int, top_k: int
) -> None:
    index, again, other = (torch.full((tokens, top_k), -1) for _ in range(3))
    for place, seed in ((index, 1), (again, 1), (other, 2)):
        draw_experts(Experts(count, top_k, routing), place, torch.Generator().manual_seed(seed))
    assert torch.equal(index, again)
    assert tokens < 50 or not torch.equal(index, other)
    away = of_other_ranks(Experts(count, top_k), index)
    assert int(away.sum()) == (routing is RoutingKind.LOCAL) * (tokens * top_k // 2)
    assert set(index[away].tolist()) <= {-1, *range(count, 2 * count)}
    here = [[one for one in row if 0 <= one < count] for row in index.tolist()]
    assert all(len(set(row)) == len(row) for row in here)


def test_loads_are_what_the_routing_says() -> None:
    def load(routing: RoutingKind) -> tuple[int, int, int]:
        index = torch.empty(4000, 2, dtype=torch.int64)
        draw_experts(Experts(16, 2, routing), index, torch.Generator().manual_seed(0))
        found = load_of(Experts(16, 2, routing), index)
        assert found.least <= found.median <= found.most
        return found.least, found.most, found.idle

    assert load(RoutingKind.BALANCED) == (500, 500, 0)
    assert load(RoutingKind.SINGLE) == (0, 4000, 14)
    least, most, idle = load(RoutingKind.UNIFORM)
    assert 400 < least < 500 < most < 600
    skewed_least, skewed_most, _ = load(RoutingKind.ZIPF)
    assert skewed_most > 6 * skewed_least
    assert idle == 0
    assert 0 < load(RoutingKind.LOCAL)[0] < load(RoutingKind.LOCAL)[1] < 320


def test_weights_of_other_ranks_are_nan() -> None:
    case = small_case(scope=Scope.EXPERTS)
    case = dataclasses.replace(case, shape=case.shape.routed(RoutingKind.LOCAL))
    assert (case.shape.name, case.pairs, case.rows) == (f"{small_case().shape.name}@local", 14, 7)
    desk = Desk(make_problem(case, "cpu"))
    for values in Values:
        _, index, weights = desk.activations(Draw(new_seed(), values))
        assert torch.equal(weights.isnan(), of_other_ranks(Experts(5, 2), index))
