"""A contender's environment: folders of its own for what it compiles, and packages of its own in front of others.

A cache that contenders share can be edited by one, or left half-written by one that was killed, and another then runs
what it finds there. So each has its own, in the user's cache folder, kept from run to run; twins of the baseline and
processes that compile beforehand have those of their implementation. What the command itself keeps lies elsewhere.
Processes of one user can still look for each other's files: this keeps apart what follows its environment.

A layer is a folder of packages that one contender's processes find before those of this environment, so that two
versions of a package can be compared in one run. uv makes it: what the suite and torch need stays as it is.

Another interpreter has its own torch and NumPy. The suite's packages, and what else a contender's process needs, which
is pure Python, are handed over to it as links in two folders.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import site
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

import platformdirs
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from swiglu_bench.cases.errors import BadInput, did_you_mean
from swiglu_bench.cases.implementation import NAME, Implementation
from swiglu_bench.machine.sources import PACKAGES

VARIABLES = {
    "XDG_CACHE_HOME": "cache", "TMPDIR": "tmp", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton",
    "TORCH_EXTENSIONS_DIR": "extensions", "CUDA_CACHE_PATH": "cuda", "CUPY_CACHE_DIR": "cupy",
    "CUTE_DSL_CACHE_DIR": "cute", "DG_JIT_CACHE_DIR": "deep_gemm", "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "NUMBA_CACHE_DIR": "numba", "TILELANG_CACHE_DIR": "tilelang",
}  # fmt: skip
"""What tells PyTorch, Triton, CUDA and other compilers where to keep things, and the folder that each gets."""
ROOM_BYTES = 2**20
"""What must fit into a cache folder for it to be used: what one contender compiles often takes as much."""
TUNING = "SWIGLU_KERNELS_TUNING"
SHARED = ("torch", "numpy")
"""Modules that all contenders of a run have in common, as they have the suite."""
EXCHANGEABLE = frozenset({"triton", "liger-kernel"})
"""Of what the suite needs, what no process has imported before its contender does."""
OF_PYTHON = frozenset({"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX"})
"""Variables that tell an interpreter where this environment's packages lie."""
HANDED_OVER = ("annotated_types", "packaging", "platformdirs", "pynvml")
"""What a contender's process needs beside torch, NumPy and the suite's packages: modules of pure Python."""
OLDEST = (3, 11)
"""The oldest Python that runs a contender's process."""
KERNELS = "swiglu-kernels"
"""The folder in which tuning and the kernels' check keep what they have found, in a user's cache folder."""


def root() -> Path:
    """The folder that has those of all contenders; where the user's cache folder cannot be written, a temporary one."""
    return _writable(Path(platformdirs.user_cache_path("swiglu-bench", appauthor=False)) / "contenders")


@functools.cache
def _writable(folder: Path) -> Path:
    """The folder where there is room in it, else a temporary one, with a warning."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(ROOM_BYTES))
        return folder
    except OSError as error:
        user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
        instead = Path(tempfile.gettempdir()) / f"swiglu-bench-{user}" / "contenders"
        warnings.warn(f"{folder} cannot be written: {error.strerror}; {instead} is used.", stacklevel=2)
        return instead


def _name_of(implementation: str, address: str) -> str:
    """What a contender's folder is called: short, for sockets in it may have paths of 107 characters."""
    address = os.path.abspath(address) if ".py:" in address else address
    digest = hashlib.sha256(f"{implementation}\n{address}".encode(errors="surrogatepass")).hexdigest()[:8]
    return f"{re.sub(r'[^A-Za-z0-9_-]+', '-', implementation)[:20]}-{digest}"


def of(implementation: Implementation) -> dict[str, str]:
    """The variables that lead an implementation's processes to its folders, which are there then.

    Where the user has named a folder for one of these, except of the user's cache, it is a folder inside that.
    """
    return of_address(implementation.name, _address(implementation))


def mark(implementation: Implementation, compiled: object) -> Path:
    """The file that is there once its processes have compiled something, by its description, which is cached since."""
    digest = hashlib.sha256(repr(compiled).encode(errors="surrogatepass")).hexdigest()[:16]
    return root() / _name_of(implementation.name, _address(implementation)) / "compiled" / digest


def _address(implementation: Implementation) -> str:
    address = implementation.address or implementation.source
    return f"{implementation.python}\n{address}" if implementation.python else address


