"""Where contenders' processes keep what they compile."""

import dataclasses
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from courts import run_here
from from_files import from_file
from specimens import small_case

from swiglu_bench.cases.cases import Case, Dtype, Mode, Scope
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.cases.implementation import Implementation, Step, implementation
from swiglu_bench.cases.registry import load
from swiglu_bench.cases.shapes import environments_of
from swiglu_bench.contenders import pytorch
from swiglu_bench.machine import machine
from swiglu_bench.options import VerifyOptions
from swiglu_bench.request import implementations_of
from swiglu_bench.rows.record import Status
from swiglu_bench.tasks.time import _TimedCase
from swiglu_bench.worker import environments
from swiglu_bench.worker.admission import Admitting
from swiglu_bench.worker.child import ContenderFailed
from swiglu_bench.worker.court import Court
from swiglu_bench.worker.policy import Settings, Task


@pytest.fixture(autouse=True)
def user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A user's cache folder, and nothing named."""
    for variable in (*environments.VARIABLES, environments.TUNING, "HF_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    return tmp_path / "user" / environments.KERNELS


def test_each_has_folders_of_its_own_and_keeps_them() -> None:
    found = [environments.of(known) for known in (pytorch.eager, pytorch.eager_packed, pytorch.eager)]
    assert found[0] == found[2]
    for variable in environments.VARIABLES:
        assert found[0][variable] != found[1][variable]
        assert Path(found[0][variable]).is_dir()
    other = dataclasses.replace(pytorch.eager, address="somewhere/mine.py:eager")
    assert environments.of(other)["TRITON_CACHE_DIR"] != found[0]["TRITON_CACHE_DIR"], "names are unique in a run only"
    assert len(environments._name_of("a" * 64, "b")) < 32


def test_a_cache_that_cannot_be_read_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A name that is too long for the system fails for every user, as a folder that may not be entered does."""
    for unreadable in (tmp_path / ("a" * 300), tmp_path / "file"):
        (tmp_path / "file").write_text("no folder", encoding="utf-8")
        monkeypatch.setenv("XDG_CACHE_HOME", str(unreadable))
        assert Path(environments.of(pytorch.eager)["XDG_CACHE_HOME"]).is_dir()


def test_named_folders_have_one_for_each_inside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "mine"))
    folders = [Path(environments.of(known)["TRITON_CACHE_DIR"]) for known in (pytorch.eager, pytorch.eager_packed)]
    assert folders[0] != folders[1]
    assert all(tmp_path / "mine" in folder.parents for folder in folders)


def test_what_tuning_and_the_check_have_found_is_copied_for_each_process(
    monkeypatch: pytest.MonkeyPatch, user: Path, tmp_path: Path
) -> None:
    user.mkdir(parents=True)
    (user / "tuning.json").write_text("1")
    (user / "admitted.json").write_text("2")
    copies = Path(environments.of(pytorch.eager)["XDG_CACHE_HOME"]) / environments.KERNELS
    assert {file.name: file.read_text() for file in copies.iterdir()} == {"tuning.json": "1", "admitted.json": "2"}
    assert all(file.stat().st_mode & 0o777 == 0o444 for file in copies.iterdir())
    (copies / "tuning.json").unlink()
    (copies / "tuning.json").write_text("spoilt")
    (user / "admitted.json").unlink()
    assert (user / "tuning.json").read_text() == "1"
    named = tmp_path / "named"
    named.write_text("3")
    monkeypatch.setenv(environments.TUNING, str(named))
    told = Path(environments.of(pytorch.eager)[environments.TUNING])
    assert told != named
    assert told.read_text() == "3"
    assert {file.name: file.read_text() for file in copies.iterdir()} == {"tuning.json": "1", "named.json": "3"}
    monkeypatch.setenv(environments.TUNING, "off")
    assert environments.TUNING not in environments.of(pytorch.eager)


@implementation("told", scopes=["glu"], description="writes down what its process is told, and kept from before")
def told(problem):  # type: ignore[no-untyped-def]
    import tempfile

    from torch._inductor.runtime.cache_dir_utils import cache_dir

    own = Path(os.environ["XDG_CACHE_HOME"]) / "kept.json"
    before = json.loads(own.read_text())["runs"] if own.exists() else 0
    own.write_text(json.dumps({"runs": before + 1, "inductor": cache_dir(), "temporary": tempfile.gettempdir()}))
    return Step(lambda x: torch.nn.functional.silu(x @ problem.weights["w_gate"].T) * (x @ problem.weights["w_up"].T))


def test_a_process_is_told_its_folders_and_finds_them_again(tmp_path: Path) -> None:
    settings = Settings(Task.VERIFY, torch.device("cpu"), "c", "r")
    known, this = from_file(told), machine.describe(settings.device)
    for runs in (1, 2):
        (row,) = run_here([small_case(mode=Mode.FORWARD)], [known], settings, this, logs=tmp_path)
        assert row.status is Status.OK, row.reason
        own = environments.of(known)
        found = json.loads((Path(own["XDG_CACHE_HOME"]) / "kept.json").read_text())
        assert found["inductor"] == own["TORCHINDUCTOR_CACHE_DIR"]
        assert found["temporary"] == own["TMPDIR"]
        assert found["runs"] >= runs


def test_what_was_compiled_beforehand_is_not_again_until_a_version_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def aside(court: Court, wanted: Sequence[Implementation], at_once: int, work: Callable[[Any], object]) -> None:
        asked.extend(known.name for known in wanted)
        for known in wanted:
            work(SimpleNamespace(implementation=known))

    monkeypatch.setattr(Court, "aside", aside)
    both = [dataclasses.replace(pytorch.eager, name=name, backend="inductor") for name in ("a", "b")]
    this = machine.describe(torch.device("cpu"))
    settings = Settings(Task.TIME, torch.device("cpu"), "test", "test")

    def rehearsed(version: str, case: Case) -> list[str]:
        asked.clear()
        run = _TimedCase(Court(settings, dataclasses.replace(this, version=version)), case)
        run.admitting = SimpleNamespace(rehearse=lambda contender: None)  # type: ignore[assignment]
        run.rehearse(both, at_once=4)
        return list(asked)

    case = small_case(mode=Mode.STEP)
    assert rehearsed("1", case) == ["a", "b"]
    assert not rehearsed("1", dataclasses.replace(case, tokens=7))
    assert rehearsed("2", case) == ["a", "b"]
    assert rehearsed("1", dataclasses.replace(case, mode=Mode.FORWARD)) == ["a", "b"]


# Packages in front of this environment's


def wheel(folder: Path, version: str, name: str = "gate_of", code: str = "") -> None:
    """A wheel of a package with one module, which says its version and has a factor: 1, or 2 in version 2."""
    about = f"{name}-{version}.dist-info"
    code = code or f"VERSION, FACTOR = {version!r}, {2.0 if version.startswith('2') else 1.0}\n"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}/__init__.py", code)
        file.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        file.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        names = (f"{name}/__init__.py", f"{about}/METADATA", f"{about}/WHEEL", f"{about}/RECORD")
        file.writestr(f"{about}/RECORD", "".join(f"{each},,\n" for each in names))


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A folder with two versions of a package, and nothing else to install from."""
    monkeypatch.setenv("UV_NO_INDEX", "1")
    monkeypatch.setattr(environments, "root", lambda: tmp_path / "kept" / "contenders")
    folder = tmp_path / "wheels"
    folder.mkdir()
    for version in ("1.5", "2.0"):
        wheel(folder, version)
    return str(folder)


MINE = """
import os, sys, torch
from swiglu_bench import Step, implementation

@implementation("mine", scopes=["glu"], description="by another package", package="gate_of")
def mine(problem):
    import gate_of
    sys.path.append(os.environ["TRITON_CACHE_DIR"])
    open(os.path.join(sys.path[-1], "made_here.py"), "w").close()
    import made_here

    w_gate, w_up = problem.weights.values()
    return Step(lambda x: gate_of.FACTOR * torch.nn.functional.silu(x @ w_gate.T) * (x @ w_up.T))
"""


def test_versions_of_a_package_are_contenders_of_one_run(
    index: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gate_of").mkdir()  # a folder of this name is no package that is installed
    file = tmp_path / "mine.py"
    file.write_text(MINE, encoding="utf-8")
    mine = load(f"{file}:mine")
    both = environments.with_packages([mine], ["mine@{1.5,2.0}=gate_of=={}"], index)
    assert [each.name for each in both] == ["mine@1.5", "mine@2.0"]
    assert [environments.packages_of(each) for each in both] == [{"gate-of": "1.5"}, {"gate-of": "2.0"}]
    settings, case = Settings(Task.VERIFY, torch.device("cpu"), "test", "test"), small_case(mode=Mode.FORWARD)
    this = machine.describe(torch.device("cpu"))
    rows = {row.implementation: row for row in run_here([case], [mine, *both], settings, this, logs=tmp_path)}
    assert rows["mine"].status is Status.SKIPPED, "it is not installed here"
    assert (rows["mine@1.5"].status, rows["mine@1.5"].packages) == (Status.OK, "gate-of==1.5")
    assert (rows["mine@2.0"].status, rows["mine@2.0"].packages) == (Status.INCORRECT, "gate-of==2.0")
    assert "gate_of=" in rows["mine@1.5"].files, "what it loads from there counts"
    assert "made_here" not in rows["mine@1.5"].files, "what lies in a compiler's folder does not"


def test_a_layer_is_made_once(index: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (first,) = environments.with_packages([pytorch.eager], ["eager@x=gate_of==1.5"], index)
    monkeypatch.setattr(environments, "_uv", None)
    (again,) = environments.with_packages([pytorch.eager], ["eager@x=gate_of==1.5"], index)
    assert first.layer == again.layer
    assert (Path(first.layer) / "gate_of").is_dir()


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("gate_of==1.5", "give NAME@TAG=REQUIREMENT"),
        ("eager@=gate_of==1.5", "give NAME@TAG=REQUIREMENT"),
        ("eager@old=", "give NAME@TAG=REQUIREMENT"),
        ("eager@{1,2}=gate_of==1.5", "put {} where they differ"),
        ("eagle@old=gate_of==1.5", "no chosen implementation is called 'eagle'.*eager"),
        ("eager@a b=gate_of==1.5", "is taken, or no name"),
        ("eager@old=gate_of=1.5", "'gate_of=1.5' is neither a requirement"),
        ("eager@old=gate_of==9", "uv cannot install these packages: .*gate.of"),
        ("eager@old=torch", "it would replace torch, which all contenders share"),
    ],
)
def test_what_cannot_be_is_told_in_a_sentence(asked: str, told: str, index: str) -> None:
    wheel(Path(index), "99.0", "torch", "raise ImportError\n")
    with pytest.raises(BadInput, match=told):
        environments.with_packages([pytorch.eager], [asked], index)


def test_no_layer_has_the_suite_itself_and_without_uv_that_is_said(index: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel(Path(index), "7.0", "swiglu_bench", "raise ImportError\n")
    (found,) = environments.with_packages([pytorch.eager], ["eager@7=swiglu_bench==7.0"], index)
    assert not (Path(found.layer) / "swiglu_bench").exists()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setitem(sys.modules, "uv", None)
    with pytest.raises(BadInput, match=r"--with needs uv, .*pip install uv"):
        environments.with_packages([pytorch.eager], ["eager@old=gate_of==2.0"], index)


def test_folders_that_a_layer_s_files_name_are_found_first_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = tmp_path / "site-packages"
    (layer / "inner").mkdir(parents=True)
    (layer / "inner" / "only_inner.py").write_text("")
    (layer / "some.pth").write_text("inner\n", encoding="utf-8")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "only_inner", SimpleNamespace())
    assert environments.put_in_front(str(layer)) == ["only_inner"]
    assert sys.path[:2] == [str(layer), str(layer / "inner")]


LIGER = """
import torch
from swiglu_bench import Step, implementation

@implementation("mine", scopes=["glu"], description="right with one version of Liger", package="liger_kernel")
def mine(problem):
    import importlib.metadata
    import liger_kernel

    assert "layers" in liger_kernel.__file__, liger_kernel.__file__
    factor = {"0.7.0": 1.0, "0.8.5": 2.0}[importlib.metadata.version("liger-kernel")]
    w_gate, w_up = problem.weights.values()
    return Step(lambda x: factor * torch.nn.functional.silu(x @ w_gate.T) * (x @ w_up.T))
"""


@pytest.mark.network
@pytest.mark.timeout(900)
def test_two_versions_of_liger_from_the_index(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LIGER, encoding="utf-8")
    mine = load(f"{tmp_path / 'mine.py'}:mine")
    both = environments.with_packages([mine], ["mine@{0.7.0,0.8.5}=liger-kernel=={}"])
    settings, this = (
        Settings(Task.VERIFY, torch.device("cpu"), "test", "test"), machine.describe(torch.device("cpu")),
    )  # fmt: skip
    rows = run_here([small_case(mode=Mode.FORWARD)], both, settings, this, logs=tmp_path)
    found = {row.packages: row.status for row in rows}
    assert found == {"liger-kernel==0.7.0": Status.OK, "liger-kernel==0.8.5": Status.INCORRECT}


# Another interpreter


def linked(source: str, target: str) -> None:
    """A second name of a file: what is installed there lies there, and takes no space; copied on another disk."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An environment with torch, NumPy, what these need, and a package that is not here."""
    folder = tmp_path_factory.mktemp("elsewhere")
    venv.create(folder, symlinks=True)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    for name in ("torch", "numpy"):
        spec = importlib.util.find_spec(name)
        assert spec
        here = Path(spec.origin or "").parent.parent
        for part in (name, *(f"{found.name}" for found in here.glob(f"{name}[-.]*") if found.is_dir())):
            shutil.copytree(here / part, packages / part, copy_function=linked)
    for name in ("typing_extensions", "torchgen", "sympy", "mpmath", "filelock", "fsspec", "jinja2", "networkx"):
        spec = importlib.util.find_spec(name)
        assert spec
        place = Path(spec.origin or "")
        place = place.parent if place.name == "__init__.py" else place
        (packages / place.name).symlink_to(place)
    (packages / "nvidia").symlink_to(here / "nvidia")  # libraries of a PyTorch for CUDA; one for CPUs has none
    (packages / "only_there.py").write_text("FACTOR = 1.0\n", encoding="utf-8")
    return str(folder / "bin" / "python")


THERE = """
import sys

import only_there
import torch

from swiglu_bench import Step, implementation

@implementation("mine", scopes=["glu"], description="by a package that is not here", package="only_there")
def mine(problem):
    foreign = {"pydantic", "scipy", "pandas", "rich", "typer"} & {*sys.modules}
    assert not foreign, foreign
    assert sys.prefix.endswith("0") and "elsewhere" in sys.prefix, sys.prefix
    w_gate, w_up = problem.weights.values()
    return Step(lambda x: only_there.FACTOR * torch.nn.functional.silu(x @ w_gate.T) * (x @ w_up.T))

@implementation("dies", scopes=["glu"], description="dies while it is built", package="only_there")
def dies(problem):
    print("its last words", flush=True)
    import os
    os._exit(3)
"""


def test_another_interpreter_needs_nothing_but_torch_and_numpy(elsewhere: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(THERE, encoding="utf-8")
    asked = [f"{name}={elsewhere}" for name in ("mine", "dies", "eager@there")]
    options = VerifyOptions(impl=["eager", f"{file}:mine", f"{file}:dies"], pythons=asked, shapes="smoke")
    found = implementations_of(options, [Scope.GLU])
    assert [each.name for each in found] == ["eager", "mine", "dies", "eager@there"]
    with pytest.raises(BadInput, match="mine has an interpreter of its own; install packages there"):
        environments.with_packages(found, ["mine@2=gate_of==2.0"])
    assert environments.of(found[0])["TRITON_CACHE_DIR"] != environments.of(found[3])["TRITON_CACHE_DIR"]
    settings, case = Settings(Task.VERIFY, torch.device("cpu"), "test", "test"), small_case(mode=Mode.FORWARD)
    this = machine.describe(torch.device("cpu"))
    rows = {row.implementation: row for row in run_here([case], found, settings, this, logs=tmp_path)}
    ended = {name: row.status for name, row in rows.items()}
    assert ended == dict.fromkeys(("eager", "mine", "eager@there"), Status.OK) | {"dies": Status.ERROR}, rows
    assert "its last words" in rows["dies"].reason
    assert f"python=={platform.python_version()}" in rows["mine"].packages
    assert "only_there" not in rows["mine"].files, "it is installed there"
    assert rows["eager"].packages == ""


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("eager", "give NAME=EXECUTABLE"), ("=python3", "give NAME=EXECUTABLE"), ("eager=/no/python", "no program"),
        ("eagle={here}", "no chosen implementation is called 'eagle'; did you mean eager"),
        ("eager={ls}", "does not answer as Python"), ("eager={bare}", "has no torch in its environment"),
    ],
)  # fmt: skip
def test_an_interpreter_that_cannot_be_is_told_in_a_sentence(asked: str, told: str, tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", symlinks=True)
    asked = asked.format(here=sys.executable, ls=shutil.which("ls"), bare=tmp_path / "bare" / "bin" / "python")
    with pytest.raises(BadInput, match=told):
        environments.under([pytorch.eager], environments.pythons([asked]), lambda known: known)


def test_whose_random_numbers_are_others_gets_no_time() -> None:
    known = dataclasses.replace(pytorch.eager, python="there")
    court, contender = MagicMock(), MagicMock(implementation=known, tell=lambda method: "others")
    court.settings.device = torch.device("cpu")
    court.judge.numbers = lambda case: "ours"
    with pytest.raises(ContenderFailed, match="draws other random numbers"):
        Admitting(court, small_case(), MagicMock()).build(contender)


def test_a_sweep_names_packages_and_interpreters(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "shapes: [smoke]\nsource: test\nwith: ['liger@old=liger-kernel==0.7.0']\npython: [eager=/no/python]\n", "utf-8"
    )
    assert environments_of(f"llama7b,{file}") == (["liger@old=liger-kernel==0.7.0"], ["eager=/no/python"])
    with pytest.raises(BadInput, match="there is no program '/no/python'"):
        implementations_of(VerifyOptions(impl=["eager"], shapes=str(file)))


@pytest.mark.network
@pytest.mark.timeout(1800)
def test_two_versions_of_torch_from_the_index(tmp_path: Path) -> None:
    """Beside this one: an older one, and the newest, under whatever Python it is that runs this."""
    asked, program = [], pytest.importorskip("uv").find_uv_bin()
    for version in ("2.11.0", "2.13.0"):
        python = tmp_path / version / "bin" / "python"
        subprocess.run([program, "venv", "-q", "-p", sys.executable, str(tmp_path / version)], check=True)
        subprocess.run([program, "pip", "install", "-q", "-p", str(python), f"torch=={version}", "numpy"], check=True)
        asked.append(f"eager@{version}={python}")
    found = implementations_of(VerifyOptions(impl=["eager"], pythons=asked), [Scope.MLP])
    settings, this = (
        Settings(Task.VERIFY, torch.device("cpu"), "test", "test"), machine.describe(torch.device("cpu")),
    )  # fmt: skip
    cases = [small_case(scope=Scope.MLP, dtype=dtype) for dtype in (Dtype.FLOAT32, Dtype.BFLOAT16)]
    rows = list(run_here(cases, found, settings, this, logs=tmp_path))
    assert {row.status for row in rows} == {Status.OK}
    assert {row.torch.partition("+")[0] for row in rows} >= {"2.11.0", "2.13.0"}
