"""Processes of a test file's own, one for each rank of a group."""

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any


def launched(
    file: str, ranks: int, arguments: tuple[object, ...], device: str, patience_s: float, more: Mapping[str, str]
) -> list[tuple[int, str]]:
    """Exit statuses and outputs of `python FILE RANK ARGUMENTS...`, by rank; `more` is for their environment."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | more
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    environment = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"} | environment
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"  # or gloo resolves the host's name, which not every sandbox can
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    commands = [[sys.executable, file, str(rank), *map(str, arguments)] for rank in range(ranks)]
    processes = [subprocess.Popen(command, env=environment, text=True, **pipes) for command in commands]
    try:
        outputs = [process.communicate(timeout=patience_s)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]
