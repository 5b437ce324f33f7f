"""Named baselines: runs that are kept to compare later ones with, each under a name and what was run."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

from swiglu_bench.cases.errors import BadInput, did_you_mean
from swiglu_bench.rows.run_folder import RECORDS

FOLDER = Path(".swiglu-bench") / "baselines"
"""Below the working directory, so that the baselines of a project stay with it."""


def place(name: str, what: str) -> Path:
    """The folder of a baseline; `what` is the command or the test that made it. Raises BadInput for a bad name."""
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise BadInput(f"{name!r} is not a valid baseline name; give letters, digits, '.', '_' and '-', such as main.")
    return FOLDER / name / what


def save(name: str, what: str, run: Path) -> Path:
    """Keep a copy of a run's folder as a baseline, in place of an earlier one, and say where. Raises OSError."""
    target = place(name, what)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".new-") as new:
        copy = shutil.copytree(run, Path(new) / what, ignore=shutil.ignore_patterns("logs", "traces"))
        if target.exists():
            target.rename(Path(new) / "old")
        copy.rename(target)
    return target


def commands(name: str) -> list[str]:
    """The commands of which a baseline was saved. Raises BadInput where there is none of that name."""
    found = sorted(file.parent.name for file in place(name, "").glob(f"*/{RECORDS}"))
    if not found:
        known = sorted({file.parent.parent.name for file in FOLDER.rglob(RECORDS)})
        near = did_you_mean(name, known) if known else f"save one: swiglu-bench forward --save-baseline {name}"
        raise BadInput(f"There is no run and no baseline {name!r}; {near.rstrip('.?')}.")
    return found


def find(name: str, what: str) -> Path:
    """The folder of a baseline that was saved. Raises BadInput where there is none, naming those that are there."""
    found = place(name, what)
    if not (found / RECORDS).exists():
        known = sorted(file.parent.parent.name for file in FOLDER.rglob(RECORDS) if file.parent.name == what)
        near = did_you_mean(name, known) if known else f"save one: swiglu-bench {what} --save-baseline {name}"
        raise BadInput(f"There is no run and no baseline {name!r} of {what}; {near.rstrip('.?')}.")
    return found
