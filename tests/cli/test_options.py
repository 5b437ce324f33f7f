from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiglu_bench.cli.options import complete_implementations, complete_shapes
from swiglu_bench.implementations import CATALOGUE
from swiglu_bench.spec import shapes
from swiglu_bench.spec.shapes import config_names

NAMES = [one.name for one in CATALOGUE]


def test_nothing_typed_offers_everything() -> None:
    assert complete_shapes("") == config_names()
    assert complete_implementations("") == NAMES


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("smo", ["smoke"]),
        ("smoke", ["smoke"]),
        ("llama3", ["llama3-70b", "llama3-8b"]),
        ("smoke,llama3-8", ["smoke,llama3-8b"]),
        ("4096x11008,mine.yaml,od", ["4096x11008,mine.yaml,odd"]),
        ("zzz", []),
        ("smoke,zzz", []),
        ("Smo", []),
    ],
)
def test_shapes_are_completed(typed: str, offered: list[str]) -> None:
    assert complete_shapes(typed) == offered


def test_everything_is_offered_after_a_comma() -> None:
    assert complete_shapes("smoke,") == [f"smoke,{name}" for name in config_names()]


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("eager-", ["eager-packed"]),
        ("liger,comp", ["liger,compile", "liger,compile-packed", "liger,compile-max-autotune"]),
        ("fused-dw-torch-", ["fused-dw-torch-preact"]),
        ("path/to/file.py:mine,uns", ["path/to/file.py:mine,unsloth"]),
        ("nobody", []),
    ],
)
def test_implementations_are_completed(typed: str, offered: list[str]) -> None:
    assert complete_implementations(typed) == offered


@pytest.mark.parametrize(("complete", "names"), [(complete_shapes, config_names()), (complete_implementations, NAMES)])
@given(st.one_of(st.text(), st.sampled_from(NAMES).map(lambda name: name[:3])))
def test_what_is_offered_goes_on_from_what_was_typed(complete, names, typed) -> None:
    for offer in complete(typed):
        assert offer.startswith(typed)
        assert offer.rpartition(",")[2] in names


def test_a_new_file_is_offered_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "new-model.yaml").touch()
    monkeypatch.setattr(shapes, "configs_folder", lambda: tmp_path)
    assert complete_shapes("new") == ["new-model"]