def of_address(implementation: str, address: str) -> dict[str, str]:
    """The same by its name and its address, which is that of a file, an entry point's or a module."""
    name = _name_of(implementation, address)
    own, found = root() / name, dict[str, str]()
    for variable, folder in VARIABLES.items():
        named = os.environ.get(variable, "") if variable != "XDG_CACHE_HOME" else ""
        place = Path(named) / "swiglu-bench" / name if named else own / folder
        with contextlib.suppress(OSError):  # whoever needs it will say that it cannot be had
            place.mkdir(parents=True, exist_ok=True)
        found[variable] = str(place)
    # What was downloaded from the hub stays where it is: large, and named by its content.
    found["HF_HOME"] = os.environ.get("HF_HOME") or str(_of_user() / "huggingface")
    return found | dict(_handed_in(Path(found["XDG_CACHE_HOME"])))


def _of_user() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))


def _handed_in(cache: Path) -> Iterator[tuple[str, str]]:
    """Copy what tuning and the kernels' check have found to where a process looks for it, anew for each process."""
    folder, copies = cache / KERNELS, dict[Path, Path]()
    with contextlib.suppress(OSError):  # such as a cache that this user may not read
        copies = {folder / file.name: file for file in (_of_user() / KERNELS).glob("*.json") if file.is_file()}
    named = os.environ.get(TUNING, "")
    if named and named != "off":
        yield TUNING, str(folder / "named.json")
        copies[folder / "named.json"] = Path(named)
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        for stale in set(folder.glob("*.json")) - {copy for copy, file in copies.items() if file.is_file()}:
            stale.unlink(missing_ok=True)
    for copy, file in copies.items():
        with contextlib.suppress(OSError):
            _copy(file, copy)


def _copy(file: Path, to: Path) -> None:
    """Copy a file whole, or not at all, to be read only; processes that start side by side do so at the same time."""
    descriptor, temporary = tempfile.mkstemp(prefix=".", dir=to.parent)
    with os.fdopen(descriptor, "wb") as copy:
        copy.write(file.read_bytes())
    os.chmod(temporary, 0o444)
    os.replace(temporary, to)


# Packages in front of this environment's


def with_packages(
    known: Sequence[Implementation], asked: Sequence[str], find_links: str | None = None
) -> list[Implementation]:
    """The implementations that `--with` adds to the chosen ones, each with its layer, which is made if it has to be.

    `NAME@TAG=REQUIREMENT ...` adds NAME@TAG; `NAME@{1.0,2.0}=PACKAGE=={}` adds one for each of the words in braces.
    Raises BadInput.
    """
    added: list[Implementation] = []
    for text in asked:
        name, words, packages = tagged(text)
        found = [each for each in known if fnmatch.fnmatch(each.name, name)]
        if not found:
            names = [each.name for each in known]
            raise BadInput(f"--with {text}: no chosen implementation is called {name!r}; {did_you_mean(name, names)}")
        if elsewhere := next((each.name for each in found if each.python), ""):
            raise BadInput(f"--with {text}: {elsewhere} has an interpreter of its own; install packages there.")
        for word in words:
            requirements = packages.replace("{}", word).split()
            folder = _layer(requirements, find_links)
            for each in found:
                full = f"{each.name}@{word}"
                if not NAME.fullmatch(full) or full in {other.name for other in (*known, *added)}:
                    raise BadInput(f"--with {text}: the name {full!r} is taken, or no name; choose another tag.")
                added.append(dataclasses.replace(each, name=full, original=each.name, layer=str(folder)))
    return added


def tagged(text: str) -> tuple[str, list[str], str]:
    """The name, the tags and the packages of one `--with`. Raises BadInput."""
    head, equals, packages = text.partition("=")
    name, at, tags = head.strip().rpartition("@")
    words = tags[1:-1].split(",") if tags.startswith("{") and tags.endswith("}") else [tags]
    if not (equals and at and name and all(words) and packages.strip()):
        raise BadInput(f"--with {text}: give NAME@TAG=REQUIREMENT, such as liger@old=liger-kernel==0.7.0.")
    if len(words) > 1 and "{}" not in packages:
        raise BadInput(f"--with {text}: the packages are the same for every tag; put {{}} where they differ.")
    return name, [word.strip() for word in words], packages


def packages_of(implementation: Implementation) -> dict[str, str]:
    """Versions of the packages in its layer, or of Python and what counts in its own environment, by their names."""
    if implementation.python:
        return Interpreter.of(implementation.python).versions(implementation.package)
    if not implementation.layer:
        return {}
    found = importlib.metadata.distributions(path=[implementation.layer])
    return dict(sorted((canonicalize_name(each.name), _version(each)) for each in found))


def _version(package: importlib.metadata.Distribution) -> str:
    """Its version and, of one from a repository, the commit."""
    origin = json.loads(package.read_text("direct_url.json") or "{}").get("vcs_info", {}).get("commit_id", "")
    return f"{package.version}@{origin[:10]}" if origin else package.version


