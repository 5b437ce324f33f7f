"""check: admit the hand-scheduled kernels under the Triton that is installed here, on this GPU.

    python -m swiglu_kernels.check [--device cuda:0] [--file FILE]

Each kernel of `hopper/admission.py` is compiled and run in a process of its own, which has a time limit: in all its
forms at small sizes that no tile divides, against fp64, between margins that nothing may touch, in memory that begins
as NaN (`standalone/odd_sizes.py`); then at an odd and at a middle size against the portable kernel. Then one process
times those that were right beside the portable kernels, at the middle size. A kernel that is wrong, breaks its process,
takes too long or is slower stays aside, named, while the others run. The verdicts are kept in the user's cache folder
for this version of Triton and torch, this model of GPU and these sources.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from swiglu_kernels.hopper import admission, shared
from swiglu_kernels.runtime import sources
from swiglu_kernels.runtime.backend import capability_of, card_of
from swiglu_kernels.runtime.compiling import PACKAGE, environment

SLOWER = 1.25
"""Times the portable kernel's time from which a kernel is not admitted: less is a matter of sizes and cards."""


def why_nothing_to_check(device: torch.device) -> str | None:
    """Say why there is nothing to check on a device, or return None."""
    capability = capability_of(device)
    if capability is None or capability[0] != 9:
        found = f"{device}" if capability is None else f"compute capability {'.'.join(map(str, capability))}"
        return f"the hand-scheduled kernels are for GPUs of compute capability 9.0 (H100, H200), and this is {found}"
    return shared.GLUON_MISSING


def check(
    device: torch.device | str = "cuda", *, file: Path | str | None = None, timeout_s: float = 300,
    tell: Callable[[str], object] = print,
) -> admission.Verdicts:  # fmt: skip
    """Compile, run and time every hand-scheduled kernel, and keep which of them may run.

    Args:
        device: a GPU of compute capability 9.0.
        file: where the verdicts are kept; None: the file in the user's cache folder that every later process reads.
        timeout_s: for each kernel, and for timing them.
        tell: is called with a line for each kernel.

    Returns:
        The verdicts.

    Raises:
        RuntimeError: this is no such GPU, or Triton has no Gluon for it; or the file cannot be written.
    """
    device = torch.device("cuda" if not torch.cuda.is_available() else device)
    if reason := why_nothing_to_check(device if torch.cuda.is_available() else torch.device("cpu")):
        raise RuntimeError(reason)
    place = Path(file) if file else admission.file()
    if place is None:
        raise RuntimeError("there is no cache folder to keep verdicts in; name a file")
    found = _found(device, timeout_s, tell)
    verdicts = admission.Verdicts(
        admission.triton_version(), torch.__version__, card_of(device), sources.of_kernels(),
        time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), found,
    )  # fmt: skip
    try:
        admission.keep(verdicts, place)
    except OSError as error:
        raise RuntimeError(f"{place} cannot be written: {error.strerror}") from error
    tell(f"{sum(not result['refused'] for result in found.values())} of {len(found)} kernels admitted; kept in {place}")
    return verdicts


def _found(device: torch.device, timeout_s: float, tell: Callable[[str], object]) -> dict[str, dict[str, Any]]:
    """The figures of each kernel, and why it is refused."""
    found: dict[str, dict[str, Any]] = {}
    at_once = max(1, min(len(admission.KERNELS), len(os.sched_getaffinity(0)) - 1))
    with ThreadPoolExecutor(at_once) as pool:
        runs = {kernel: pool.submit(_child, ["--run", kernel], device, timeout_s) for kernel in admission.KERNELS}
        for kernel, run in runs.items():
            results, ended = run.result()
            found[kernel] = {"refused": ended or "its process ended without a result"} if not results else results[0]
            tell(f"{kernel}: {_words(found[kernel])}")
    right = [kernel for kernel, result in found.items() if not result["refused"]]
    results, ended = _child(["--time", *right], device, timeout_s) if right else ([], "")
    timed = {result.pop("kernel"): result for result in results}
    for kernel in right:
        result = found[kernel]
        result |= timed.get(kernel, {"refused": f"it was not timed: {ended or 'its process ended without a result'}"})
        if result.get("ratio", 0) > SLOWER:
            result["refused"] = f"it takes {result['ratio']:.2f} times as long as the portable kernel at {result['at']}"
        tell(f"{kernel}: {_words(result)}")
    return found


def _words(result: dict[str, Any]) -> str:
    if result["refused"]:
        return f"refused: {result['refused']}"
    if "ratio" in result:
        return f"{result['by_hand_us']:.0f} us at {result['at']}, the portable kernel {result['portable_us']:.0f} us"
    return f"right in {result['launches']} launches, at most {result['roundings']:.2f} roundings off"


def _child(arguments: list[str], device: torch.device, timeout_s: float) -> tuple[list[dict[str, Any]], str]:
    """Run this package in another process; what it found, and how it ended if not well."""
    command = [sys.executable, "-m", f"{PACKAGE.name}.check", "--device", str(device), *arguments]
    try:
        done = subprocess.run(
            command, env=environment(), capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired as expired:
        return list(_results(expired.stdout or b"")), f"it took more than {timeout_s:g} s"
    last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "")
    ended = f"its process ended with status {done.returncode}: {last.strip()[:300]}" if done.returncode else ""
    return list(_results(done.stdout)), ended


def _results(output: str | bytes) -> Iterator[dict[str, Any]]:
    text = output.decode(errors="replace") if isinstance(output, bytes) else output
    for line in text.splitlines():
        if line.startswith("{"):
            yield json.loads(line)
