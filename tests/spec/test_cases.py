import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specimens import SMALL, result_or_complaint, small_case

from swiglu_bench.spec.cases import (
    ACTIVATIONS,
    DTYPE_ALIASES,
    VARIANTS,
    WEIGHTS,
    Dtype,
    Mode,
    Scope,
    Shape,
    expand,
    parse_dtypes,
    parse_tokens,
    tensors,
)
from swiglu_bench.spec.errors import BadInput, did_you_mean


def test_a_case_is_hashable_and_frozen() -> None:
    assert len({small_case(), small_case(), small_case(seed=1)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        small_case().tokens = 3  # type: ignore[misc]


def test_a_label_says_all_that_tells_cases_apart() -> None:
    assert small_case(mode=Mode.BACKWARD).label == "backward glu small 7 tokens float32"


@pytest.mark.parametrize(
    ("scope", "names"),
    [
        (Scope.ACTIVATION, ("gate", "up")),
        (Scope.GLU, ("x", "w_gate", "w_up")),
        (Scope.MLP, ("x", "w_gate", "w_up", "w_down")),
    ],
)
def test_every_scope_names_its_tensors(scope: Scope, names: tuple[str, ...]) -> None:
    assert tensors(scope) == names == ACTIVATIONS[scope] + WEIGHTS[scope]


def test_at_least_two_variants_rotate() -> None:
    assert VARIANTS >= 2, "with one set of inputs a remembered answer is always right"


@pytest.mark.parametrize(("dtype", "size"), [(Dtype.FLOAT32, 4), (Dtype.FLOAT16, 2), (Dtype.BFLOAT16, 2)])
def test_dtype_bytes(dtype: Dtype, size: int) -> None:
    assert dtype.bytes == size


def test_expand_goes_shape_by_shape_with_tokens_ascending() -> None:
    other = Shape("other", 8, 16, "made up", (5, 1))
    cases = expand([SMALL, other], scopes=[Scope.GLU, Scope.MLP], modes=[Mode.FORWARD], dtypes=[Dtype.FLOAT32])
    assert [(case.shape.name, str(case.scope), case.tokens) for case in cases] == [
        ("small", "glu", 3), ("small", "glu", 7), ("small", "mlp", 3), ("small", "mlp", 7),
        ("other", "glu", 1), ("other", "glu", 5), ("other", "mlp", 1), ("other", "mlp", 5),
    ]  # fmt: skip


def test_expand_takes_given_tokens_instead_and_the_seed() -> None:
    cases = expand([SMALL], scopes=[Scope.GLU], modes=[Mode.STEP], dtypes=[Dtype.BFLOAT16], tokens=[9, 2, 9], seed=5)
    assert [(case.tokens, case.seed, case.dtype) for case in cases] == [(2, 5, Dtype.BFLOAT16), (9, 5, Dtype.BFLOAT16)]


def test_expand_runs_nothing_twice() -> None:
    cases = expand(
        [SMALL],
        scopes=[Scope.GLU, Scope.GLU],
        modes=[Mode.STEP],
        dtypes=[Dtype.FLOAT32, Dtype.BFLOAT16, Dtype.FLOAT32],
        tokens=[1],
    )
    assert len(cases) == len(set(cases)) == 2


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("1", [1]),
        ("1,128,1k,8k", [1, 128, 1024, 8192]),
        (" 16 , 2K ", [16, 2048]),
        ("007", [7]),
        ("999999999999", [999999999999]),
    ],
)
def test_token_counts(text: str, counts: list[int]) -> None:
    assert parse_tokens(text) == counts


@pytest.mark.parametrize(
    "text",
    ["", "0", "0k", "-1", "1,-128", "1.5", "1e3", "k", "1m", "many", "1,,2", "1 2", "+1", "1kk", "1_000", "9" * 5000],
)
def test_what_is_no_token_count_is_refused_and_shown(text: str) -> None:
    with pytest.raises(BadInput, match=r"^--tokens: '.*' is not a token count; .*1,128,1k,8k\.$"):
        parse_tokens(text)


@pytest.mark.parametrize(("name", "dtype"), DTYPE_ALIASES.items())
def test_every_spelling_of_a_dtype(name: str, dtype: Dtype) -> None:
    assert parse_dtypes(f" {name.upper()},{name}") == [dtype, dtype]


@pytest.mark.parametrize("text", ["", "fp8", "bf16,", "float64", "int8", "bf16 fp16"])
def test_an_unknown_dtype_is_refused_and_the_known_ones_are_named(text: str) -> None:
    with pytest.raises(BadInput, match=r"^--dtype: '.*' is not one of bf16, fp16, fp32\.$"):
        parse_dtypes(text)


@given(st.text())
def test_any_text_is_token_counts_or_bad_input(text: str) -> None:
    counts = result_or_complaint(lambda: parse_tokens(text))
    if isinstance(counts, BadInput):
        return
    assert counts
    assert all(count >= 1 for count in counts)


@given(st.lists(st.integers(min_value=1, max_value=10**11), min_size=1))
def test_token_counts_survive_the_way_through_text(counts: list[int]) -> None:
    assert parse_tokens(",".join(map(str, counts))) == counts


@given(st.one_of(st.text(), st.lists(st.sampled_from(["bf16", "fp32", "half", "x"])).map(",".join)))
def test_any_text_is_dtypes_or_bad_input(text: str) -> None:
    dtypes = result_or_complaint(lambda: parse_dtypes(text))
    if isinstance(dtypes, BadInput):
        return
    assert dtypes
    assert set(dtypes) <= set(Dtype)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("lama7b", r"did you mean llama7b"),
        ("llama3", r"did you mean .*llama3-8b.*\?"),
        ("fuse", r"did you mean fused"),
        ("xyzzy", r"^known: llama7b, llama3-8b, smoke, fused\.$"),
        ("", r"^known: llama7b, llama3-8b, smoke, fused\.$"),
    ],
)
def test_near_matches(word: str, expected: str) -> None:
    assert re.search(expected, did_you_mean(word, ["llama7b", "llama3-8b", "smoke", "fused"]))
