import contextlib
import importlib.metadata
import shutil
from functools import partial
from pathlib import Path

import pytest
from places import SUPPORT
from specimens import complaint as refused

from swiglu_bench.cases.cases import Scope
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.cases.implementation import Implementation, Step, implementation
from swiglu_bench.cases.registry import entry_point_addresses, from_file, load, select
from swiglu_bench.contenders import CATALOGUE


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    """A user's file, outside the package."""
    return Path(shutil.copy(SUPPORT / "user_implementations.py", tmp_path / "mine.py"))


def names(chosen: list[Implementation]) -> list[str]:
    return [known.name for known in chosen]


complaint = partial(refused, select)


def dummy(name: str) -> Implementation:
    return implementation(name, scopes=["glu"], description="does nothing")(lambda problem: Step(lambda x: x))


@pytest.mark.parametrize(
    ("wanted", "unwanted", "chosen"),
    [
        (["liger", "eager", "eager", "eage*"], [], ["eager", "eager-packed", "liger"]),  # the catalogue's order, once
        (["*packed"], [], ["eager-packed", "compile-packed"]),
        (["[lu]*"], ["*-mlp", "*-experts"], ["liger", "unsloth"]),
        (["eager*", "liger"], ["*-packed"], ["eager", "liger"]),
        (["*"], [], names(list(CATALOGUE))),
        ([], [], [known.name for known in CATALOGUE if not known.on_request]),
        ([], ["f*"], [known.name for known in CATALOGUE if not known.on_request and known.name[0] != "f"]),
    ],
)
def test_names_and_globs(wanted: list[str], unwanted: list[str], chosen: list[str]) -> None:
    assert names(select(CATALOGUE, wanted, unwanted)) == chosen
    assert names(select(CATALOGUE, unasked=["fused", "eager"])) == ["eager", "fused"]


@pytest.mark.parametrize(("word", "near"), [("eagr", "did you mean eager"), ("zz*", "known: eager")])
def test_unknown_names_get_near_matches(word: str, near: str) -> None:
    assert complaint(CATALOGUE, [word]).startswith(f"--impl: no implementation is called '{word}'; {near}")
    assert complaint(CATALOGUE, [], [word]).startswith(f"--skip-impl: no implementation is called '{word}'; {near}")
    assert "left no implementation to run" in complaint(CATALOGUE, [], ["*"])


def test_two_of_one_name_are_refused(user_file: Path, tmp_path: Path) -> None:
    """A package's entry point or a file must not take another's place, nor its samples."""
    eager, mine = select(CATALOGUE, ["eager", f"{user_file}:mine"])
    assert (eager.name, mine.name, mine.scopes, mine.address) == ("eager", "mine", {Scope.GLU}, f"{user_file}:mine")
    assert "Two implementations are called 'eager'" in complaint([*CATALOGUE, dummy("eager")])
    again = shutil.copy(user_file, tmp_path / "again.py")
    assert "the name 'mine' is taken" in complaint(CATALOGUE, [f"{user_file}:mine", f"{again}:mine"])
    assert "the name 'mine' is taken" in complaint([*CATALOGUE, dummy("mine")], [f"{user_file}:mine"])
    assert "has no implementation 'gone'; it offers: mine, swapped" in complaint(CATALOGUE, [f"{user_file}:gone"])
    assert f"name one, as in {user_file}:mine" in complaint(CATALOGUE, [str(user_file)])
    assert "has no implementation 'not_an" in complaint(CATALOGUE, [f"{user_file}:not_an_implementation"])
    assert "there is no file" in complaint(CATALOGUE, [f"{tmp_path}/gone.py:mine"])


def test_a_file_names_an_implementation_or_its_variable(tmp_path: Path) -> None:
    """And its dataclasses find their module."""
    path = tmp_path / "two.py"
    path.write_text(
        "from __future__ import annotations\nimport dataclasses\n"
        "from swiglu_bench import Step, implementation\n"
        "@dataclasses.dataclass\nclass Tile:\n    size: int\n"
        "@implementation('my-kernel', scopes=['mlp'], description='d')\n"
        "def variable(problem):\n    return Step(lambda x: x)\n",
        encoding="utf-8",
    )
    assert from_file(f"{path}:my-kernel").name == from_file(f"{path}:variable").name == "my-kernel"
    assert load(str(path)).address == f"{path}:my-kernel", "the only one"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = 1\n", "it offers: none (decorate a build function with"),
        ("import surely_not_installed\n", "ModuleNotFoundError: No module named 'surely_not_installed'"),
        ("def broken(:\n", "failed to import: SyntaxError"),
        ("raise ValueError('first line\\nsecond line')\n", "failed to import: ValueError: first line second line"),
        ("raise SystemExit('enough')\n", "failed to import: SystemExit: enough"),
    ],
)
def test_a_file_without_an_implementation(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "broken.py").write_text(text, encoding="utf-8")
    assert expected in complaint(CATALOGUE, [f"{tmp_path / 'broken.py'}:x"])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("user_implementations:mine", None),
        ("user_implementations:glu", "theirs = user_implementations:glu is a function, not an Implementation"),
        ("surely_not_installed:mine", "theirs = surely_not_installed:mine failed to import: ModuleNotFoundError"),
    ],
)
def test_entry_points_of_other_packages(monkeypatch: pytest.MonkeyPatch, value: str, expected: str | None) -> None:
    entry = importlib.metadata.EntryPoint("theirs", value, "swiglu_bench.implementations")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry] if group == entry.group else [])
    with pytest.raises(BadInput, match=expected) if expected else contextlib.nullcontext():
        found = [load(address) for address in entry_point_addresses()]
        assert names(select([*CATALOGUE, *found], ["mi*"])) == ["mine"]
