"""What runs in a contender's process: one implementation, built for one case, called as its parent says.

Nothing is judged here, and no time that counts is kept: results go into the letterbox, samples to the parent at once.
"""

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from swiglu_bench.cases import fp8
from swiglu_bench.cases.cases import PLAIN, Case, Extras, Mode
from swiglu_bench.cases.errors import one_line
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.check import results, usage
from swiglu_bench.check.built import Built, Call, Produced
from swiglu_bench.check.chain import Chain
from swiglu_bench.check.inputs import Desk, Draw, make_problem, new_draw, numbers, torch_dtype
from swiglu_bench.check.judge import REFERENCE
from swiglu_bench.measure.clock import Clock, CudaClock, DeviceLost, LatencyClock, answers, make_clock
from swiglu_bench.measure.resources import UNJOINED, Graph, capture
from swiglu_bench.worker import worker
from swiglu_bench.worker.ahead import choose_nothing, every_candidate
from swiglu_bench.worker.policy import Settings

HOLD_CYCLES = 10_000_000
"""How long the GPU is kept from its queue: some 5 ms, more than the host needs to queue a call."""
POOL_STREAMS = 32
"""Of either priority, in the pools from which torch takes streams."""
RECOMPILE_LIMIT = 64
USAGE = "usage"
"""The kind of letterbox that the judge closes as soon as it has read it; it is open here until the next one."""
Told = tuple[list[str], dict[str, worker.FaultReport]]
"""Names of the results that lie in a letterbox, and what is wrong with the others."""
_sleep = getattr(torch.cuda, "_sleep", None)


