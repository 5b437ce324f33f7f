"""The wheel works by itself: built by way of the sdist, installed in an empty venv, run outside the checkout."""

import csv
import importlib.metadata
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import yaml
from places import ROOT

import swiglu_bench
from swiglu_bench.cli.finished import NEEDS

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
VERSION = swiglu_bench.__version__

FACTS = """
import importlib.metadata, json, sys
import swiglu_kernels
alone = "swiglu_bench" not in sys.modules
import kernels  # somebody else's, which is last in the search order
import swiglu_bench
from swiglu_bench.cases.shapes import config_names
print(json.dumps({
    "version": importlib.metadata.version("swiglu-bench"), "files": [swiglu_bench.__file__, swiglu_kernels.__file__],
    "path": sys.path, "configs": config_names(), "alone": alone, "owner": kernels.OWNER,
}))
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Standard output of a command that must succeed, in an environment that says nothing of the checkout."""
    unwanted = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "TRITON_INTERPRET"}
    env = {name: value for name, value in os.environ.items() if name not in unwanted}
    env |= {"PYTHONNOUSERSITE": "1", "PYTHONUTF8": "1", "NO_COLOR": "1", "COLUMNS": "120", "OMP_NUM_THREADS": "1"}
    completed = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert completed.returncode == 0, f"{command} exited {completed.returncode}:\n{completed.stdout}{completed.stderr}"
    return completed.stdout


@pytest.fixture
def foreign_kernels(tmp_path: Path) -> Path:
    """A site-packages folder with a package that imports as `kernels`, as one on PyPI does."""
    site = tmp_path / "site-packages"
    (site / "kernels").mkdir(parents=True)
    (site / "kernels" / "__init__.py").write_text("OWNER = 'somebody else'\n", encoding="utf-8")
    return site


def install(wheel: Path, home: Path, *more: Path) -> Path:
    """The programs of a venv that has the wheel's own files, over the dependencies of these tests, and `more`.

    It gets the latter from a .pth file that names their site-packages. Python does not read the .pth files in a folder
    that came in that way, so the checkout, which an editable install adds by one, is out of sight.
    """
    venv.create(home)
    programs = home / ("Scripts" if os.name == "nt" else "bin")
    pip = (sys.executable, "-m", "pip", "--python", programs / "python", "install", "--quiet", "--no-index")
    run(*pip, "--no-deps", "--no-compile", wheel, cwd=home)
    (site,) = home.rglob("site-packages")
    dependencies = [path for path in sys.path if Path(path).name in {"site-packages", "dist-packages"}]
    (site / "dependencies_of_the_tests.pth").write_text("\n".join([*dependencies, *map(str, more)]), encoding="utf-8")
    return programs


