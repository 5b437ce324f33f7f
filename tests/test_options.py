from pathlib import Path

import pytest

from swiglu_bench.cases import shapes
from swiglu_bench.cases.shapes import config_names
from swiglu_bench.contenders import CATALOGUE
from swiglu_bench.options import complete_implementations, complete_shapes

NAMES = [one.name for one in CATALOGUE]


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("", config_names()),
        ("smo", ["smoke", "smoke-experts"]),
        ("smoke", ["smoke", "smoke-experts"]),
        ("smoke,llama3-8", ["smoke,llama3-8b"]),
        ("4096x11008,mine.yaml,od", ["4096x11008,mine.yaml,odd"]),
        ("smoke,zzz", []),
    ],
)
def test_shapes_are_completed(typed: str, offered: list[str]) -> None:
    assert complete_shapes(typed) == offered


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("", NAMES),
        ("eager-", ["eager-packed"]),
        ("path/to/file.py:mine,uns", ["path/to/file.py:mine,unsloth"]),
        ("nobody", []),
    ],
)
def test_implementations_are_completed(typed: str, offered: list[str]) -> None:
    assert complete_implementations(typed) == offered


def test_a_new_file_is_offered_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "new-model.yaml").touch()
    monkeypatch.setattr(shapes, "configs_folder", lambda: tmp_path)
    assert complete_shapes("new") == ["new-model"]