class Workbench:
    """One implementation in one process. Methods are asked for by name, from the parent."""

    def __init__(
        self, settings: Settings, implementation: Implementation, state: results.GlobalState | None = None
    ) -> None:
        """Make the device's context. `state` is that of before the implementation was imported."""
        self.settings = settings
        self._implementation = implementation
        self._device = settings.device
        torch.zeros((), device=settings.device)
        self._boxes: dict[str, results.Letterbox] = {}
        self._earlier: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
        self._begun: Call | None = None
        self._graph: Graph | None = None
        self._chain: Chain | None = None
        self._layers: list[Built] = []
        self._used: tuple[object, Built] | None = None
        self._state = state or results.GlobalState()
        self._replaced: set[str] = set()

    @cached_property
    def clock(self) -> Clock:
        """The device's clock."""
        return make_clock(self._device, self.settings.cold_l2)

    @cached_property
    def _streams(self) -> list[torch.cuda.Stream]:
        """Every stream that torch hands out on a GPU."""
        return [torch.cuda.Stream(self._device, priority) for priority in (0, -1) for _ in range(POOL_STREAMS)]

    @cached_property
    def _hot(self) -> Clock:
        return make_clock(self._device, cold_l2=False)

    @cached_property
    def _latency(self) -> LatencyClock:
        assert isinstance(self.clock, CudaClock)
        return LatencyClock(self.clock)

    def warm_up(self, case: Case) -> None:
        """Do the suite's own part of a call once, at a small size: what torch and CUDA load lazily is loaded then.

        No code of the contender's runs here, so that processes may do this side by side.
        """
        small = usage.small_case(case, self._device.type)
        built, draw = Built(REFERENCE, make_problem(small, self._device)), Draw(0)
        for _ in range(2):
            produced = built.train(draw) | built.infer(draw)
            results.poison(built.problem, backward=True)
            for value in (*produced.values(), *built.desk.given.values()):
                results.fingerprint(value)
            call = built.call(Mode.STEP, draw)
            self.clock.sample(lambda: call.run(self.clock.pause), 100.0, call.prepare)  # noqa: B023
        self.clock.synchronize()

    def build(self, case: Case, weights_seed: int, extras: Extras = PLAIN) -> worker.BuildReport:
        """Build the implementation for a case; raises what it raises."""
        self.forget()
        self._put_back()
        forget_compiled()
        if self._implementation.backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1":
            _round_bfloat16()
        self._problem, self._weights_seed = make_problem(case, self._device, extras, weights_seed), weights_seed
        self._built = Built(self._implementation, self._problem)
        self._weights = self._built.parameters | self._problem.parameters
        self._built.as_they_lie, layout = True, self._built.layout
        told = worker.LayoutReport.of(layout) if layout else None
        return worker.BuildReport(gradients=list(self._built.gradients), layout=told)

    def numbers(self) -> str:
        """A mark of the random numbers that are drawn here for the case."""
        return numbers(self._problem.case, self._device)

    def rehearse(self, case: Case, weights_seed: int, extras: Extras = PLAIN) -> None:
        """Build and call it once, where nothing is timed or judged: what has to be compiled is on disk afterwards."""
        choose_nothing(self._implementation.backend == "inductor")
        self.build(case, weights_seed, extras)
        with every_candidate():
            self._built.call(case.mode, Draw(weights_seed))()
        self.clock.synchronize()
        self.forget()

    def forget(self) -> None:
        """Let go of the last case, and of the device's memory."""
        for name in ("_built", "_problem", "_weights"):
            self.__dict__.pop(name, None)
        self._earlier, self._begun, self._graph, self._layers = ({}, {}), None, None, []
        self._used, self._chain = None, None
        self._boxes.clear()
        torch.cuda.empty_cache()

    def open_letterbox(self, kind: str, address: bytes, sizes: results.Sizes) -> None:
        """Map the judge's memory for results of a kind."""
        dtype = {"codes": fp8.E4M3, "scales": torch.float32}.get(kind, torch_dtype(self._problem.case))
        self._open(kind, address, sizes, dtype)

    def _open(self, kind: str, address: bytes, sizes: results.Sizes, dtype: torch.dtype) -> results.Letterbox:
        """The judge has closed the last of this kind, and that of usage: they go before another is mapped."""
        for closed in (kind, USAGE):
            self._boxes.pop(closed, None)
        self._boxes[kind] = results.Letterbox.open(address, sizes, dtype)
        return self._boxes[kind]

    def check(self, draw: Draw, train: bool) -> worker.CallReport:
        """One call, forward alone or with its backward, watched: what it changes that it must not, what comes late."""
        problem, built = self._problem, self._built
        overwrites = built.implementation.overwrites if train else frozenset()
        before = _fingerprints(self._weights)
        chance = results.random_state()
        results.poison(problem, backward=train)
        if self._device.type == "cuda" and _sleep is not None:
            self._hold(everywhere=bool(self._earlier[0]))
        handed: dict[str, tuple[Tensor, Tensor]] = {}
        if built.hand_over:
            built.hand_over(handed)
        produced = built.train(draw) if train else built.infer(draw)
        prints = _fingerprints(_plain(produced))  # queued right behind the work, read when everything is done
        desk = built.desk
        others = [value for name, value in desk.given.items() if name not in overwrites]
        delivered, faults = self._deliver("results", produced, [*others, *self._weights.values()])
        self.clock.synchronize()
        late = _changed(_plain(produced), prints)
        for name in late:
            unfinished = "was not complete when its stream was done"
            faults[name] = worker.FaultReport(check="complete on return", reason=unfinished)
        for name in _changed(*self._earlier):
            if name in produced and name not in late and not self._lies_on_desk(self._earlier[0][name]):
                faults.setdefault(name, worker.FaultReport(check="kept", reason="was changed by the next call"))
        conduct = self._conduct(draw, overwrites, before, train and bool(built.gradients))
        if self._earlier[0] and results.random_state() != chance:  # the first call may tune itself with random numbers
            conduct["random state"] = "drew from a global random number generator, which SwiGLU does not need"
        self._earlier = _plain(produced), prints
        operands = self._deliver_operands(handed, conduct) if built.hand_over else None
        torch.cuda.empty_cache()  # other processes need the memory that this one's allocator would keep
        delivered, faults = self._by_weight([n for n in delivered if n not in late], faults)
        return worker.CallReport(delivered=delivered, faults=faults, conduct=conduct, operands=operands)

    def _hold(self, everywhere: bool) -> None:
        """Keep the GPU from this stream's queue, and `everywhere` from those of torch's pools.

        Work on a stream that is joined too early, or never, then has not ended when its result is read.
        """
        assert _sleep is not None
        _sleep(HOLD_CYCLES)
        for stream in self._streams if everywhere else ():
            with torch.cuda.stream(stream):
                _sleep(HOLD_CYCLES)

    def _deliver_operands(self, handed: dict[str, tuple[Tensor, Tensor]], conduct: dict[str, str]) -> list[str]:
        """Hand over codes and scales, and keep none from now on; what has the wrong form goes into `conduct`."""
        assert self._built.hand_over
        self._built.hand_over(None)
        known = self._boxes["codes"].tensors
        if unknown := sorted(set(handed) - set(known)):
            conduct["recipe"] = f"handed over codes of {', '.join(unknown)}; the operands are {', '.join(known)}"
        found = {name: pair for name, pair in handed.items() if name in known}
        for number, kind in enumerate(("codes", "scales")):
            _, faults = self._deliver(kind, {name: pair[number] for name, pair in found.items()}, [])
            for name, fault in faults.items():
                conduct["recipe"] = f"the {kind} of {name}: {fault.reason}"
                found.pop(name)
        self.clock.synchronize()
        return list(found)

    def lead_in(self, draw: Draw) -> None:
        """Make an untimed call before a timed one whose inputs are not drawn yet, as in a loop.

        The host's caches are warm then. Of a backward, the forward on this draw's activations. All of it is done when
        this returns, on the GPU as well: none of it is part of the turn that follows.
        """
        self._put_back()
        mode = self._problem.case.mode
        results.poison(self._problem, mode is not Mode.FORWARD)
        if not self.settings.rule.rest_s:
            self._built.call(mode, Draw(~draw.seed))()
        if mode is Mode.BACKWARD:
            self._begun = self._built.call(mode, draw)
            self._begun.begin()
        self.clock.synchronize()

    def sample(self, draw: Draw, lead_us: float, timed_by: str = "", led: bool = False) -> worker.SampleReport:
        """One timed call of the case's mode, inputs drawn behind the spin; `led`: its `lead_in` came before.

        `timed_by` is "" for the device's clock, "latency", or "hot" where the L2 is not flushed.
        """
        if not led:
            self.lead_in(draw)
        begun, self._begun = self._begun, None
        latency = timed_by == "latency"
        call = begun or self._built.call(self._problem.case.mode, draw, upstream_first=latency)
        own = self._hot if timed_by == "hot" else self.clock
        clock, pause = (self._latency, contextlib.nullcontext) if latency else (own, own.pause)
        return self._take(clock, lambda: call.run(pause), lambda: call.prepare(draw), call.results, lead_us)

    def first_calls(self, counts: Sequence[int]) -> worker.TimesReport:
        """One call of the layer with each of some token counts: a forward, or else a forward and backward."""
        found = []
        for tokens in counts:
            case = dataclasses.replace(self._problem.case, tokens=tokens)
            desk, draw = Desk(dataclasses.replace(self._problem, case=case)), new_draw()
            given, upstream = desk.activations(draw), desk.upstream(draw)
            self.clock.synchronize()
            began = time.perf_counter()
            if case.mode is Mode.FORWARD:
                with torch.no_grad():
                    self._built.forward(*given)
            else:
                self._built.run_on(given, upstream)
            self.clock.synchronize()
            found.append((time.perf_counter() - began) * 1e3)
        return worker.TimesReport(ms=found)

    def record(self, mode: Mode) -> str:
        """Record the work of a mode, for all layers, as a CUDA graph; why it cannot be recorded, or ""."""
        try:
            self._layers = [self._built]
            for _ in range(1, self.settings.layers):  # built again, on the same weights in memory of their own
                again = make_problem(self._problem.case, self._device, self._problem.extras, self._weights_seed)
                self._layers.append(Built(self._implementation, again))
                self._layers[-1].desk.lay_out(Draw(self._weights_seed))
            calls = [built.recordable(mode) for built in self._layers]
            self._graph = capture(lambda: [call() for call in calls], self._device)
        except Exception as error:  # whatever a contender or CUDA has against being recorded
            self._layers = []
            return self._not_recorded(error)
        return ""

    def _not_recorded(self, error: Exception) -> str:
        """Why not, in a word that the parent knows where work was left on a stream that is not joined."""
        if UNJOINED in str(error):  # the process is of no use after it, and its parent ends it
            return UNJOINED
        self._must_answer(error)
        return f"It cannot be recorded: {one_line(error)}"

    def replay(self, draw: Draw, lead_us: float) -> worker.SampleReport:
        """One timed replay on new inputs, which are copied in before it.

        One layer, which none can know when it is recorded, has those of the draw and hands over its results.
        """
        graph, layers = self._graph, self._layers
        assert graph is not None
        judged = draw.seed % len(layers)

        def load() -> None:
            for number, built in enumerate(layers):
                built.desk.lay_out(draw if number == judged else Draw(draw.seed ^ ((number + 1) << 8)))

        return self._take(self.clock, graph.replay, load, lambda: graph.result[judged](), lead_us)

    def lay_chain(self, draw: Draw, calls: int, recorded: bool) -> str:
        """Make a chain of calls of the case's mode ready; why it cannot be recorded, where it is to be, or ""."""
        self._put_back()
        self._chain = None
        mode, sums = self._problem.case.mode, self._boxes["results"].tensors
        chain = Chain(self._built, mode, draw, calls, sums, self.clock.flush)
        if recorded:
            try:
                chain.record(self._device)
            except Exception as error:  # whatever a contender or CUDA has against being recorded
                return self._not_recorded(error)
        self.clock.synchronize()
        self._chain = chain
        return ""

    def chain(self, key: int | None) -> worker.ChainReport:
        """Make the calls of the chain that is ready, its first inputs by `key`; the sums of results are handed over.

        Without a key nothing is done, which shows what the question takes.
        """
        if key is None:
            return worker.ChainReport(marks=[])
        assert self._chain is not None
        marks = self._chain.run(key)
        self.clock.synchronize()
        return worker.ChainReport(marks=marks)

    def repeat(self, calls: int) -> None:
        """Make the same call `calls` times back to back, and wait until all are done."""
        work = self._built.recordable(self._problem.case.mode)
        for _ in range(calls):
            work()
        self.clock.synchronize()

    def profiled(self, draws: Sequence[Draw], around: Callable[[], AbstractContextManager[object]]) -> None:
        """Calls of the case's mode, each inside of an `around` when its inputs are laid out."""
        for draw in draws:
            call = self._built.call(self._problem.case.mode, draw, upstream_first=True)
            call.begin()
            call.prepare()
            self.clock.synchronize()
            with around():
                call.run(contextlib.nullcontext)
                self.clock.synchronize()
            call.results()

    def trace(self, draws: Sequence[Draw], file: str) -> None:
        """A trace of calls by torch's profiler, as JSON that Perfetto and chrome://tracing open."""
        self.profiled(draws, contextlib.nullcontext)
        label = f"swiglu {self._problem.case.mode}"
        with torch.profiler.profile(record_shapes=True) as profiler:
            self.profiled(draws, lambda: torch.profiler.record_function(label))
        profiler.export_chrome_trace(file)

    def memory(self, draw: Draw) -> worker.MemoryReport:
        """Bytes of one forward and backward."""
        return worker.MemoryReport(**dataclasses.asdict(self._built.memory(draw)))

    def deliver_weights(self) -> worker.CallReport:
        """Hand over the weights as the contender has them now."""
        wanted, built = self._boxes["weights"].tensors, self._built
        views = {name: view for name, view in built.views.items() if name in wanted}
        found = {name: view.read(built.parameters[view.parameter].detach()) for name, view in views.items()}
        delivered, _ = self._deliver("weights", found, [])
        self.clock.synchronize()
        return worker.CallReport(delivered=delivered, faults={}, conduct={})

    def conduct(self) -> worker.CallReport:
        """What it has replaced or left behind in its process."""
        self._put_back()
        found = {"own clock": f"replaced {', '.join(sorted(self._replaced))}"} if self._replaced else {}
        if self._state.changed:
            found["global state"] = f"changed {', '.join(sorted(self._state.changed))}"
        return worker.CallReport(delivered=[], faults={}, conduct=found)

    def use(self, asked: usage.Question, address: bytes, sizes: results.Sizes) -> worker.UsageReport:
        """Run a scenario of a model's use: at the case's own size on the layer that is timed, else on one for that."""
        box = self._open(USAGE, address, sizes, torch_dtype(asked.case))
        config: Any = sys.modules.get("torch._dynamo.config")
        if config is not None:  # a function may be compiled for the case and for every scenario, each in its own sizes
            config.recompile_limit = max(config.recompile_limit, RECOMPILE_LIMIT)
        delivered: list[str] = []
        torn: list[str] = []
        raised, built, changes = "", False, asked.name == usage.changed_weights.__name__
        try:
            layer = self._layer_to_use(asked)
            built = True
            before = {} if changes else _fingerprints(layer.parameters)
            results.poison(layer.problem, backward=asked.train)
            found = usage.Arrangement(layer, asked).run()
            for name, place in box.tensors.items():
                if results.form_fault(found.get(name), place.shape, place.dtype, place.device) is None:
                    place.copy_(found[name])
                    delivered.append(name)
            torn = _changed(layer.parameters, before) if not changes else []
        except Exception as error:  # an implementation may raise anything
            self._must_answer(error)
            raised = one_line(error)
        finally:
            if built and changes:
                own = make_problem(asked.case, self._device, asked.extras, asked.seeds.weights)
                layer.set_weights(own.parameters)
        self.clock.synchronize()
        torch.cuda.empty_cache()
        conduct = {"inputs unchanged": f"changed its parameters {', '.join(torn)}"} if torn else {}
        return worker.UsageReport(delivered=delivered, raised=raised, built=built, conduct=conduct)

    def _layer_to_use(self, asked: usage.Question) -> Built:
        if "_built" in self.__dict__ and asked.case == self._problem.case:
            return self._built
        key = asked.case, asked.extras, asked.seeds.weights
        if self._used is None or self._used[0] != key:
            self._used = None
            problem = make_problem(asked.case, self._device, asked.extras, asked.seeds.weights)
            self._used = key, Built(self._implementation, problem)
        return self._used[1]

    def end_use(self) -> None:
        """Let go of the layer that scenarios were run on."""
        self._used = None
        self._boxes.pop(USAGE, None)
        torch.cuda.empty_cache()

    def _put_back(self) -> None:
        self._replaced.update(results.put_functions_back())
        self._state.put_back()

    def _take(
        self, clock: Clock, run: Callable[[], object], prepare: Callable[[], None],
        results: Callable[[], Produced], lead_us: float,
    ) -> worker.SampleReport:  # fmt: skip
        handed: list[Told] = []
        taken = clock.sample(run, lead_us, prepare, lambda: handed.append(self._deliver("results", results(), [])))
        self.clock.synchronize()  # other streams of the contender's own included
        delivered, faults = self._by_weight(*handed.pop())
        return worker.SampleReport(
            ms=max(taken.ms, 0.0), host_us=max(taken.host_us, 0.0), queue_us=taken.queue_us,
            queue_filled=taken.queue_filled, mhz=taken.mhz, delivered=delivered, faults=faults,
        )  # fmt: skip

    def _by_weight(self, delivered: list[str], faults: dict[str, worker.FaultReport]) -> Told:
        """What is told of parameters of its own, told of the weights that lie in them."""
        parts = self._built.layout.parts if self._built.layout else lambda name: [name]
        faults = {part: fault for name, fault in faults.items() for part in parts(name)}
        return [part for name in delivered for part in parts(name)], faults

    def _deliver(self, kind: str, produced: Produced, others: list[Tensor]) -> Told:
        delivered: list[str] = []
        faults: dict[str, worker.FaultReport] = {}
        places = self._boxes[kind].tensors
        for name, value in produced.items():
            place = places[name]
            if fault := results.form_fault(value, place.shape, place.dtype, self._device, others):
                faults[name] = worker.FaultReport(check=fault.check, reason=fault.reason)
            else:
                place.copy_(value)
                delivered.append(name)
        return delivered, faults

    def _conduct(
        self, draw: Draw, overwrites: frozenset[str], before: Mapping[str, Tensor], train: bool
    ) -> dict[str, str]:
        found: dict[str, str] = {}
        desk = self._built.desk
        if torn := _changed(self._weights, before):
            found["inputs unchanged"] = f"changed its parameters {', '.join(torn)}"
        now = _fingerprints(desk.given)
        desk.activations(draw)
        if train:
            desk.upstream(draw)
        if spoilt := [name for name in _changed(desk.given, now) if name not in overwrites]:
            found["inputs unchanged"] = f"changed its inputs {', '.join(spoilt)}"
        return found

    def _lies_on_desk(self, value: Tensor) -> bool:
        """Whether a result shares memory with the inputs, which the next call overwrites; only what is declared may."""
        places = {place.untyped_storage().data_ptr() for place in self._built.desk.given.values()}
        return value.untyped_storage().data_ptr() in places

    def _must_answer(self, error: Exception) -> None:
        if not answers(self._device):
            raise DeviceLost(one_line(error)) from error


