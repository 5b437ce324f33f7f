"""What runs in a child process: it answers one question after the other.

A contender's process has a Workbench and no judge, the judge's has a JudgeBench and imports no contender. A question is
the name of a method and its arguments. A contender's process answers in JSON: pickled objects would run code in its
parent. It may run under another interpreter, with another torch: of what is imported here, torch and NumPy have to be
there, and all else is pure Python that is handed over.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import gc
import importlib
import json
import logging
import multiprocessing
import os
import pkgutil
import signal
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from annotated_types import Ge, Gt, Le, Lt, MaxLen

from swiglu_bench.cases import registry
from swiglu_bench.cases.errors import BadInput, one_line
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.check.built import OwnLayout, View
from swiglu_bench.check.results import GlobalState
from swiglu_bench.machine import sources
from swiglu_bench.machine.machine import Machine
from swiglu_bench.measure.clock import DeviceLost, Sample, answers
from swiglu_bench.worker import environments, forkserver, policy
from swiglu_bench.worker.ahead import keep_no_choice
from swiglu_bench.worker.policy import Settings, Task

CONTENDER, JUDGE = "contender", "judge"
"""The roles of processes: the judge's alone is trusted."""
MOST_BYTES = 2**24
"""Of one answer."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


@dataclass(frozen=True)
class Setting:
    """What a child takes over from its parent."""

    log: Path
    environment: dict[str, str]
    threads: int
    origins: dict[str, str | None]
    """The file that each package has to come from."""
    program: list[str]
    """The beginning of a command line that calls `go_on` under another interpreter; empty: this one."""

    @classmethod
    def of_this_process(
        cls, log: Path, environment: Mapping[str, str], interpreter: environments.Interpreter | None = None
    ) -> Setting:
        """This process's settings, some environment variables changed, and a file for all that the child prints."""
        changed = {**forkserver.environment(), **environment}
        if interpreter:
            changed = {name: value for name, value in changed.items() if name not in environments.OF_PYTHON}
            program = interpreter.program("swiglu_bench.worker.worker:go_on")
            return cls(log, changed, torch.get_num_threads(), interpreter.origins(), program)
        return cls(log, changed, torch.get_num_threads(), sources.origins(), [])


class Role:
    """Answers the first question itself, which begins the process, and passes all others to its bench."""

    _bench: Any = None
    _loaded: sources.Loaded | None = None
    _failure: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        """Methods of the bench; where it could not begin, each question fails as that did."""
        if self._failure:
            raise self._failure
        if self._bench is None or name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._bench, name)

    def begin_judge(self, settings: Settings, this: Machine) -> None:
        """Be the judge's process from now on."""
        from swiglu_bench.worker.judge_bench import JudgeBench

        self._bench = JudgeBench(settings, this)

    def declare(self, known: str | Implementation) -> dict[str, Any]:
        """What an implementation declares, by its address or known from elsewhere; its code runs here."""
        found = registry.load(known) if isinstance(known, str) else registry.find(known)
        return found.as_data()

    def begin(self, settings: Settings, declared: Implementation, bench: str) -> None:
        """Import what an implementation needs, and be its process from now on; `bench` is the class that answers.

        What fails to import fails again, and is told, at the build; its own file has to load here.
        """
        answers_by = pkgutil.resolve_name(bench)
        self._loaded = sources.Loaded(filter(None, map(os.environ.get, environments.VARIABLES)))
        if declared.layer:
            self._loaded.let_go(environments.put_in_front(declared.layer))
        state = GlobalState()
        for module in declared.modules:
            with suppress(Exception):
                importlib.import_module(module)
        if settings.task is Task.VERIFY and policy.compiles(settings, declared):
            keep_no_choice(declared.backend == "inductor")
        try:
            self._bench = answers_by(settings, registry.find(declared), state)
        except Exception as error:
            self._failure = error
            raise

    def loaded(self) -> LoadedReport:
        """Where the code lies that this process has loaded from outside the installed packages."""
        return LoadedReport(paths=self._loaded.paths() if self._loaded else [])


def serve(pipe: Connection, role: str, setting: Setting) -> None:
    """Answer questions until the pipe closes."""
    sentinel = _attach(setting)
    if setting.program:
        for descriptor in (pipe.fileno(), sentinel):
            os.set_inheritable(descriptor, True)
        told = json.dumps([pipe.fileno(), sentinel, setting.threads, setting.origins])
        os.execv(setting.program[0], [*setting.program, told])
    _take_over(sentinel, setting.threads, setting.origins)
    _answer_all(pipe, role)


