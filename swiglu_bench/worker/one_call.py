"""One call of one implementation in a process of its own, for NVIDIA's tools: Nsight Compute and compute-sanitizer.

compute-sanitizer sees accesses to memory that no wrong result betrays. https://docs.nvidia.com/compute-sanitizer/
"""

import base64
import contextlib
import dataclasses
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from swiglu_bench.cases import registry
from swiglu_bench.cases.cases import Case
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.check.built import Built
from swiglu_bench.check.inputs import Draw, make_problem, new_seed
from swiglu_bench.worker import environments
from swiglu_bench.worker.policy import Settings
from swiglu_bench.worker.workbench import Workbench

PROGRAM = "compute-sanitizer"
FOUND = 86
"""The exit status of a program in which the tool found something."""
REPORT = re.compile(r"^=+ (?!COMPUTE-SANITIZER|[A-Z]+ SUMMARY)(\S.*)$", re.MULTILINE)
"""The first line of each finding; the indented lines below it are left out. For racecheck, see `hazards`."""


class NoVerdict(RuntimeError):
    """The tool could not finish; the message is a sentence."""


def check(tool: str, device: torch.device) -> None:
    """Raise BadInput where the tool cannot run."""
    if device.type != "cuda":
        raise BadInput(f"--sanitize {tool} checks GPU kernels; the device is {device}.")
    if not shutil.which(PROGRAM):
        raise BadInput(f"--sanitize {tool} needs {PROGRAM}, which comes with the CUDA toolkit; it is not on the PATH.")


def program(settings: Settings, implementation: Implementation, case: Case) -> list[str]:
    """The command line of a process that makes one call."""
    packed = pickle.dumps((dataclasses.replace(settings, folder=None), implementation.declared(), case))
    begin = [sys.executable, "-m", "swiglu_bench.worker.one_call"]
    if implementation.python:
        begin = environments.Interpreter.of(implementation.python).program("swiglu_bench.worker.one_call:main")
    return [*begin, base64.b64encode(packed).decode()]


def findings(settings: Settings, implementation: Implementation, case: Case, timeout_s: float, log: Path) -> str:
    """What the tool of `settings.sanitizer` found in a forward and backward, or ""; raises NoVerdict if it fails."""
    from swiglu_kernels.standalone import hazards

    of_races, every = settings.sanitizer == "racecheck", ["--error-exitcode", str(FOUND), "--target-processes", "all"]
    command = [PROGRAM, "--tool", settings.sanitizer, *every, *(["--print-limit", "0"] if of_races else [])]
    # Without PyTorch's cache each tensor is an allocation of its own, whose bounds and first writes the tool knows.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        with log.open("wb") as out:
            status = subprocess.run(
                [*command, *program(settings, implementation, case)], stdin=subprocess.DEVNULL, stdout=out,
                stderr=subprocess.STDOUT, env=environment, timeout=timeout_s,
            ).returncode  # fmt: skip
    except subprocess.TimeoutExpired:
        raise NoVerdict(f"It had not finished after {timeout_s:g} s under {PROGRAM} (--timeout).") from None
    if status not in (0, FOUND):
        raise NoVerdict(f"Its process ended with status {status}; the output is in {log}.")
    text = log.read_text("utf-8", "replace")
    reports = hazards.unexplained(text) if of_races else REPORT.findall(text)
    if status == 0 or (of_races and not reports):
        log.unlink()
        return ""
    return f"{reports[0] if reports else 'an error'}; all reports are in {log}"


def main() -> None:
    """Make the call of the command line; for Nsight Compute all else is outside of the CUDA profiler's range."""
    settings, declared, case = pickle.loads(base64.b64decode(sys.argv[1]))
    os.environ.update(environments.of(declared))
    if declared.layer:
        environments.put_in_front(declared.layer)
    implementation, on_gpu = registry.find(declared), settings.device.type == "cuda"
    if settings.sanitizer:
        from swiglu_kernels.standalone import hazards

        Built(implementation, make_problem(case, settings.device)).train(Draw(new_seed()))
        if on_gpu:
            torch.cuda.synchronize(settings.device)
        hazards.announce()
        return
    bench, draws = Workbench(settings, implementation), [Draw(new_seed())]
    bench.build(case, new_seed())
    bench.profiled(draws, contextlib.nullcontext)  # which compiles and tunes
    bench.profiled(draws, torch.cuda.profiler.profile if on_gpu else contextlib.nullcontext)


if __name__ == "__main__":
    main()
