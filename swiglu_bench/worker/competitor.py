"""Programs that compete with a measurement: one for each CPU and, on a GPU, one that keeps it busy.

Each is this file, run with a device's name.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import torch

SIDE = {"cpu": 256, "cuda": 4096}


@contextlib.contextmanager
def competitors(device: torch.device) -> Iterator[int]:
    """Let them work until this is left; how many there are."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    on = ["cpu"] * cpus + ([str(device)] if device.type == "cuda" else [])
    started = [subprocess.Popen([sys.executable, __file__, kind], stdin=subprocess.PIPE) for kind in on]
    try:
        yield len(started)
    finally:
        for program in started:
            program.kill()
            program.wait()


def _work(device: torch.device) -> None:
    """Until this process is killed, or whoever started it has ended."""
    torch.set_num_threads(1)
    matrix = torch.randn(SIDE[device.type], SIDE[device.type], device=device)
    began_under = os.getppid()
    while os.getppid() == began_under:
        for _ in range(20):
            matrix @ matrix
        if device.type == "cuda":
            torch.cuda.synchronize(device)


if __name__ == "__main__":
    _work(torch.device(sys.argv[1]))