def put_in_front(layer: str) -> list[str]:
    """In a contender's process, before anything of it is imported: find modules in a layer first.

    Those that were imported from elsewhere are imported again when they are wanted; their names are returned.
    """
    before, imported = list(sys.path), list(sys.modules)
    sys.path.insert(0, layer)
    importlib.invalidate_caches()
    site.addsitedir(layer)  # with what its .pth files add, such as those of nvidia-cutlass-dsl
    added = [folder for folder in sys.path if folder not in before]
    sys.path[:] = [*added, *before]
    own = {Path(entry.name).stem.partition(".")[0] for folder in added if os.path.isdir(folder)
           for entry in os.scandir(folder)}  # fmt: skip
    found = [name for name in imported if name.partition(".")[0] in own]
    for name in found:
        del sys.modules[name]
    return found


def _layer(requirements: Sequence[str], find_links: str | None) -> Path:
    """The folder with some packages; those that are pinned are made once."""
    named = _named(requirements)
    kept = _kept(set(named))
    key = json.dumps([sorted(requirements), kept, sys.version, find_links])
    # Some packages, such as QuACK, tell what is installed from what is being written by the name of this folder.
    folder = root().parent / "layers" / hashlib.sha256(key.encode()).hexdigest()[:16] / "site-packages"
    versions = [str(each.specifier) if isinstance(each, Requirement) else "" for each in named.values()]
    if folder.is_dir() and all(re.fullmatch(r"==[^*,]+", version) for version in versions):
        return folder
    links = ["--find-links", os.path.abspath(find_links)] if find_links else []
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        constraints, made = Path(temporary) / "constraints.txt", Path(temporary) / "layer"
        constraints.write_text("\n".join(kept), encoding="utf-8")
        told = _uv("install", "--dry-run", "--break-system-packages", "-c", str(constraints), *links, *requirements)
        pinned_by_it = re.findall(r"^ \+ (\S+)==(\S+)(?: \(.*\))?$", told, re.MULTILINE)
        others = [f"{name}=={version}" for name, version in pinned_by_it if canonicalize_name(name) not in named]
        _uv("install", "--no-deps", "--target", str(made), *links, *requirements, *others)
        for name in SHARED:
            if (made / name).exists():
                raise BadInput(f"--with {' '.join(requirements)}: it would replace {name}, which all contenders share.")
        shutil.rmtree(made / "swiglu_bench", ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)  # whole, or not at all
    return folder


def _named(requirements: Sequence[str]) -> dict[str, Requirement | str]:
    """Requirements by the names of their packages; paths and URLs by themselves."""
    found: dict[str, Requirement | str] = {}
    for text in requirements:
        try:
            each = Requirement(text)
            found[canonicalize_name(each.name)] = each
        except InvalidRequirement:
            if not os.path.exists(text) and "://" not in text:
                expected = "neither a requirement, as liger-kernel==0.7.0, nor a path or URL"
                raise BadInput(f"--with: {text!r} is {expected}.") from None
            found[text] = text
    return found


def _kept(exchanged: set[str]) -> list[str]:
    """The versions here of all that the suite and torch need, but for what is exchanged."""
    waiting, found = ["swiglu-bench", "torch", "numpy"], dict[str, str]()
    while waiting:
        name = canonicalize_name(waiting.pop())
        with contextlib.suppress(importlib.metadata.PackageNotFoundError, InvalidRequirement):
            if name not in found and name not in EXCHANGEABLE:
                found[name] = importlib.metadata.version(name)
                needs = map(Requirement, importlib.metadata.requires(name) or ())
                waiting += [need.name for need in needs if not need.marker or need.marker.evaluate({"extra": ""})]
    found.pop("swiglu-bench", None)
    return [f"{name}=={version}" for name, version in sorted(found.items()) if name not in exchanged]


