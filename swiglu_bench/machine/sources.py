"""The code and the kind of machine behind a row; rows of one run must agree in both."""

from __future__ import annotations

import functools
import importlib.util
import subprocess
from pathlib import Path

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
    date = git(root, "log", "-1", "--format=%cs", commit, "--")
    if date is None:
        return "of a commit that is not in this checkout", True
    kernels = ("--", "kernels/swiglu_kernels")
    since = len((git(root, "log", "--format=%h", f"{commit}..HEAD", *kernels) or "").split())
    behind = bool(git(root, "diff", "--name-only", commit, *kernels))
    state = "with the kernels of today"
    if behind:
        state = (
            f"the kernels have changed in {since} commits since" if since else "with kernels that were changed since"
        )
    return f"of {date}, {'with changes that no commit holds, ' if dirty else ''}{state}", behind


def git(root: Path, *arguments: str) -> str | None:
    """What git answers; None where it refuses, or is not there."""
    try:
        done = subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
