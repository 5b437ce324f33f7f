from functools import partial
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from specimens import complaint as refused
from specimens import result_or_complaint

from swiglu_bench.cases import shapes
from swiglu_bench.cases.cases import Shape
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.cases.shapes import DEFAULT_TOKENS, all_configs, config_names, dense_shapes, load_shapes, with_tokens


def write(folder: Path, text: str, name: str = "mine.yaml") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


complaint = partial(refused, load_shapes)


def test_every_config_loads_and_states_its_source() -> None:
    for config in all_configs():
        assert len(config.content.source.split()) >= 3, "a source is a phrase that lets a reader check the numbers"
        for shape in load_shapes(config.name):
            assert shape.source
            assert shape.tokens == tuple(sorted(set(shape.tokens)))
    assert {"smoke", "odd", "tokens", "models", "llama7b"} <= set(config_names())
    (odd,) = load_shapes("odd")
    assert all(size % divisor for size in (odd.hidden, odd.intermediate) for divisor in (2, 3, 5, 7, 8, 16))


def test_names_of_several_kinds(tmp_path: Path) -> None:
    path = write(tmp_path, "hidden: 8\nintermediate: 16\nsource: made up\ntokens: [2]\n")
    loaded = load_shapes(f"smoke, {path},3x5,smoke,3x5")
    assert [(shape.name, shape.hidden) for shape in loaded] == [("smoke", 128), ("mine", 8), ("3x5", 3)], "each once"
    path = write(tmp_path, GOOD, "smoke.yaml")
    assert "two different shapes are called 'smoke'" in complaint(f"smoke,{path}")


@pytest.mark.parametrize("text", ["0x5", "5x-1", "-3x-3", "16777217x1", f"1x{10**18}"])
def test_sizes_on_the_command_line(text: str) -> None:
    assert load_shapes(" 04096X11008 ") == [
        Shape("4096x11008", 4096, 11008, "given on the command line", DEFAULT_TOKENS)
    ]
    assert complaint(text).startswith(f"--shapes: '{text}' has a size outside 1 to 2^24")


@pytest.mark.parametrize(
    ("text", "offered"),
    [
        ("lama7b", "llama7b"), ("Smoke", "smoke"), ("deepseek", "deepseek-v3-expert"), ("nonsense", "known: "),
        ("smoke,", "known: "), ("9" * 5000 + "x1", "known: "), ("gone.yml", "no file"), ("no/such/file", "no file"),
        ("a/" * 5000, "no file"), ("nul\0/x.yaml", "no file"),
    ],
)  # fmt: skip
def test_an_unknown_name_gets_near_matches(text: str, offered: str) -> None:
    message = complaint(text)
    assert message.startswith("--shapes: there is no ")
    assert offered in message


def test_random_layers_are_those_of_the_seed() -> None:
    first = load_shapes("random:4", seed=1)
    assert [(shape.name, shape.tokens) for shape in first] == [
        ("2432x16448", (1655,)), ("2920x4616", (78,)), ("4992x13312", (2,)), ("2136x15816", (67,)),
    ]  # fmt: skip
    many = load_shapes("random:1000", seed=1)
    assert many[:4] == first == dense_shapes("random:4", "tune", 1) != load_shapes("random:4", seed=2)
    assert len({(shape.hidden, shape.intermediate) for shape in many}) == 1000
    assert all(2048 <= shape.hidden <= 8200 and 768 <= shape.intermediate <= 28680 for shape in many)
    assert [shape.tokens for shape in with_tokens(load_shapes("smoke,random:1", 1), [5])] == [(5,), (1655,)]

    for text in ("random", "random:", "random:0", "random:-3", "random-experts:many", "random:10001"):
        assert complaint(f"smoke,{text}").startswith(f"--shapes: {text!r} does not say how many layers to draw")


def test_random_mixtures_are_those_of_the_seed_and_fit_a_gpu() -> None:
    many = load_shapes("random-experts:300", seed=1)
    assert many[:4] == load_shapes("random-experts:4", seed=1) != load_shapes("random-experts:4", seed=2)
    assert {shape.experts.count for shape in many if shape.experts} == {8, 16, 32, 64, 128, 256}
    for shape in many:
        assert shape.experts
        assert shape.experts.top_k < shape.experts.count
        assert shape.experts.count * shape.hidden * shape.intermediate <= 2**29
        assert shape.hidden % 8 == shape.intermediate % 8 == 0


GOOD = "hidden: 8\nintermediate: 16\nsource: made up\n"

