"""Each implementation called once under NVIDIA's compute-sanitizer: it sees accesses that no wrong result betrays.

A call is a forward and a backward, on a problem drawn as for every check, in a process of its own without a judge.
https://docs.nvidia.com/compute-sanitizer/
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from swiglu_bench.cases import registry
from swiglu_bench.cases.cases import Case
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.check.built import Built
from swiglu_bench.check.inputs import Draw, make_problem, new_seed
from swiglu_bench.machine.machine import Machine
from swiglu_bench.rows.record import Record, Status
from swiglu_bench.worker import policy
from swiglu_bench.worker.admission import failure
from swiglu_bench.worker.crew import log_name
from swiglu_bench.worker.settings import Listener, Settings, teller
from swiglu_kernels.standalone import hazards

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
PROGRAM = "compute-sanitizer"
FOUND = 86
"""The exit status of a program in which the tool found something."""
REPORT = re.compile(r"^=+ (?!COMPUTE-SANITIZER|[A-Z]+ SUMMARY)(\S.*)$", re.MULTILINE)
"""The first line of what the tool found, and the indented ones below it are left out. Of racecheck, see `hazards`."""
CALL = "import sys; sys.path[:] = {path!r}; from {module} import call_once; call_once({file!r})"


def check(tool: str, device: torch.device) -> None:
    """Raise BadInput where the tool cannot run."""
    if device.type != "cuda":
        raise BadInput(f"--sanitize {tool} checks GPU kernels; the device is {device}.")
    if not shutil.which(PROGRAM):
        raise BadInput(f"--sanitize {tool} needs {PROGRAM}, which comes with the CUDA toolkit; it is not on the PATH.")


def run(
    cases: Sequence[Case], implementations: Sequence[Implementation], settings: Settings, this: Machine,
    listen: Listener, *, timeout_s: float, logs: Path,
) -> Iterator[Record]:  # fmt: skip
    """A row for each implementation at each case; what the tool prints goes to files in `logs`."""
    for number, case in enumerate(cases):
        tell = teller(listen, number, cases)
        for index, one in enumerate(implementations):
            tell(f"{settings.sanitizer} of {one.name}", index / len(implementations))
            record = policy.blank(settings, this, case, one)
            reason = policy.inapplicable(settings, this, case, one)
            if reason:
                yield record.end(Status.SKIPPED, reason)
            else:
                _sanitize(record, case, one, settings, timeout_s, logs / log_name(f"{one.name} {case.label}"))
                yield record


def _sanitize(record: Record, case: Case, one: Implementation, settings: Settings, timeout_s: float, log: Path) -> None:
    request = log.with_suffix(".pickle")
    request.write_bytes(pickle.dumps((one.declared(), case, settings.device)))
    code = CALL.format(path=sys.path, module=__name__, file=str(request))
    command = [PROGRAM, "--tool", settings.sanitizer, "--error-exitcode", str(FOUND), "--target-processes", "all"]
    # Without PyTorch's cache each tensor is an allocation of its own, whose bounds and first writes the tool knows.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        with log.open("wb") as out:
            status = subprocess.run(
                [*command, sys.executable, "-c", code], stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                env=environment, timeout=timeout_s,
            ).returncode  # fmt: skip
    except subprocess.TimeoutExpired:
        record.end(Status.ERROR, f"It was not done after {timeout_s:g} s under {PROGRAM} (--timeout).")
        return
    finally:
        request.unlink()
    if status not in (0, FOUND):
        record.end(Status.ERROR, f"Its process ended with status {status}; the output is in {log}.")
        return
    text = log.read_text("utf-8", "replace")
    of_races = settings.sanitizer == "racecheck"
    reports = hazards.unexplained(text) if of_races else REPORT.findall(text)
    clean = status == 0 or (of_races and not reports)
    wrong = "" if clean else f"{reports[0] if reports else 'an error'}; all reports are in {log}"
    found = failure("sanitizer", wrong)
    record.tensor_checks = (dataclasses.replace(found, tensor=settings.sanitizer, ok=not wrong),)
    if wrong:
        record.end(Status.INCORRECT, f"{settings.sanitizer}: {wrong}.")
    else:
        log.unlink()


def call_once(request: str) -> None:
    """In the process that the tool watches: one call, with its backward if there is one."""
    declared, case, device = pickle.loads(Path(request).read_bytes())
    built = Built(registry.find(declared), make_problem(case, device))
    built.train(Draw(new_seed()))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    hazards.announce()
