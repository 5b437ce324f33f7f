import pytest
from specimens import SMALL, small_case

from swiglu_bench.cases.cases import DTYPE_ALIASES, Dtype, Mode, Scope, Shape, expand, parse_dtypes, parse_tokens
from swiglu_bench.cases.errors import BadInput


def test_a_case_is_hashable_and_its_label_tells_it_apart() -> None:
    assert len({small_case(), small_case(), small_case(seed=1)}) == 2
    assert small_case(mode=Mode.BACKWARD).label == "backward glu small 7 tokens float32"


def test_expand_goes_shape_by_shape_with_tokens_ascending_and_runs_nothing_twice() -> None:
    other = Shape("other", 8, 16, "made up", (5, 1))
    scopes, dtypes = [Scope.GLU, Scope.MLP, Scope.GLU], [Dtype.FLOAT32]
    cases = expand([SMALL, other], scopes=scopes, modes=[Mode.FORWARD], dtypes=dtypes)
    assert [(case.shape.name, str(case.scope), case.tokens) for case in cases] == [
        ("small", "glu", 3), ("small", "glu", 7), ("small", "mlp", 3), ("small", "mlp", 7),
        ("other", "glu", 1), ("other", "glu", 5), ("other", "mlp", 1), ("other", "mlp", 5),
    ]  # fmt: skip
    cases = expand([SMALL], scopes=[Scope.GLU], modes=[Mode.STEP], dtypes=2 * dtypes, tokens=[9, 2, 9], seed=5)
    assert [(case.tokens, case.seed) for case in cases] == [(2, 5), (9, 5)]


def test_token_counts_and_dtypes() -> None:
    assert parse_tokens("1,128, 1k ,8K,007") == [1, 128, 1024, 8192, 7]
    for name, dtype in DTYPE_ALIASES.items():
        assert parse_dtypes(f" {name.upper()},{name}") == [dtype, dtype]


@pytest.mark.parametrize(
    "text", ["", "0k", "1,-128", "1.5", "1e3", "k", "1,,2", "1 2", "+1", "1kk", "1_000", "9" * 5000]
)
def test_what_is_neither_a_token_count_nor_a_dtype_is_refused_and_shown(text: str) -> None:
    with pytest.raises(BadInput, match=r"^--tokens: '.*' is not a token count; .*1,128,1k,8k\.$"):
        parse_tokens(text)
    with pytest.raises(BadInput, match=r"^--dtype: '.*' is not one of bf16, fp16, fp32\.$"):
        parse_dtypes(f"bf16,{text}")
