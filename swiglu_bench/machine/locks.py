"""One sweep at a time on a GPU and in a folder, across processes. A file beside each lock names its holder."""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from swiglu_bench.cases.errors import BadInput
from swiglu_bench.machine.system import gpu_uuid
from swiglu_bench.rows.figures import reason

POLL_S = 0.5


def device(
    chosen: torch.device, command: str, wait: bool, tell: Callable[[str], object]
) -> contextlib.AbstractContextManager[None]:
    """Hold a device as `gpu` does, so that nothing else measures on it meanwhile; a CPU has no lock."""
    return gpu(gpu_uuid(chosen), command, wait, tell) if chosen.type == "cuda" else contextlib.nullcontext()


@contextlib.contextmanager
def gpu(uuid: str, command: str, wait: bool, tell: Callable[[str], object]) -> Iterator[None]:
    """Hold a GPU, by its UUID so that its number in CUDA_VISIBLE_DEVICES does not matter.

    Where another sweep of this user holds it, `tell` is called with its holder and this one waits, or raises BadInput.
    """
    folder = Path(tempfile.gettempdir()) / f"swiglu-bench-{getattr(os, 'getuid', int)()}"
    path = folder / f"{uuid}.lock"
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            if not _hold(stack, path, command, timeout_s=0):
                held = f"The GPU is in use by {_holder(path)}"
                if not wait:
                    raise BadInput(f"{held}; wait for it to end, or leave out --no-wait.")
                tell(f"{held}; waiting for it to end.")
                _hold(stack, path, command, timeout_s=-1)
        except OSError as error:
            tell(f"Warning: {folder} cannot be used: {reason(error)}; another sweep on this GPU will not be noticed.")
        yield


@contextlib.contextmanager
def folder(path: Path, command: str) -> Iterator[None]:
    """Hold an output folder, which must exist; raises BadInput where another sweep writes into it."""
    lock = path / ".lock"
    with contextlib.ExitStack() as stack:
        if not _hold(stack, lock, command, timeout_s=0):
            raise BadInput(f"--out: {path} is being written by {_holder(lock)}; wait for it, or give another folder.")
        yield


def _hold(stack: contextlib.ExitStack, path: Path, command: str, timeout_s: float) -> bool:
    """Take a lock until the stack unwinds; False where that was not possible in time."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=timeout_s, poll_interval=POLL_S)
    except Timeout:
        return False
    stack.callback(lock.release)
    # Removed while the lock is held: a process that waits on the removed file notices that and locks a new one.
    stack.callback(path.unlink, missing_ok=True)
    holder = path.with_suffix(".holder")
    stack.callback(holder.unlink, missing_ok=True)
    with contextlib.suppress(OSError):  # a full disk; the lock itself holds
        holder.write_text(f"process {os.getpid()}: {command}", encoding="utf-8", errors="backslashreplace")
    return True


def _holder(path: Path) -> str:
    """Who holds a lock, by the file beside it."""
    with contextlib.suppress(OSError):  # the holder has just begun, or just ended
        return " ".join(path.with_suffix(".holder").read_text(encoding="utf-8").split()) or "another process"
    return "another process"
