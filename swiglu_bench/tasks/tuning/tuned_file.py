"""The file of tuned choices, changed under a lock: one choice entered or taken out, or all removed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from swiglu_bench.cases.errors import BadInput
from swiglu_kernels.tiles import tuning

if TYPE_CHECKING:
    from swiglu_kernels.tiles.tuning import Entry


def keep(path: Path, entry: Entry, wins: bool, tell: Callable[[str], object]) -> None:
    """Enter a choice in place of an earlier one; where it does not win, only remove the earlier one.

    A file that is not sound is moved aside, since a user may need it, and `tell` is called with where to. Raises
    BadInput where the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(_lock(path)):
            try:
                others = [one for one in tuning.read(path) if one.place != entry.place]
            except ValueError as error:
                others, unsound = [], path.with_name(f"{path.name}.unsound")
                path.replace(unsound)
                tell(f"{path} is {error}; it was moved to {unsound}.")
            tuning.write([*others, entry] if wins else others)
    except OSError as error:
        raise BadInput(f"{path} cannot be written: {error.strerror}; name another in {tuning.VARIABLE}.") from None
    tuning.forget()


def clear(path: Path) -> str:
    """Remove the file and say so. Raises BadInput for one that a user named and that holds no tuned choices."""
    if not path.exists():
        return f"Nothing is kept in {path}."
    try:
        held = f" with tuned choices: {len(tuning.read(path))}"
    except ValueError as error:
        if os.environ.get(tuning.VARIABLE):
            raise BadInput(f"{tuning.VARIABLE} names {path}, which is {error}; remove it yourself.") from None
        held = ", which was not sound"
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}; remove it yourself.") from None
    path.unlink()
    with contextlib.suppress(OSError):
        _lock(path).unlink()
    tuning.forget()
    return f"Removed {path}{held}."


def _lock(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")
