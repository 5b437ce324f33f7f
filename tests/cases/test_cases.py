import pytest
from hypothesis import given
from hypothesis import strategies as st
from specimens import SMALL, result_or_complaint, small_case

from swiglu_bench.cases.cases import DTYPE_ALIASES, Dtype, Mode, Scope, Shape, expand, parse_dtypes, parse_tokens
from swiglu_bench.cases.errors import BadInput


def test_a_case_is_hashable_and_its_label_tells_it_apart() -> None:
    assert len({small_case(), small_case(), small_case(seed=1)}) == 2
    assert small_case(mode=Mode.BACKWARD).label == "backward glu small 7 tokens float32"


def test_expand_goes_shape_by_shape_with_tokens_ascending() -> None:
    other = Shape("other", 8, 16, "made up", (5, 1))
    cases = expand([SMALL, other], scopes=[Scope.GLU, Scope.MLP], modes=[Mode.FORWARD], dtypes=[Dtype.FLOAT32])
    assert [(case.shape.name, str(case.scope), case.tokens) for case in cases] == [
        ("small", "glu", 3), ("small", "glu", 7), ("small", "mlp", 3), ("small", "mlp", 7),
        ("other", "glu", 1), ("other", "glu", 5), ("other", "mlp", 1), ("other", "mlp", 5),
    ]  # fmt: skip


def test_expand_takes_given_tokens_and_the_seed_and_runs_nothing_twice() -> None:
    cases = expand(
        [SMALL], scopes=[Scope.GLU, Scope.GLU], modes=[Mode.STEP], dtypes=[Dtype.BFLOAT16, Dtype.BFLOAT16],
        tokens=[9, 2, 9], seed=5,
    )  # fmt: skip
    assert [(case.tokens, case.seed, case.dtype) for case in cases] == [(2, 5, Dtype.BFLOAT16), (9, 5, Dtype.BFLOAT16)]


@pytest.mark.parametrize(
    ("text", "counts"),
    [("1,128,1k,8k", [1, 128, 1024, 8192]), (" 16 , 2K ", [16, 2048]), ("007", [7]), ("999999999999", [999999999999])],
)
def test_token_counts(text: str, counts: list[int]) -> None:
    assert parse_tokens(text) == counts


@pytest.mark.parametrize(
    "text", ["", "0k", "1,-128", "1.5", "1e3", "k", "1,,2", "1 2", "+1", "1kk", "1_000", "9" * 5000]
)
def test_what_is_no_token_count_is_refused_and_shown(text: str) -> None:
    with pytest.raises(BadInput, match=r"^--tokens: '.*' is not a token count; .*1,128,1k,8k\.$"):
        parse_tokens(text)


@pytest.mark.parametrize(("name", "dtype"), DTYPE_ALIASES.items())
def test_every_spelling_of_a_dtype(name: str, dtype: Dtype) -> None:
    assert parse_dtypes(f" {name.upper()},{name}") == [dtype, dtype]


@pytest.mark.parametrize("text", ["", "fp8", "bf16,", "bf16 fp16"])
def test_an_unknown_dtype_is_refused_and_the_known_ones_are_named(text: str) -> None:
    with pytest.raises(BadInput, match=r"^--dtype: '.*' is not one of bf16, fp16, fp32\.$"):
        parse_dtypes(text)


@given(st.one_of(st.text(), st.lists(st.sampled_from(["bf16", "fp32", "half", "1k", "x"])).map(",".join)))
def test_any_text_is_read_or_bad_input(text: str) -> None:
    counts = result_or_complaint(lambda: parse_tokens(text))
    assert isinstance(counts, BadInput) or (counts and all(count >= 1 for count in counts))
    dtypes = result_or_complaint(lambda: parse_dtypes(text))
    assert isinstance(dtypes, BadInput) or (dtypes and set(dtypes) <= set(Dtype))