def settle(setting: Setting) -> None:
    """Be a child with its parent's settings, which prints into its log and ends when the parent does."""
    _take_over(_attach(setting), setting.threads, setting.origins)


def go_on() -> None:
    """Under another interpreter: be the contender's process that `serve` has begun."""
    descriptor, sentinel, threads, origins = json.loads(sys.argv[1])
    _take_over(sentinel, threads, origins)
    _answer_all(Connection(descriptor), CONTENDER)


def _answer_all(pipe: Connection, role: str) -> None:
    answerer = Role()
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        kind, value = answer(answerer, method, arguments)
        if role == JUDGE:
            pipe.send((kind, value))
        else:
            pipe.send_bytes(json.dumps((kind, value)).encode())
        if kind == "lost":
            return


def answer(answerer: Any, method: str, arguments: tuple[Any, ...]) -> tuple[str, Any]:
    """How a question ends, and what is answered, reports as plain data, or what was raised, in one line."""
    try:
        value = getattr(answerer, method)(*arguments)
        return "answer", asdict(value) if isinstance(value, Report) else value
    except BadInput as error:
        return "refused", str(error)
    except DeviceLost as error:
        return "lost", one_line(error)
    except Exception as error:  # a contender may raise anything
        with suppress(Exception):  # such as one whose text cannot be had
            logging.getLogger("swiglu_bench").info("An implementation raised:", exc_info=error)
        if isinstance(error, RuntimeError) and torch.cuda.is_initialized() and not answers(torch.device("cuda")):
            return "lost", one_line(error)
        return "failed", one_line(error)


def _attach(setting: Setting) -> int:
    """Take over the parent's environment and print into the log; what is ready once the parent has ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    if hasattr(os, "setsid"):
        os.setsid()  # the terminal's Ctrl-C is the parent's to handle; and what a child starts can be ended with it
    if sys.platform == "linux":  # a process that stands still cannot notice its parent's end by itself
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # what this process starts stays its descendant
        forkserver.let_go()
    log = os.open(setting.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(log, descriptor)
    os.close(log)
    os.environ.clear()
    os.environ.update(setting.environment)
    return int(parent.sentinel)


def _take_over(sentinel: int, threads: int, origins: dict[str, str | None]) -> None:
    """Take over all else, once this is the interpreter that answers."""
    threading.Thread(target=_end_with_parent, args=(sentinel,), daemon=True).start()
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    faulthandler.enable(all_threads=False)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(message)s")
    logging.getLogger("swiglu_bench").setLevel(logging.INFO)
    tempfile.tempdir = None  # what it was elsewhere may be remembered
    # torch.compile's pool of processes, one for each core, would work on while others are timed.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    torch.set_num_threads(threads)
    here = sources.origins()
    for package, there in origins.items():
        if here[package] != there:
            raise SystemExit(f"{package} would come from {here[package]} here; in the parent it comes from {there}")
    gc.freeze()  # all that was imported: a collection between cases then takes no time


def _end_with_parent(sentinel: int) -> None:
    wait([sentinel])
    if hasattr(os, "killpg"):
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


# What a contender's process tells its parent: it comes as JSON and is checked, for the sender may be anything

MOST_REASON = 2000
Text = Annotated[str, MaxLen(MOST_REASON)]
LONGEST_MS = 1e8
"""Of one call: what waits for a GPU is as long as a contender says of its calls."""
LONGEST_US = 1e3 * LONGEST_MS
Duration = Annotated[float, Ge(0), Le(LONGEST_US)]
"""In microseconds."""
Time = Annotated[float, Gt(0), Le(LONGEST_MS)]
"""In milliseconds."""
Bits = Annotated[int, Ge(-(2**31)), Lt(2**31)]
MOST_CALLS = 256
"""Of a chain."""
Bytes = Annotated[int, Ge(0), Lt(2**50)]


class Malformed(ValueError):
    """A report that is none: one phrase."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The base of all: nothing more and nothing less than its fields, in their types."""

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True, "allow_inf_nan": False}

    @classmethod
    @functools.cache
    def _adapter(cls) -> Any:
        import pydantic

        return pydantic.TypeAdapter(cls)

    @classmethod
    def checked(cls, data: object) -> Self:
        """The report in what a process sent; raises Malformed."""
        import pydantic  # which no contender's process needs

        if isinstance(data, cls):  # of this process
            return data
        try:
            return cls._adapter().validate_json(json.dumps(data))
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or "the message"
            raise Malformed(f"its process sent a malformed report ({place}: {first['msg']})") from None


@dataclass(frozen=True, kw_only=True)
class FaultReport(Report):
    """Why a tensor's values do not count."""

    check: Text
    reason: Text


