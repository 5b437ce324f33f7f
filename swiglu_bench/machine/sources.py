"""The code and the kind of machine behind a row; rows of one run must agree in both."""

import contextlib
import functools
import hashlib
import importlib.util
import os
import site
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote, unquote

MACHINE = ("device", "driver", "cuda", "torch", "triton", "python", "cpu", "cpu_threads")
PACKAGES = ("swiglu_bench", "swiglu_kernels")


def code() -> dict[str, str]:
    """A digest of the sources of each of the suite's packages, as they are installed here."""
    return {package: _sources(package) for package in PACKAGES}


def origins() -> dict[str, str | None]:
    """The file that each package is imported from in this process."""
    specs = {name: importlib.util.find_spec(name) for name in (*PACKAGES, "torch", "triton", "numpy")}
    return {name: spec.origin if spec else None for name, spec in specs.items()}


def of_file(file: Path) -> str:
    """A digest of one file."""
    from swiglu_kernels.runtime.sources import digest

    return digest([file])


CODE = frozenset({".py", ".pyx", ".so", ".pyd", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".ptx", ".cubin"})
"""The endings of a package's files that count."""
MOST_OPENED = 10_000


class Loaded:
    """What a process loads, from now on, from outside the installed packages: modules, and files that lie with them.

    Nor does what lies in the folders `made` count, where compilers keep what they make from these.
    """

    def __init__(self, made: Iterable[str]) -> None:
        self._before, self._opened = set(sys.modules), set[str]()
        # While nothing lies in front of what is installed.
        self._left_out = (*_installed_in(), *(os.path.realpath(folder) + os.sep for folder in made))
        sys.addaudithook(self._hear)

    def let_go(self, modules: Iterable[str]) -> None:
        """Count modules that were loaded before, and are loaded anew from elsewhere."""
        self._before -= set(modules)

    def _hear(self, event: str, arguments: tuple[object, ...]) -> None:
        if event in {"open", "ctypes.dlopen"} and len(self._opened) < MOST_OPENED:
            path, *mode = arguments
            written = mode and isinstance(mode[0], str) and not mode[0].startswith("r")
            if isinstance(path, str | bytes | os.PathLike) and not written:
                self._opened.add(os.path.abspath(os.fsdecode(path)))

    def paths(self) -> list[str]:
        """Files of single modules, folders of packages, and files that were read in the folders of these."""
        found = set[str]()
        for name in {name.partition(".")[0] for name in set(sys.modules) - self._before}:
            top = sys.modules.get(name)
            of_package = getattr(top, "__path__", None)
            for place in list(of_package or filter(None, [getattr(top, "__file__", None)])):
                if isinstance(place, str) and os.path.exists(place) and not _in(place, self._left_out):
                    found.add(os.path.abspath(place))
        folders = {os.path.join(place if os.path.isdir(place) else os.path.dirname(place), "") for place in found}
        packages = tuple(os.path.join(place, "") for place in found)
        for file in self._opened:  # thousands, of which few lie there
            # Not through a hidden folder, as that of a cache is, and not to a hidden file.
            around = any(file.startswith(folder) and f"{os.sep}." not in file[len(folder) - 1 :] for folder in folders)
            ending = os.path.splitext(file)[1]
            counted = ending == ".pyc" or (ending in CODE and file.startswith(packages))
            if around and not counted and os.path.isfile(file) and not _in(file, self._left_out):
                found.add(file)
        return sorted(found)


def _installed_in() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = [*(sysconfig.get_paths()[name] for name in names), *site.getsitepackages(), site.getusersitepackages()]
    specs = map(importlib.util.find_spec, PACKAGES)
    folders += [folder for spec in specs if spec for folder in spec.submodule_search_locations or ()]
    found = set[str]()
    for folder in folders:
        with contextlib.suppress(OSError):  # below a home that this user may not enter
            found.add(os.path.realpath(folder) + os.sep)
    return tuple(found)


@functools.cache
def _in(place: str, folders: tuple[str, ...]) -> bool:
    return (os.path.realpath(place) + os.sep).startswith(folders)


def digests(paths: Iterable[str], file: str) -> str:
    """`path=digest` of what a process loaded, separated by spaces, paths as seen from the folder of a file."""
    folder = os.path.dirname(os.path.abspath(file)) if file else os.getcwd()
    return " ".join(f"{quote(os.path.relpath(path, folder))}={_digest(Path(path))}" for path in sorted(paths))


def digests_now(listed: str, file: str) -> str:
    """The same for the paths of such a list, as they are now."""
    folder = os.path.dirname(os.path.abspath(file)) if file else os.getcwd()
    names = (unquote(entry.rpartition("=")[0]) for entry in listed.split())
    return digests([os.path.normpath(os.path.join(folder, name)) for name in names], file)


def _digest(path: Path) -> str:
    inside = (file for file in path.rglob("*") if file.suffix in CODE and file.is_file())
    found = hashlib.sha256()
    for file in sorted(inside) if path.is_dir() else [path]:
        try:
            content = file.read_bytes()
        except OSError:
            return "gone"
        found.update(file.name.encode(errors="surrogatepass") + b"\0" + content + b"\0")
    return found.hexdigest()[:8]


def _sources(package: str) -> str:
    from swiglu_kernels.runtime.sources import digest  # imports torch, which what shows finished runs does without

    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    (folder,) = map(Path, spec.submodule_search_locations)
    return digest(sorted(folder.rglob("*.py")), folder)


@functools.cache
def standing(version: str, root: Path = Path(__file__).parents[2]) -> tuple[str, bool]:
    """How old a version is and how its kernels stand to those of this checkout, and whether these are others.

    Outside of a checkout nothing is known: ("", False).
    """
    commit, dirty = version.partition("+")[2].removesuffix("-dirty"), version.endswith("-dirty")
    if not commit or not (root / ".git").exists():
        return "", False
    if (date := git(root, "log", "-1", "--format=%cs", commit, "--")) is None:
        return "of a commit that is not in this checkout", True
    kernels = ("--", "kernels/swiglu_kernels")
    since = len((git(root, "log", "--format=%h", f"{commit}..HEAD", *kernels) or "").split())
    behind = bool(git(root, "diff", "--name-only", commit, *kernels))
    changed = f"the kernels have changed in {since} commits since" if since else "with kernels that were changed since"
    state = changed if behind else "with the kernels of today"
    return f"of {date}, {'with changes that no commit holds, ' if dirty else ''}{state}", behind


def git(root: Path, *arguments: str) -> str | None:
    """What git answers; None where it refuses, or is not there."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()
    return None
