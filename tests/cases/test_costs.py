import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specimens import small_case

from swiglu_bench.cases import costs
from swiglu_bench.cases.cases import BIASES, Case, Dtype, Extras, Mode, Scope, Shape, tensors
from swiglu_bench.cases.costs import contender_bytes, flops, judge_bytes, min_bytes, products, tensor_elements

T, H, I = 7, 24, 40  # noqa: E741 -- tokens, hidden, intermediate of small_case, as the formulae name them


def test_products() -> None:
    forward, down = (T, 2 * I, H), (T, H, I)
    dx, dw, dh, dw_down = (T, H, 2 * I), (2 * I, H, T), (T, I, H), (H, I, T)
    assert products(small_case(scope=Scope.ACTIVATION), ("gate", "up")) == []
    for scope, first, of_inputs, of_weights in (
        (Scope.GLU, [forward], [dx], [dw]),
        (Scope.MLP, [forward, down], [dx, dh], [dw, dw_down]),
    ):
        case = {mode: small_case(scope=scope, mode=mode) for mode in Mode}
        everything = tensors(scope)
        assert products(case[Mode.FORWARD], everything) == first
        assert products(case[Mode.BACKWARD], ("x",)) == of_inputs
        assert products(case[Mode.BACKWARD], ()) == []
        assert products(case[Mode.BACKWARD], everything) == of_inputs + of_weights
        assert products(case[Mode.STEP], everything) == first + of_inputs + of_weights


def test_operations_of_llama7b() -> None:
    """Three products of 2 x tokens x 4096 x 11008 operations, written out."""
    llama = Case(Shape("llama7b", 4096, 11008, "config.json", (1,)), 2048, Dtype.BFLOAT16, Scope.MLP, Mode.FORWARD)
    assert flops(llama, ()) == 3 * 2 * 2048 * 4096 * 11008 + 5 * 2048 * 11008
    gate = [flops(small_case(scope=Scope.ACTIVATION, mode=mode), ("gate", "up")) for mode in Mode]
    assert gate == [5 * T * I, 12 * T * I, 17 * T * I]


def test_experts_count_every_token_s_experts_and_read_the_weights_of_those_in_use() -> None:
    forward, backward, step = (small_case(scope=Scope.EXPERTS, mode=mode, tokens=100) for mode in Mode)
    everything, gate = tensors(Scope.EXPERTS), 200 * I  # top 2 of 5
    assert flops(forward, ()) == 6 * 200 * H * I + 5 * gate
    assert flops(step, everything) == 18 * 200 * H * I + 17 * gate
    of_rows, of_weights = costs.products_by_kind(step, everything)
    assert products(step, everything) == of_rows + of_weights
    assert {k for _, _, k in of_weights} == {m for m, _, _ in of_rows} == {200}
    read, weights = 2 * 100 * H + 2 * 200, 3 * I * H
    assert min_bytes(forward, ()) == 4 * (read + 5 * weights)
    assert min_bytes(forward, (), idle_experts=2) == 4 * (read + 3 * weights)
    assert min_bytes(small_case(scope=Scope.EXPERTS, mode=Mode.FORWARD, tokens=1), ()) == 4 * (2 * H + 4 + 2 * weights)
    written = 100 * H + 200 + 5 * weights
    assert min_bytes(backward, everything, idle_experts=2) == 4 * (read + 3 * weights + written), "zeros are written"


def test_biases_of_experts_are_read_and_their_gradients_written() -> None:
    shape = dataclasses.replace(small_case(scope=Scope.EXPERTS).shape, extras=Extras(bias=True))
    forward, backward, _ = (small_case(scope=Scope.EXPERTS, mode=mode, tokens=100, shape=shape) for mode in Mode)
    plain, _, _ = (small_case(scope=Scope.EXPERTS, mode=mode, tokens=100) for mode in Mode)
    biases = 2 * I + H  # of an expert
    assert min_bytes(forward, ()) - min_bytes(plain, ()) == 4 * 5 * biases
    assert min_bytes(forward, (), idle_experts=2) - min_bytes(plain, (), idle_experts=2) == 4 * 3 * biases
    assert min_bytes(backward, BIASES[Scope.EXPERTS]) - min_bytes(backward, ()) == 4 * 5 * biases


@pytest.mark.parametrize("dtype", list(Dtype))
def test_fewest_bytes(dtype: Dtype) -> None:
    def elements(scope: Scope, mode: Mode, gradients: tuple[str, ...]) -> float:
        return min_bytes(small_case(scope=scope, mode=mode, dtype=dtype), gradients) / dtype.bytes

    assert elements(Scope.ACTIVATION, Mode.FORWARD, ()) == 3 * T * I
    assert elements(Scope.ACTIVATION, Mode.BACKWARD, ("gate", "up")) == 5 * T * I
    assert elements(Scope.GLU, Mode.FORWARD, ()) == T * H + 2 * I * H + T * I
    assert elements(Scope.GLU, Mode.BACKWARD, ("x",)) == 2 * T * H + 2 * I * H + T * I
    assert elements(Scope.MLP, Mode.FORWARD, ()) == 2 * T * H + 3 * I * H
    assert elements(Scope.MLP, Mode.BACKWARD, tensors(Scope.MLP)) == 3 * T * H + 6 * I * H


def test_predicted_memory_is_the_largest_phase() -> None:
    footprint = costs.Footprint(saved=3, phases=((6, 0, 0), (4, 1, 1), (2, 2, 2)))
    few, many = small_case(tokens=1), small_case(tokens=1000, dtype=Dtype.BFLOAT16)
    assert costs.predicted_memory(few, footprint) == (3 * I * 4, (2 * I + 2 * H + 2 * I * H) * 4)
    assert costs.predicted_memory(many, footprint) == (3 * 1000 * I * 2, 6 * 1000 * I * 2)


sizes = st.integers(min_value=1, max_value=10**6)


@given(sizes, sizes, sizes, st.sampled_from(Scope), st.sampled_from(Mode), st.sampled_from(Dtype))
def test_needed_memory_holds_what_a_case_allocates(
    tokens: int, hidden: int, intermediate: int, scope: Scope, mode: Mode, dtype: Dtype
) -> None:
    case = small_case(
        shape=Shape("any", hidden, intermediate, "drawn", (1,)), tokens=tokens, dtype=dtype, scope=scope, mode=mode
    )
    size = tensor_elements(case)
    results = size["output"] + (sum(size[name] for name in tensors(scope)) if mode is not Mode.FORWARD else 0)
    given = sum(size[name] for name in tensors(scope)) + size["output"]  # the last for the upstream gradient
    larger = dataclasses.replace(case, tokens=tokens + 1)
    assert contender_bytes(case) >= (given + 2 * results) * dtype.bytes
    assert judge_bytes(case) >= (given + results) * dtype.bytes + 2 * results * 8, "two draws' truths"
    assert contender_bytes(larger) > contender_bytes(case)
    assert contender_bytes(case, 3) - contender_bytes(case) >= 2 * (given + results) * dtype.bytes
    assert judge_bytes(larger) > judge_bytes(case)
