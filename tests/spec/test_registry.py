import dataclasses
import importlib.metadata
import platform
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
from places import SUPPORT

from swiglu_bench.implementations import CATALOGUE
from swiglu_bench.spec import registry
from swiglu_bench.spec.cases import ACTIVATIONS, Dtype, Scope, tensors
from swiglu_bench.spec.errors import BadInput
from swiglu_bench.spec.implementation import Implementation, Step, implementation
from swiglu_bench.spec.registry import entry_point_addresses, from_file, load, select

USER_FILE = SUPPORT / "user_implementations.py"


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    """A user's file, outside the package."""
    return Path(shutil.copy(USER_FILE, tmp_path / "mine.py"))


def names(chosen: list[Implementation]) -> list[str]:
    return [one.name for one in chosen]


def complaint(*arguments: object, **keywords: object) -> str:
    with pytest.raises(BadInput) as caught:
        select(*arguments, **keywords)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return str(caught.value)


def dummy(name: str, **fields: object) -> Implementation:
    declare = implementation(name, scopes=["glu"], description="does nothing", **fields)  # type: ignore[arg-type]
    return declare(lambda problem: Step(lambda x: x))


# The catalogue


def test_names_in_the_catalogue_are_unique() -> None:
    assert len(set(names(list(CATALOGUE)))) == len(CATALOGUE)


def test_the_four_families_are_there() -> None:
    wanted = {
        "eager", "eager-packed", "compile", "compile-packed", "liger", "unsloth", "silu-mul", "fused", "fused-dw-torch",
        "fused-dw-triton",
    }  # fmt: skip
    assert wanted <= set(names(list(CATALOGUE)))


@pytest.mark.parametrize("one", CATALOGUE, ids=lambda one: one.name)
def test_entries_are_complete(one: Implementation) -> None:
    assert one.description
    assert one.scopes
    # The peak of a chunked one is no fixed number of tensors of the case's sizes, and others' kernels allocate as they
    # like: none is predicted.
    unpredicted = one.name == "fused-mlp-chunked" or one.source == "swiglu_bench.implementations.peers"
    assert set(one.footprints) == (set() if unpredicted else one.scopes), "every scope has a prediction of its memory"
    assert "," not in one.name, "a comma separates names on the command line"


def test_only_frozen_implementations_leave_weights_out() -> None:
    for one in CATALOGUE:
        for scope in one.scopes:
            expected = ACTIVATIONS[scope] if one.name in {"fused", "fused-preact"} else tensors(scope)
            assert one.gradients(scope) == expected


@pytest.mark.parametrize(
    ("trains", "gradients"), [("everything", ("x", "w_gate", "w_up")), ("inputs", ("x",)), ("nothing", ())]
)
def test_gradients_follow_from_what_it_trains(trains: str, gradients: tuple[str, ...]) -> None:
    assert dummy("one", trains=trains).gradients(Scope.GLU) == gradients


