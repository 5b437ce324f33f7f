from pathlib import Path

import pytest

from swiglu_bench.cases.errors import BadInput
from swiglu_bench.rows import baselines


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(text: str) -> Path:
    folder = Path("results/run")
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    (folder / "records.csv").write_text(text, encoding="utf-8")
    return folder


def test_a_baseline_is_a_copy_that_a_later_one_replaces() -> None:
    for text in ("first", "second"):
        baselines.save("main", "forward", run(text))
    found = baselines.find("main", "forward")
    assert [path.name for path in found.iterdir()] == ["records.csv"]
    assert (found / "records.csv").read_text(encoding="utf-8") == "second"
    assert [path.name for path in found.parent.iterdir()] == ["forward"]


def test_what_is_not_there_is_named_with_what_is() -> None:
    with pytest.raises(BadInput, match="--save-baseline main"):
        baselines.find("main", "forward")
    baselines.save("main", "forward", run(""))
    with pytest.raises(BadInput, match="did you mean main"):
        baselines.find("mian", "forward")
    with pytest.raises(BadInput, match="--save-baseline main"):
        baselines.find("main", "step")


@pytest.mark.parametrize("name", ["", "..", "a/b", "-x", "a b", "."])
def test_a_name_is_no_path(name: str) -> None:
    with pytest.raises(BadInput, match="is not a valid baseline name"):
        baselines.place(name, "forward")