MISTAKES = {
    "missing key": ("hidden: 8\nsource: made up\n", 1, "intermediate: Field required"),
    "negative size": ("hidden: 8\nintermediate: -16\nsource: made up\n", 2, "greater than 0 (found -16)"),
    "more than 64 bits": (f"hidden: 0x{'f' * 6000}\nintermediate: 1\nsource: s\n", 1, "more than 64 bits"),
    "unknown key": (f"{GOOD}hiden: 3\n", 4, "hiden: Extra inputs are not permitted (found 3)"),
    "duplicate key": (f"{GOOD}hidden: 9\n", 4, "hidden: the key is given twice"),
    "token of zero": (f"{GOOD}tokens:\n  - 4\n  - 0\n", 6, "tokens.1: Input should be greater than 0 (found 0)"),
    "an empty file": ("", 1, "found an empty file"),
    "a value without end": ("hidden: &a [*a]\nintermediate: 1\nsource: s\n", 1, "valid integer (found a list)"),
    "two documents": ("---\nhidden: 8\n---\nhidden: 9\n", 3, "not valid YAML: expected a single document"),
    "sweep of unknown": ("source: s\nshapes:\n  - smoke\n  - lama7b\n", 4, "'lama7b'; did you mean llama7b"),
    "sweep of sweeps": ("source: s\nshapes: [smoke,\n  models]\n", 3, "a sweep may only name shapes"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_file_is_named_with_file_and_line(tmp_path: Path, mistake: str) -> None:
    text, line, expected = MISTAKES[mistake]
    path = write(tmp_path, text)
    message = complaint(path)
    assert message.startswith(f"{path}:{line}: ")
    assert expected in message
    assert len(message) < len(path) + 300


@pytest.mark.parametrize(
    "content",
    [
        b"\x00", b"hidden: !!timestamp x", b"hidden: !!int ''", b"hidden: !!bool x", b"[" * 1200,
        b"hidden: 2001-02-31", b"source: caf\xe9\n", b"hidden: !!python/object/apply:pathlib.Path.touch [touched]",
        b"hidden: !!python/object/new:os.system [touch touched]", b"hidden: !!python/name:os.system",
    ],
)  # fmt: skip
def test_what_breaks_the_yaml_library_or_would_run_code_is_bad_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.yaml").write_bytes(content)
    assert "not valid YAML" in complaint("broken.yaml")
    assert not Path("touched").exists()
    monkeypatch.setattr(Path, "read_text", MagicMock(side_effect=PermissionError(13, "Permission denied")))
    assert complaint("broken.yaml") == "broken.yaml: cannot be read: Permission denied."


def test_a_user_s_sweep(tmp_path: Path) -> None:
    own = write(tmp_path, "hidden: &size 8\nintermediate: *size\nsource: made up  # by hand\n", "own.yaml")
    path = write(tmp_path, f"shapes: [smoke, {own}, 3x5]\ntokens: [9]\nsource: s\n", "sweep.yml")
    assert {shape.name: shape.tokens for shape in load_shapes(path)} == dict.fromkeys(("smoke", "own", "3x5"), (9,))
    drawn = write(tmp_path, "shapes: [random:2]\nsource: s\n", "drawn.yaml")
    assert load_shapes(drawn, seed=1) == load_shapes("random:2", seed=1)
    itself = write(tmp_path, f"shapes: [{tmp_path / 'self.yaml'}]\nsource: s\n", "self.yaml")
    assert "a sweep may only name shapes" in complaint(itself)


keys = st.sampled_from(["hidden", "intermediate", "source", "tokens", "shapes", "<<", "a", "? [x]"])
odd_values = [
    "[1, 2]", "{}", "~", "*a", "&a 3", "&a [*a]", "!!int x", "!!set {a}", "2001-01-01", "'", "|", "- 1", ".nan", "@",
]  # fmt: skip
values = st.one_of(st.integers().map(str), st.sampled_from(odd_values), st.text(max_size=12))
nearly_yaml = st.lists(st.tuples(keys, values)).map(lambda pairs: "".join(f"{key}: {value}\n" for key, value in pairs))


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.one_of(st.text(), nearly_yaml))
def test_any_text_as_a_file_is_shapes_or_bad_input(tmp_path: Path, text: str) -> None:
    path = tmp_path / "any.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    loaded = result_or_complaint(lambda: load_shapes(str(path)))
    if isinstance(loaded, BadInput):
        assert "\n" not in str(loaded)
        return
    assert all(0 < shape.hidden <= 2**24 and 0 < shape.intermediate <= 2**24 and shape.source for shape in loaded)


@pytest.mark.parametrize(
    ("lines", "names"),
    [
        ("top_k: 2", ["top_k", "experts"]), ("experts: 4", ["top_k", "1 to 4"]),
        ("experts: 4\ntop_k: 5", ["top_k", "1 to 4"]), ("bias: true", ["bias", "experts"]),
        ("experts: 4\ntop_k: 2\nlimit: 7.0", ["limit", "alpha"]),
        ("experts: 4\ntop_k: 2\nlimit: -1.0\nalpha: 1.7", ["limit"]),
    ],
)  # fmt: skip
def test_experts_that_make_no_sense(tmp_path: Path, lines: str, names: list[str]) -> None:
    message = complaint(write(tmp_path, f"hidden: 8\nintermediate: 16\nsource: made up\n{lines}\n"))
    assert all(name in message for name in names), message


def test_a_mixture_of_experts_is_refused_where_only_dense_blocks_are_taken() -> None:
    with pytest.raises(BadInput, match=r"olmoe is a mixture of experts, which tune does not take"):
        shapes.dense_shapes("llama7b,olmoe", "tune")
    assert [shape.name for shape in shapes.dense_shapes("llama7b", "tune")] == ["llama7b"]
