"""Processes of a test file's own, one for each rank of a group.

On CPUs they are forks of one process, this file as a script, which imports for all of them what the file imports and
what `imported` names: in each of them that took most of the time.
"""

import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any


def replayed(part: dict[str, Any], leaves: Iterable[str], called: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Output and gradients of what a rank has, from a CUDA graph that was recorded with another x."""
    import torch

    x, graph, stream = part["x"].detach().clone(), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.no_grad():
        part["x"].zero_()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            called(part).backward(part["d_out"])
    torch.cuda.synchronize()
    for name in leaves:
        part[name].grad = None
    with torch.cuda.graph(graph, stream=stream):
        out = called(part)
        out.backward(part["d_out"])
    with torch.no_grad():
        part["x"].copy_(x)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    return {"out": out.detach()} | {name: part[name].grad for name in leaves}


def launched(
    file: str, ranks: int, arguments: tuple[object, ...], device: str, patience_s: float, more: Mapping[str, str],
    imported: tuple[str, ...] = (),
) -> list[tuple[int, str]]:  # fmt: skip
    """Exit statuses and outputs of `python FILE RANK ARGUMENTS...`, by rank; `more` is for their environment."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | more
    environment = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"} | environment
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"  # or gloo resolves the host's name, which not every sandbox can
    how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    how |= {"text": True, "start_new_session": True}
    given = list(map(str, arguments))
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, folder, str(ranks), ",".join(imported), file, *given]
            ((status, output),) = _ended([subprocess.Popen(command, env=environment, **how)], patience_s)
            assert status == 0, output
            statuses = json.loads(Path(folder, "statuses").read_text(encoding="utf-8"))
            return [(status, Path(folder, str(rank)).read_text("utf-8")) for rank, status in enumerate(statuses)]
    commands = [[sys.executable, file, str(rank), *given] for rank in range(ranks)]
    return _ended([subprocess.Popen(command, env=environment, **how) for command in commands], patience_s)


def _ended(processes: list["subprocess.Popen[str]"], patience_s: float) -> list[tuple[int, str]]:
    try:
        outputs = [process.communicate(timeout=patience_s)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # its forks, too
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


def _fork(folder: Path, ranks: int, imported: str, file: str, arguments: list[str]) -> None:
    runpy.run_path(file)
    for name in filter(None, imported.split(",")):
        importlib.import_module(name)
    forks = []
    for rank in range(ranks):
        forks.append(os.fork())
        if not forks[-1]:
            with (folder / str(rank)).open("w") as output:
                os.dup2(output.fileno(), 1)
                os.dup2(1, 2)
            sys.argv, status = [file, str(rank), *arguments], 1
            try:
                runpy.run_path(file, run_name="__main__")
                status = 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(status)  # to take down what was imported takes half a second
    statuses = [os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) for fork in forks]
    (folder / "statuses").write_text(json.dumps(statuses), encoding="utf-8")


if __name__ == "__main__":
    _fork(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:5], sys.argv[5:])
