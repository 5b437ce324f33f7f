"""How every command ends, whatever was on its way: a full disk behind stdout, Ctrl-C at any moment, a poor terminal.

Only of the standard library, so that Ctrl-C during the imports of all the rest ends as well as later.
"""

import contextlib
import errno
import io
import os
import signal
import sys
import types
from collections.abc import Callable
from typing import NoReturn, TextIO

INTERRUPTED = 130
"""The exit status after Ctrl-C."""


class Outlet(io.FileIO):
    """A descriptor that takes everything: after the first failure, which is kept, what comes is thrown away."""

    failure: OSError | None = None

    def write(self, data) -> int:  # type: ignore[no-untyped-def]
        """Bytes that were taken."""
        if self.failure is None:
            try:
                return super().write(data)
            except OSError as error:
                self.failure = error
        return memoryview(data).nbytes


class _Interrupted:
    """Whether Ctrl-C came: all that fails afterwards fails because of it, such as an import that was cut in half."""

    def __init__(self) -> None:
        self.came = False

    def __call__(self, number: int, frame: types.FrameType | None) -> NoReturn:
        self.came = True
        if _starts(frame):
            with contextlib.suppress(Exception):
                sys.stdout.flush()
            os._exit(INTERRUPTED)
        raise KeyboardInterrupt


def _starts(frame: types.FrameType | None) -> bool:
    """Whether an import is cut before any child works: C++ code of torch loses what is raised there, or aborts."""
    processes = sys.modules.get("multiprocessing")
    if processes and processes.active_children():
        return False
    while frame:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def end(command: Callable[[], int]) -> NoReturn:
    """Run a command and exit with its status; it is 130 after Ctrl-C, and 1 where stdout did not take all of it.

    Characters that a terminal does not have are printed as question marks.
    """
    ctrl_c, (out, _) = _Interrupted(), (_open("stdout"), _open("stderr"))
    before, hook = signal.signal(signal.SIGINT, ctrl_c), sys.unraisablehook
    sys.unraisablehook = lambda given: None if ctrl_c.came else hook(given)
    try:
        status = command()
    except BaseException as error:
        if not (ctrl_c.came or isinstance(error, KeyboardInterrupt)):
            raise
        status = INTERRUPTED
    signal.signal(signal.SIGINT, signal.SIG_IGN if ctrl_c.came else before)
    if not ctrl_c.came:
        sys.unraisablehook = hook
    sys.stdout.flush()
    if out and out.failure and out.failure.errno != errno.EPIPE:  # who reads a part, as head does, wants no more
        sys.stderr.write(f"Warning: stdout did not take all that was printed: {out.failure.strerror}.\n")
        status = status or 1
    sys.exit(status)


def _open(name: str) -> Outlet | None:
    """Let a standard stream of this process go through an Outlet; None where it goes somewhere else, as in tests."""
    stream: TextIO | None = getattr(sys, name)
    if stream is None:  # closed by whoever started this
        setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        return None
    if stream is not getattr(sys, f"__{name}__") or not isinstance(stream, io.TextIOWrapper):
        return None
    stream.flush()
    outlet = Outlet(stream.fileno(), "wb", closefd=False)
    setattr(sys, name, io.TextIOWrapper(
        io.BufferedWriter(outlet), stream.encoding, "replace" if stream.errors == "strict" else stream.errors,
        line_buffering=stream.line_buffering, write_through=stream.write_through,
    ))  # fmt: skip
    return outlet