def _uv(*arguments: str) -> str:
    """What uv's pip says; raises BadInput where there is no uv, or with its words where it fails."""
    program = shutil.which("uv")
    with contextlib.suppress(ImportError, FileNotFoundError):
        import uv

        program = uv.find_uv_bin()
    if program is None:
        raise BadInput("--with needs uv, which makes the folder of packages; pip install uv.")
    command = [program, "pip", "--color", "never", *arguments, "--python", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = " ".join(re.sub(r"^[^\w]*(error|cause|hint):\s*", "", line.strip()) for line in done.stderr.splitlines()
                        if not line.startswith(("Using ", "Resolved ", "warning")))  # fmt: skip
        raise BadInput(f"--with: uv cannot install these packages: {said.strip().rstrip('.')}.")
    return done.stderr


# Another interpreter


@dataclasses.dataclass(frozen=True)
class Interpreter:
    """Another Python, with packages of its own."""

    executable: str
    version: str
    path: tuple[str, ...]
    """Where it finds packages."""
    front: str
    """A folder with links to the suite's packages, to be found before its own."""
    behind: str
    """A folder with links to what it may lack."""

    @classmethod
    @functools.cache
    def of(cls, executable: str) -> Interpreter:
        """What an executable is; raises BadInput where it is no Python that can run a contender's process."""
        said = f"--python: {executable}"
        environment = {name: value for name, value in os.environ.items() if name not in OF_PYTHON}
        ask = "import json, platform, sys; print(json.dumps([platform.python_version(), sys.path[1:]]))"
        try:
            done = subprocess.run(
                [executable, "-c", ask], capture_output=True, text=True, env=environment, timeout=60, check=True
            )
            version, path = json.loads(done.stdout)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            words = (getattr(error, "stderr", "") or str(error)).strip().splitlines() or ["it prints nothing"]
            raise BadInput(f"{said} does not answer as Python {OLDEST[0]}.{OLDEST[1]} does ({words[-1]}).") from None
        if tuple(map(int, version.split(".")[:2])) < OLDEST:
            raise BadInput(f"{said} is Python {version}; give one from {OLDEST[0]}.{OLDEST[1]} on.")
        for needed in SHARED:
            if PathFinder.find_spec(needed, path) is None:
                raise BadInput(f"{said} has no {needed} in its environment; install torch and numpy there.")
        return cls(executable, version, tuple(path), _links(PACKAGES), _links(HANDED_OVER))

    def program(self, function: str) -> list[str]:
        """The beginning of a command line that calls `module:function` there, whose arguments follow."""
        begin = (
            "import json, pkgutil, sys; front, behind = json.loads(sys.argv.pop(1)); sys.path.insert(0, front); "
            "sys.path.append(behind); pkgutil.resolve_name(sys.argv.pop(1))()"
        )
        return [self.executable, "-P", "-c", begin, json.dumps([self.front, self.behind]), function]

    def origins(self) -> dict[str, str | None]:
        """The files that the suite's packages have to come from."""
        return {name: os.path.join(self.front, name, "__init__.py") for name in PACKAGES}

    @functools.cache  # noqa: B019
    def versions(self, module: str) -> dict[str, str]:
        """Of Python, torch, Triton and the package that has a module."""
        found, top = {"python": self.version}, module.partition(".")[0]
        for each in importlib.metadata.distributions(path=list(self.path)):
            name, modules = canonicalize_name(each.name), (each.read_text("top_level.txt") or "").split()
            if name in {"torch", "triton"} or (top and (name == canonicalize_name(top) or top in modules)):
                found.setdefault(name, _version(each))
        return found


def _links(modules: Sequence[str]) -> str:
    """A folder with a link to each of some modules of this environment."""
    places = [Path(spec.origin) for spec in map(importlib.util.find_spec, modules) if spec and spec.origin]
    targets = [place.parent if place.name == "__init__.py" else place for place in places]
    digest = hashlib.sha256("\n".join(map(str, targets)).encode(errors="surrogatepass")).hexdigest()[:16]
    folder = root().parent / "handed-over" / digest
    folder.mkdir(parents=True, exist_ok=True)
    for target in targets:
        with contextlib.suppress(FileExistsError):
            (folder / target.name).symlink_to(target)
    return str(folder)


def under(
    known: Sequence[Implementation], asked: Mapping[str, str],
    declared_there: Callable[[Implementation], Implementation],
) -> list[Implementation]:  # fmt: skip
    """The implementations, those that `--python` names under another interpreter; NAME@TAG adds one.

    `declared_there` returns what one declares there, if that may be something else. Raises BadInput.
    """
    found = {each.name: each for each in known}
    for name, python in asked.items():
        original = name if name in found else name.rpartition("@")[0]
        if original not in found:
            said = f"--python {name}={python}: no chosen implementation is called {name!r}"
            raise BadInput(f"{said}; {did_you_mean(name, list(found))}")
        given = found[original]
        interpreter = Interpreter.of(python)
        there = dataclasses.replace(given, python=python, path=interpreter.path)
        if given.package and given.python != python:
            told = declared_there(there)
            there = dataclasses.replace(told, address=given.address, python=python, path=interpreter.path)
        found[name] = dataclasses.replace(there, name=name, original=original if name != original else "")
    return list(found.values())


def pythons(asked: Sequence[str]) -> dict[str, str]:
    """The executables of `--python NAME=PATH`, by name. Raises BadInput."""
    found: dict[str, str] = {}
    for text in asked:
        name, equals, python = text.partition("=")
        python = python.strip()
        executable = shutil.which(os.path.expanduser(python))
        if not (equals and NAME.fullmatch(name.strip())):
            raise BadInput(f"--python {text}: give NAME=EXECUTABLE, such as sonic=/opt/sonic/bin/python.")
        if executable is None:
            raise BadInput(f"--python {text}: there is no program {python!r}; name an environment's bin/python.")
        found[name.strip()] = os.path.abspath(executable)
    return found
