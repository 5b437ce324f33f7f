"""Hardware counters of the kernels of one call, read by NVIDIA Nsight Compute (`ncu`), which has to be installed.

It runs a program and replays each of its kernels as often as the counters need; what is timed meanwhile is worthless.
"""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TIME = "gpu__time_duration.sum"
TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"
DRAM, L2, REGISTERS = "dram__bytes.sum", "lts__t_bytes.sum", "launch__registers_per_thread"
LIMIT_S = 600.0
NOT_PERMITTED = (
    "ncu may not read the GPU's counters (ERR_NVGPUCTRPERM): run it as root, or load the driver with "
    "NVreg_RestrictProfilingToAdminUsers=0"
)


class NoCounters(RuntimeError):
    """Why there are none, in one phrase."""


@dataclass(frozen=True)
class Counters:
    """Of all kernels of one call together; None: this GPU does not have the counter."""

    tensor_pct: float | None
    """Cycles in which the tensor cores worked, of all: the kernels' mean, weighted by their times."""
    dram_bytes: int | None
    l2_bytes: int | None
    registers_per_thread: int | None
    """Of the kernel that takes longest."""


def counters(ncu: str, program: Sequence[str]) -> Counters:
    """Run a program under `ncu`, between the starts and stops of the CUDA profiler in it. Raises NoCounters."""
    with tempfile.TemporaryDirectory(prefix="swiglu-bench-") as folder:
        log, printed = Path(folder) / "ncu.csv", Path(folder) / "printed"
        command = [
            ncu, "--csv", "--page", "raw", "--print-units", "base", "--metrics",
            ",".join((TIME, TENSOR, DRAM, L2, REGISTERS)), "--profile-from-start", "off", "--target-processes", "all",
            "--clock-control", "none", "--log-file", str(log), *program,
        ]  # fmt: skip
        # In another locale, ncu writes numbers with other separators.
        environment = os.environ | {"LC_ALL": "C", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            with printed.open("wb") as out:
                subprocess.run(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, timeout=LIMIT_S
                )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NoCounters(f"ncu failed: {error}") from None
        texts = [file.read_text(encoding="utf-8", errors="replace") for file in (log, printed) if file.exists()]
    return parse("\n".join(texts))


def parse(text: str) -> Counters:
    """The counters in what `ncu --csv --page raw` wrote: a line of names, one of units, and one for each kernel.

    Raises NoCounters where there are none, with the reason that ncu or the program gave.
    """
    lines = text.splitlines()
    head = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    table = [line for line in lines[head:] if line.startswith('"')]
    kernels = [row for row in csv.DictReader(table) if (row["ID"] or "").isdigit()]
    if not kernels:
        raise NoCounters(_reason(lines))

    def values(metric: str) -> list[float]:
        """Of each kernel; empty where one has none."""
        found = [_number(row.get(metric)) for row in kernels]
        return [value for value in found if value is not None] if None not in found else []

    times, tensor, registers = values(TIME), values(TENSOR), values(REGISTERS)
    dram, level2 = values(DRAM), values(L2)
    if not times:
        raise NoCounters("ncu gave the kernels no times")
    longest = times.index(max(times))
    share = sum(time * value for time, value in zip(times, tensor, strict=True)) / sum(times) if tensor else None
    return Counters(
        tensor_pct=share,
        dram_bytes=round(sum(dram)) if dram else None,
        l2_bytes=round(sum(level2)) if level2 else None,
        registers_per_thread=int(registers[longest]) if registers else None,
    )


def _number(text: str | None) -> float | None:
    try:
        return float((text or "").replace(",", ""))
    except ValueError:  # n/a
        return None


def _reason(lines: Sequence[str]) -> str:
    if any("ERR_NVGPUCTRPERM" in line for line in lines):
        return NOT_PERMITTED
    errors = [re.sub(r"^==(ERROR|WARNING)==\s*", "", line) for line in lines if re.match("==(ERROR|WARNING)==", line)]
    said = [line for line in lines if line.strip() and not line.startswith("==")]
    last = (errors[:1] or said[-1:] or ["it wrote nothing"])[0].strip().rstrip(".")
    return f"ncu saw no kernel: {last}"
