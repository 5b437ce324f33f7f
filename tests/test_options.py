from pathlib import Path

import pytest

from swiglu_bench.cases import shapes
from swiglu_bench.cases.shapes import config_names
from swiglu_bench.contenders import CATALOGUE
from swiglu_bench.options import complete_implementations, complete_shapes


def test_names_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert complete_shapes("") == config_names()
    assert complete_implementations("") == [known.name for known in CATALOGUE]
    for complete, typed, offered in (
        (complete_shapes, "smo", ["smoke", "smoke-experts"]), (complete_shapes, "smoke,zzz", []),
        (complete_shapes, "4096x11008,mine.yaml,od", ["4096x11008,mine.yaml,odd"]),
        (complete_implementations, "eager-", ["eager-packed"]), (complete_implementations, "nobody", []),
        (complete_implementations, "path/to/file.py:mine,uns", ["path/to/file.py:mine,unsloth"]),
    ):  # fmt: skip
        assert complete(typed) == offered
    (tmp_path / "new-model.yaml").touch()
    monkeypatch.setattr(shapes, "configs_folder", lambda: tmp_path)
    assert complete_shapes("new") == ["new-model"]