def test_importing_the_catalogue_imports_no_torch() -> None:
    code = (
        "import sys, swiglu_bench.implementations; "
        "print({'torch', 'triton', 'swiglu_kernels', 'liger_kernel', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "set()\n"


# select


def test_nothing_wanted_means_all_but_those_on_request() -> None:
    assert select(CATALOGUE) == [one for one in CATALOGUE if not one.on_request]
    assert select(CATALOGUE, ["*"]) == list(CATALOGUE)
    assert names(select(CATALOGUE, ["*autotune"])) == ["compile-max-autotune"]


def test_names_come_in_the_catalogue_s_order_and_once() -> None:
    assert names(select(CATALOGUE, ["liger", "eager", "eager", "eage*"])) == ["eager", "eager-packed", "liger"]


@pytest.mark.parametrize(
    ("pattern", "chosen"),
    [
        ("*packed", ["eager-packed", "compile-packed"]),
        ("fused", ["fused"]),
        ("fused-dw-t????", ["fused-dw-torch"]),
        ("[lu]*", ["liger", "unsloth"]),
    ],
)
def test_globs(pattern: str, chosen: list[str]) -> None:
    assert names(select(CATALOGUE, [pattern])) == chosen


def test_skipping() -> None:
    assert names(select(CATALOGUE, ["eager*", "liger"], ["*-packed"])) == ["eager", "liger"]
    assert not [name for name in names(select(CATALOGUE, [], ["fused*"])) if name.startswith("fused")]


@pytest.mark.parametrize(
    ("word", "near"), [("eagr", "eager"), ("Liger", "liger"), ("fused_dw_torch", "fused-dw-torch")]
)
def test_unknown_names_get_near_matches(word: str, near: str) -> None:
    for option, message in [
        ("--impl", complaint(CATALOGUE, [word])),
        ("--skip-impl", complaint(CATALOGUE, [], [word])),
    ]:
        assert message.startswith(f"{option}: no implementation is called '{word}'; did you mean ")
        assert near in message


def test_a_glob_that_matches_nothing_names_what_there_is() -> None:
    assert "known: eager, " in complaint(CATALOGUE, ["zzz*"])


def test_skipping_everything_is_refused() -> None:
    assert "left no implementation to run" in complaint(CATALOGUE, [], ["*"])


def test_two_of_one_name_are_refused() -> None:
    """A package's entry point must not take a built-in's place, nor its samples."""
    assert "Two implementations are called 'eager'" in complaint([*CATALOGUE, dummy("eager")])


# Files


def test_a_user_s_file(user_file: Path) -> None:
    chosen = select(CATALOGUE, ["eager", f"{user_file}:mine"])
    assert names(chosen) == ["eager", "mine"]
    assert chosen[1].scopes == {Scope.GLU}
    assert names(select(CATALOGUE, [f"{user_file}:mine"])) == ["mine"]


def test_a_file_names_an_implementation_or_its_variable(tmp_path: Path) -> None:
    path = tmp_path / "two.py"
    path.write_text(
        "from swiglu_bench.spec.implementation import Step, implementation\n"
        "@implementation('my-kernel', scopes=['mlp'], description='d')\n"
        "def variable(problem):\n    return Step(lambda x: x)\n",
        encoding="utf-8",
    )
    assert from_file(f"{path}:my-kernel") is not None
    assert from_file(f"{path}:variable").name == "my-kernel"


def test_dataclasses_in_a_user_s_file_find_their_module(tmp_path: Path) -> None:
    path = tmp_path / "typed.py"
    path.write_text(
        "from __future__ import annotations\nimport dataclasses\n"
        "from swiglu_bench.spec.implementation import Step, implementation\n"
        "@dataclasses.dataclass\nclass Tile:\n    size: int\n"
        "@implementation('typed', scopes=['glu'], description='d')\n"
        "def typed(problem):\n    return Step(lambda x: x)\n",
        encoding="utf-8",
    )
    assert from_file(f"{path}:typed").name == "typed"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gone", "has no implementation 'gone'; it offers: mine, swapped"),
        ("not_an_implementation", "has no implementation 'not_an_implementation'"),
        ("glu", "has no implementation 'glu'"),
        ("", "has no implementation ''"),
    ],
)
def test_a_name_that_the_file_has_not(user_file: Path, name: str, words: str) -> None:
    assert words in complaint(CATALOGUE, [f"{user_file}:{name}"])


def test_a_file_without_any_implementation_says_how_to_write_one(tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("x = 1\n", encoding="utf-8")
    assert "none (decorate a build function with" in complaint(CATALOGUE, [f"{tmp_path / 'empty.py'}:x"])


def test_a_missing_file(tmp_path: Path) -> None:
    message = complaint(CATALOGUE, [f"{tmp_path / 'gone.py'}:mine"])
    assert "there is no file" in message
    assert "path/to/file.py:name" in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import surely_not_installed\n", "ModuleNotFoundError: No module named 'surely_not_installed'"),
        ("def broken(:\n", "SyntaxError"),
        ("raise ValueError('first line\\nsecond line')\n", "ValueError: first line second line"),
        (
            "from swiglu_bench.spec.implementation import implementation\n"
            "@implementation('x', scopes=['gul'], description='d')\ndef x(problem): ...\n",
            "'gul' is not a valid Scope",
        ),
    ],
)
def test_a_file_that_does_not_import(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "broken.py").write_text(text, encoding="utf-8")
    message = complaint(CATALOGUE, [f"{tmp_path / 'broken.py'}:x"])
    assert "failed to import" in message
    assert words in message


def test_a_file_may_not_take_a_name_that_is_taken(user_file: Path, tmp_path: Path) -> None:
    again = shutil.copy(USER_FILE, tmp_path / "again.py")
    assert "the name 'mine' is taken" in complaint(CATALOGUE, [f"{user_file}:mine", f"{again}:mine"])
    assert "the name 'mine' is taken" in complaint([*CATALOGUE, dummy("mine")], [f"{user_file}:mine"])


# Entry points


class FakeEntryPoint:
    name = "theirs"
    value = "package:theirs"

    def __init__(self, thing: object) -> None:
        self.thing = thing

    def load(self) -> object:
        if isinstance(self.thing, Exception):
            raise self.thing
        return self.thing


def publish(monkeypatch: pytest.MonkeyPatch, *things: object) -> None:
    def entry_points(*, group: str) -> list[FakeEntryPoint]:
        assert group == "swiglu_bench.implementations"
        return [FakeEntryPoint(thing) for thing in things]

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)


def from_entry_points() -> list[Implementation]:
    return [load(address) for address in entry_point_addresses()]


def test_entry_points_of_other_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = dummy("theirs")
    publish(monkeypatch, theirs)
    assert from_entry_points() == [theirs]
    assert names(select([*CATALOGUE, *from_entry_points()], ["th*"])) == ["theirs"]


def test_no_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    publish(monkeypatch)
    assert from_entry_points() == []


def test_an_entry_point_of_another_kind_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    publish(monkeypatch, lambda problem: None)
    with pytest.raises(BadInput, match=r"theirs = package:theirs is a function, not an Implementation"):
        from_entry_points()