def test_the_wheel(tmp_path: Path, foreign_kernels: Path) -> None:
    """One test, because the wheel is built and installed once for all of it."""
    dist = ROOT / os.environ.get("SWIGLU_BENCH_DIST", "")  # made before by `make release`
    if dist == ROOT:
        dist = tmp_path / "dist"
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, ROOT, cwd=tmp_path)
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")  # one built from the other, as a release is
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "constraints.txt", "CHANGELOG.md", "kernels/hub.py", "tests/test_packaging.py"} <= names
    with zipfile.ZipFile(wheel) as archive:
        found = set(archive.namelist())
    about = f"swiglu_bench-{VERSION}.dist-info"
    assert {name.split("/")[0] for name in found} == {"swiglu_bench", "swiglu_kernels", about}
    homes = {ROOT / "swiglu_bench": "swiglu_bench", ROOT / "kernels/swiglu_kernels": "swiglu_kernels"}
    wanted = {
        f"{package}/{path.relative_to(folder).as_posix()}"
        for folder, package in homes.items()
        for path in folder.rglob("*.py")
    }
    wanted.add("swiglu_bench/show/page.html")
    wanted |= {f"swiglu_bench/configs/{path.name}" for path in (ROOT / "configs").glob("*.yaml")}
    wanted |= {"swiglu_bench/py.typed", "swiglu_kernels/py.typed", f"{about}/licenses/LICENSE"}
    assert wanted <= found

    home = tmp_path / "venv"
    programs, elsewhere = install(wheel, home, foreign_kernels), tmp_path / "elsewhere"
    elsewhere.mkdir()
    facts = json.loads(run(programs / "python", "-c", FACTS, cwd=elsewhere))
    assert str(ROOT) not in facts["path"], "the checkout has to be out of sight"
    assert all(Path(file).resolve().is_relative_to(home.resolve()) for file in facts["files"])
    assert facts["version"] == VERSION == importlib.metadata.version("swiglu-bench")
    assert facts["configs"] == sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
    assert facts["alone"], "the kernels import without the suite"
    assert facts["owner"] == "somebody else"

    few = ("--shapes", "smoke", "--tokens", "16", "--impl", "eager", "--device", "cpu")
    printed = run(programs / "swiglu-bench", "memory", *few, "--out", elsewhere / "run", cwd=elsewhere)
    assert "eager" in printed
    with (elsewhere / "run" / "records.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["implementation"], row["tokens"], row["status"]) for row in rows] == [("eager", "16", "ok")]


def test_an_installed_kernels_stays_importable_beside_an_editable_install(foreign_kernels: Path) -> None:
    """The checkout's folders come first here, and the working directory is the checkout: the worst case."""
    folders = [str(ROOT / folder) for folder in PYPROJECT["tool"]["hatch"]["build"]["dev-mode-dirs"]]
    code = f"import sys; sys.path[:0] = {folders!r}; sys.path.append({str(foreign_kernels)!r}); import kernels; "
    assert run(sys.executable, "-c", code + "print(kernels.OWNER)", cwd=ROOT).strip() == "somebody else"
    assert not (ROOT / "kernels" / "__init__.py").exists()


def installation_lines() -> dict[str, str]:
    """What follows `pip install` in documents, errors and comments, and where it stands."""
    places = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "constraints.txt", *ROOT.glob("tests/worker/*.py")]
    places += [*ROOT.glob("swiglu_bench/**/*.py"), *ROOT.glob("kernels/**/*.py"), *ROOT.glob("kernels/**/*.md")]
    found = {}
    for place in places:
        text = place.read_text(encoding="utf-8")
        if place.suffix == ".md":
            prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
            lines = [span for span in re.findall(r"`([^`]+)`", prose) if "pip install" in span]
            lines += re.findall(r"^[^`\n]*\bpip install .*", text, flags=re.MULTILINE)
        else:
            lines = re.findall(r"\bpip install [^`\"\n{}]+", text)
        found |= {line.split("pip install ")[-1].split(" # ")[0].replace("\n", " "): place.name for line in lines}
    return found


def test_every_installation_line_works_today() -> None:
    """Each names this checkout, a wheel or packages of others, and extras that there are; pip itself reads the extras.

    Nothing is fetched: that a package of others is on PyPI is taken from pyproject.toml and constraints.txt.
    """
    about, extras = PYPROJECT["project"], set[str]()
    listed = [*about["dependencies"], *(name for listed in about["optional-dependencies"].values() for name in listed)]
    others = {"twine"} | {re.split(r"[\[<>=; ]", name)[0] for name in listed}
    lines = installation_lines()
    assert len(lines) > 8
    assert {*NEEDS.values()} <= others, "what the error of `report` names"
    for line, place in lines.items():
        for word in shlex.split(line if line.endswith(" .") else line.strip().removesuffix(".")):
            own = re.fullmatch(r"\.(?:\[([a-z,]+)\])?", word)
            if own and own[1]:
                extras |= {*own[1].split(",")}
            known = own or word in {"-c", "-e", "constraints.txt"}
            assert known or word in others or re.fullmatch(r"\S*swiglu_bench-\*\.whl", word), (place, line, word)
    assert extras >= {"report", "peers", "train", "cluster"}
    assert extras <= {*about["optional-dependencies"]}
    told = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--no-index", "--no-build-isolation",
         "-c", "constraints.txt", f".[{','.join(sorted(extras))}]"], cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    assert "Would install swiglu-bench" in told.stdout
    assert "does not provide the extra" not in told.stderr


def test_a_release_takes_its_version_from_the_tag(tmp_path: Path) -> None:
    """The workflow's own step, run on a copy of the file that has the version."""
    workflow = ROOT / ".github" / "workflows" / "release.yml"
    if not workflow.exists():
        pytest.skip("an sdist has no workflows")
    steps = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"]["build"]["steps"]
    (step,) = (one["run"] for one in steps if one.get("name") == "Version from the tag")
    file = tmp_path / "swiglu_bench" / "version.py"
    file.parent.mkdir()
    file.write_text((ROOT / "swiglu_bench" / "version.py").read_text(encoding="utf-8"), encoding="utf-8")
    subprocess.run(["bash", "-ec", step], cwd=tmp_path, env=os.environ | {"GITHUB_REF_NAME": "v0.9.1"}, check=True)
    assert runpy.run_path(str(file))["__version__"] == "0.9.1"
