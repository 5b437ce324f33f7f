"""JSON files in the user's cache folder: what this machine has found out, kept between processes.

A file that cannot be read ends no call: it costs one warning, and the call goes on as if nothing had been kept. So does
Triton's own cache, where compiled kernels go: see `compiling`.
"""

import functools
import json
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

FOLDER = "swiglu-kernels"
T = TypeVar("T")


def path(name: str, variable: str = "") -> Path | None:
    """Return the place of a file: `$XDG_CACHE_HOME/swiglu-kernels/name`, `~/.cache/...` without XDG_CACHE_HOME.

    The environment variable `variable` names another file, or is `off`: then None. None as well where there is no home.
    """
    named = os.environ.get(variable, "") if variable else ""
    if named:
        return None if named == "off" else Path(named)
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # no home folder can be determined
        return None
    return Path(cache) / FOLDER / name


def read(file: Path, what: str, of_content: Callable[[Any], list[Any]]) -> list[Any]:
    """Return what `of_content` makes of the content of a file of `what`; nothing where there is no file.

    Raises OSError, and ValueError where the file is not JSON or `of_content` does not accept it.
    """
    try:
        return of_content(json.loads(file.read_bytes()))
    except FileNotFoundError:
        return []
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a file of {what} ({type(error).__name__}: {error})") from error


def read_if_sound(file: Path | None, what: str, of_content: Callable[[Any], list[Any]], instead: str) -> list[Any]:
    """Return the same; nothing, and warn once of what happens `instead`, where a file is not sound.

    What `instead` advises in a second sentence is for a file that is there and can be read.
    """
    if file is None:
        return []
    try:
        return read(file, what, of_content)
    except OSError as error:
        warn_once(file, f"cannot be read: {error.strerror}", f"{instead.partition('. ')[0]}.")
    except ValueError as error:
        warn_once(file, str(error), instead)
    return []


def compiling(call: Callable[[], T]) -> T:
    """Make a call that may compile a kernel; where Triton's cache cannot be read or written, with a temporary one."""
    try:
        return call()
    except OSError as error:
        from triton import knobs

        usual, temporary = knobs.cache.dir, _temporary().name
        if usual == temporary:
            raise
        warn_once(Path(usual), f"cannot be used: {error.strerror}", "each process compiles its kernels anew.")
        knobs.cache.dir = temporary
        return call()


@functools.cache
def _temporary() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="swiglu-kernels-")


def write(file: Path, content: Any) -> None:
    """Replace a file at once. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    temporary.replace(file)


@functools.cache
def warn_once(file: Path, reason: str, instead: str) -> None:
    """Warn that a file is not used, once per process for each reason."""
    warnings.warn(f"{file}: {reason}; {instead}", stacklevel=2)