def test_an_entry_point_that_does_not_import_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    publish(monkeypatch, ImportError("No module\nnamed x"))
    with pytest.raises(BadInput, match=r"theirs = package:theirs failed to import: ImportError: No module named x; "):
        from_entry_points()


def test_what_is_imported_before_a_first_call() -> None:
    assert dummy("torch").modules == ()
    assert dummy("triton", backend="triton", package="theirs").modules == ("triton", "theirs")
    assert dummy("inner", package="theirs", imports="theirs.inner").modules == ("theirs.inner",)
    for one in CATALOGUE:
        assert one.imports.partition(".")[0] in ("", one.package), one.name


# Availability


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The modules that can be found; a test takes some away."""
    there = {"triton", *(one.package for one in CATALOGUE if one.package)}

    def find_spec(module: str) -> types.SimpleNamespace | None:
        return types.SimpleNamespace() if module in there else None

    monkeypatch.setattr(registry.importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    return there


TORCH, INDUCTOR, TRITON = dummy("torch"), dummy("inductor", backend="inductor"), dummy("triton", backend="triton")
LIGER = dummy("liger", backend="triton", package="liger_kernel", interpretable="It cannot be interpreted.")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("interpreter", [False, True])
def test_torch_runs_everywhere(installed: set[str], device: str, interpreter: bool) -> None:
    installed.clear()
    assert TORCH.unavailable(device, interpreter) is None


def test_everything_runs_on_a_gpu(installed: set[str]) -> None:
    assert all(one.unavailable("cuda") is None for one in CATALOGUE)


def test_triton_on_a_cpu_needs_the_interpreter(installed: set[str]) -> None:
    assert "Triton kernels need a GPU; `swiglu-bench verify`" in (TRITON.unavailable("cpu") or "")
    assert TRITON.unavailable("cpu", interpreter=True) is None
    assert LIGER.unavailable("cpu", interpreter=True) == "It cannot be interpreted."


@pytest.mark.parametrize(
    ("triton", "numpy", "works"), [("3.6.0", "2.3.5", True), ("3.6.0", "2.4.0", False), ("3.7.1", "2.5.0", True)]
)
def test_the_interpreter_has_its_needs(
    installed: set[str], monkeypatch: pytest.MonkeyPatch, triton: str, numpy: str, works: bool
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", {"triton": triton, "numpy": numpy}.__getitem__)
    assert TRITON.unavailable("cuda") is None
    reason = TRITON.unavailable("cpu", interpreter=True)
    assert reason is None if works else "needs a NumPy older than 2.4, and 2.4.0 is installed" in str(reason)


def test_without_triton(installed: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    installed.remove("triton")
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    for device in ("cpu", "cuda"):
        assert TRITON.unavailable(device, interpreter=True) == "Triton is not installed (it has no package for Darwin)."
    assert INDUCTOR.unavailable("cuda") == "torch.compile on a GPU needs Triton, which is not installed."
    assert INDUCTOR.unavailable("cpu") is None


def test_without_its_package(installed: set[str]) -> None:
    installed.remove("liger_kernel")
    assert LIGER.unavailable("cuda") == "The package liger_kernel is not installed."


def test_a_package_inside_one_that_is_missing() -> None:
    """Python raises instead of answering when the parent of a dotted name is missing."""
    nested = dummy("nested", package="surely_not_installed.part")
    assert nested.unavailable("cpu") == "The package surely_not_installed.part is not installed."


def test_compiling_on_a_cpu_needs_a_compiler(installed: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "needs a C++ compiler" in (INDUCTOR.unavailable("cpu") or "")
    assert INDUCTOR.unavailable("cuda") is None
    monkeypatch.setenv("CXX", "my-c++")
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/my-c++" if name == "my-c++" else None)
    assert INDUCTOR.unavailable("cpu") is None


@pytest.mark.parametrize("one", CATALOGUE, ids=lambda one: one.name)
def test_reasons_are_sentences(one: Implementation, installed: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    installed.clear()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    for device in ("cpu", "cuda"):
        reason = one.unavailable(device)
        if reason is not None:
            assert reason[0].isupper() or reason.startswith("torch.compile")
            assert reason.endswith(".")


def test_the_decorator_keeps_what_it_is_given() -> None:
    declare = implementation(
        "packed-one", scopes=["mlp", Scope.GLU], description="d", weight_layout="packed", trains="inputs"
    )

    def build(problem: object) -> Step:
        return Step(lambda x: x)

    one = declare(build)
    assert dataclasses.asdict(one) | {"build": None} == {
        "name": "packed-one", "description": "d", "scopes": frozenset({Scope.GLU, Scope.MLP}), "build": None,
        "weight_layout": "packed", "backend": "torch", "package": "", "imports": "", "trains": "inputs",
        "interpretable": "yes", "gpus": (), "dtypes": frozenset(Dtype), "multiple": 1, "on_request": False,
        "offers": frozenset(), "overwrites": frozenset(),
        "footprints": {}, "usage": "", "source": __name__, "file": __file__, "address": "",
    }  # fmt: skip
    assert one.build is build
