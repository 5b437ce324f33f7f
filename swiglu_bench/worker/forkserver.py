"""How child processes come about: forked from one that has imported what they need and has done nothing else.

That one has not touched the GPU and has run no operation of torch, so a fork of it is sound. It takes milliseconds, the
imports take seconds. Where there is no fork, children start from nothing. Threads may fork and wait at the same time.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from multiprocessing import connection, resource_tracker
from typing import Any

METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
CONTEXT = multiprocessing.get_context(METHOD)
PRELOAD = [
    "swiglu_bench.worker.worker", "swiglu_bench.worker.workbench", "swiglu_bench.worker.judge_bench",
    "torch.fx.experimental.symbolic_shapes",  # which the first backward of a process imports, in a quarter of a second
]  # fmt: skip
CONTEXT.set_forkserver_preload(PRELOAD)
LOCK = threading.Lock()
"""Held while the environment is another, and while an exit status is read: starting a process reads those of all
others, and of two readers of one status one gets nothing."""


def start(*also: str) -> None:
    """Let the imports, and those of `also`, begin before the first child is wanted. The environment has to be final."""
    if METHOD == "forkserver":
        from multiprocessing import forkserver

        CONTEXT.set_forkserver_preload([*PRELOAD, *also])

        with _alone():
            forkserver.ensure_running()


def fork(target: Callable[..., object], *arguments: object) -> Any:
    """A new process that calls `target`."""
    process = CONTEXT.Process(target=target, args=arguments)  # type: ignore[attr-defined]
    try:
        with _alone():
            process.start()
    except BaseException:  # Ctrl-C that was held back: nobody will know of this process
        if process.pid is not None:
            process.kill()
            process.join()
        raise
    return process


def ended(process: Any, timeout_s: float) -> bool:
    """Wait for the end of a process; whether it came in time. Then its exit status is known."""
    connection.wait([process.sentinel], timeout_s)
    with LOCK:
        process.join(0)
        return process.exitcode is not None


def let_go() -> None:
    """In a child: close the handle to the server, so that it ends with the program though children stand still."""
    from multiprocessing import forkserver

    server: Any = forkserver._forkserver
    alive, server._forkserver_alive_fd = server._forkserver_alive_fd, None
    if alive is not None:
        os.close(alive)


def environment() -> dict[str, str]:
    """This process's environment, without what starting a process changes in it temporarily."""
    with LOCK:
        return dict(os.environ)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Processes started meanwhile do not import this program's main module again, and leave no message when killed.

    What a killed process shared is cleaned up by multiprocessing's tracker, which would warn that it was leaked.
    Packages are to come from where they come from here, and not from the current folder. And torch is to ask NVML
    whether there is a GPU: asking CUDA would make it unusable in every fork. Ctrl-C is this program's alone: until the
    server ignores it, which it does after its imports, it is held back.
    """
    wanted = {
        "PYTHONWARNINGS": "ignore:resource_tracker:UserWarning",
        "PYTHONPATH": os.pathsep.join(os.path.abspath(folder) for folder in sys.path),
        "PYTHONSAFEPATH": "1",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }
    with LOCK:
        main, before = sys.modules["__main__"], {name: os.environ.get(name) for name in wanted}
        sys.modules["__main__"], held = types.ModuleType("__main__"), None
        os.environ.update(wanted)
        try:
            resource_tracker.ensure_running()  # which holds Ctrl-C back from itself
            held = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT]) if METHOD == "forkserver" else None
            yield
        finally:
            if held is not None:
                signal.pthread_sigmask(signal.SIG_SETMASK, held)
            sys.modules["__main__"] = main
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
