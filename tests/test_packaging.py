"""The wheel works by itself: built by way of the sdist, installed in an empty venv, run outside the checkout."""

import csv
import importlib.metadata
import os
import subprocess
import sys
import tomllib
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from places import ROOT

import swiglu_bench

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
VERSION = PYPROJECT["project"]["version"]


def run(*command: str | Path, cwd: Path) -> str:
    """Standard output of a command that must succeed, in an environment that says nothing of the checkout."""
    unwanted = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "TRITON_INTERPRET"}
    env = {name: value for name, value in os.environ.items() if name not in unwanted}
    env |= {"PYTHONNOUSERSITE": "1", "PYTHONUTF8": "1", "NO_COLOR": "1", "COLUMNS": "120"}
    completed = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert completed.returncode == 0, f"{command} exited {completed.returncode}:\n{completed.stdout}{completed.stderr}"
    return completed.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built as a release is: sdist first, the wheel from that."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def wheel_files(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


@dataclass(frozen=True)
class Installed:
    """An empty venv with the wheel in it, and a folder outside the checkout to run it from."""

    programs: Path
    elsewhere: Path

    def python(self, code: str) -> str:
        return run(self.programs / "python", "-c", code, cwd=self.elsewhere).strip()

    def swiglu_bench(self, *arguments: str | Path) -> str:
        return run(self.programs / "swiglu-bench", *arguments, cwd=self.elsewhere)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel's own files, over the dependencies of the environment that runs the tests.

    The venv gets those from a .pth file that names this environment's site-packages. Python does not read the .pth
    files in a folder that came in that way, so the checkout, which an editable install adds by one, is out of sight.
    """
    home = tmp_path_factory.mktemp("empty") / "venv"
    venv.create(home, with_pip=True)
    programs = home / ("Scripts" if os.name == "nt" else "bin")
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    run(programs / "python", "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", wheel, cwd=elsewhere)
    site = Path(
        run(programs / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=home).strip()
    )
    dependencies = [path for path in sys.path if Path(path).name in {"site-packages", "dist-packages"}]
    (site / "dependencies_of_the_tests.pth").write_text("\n".join(dependencies), encoding="utf-8")
    return Installed(programs, elsewhere)


def test_versions_agree(installed: Installed) -> None:
    assert swiglu_bench.__version__ == VERSION
    assert importlib.metadata.version("swiglu-bench") == VERSION
    assert installed.python("import importlib.metadata as m; print(m.version('swiglu-bench'))") == VERSION
    assert installed.swiglu_bench("--version").strip() == f"swiglu-bench {VERSION}"


def test_the_wheel_holds_two_packages_and_nothing_else(wheel_files: list[str]) -> None:
    tops = {name.split("/")[0] for name in wheel_files}
    assert tops == {"swiglu_bench", "swiglu_kernels", f"swiglu_bench-{VERSION}.dist-info"}


def test_the_wheel_holds_every_source_file_and_config(wheel_files: list[str]) -> None:
    homes = {ROOT / "swiglu_bench": "swiglu_bench", ROOT / "kernels/swiglu_kernels": "swiglu_kernels"}
    wanted = {
        f"{package}/{path.relative_to(folder).as_posix()}"
        for folder, package in homes.items()
        for path in folder.rglob("*.py")
    }
    wanted |= {f"swiglu_bench/report/page.{kind}" for kind in ("css", "html", "js")}
    wanted |= {f"swiglu_bench/configs/{path.name}" for path in (ROOT / "configs").glob("*.yaml")}
    wanted |= {"swiglu_bench/py.typed", "swiglu_kernels/py.typed", f"swiglu_bench-{VERSION}.dist-info/licenses/LICENSE"}
    assert wanted <= set(wheel_files)


def test_the_checkout_is_out_of_sight(installed: Installed) -> None:
    """Without this the tests below could pass on the checkout's files."""
    code = "import swiglu_bench, swiglu_kernels; print(swiglu_bench.__file__, swiglu_kernels.__file__, sep='\\n')"
    home = installed.programs.parent.resolve()
    assert all(Path(line).resolve().is_relative_to(home) for line in installed.python(code).splitlines())
    assert str(ROOT) not in installed.python("import sys; print(*sys.path, sep='\\n')").splitlines()


def test_the_installed_wheel_finds_its_shapes(installed: Installed) -> None:
    names = installed.python("from swiglu_bench.spec.shapes import config_names; print(*config_names())").split()
    assert names == sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))


def test_the_kernels_import_without_the_suite(installed: Installed) -> None:
    assert installed.python("import sys, swiglu_kernels; print('swiglu_bench' in sys.modules)") == "False"


def test_help_works_from_the_wheel(installed: Installed) -> None:
    assert "forward" in installed.swiglu_bench("--help")


def test_a_benchmark_runs_from_the_wheel(installed: Installed) -> None:
    out = installed.elsewhere / "run"
    run_it = ["forward", "--shapes", "smoke", "--tokens", "16", "--impl", "eager", "--device", "cpu", "--budget", "1"]
    assert "eager" in installed.swiglu_bench(*run_it, "--out", out)
    with (out / "records.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["implementation"], row["tokens"], row["status"]) for row in rows] == [("eager", "16", "ok")]


@pytest.fixture(scope="module")
def somebody_elses_kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site-packages folder with a package that imports as `kernels`, as one on PyPI does."""
    site = tmp_path_factory.mktemp("site-packages")
    (site / "kernels").mkdir()
    (site / "kernels" / "__init__.py").write_text("OWNER = 'somebody else'\n", encoding="utf-8")
    return site


def owner_of_kernels(site: Path) -> str:
    """Code that puts a site-packages folder last in the search order and says whose `kernels` that finds."""
    return f"import sys; sys.path.append({str(site)!r}); import kernels; print(kernels.OWNER)"


def test_an_installed_kernels_stays_importable_beside_the_wheel(
    installed: Installed, somebody_elses_kernels: Path
) -> None:
    assert installed.python(owner_of_kernels(somebody_elses_kernels)) == "somebody else"


def test_an_installed_kernels_stays_importable_beside_an_editable_install(somebody_elses_kernels: Path) -> None:
    """The checkout's folders come first here, and the working directory is the checkout: the worst case."""
    folders = [str(ROOT / folder) for folder in PYPROJECT["tool"]["hatch"]["build"]["dev-mode-dirs"]]
    code = f"import sys; sys.path[:0] = {folders!r}; {owner_of_kernels(somebody_elses_kernels)}"
    assert run(sys.executable, "-c", code, cwd=ROOT).strip() == "somebody else"


def test_nothing_makes_a_regular_package_of_the_kernels_folder() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()