@dataclass(frozen=True, kw_only=True)
class CallReport(Report):
    """One untimed call: which results lie in the letterbox, and what is wrong with the others."""

    delivered: list[Text]
    faults: dict[Text, FaultReport]
    """By the name of a result."""
    conduct: dict[Text, Text]
    """By the name of a check: faults that belong to no result."""
    operands: list[Text] | None = None
    """Names of the operands whose codes and scales lie in their letterboxes; None where it hands over none."""


@dataclass(frozen=True, kw_only=True)
class SampleReport(Report):
    """One timed call."""

    ms: Time
    host_us: Duration
    queue_us: Duration
    queue_filled: bool
    mhz: Duration | None = None
    delivered: list[Text]
    faults: dict[Text, FaultReport]

    def sample(self) -> Sample:
        """Its times, without the call's result."""
        return Sample(self.ms, self.host_us, self.queue_us, self.queue_filled, None, mhz=self.mhz)


@dataclass(frozen=True, kw_only=True)
class TimesReport(Report):
    """What some calls took, each by the host's clock, in milliseconds."""

    ms: Annotated[list[Time], MaxLen(MOST_CALLS)]


@dataclass(frozen=True, kw_only=True)
class ChainReport(Report):
    """A chain of calls: the bits of the mark of each result of each call."""

    marks: Annotated[list[Annotated[list[Bits], MaxLen(64)]], MaxLen(MOST_CALLS)]


Sizes = Annotated[list[Bytes], MaxLen(8)]


@dataclass(frozen=True, kw_only=True)
class ViewReport(Report):
    """A `built.View`; `order` has the shape `rows`."""

    parameter: Text
    size: Sizes
    stride: Sizes
    offset: Bytes
    order: list[Bytes] | None
    rows: Sizes
    columns: bool
    flipped: bool


@dataclass(frozen=True, kw_only=True)
class LayoutReport(Report):
    """A `built.OwnLayout`."""

    sizes: dict[Text, Sizes]
    views: dict[Text, ViewReport]

    @classmethod
    def of(cls, layout: OwnLayout) -> Self:
        """What is told of a layout."""
        views = {
            name: ViewReport(
                parameter=view.parameter, size=list(view.size), stride=list(view.stride), offset=view.offset,
                order=None if view.order is None else view.order.flatten().tolist(),
                rows=[] if view.order is None else list(view.order.shape), columns=view.columns, flipped=view.flipped,
            )
            for name, view in layout.views.items()
        }  # fmt: skip
        return cls(sizes={name: list(size) for name, size in layout.sizes.items()}, views=views)

    def layout(self, weights: Mapping[str, tuple[int, ...]]) -> OwnLayout:
        """The layout of weights of these sizes; raises Malformed where it is none."""
        try:
            views = {
                name: View(
                    told.parameter, tuple(told.size), tuple(told.stride), told.offset,
                    None if told.order is None else torch.tensor(told.order).view(told.rows),
                    told.columns, told.flipped,
                )
                for name, told in self.views.items()
            }  # fmt: skip
            return OwnLayout({name: tuple(size) for name, size in self.sizes.items()}, views).checked(weights)
        except (ValueError, RuntimeError, IndexError, KeyError) as error:
            raise Malformed(f"its process sent a malformed report (layout: {one_line(error)})") from None


@dataclass(frozen=True, kw_only=True)
class BuildReport(Report):
    """An implementation that was built."""

    gradients: list[Text]
    """Names of the gradients that it yields."""
    layout: LayoutReport | None = None
    """Where its weights lie, if in parameters of its own."""


@dataclass(frozen=True, kw_only=True)
class MemoryReport(Report):
    """Bytes above inputs and weights."""

    saved_bytes: Bytes
    peak_bytes: Bytes
    kept_bytes: Bytes


@dataclass(frozen=True, kw_only=True)
class UsageReport(Report):
    """One scenario of a model's use: results that lie in the letterbox, and how it ended."""

    delivered: list[Text]
    raised: Text
    """The error that it ended with, or ""."""
    built: bool
    """Whether the layer could be built, without which there is no scenario."""
    conduct: dict[Text, Text]


@dataclass(frozen=True, kw_only=True)
class LoadedReport(Report):
    """Files and folders with code, by their paths."""

    paths: Annotated[list[Annotated[str, MaxLen(4096)]], MaxLen(sources.MOST_OPENED)]


@dataclass(frozen=True, kw_only=True)
class CheckReport(Report):
    """One check of the contract."""

    verdict: Literal["pass", "fail", "unsupported", "not run"]
    reason: Text