def forget_compiled() -> None:
    """Let torch.compile begin anew: it counts what it compiled of one function, over all that was built in a process.

    Beyond its limit, eight, it refuses (fullgraph) or leaves the function to eager, and eager's time would be taken.
    Where nothing was compiled, to ask for it would import what does, which takes seconds.
    """
    dynamo = sys.modules.get("torch._dynamo.convert_frame")
    if dynamo is not None and getattr(dynamo, "FRAME_COUNTER", True):
        torch.compiler.reset()


def _fingerprints(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: results.fingerprint(value) for name, value in values.items()}


def _changed(values: Mapping[str, Tensor], prints: Mapping[str, Tensor]) -> list[str]:
    return [name for name, mark in _fingerprints(values).items() if not torch.equal(mark, prints[name])]


def _plain(produced: Produced) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, value in produced.items():
        with contextlib.suppress(RuntimeError):
            if type(value) is Tensor and value.layout is torch.strided and not value.is_nested and not value.is_meta:
                found[name] = value
    return found


@cache
def _round_bfloat16() -> None:
    """Let Triton's interpreter round fp32 to bfloat16 to nearest even, as GPUs do.

    It cuts digits off, and a kernel that is right on every GPU would fail the check of the mean error.
    """
    import numpy
    from triton import language
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(value: Any, source: Any, target: Any, mode: Any) -> Any:
        towards_zero = mode is not None and mode == interpreter._ir.ROUNDING_MODE.RTZ
        if (source, target) == (language.float32, language.bfloat16) and not towards_zero:
            bits = numpy.ascontiguousarray(value).view(numpy.uint32)
            nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
            value = numpy.where(numpy.isnan(value), bits, nearest.astype(numpy.uint32)).view(numpy.float32)
        return convert(value, source, target, mode)

    interpreter._convert_float = rounded
