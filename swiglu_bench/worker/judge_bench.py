"""What runs in the judge's process: truths, verdicts, and what the suite itself measures on the device.

No contender is ever imported here. Results come through letterboxes, which this process makes.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from swiglu_bench.cases import fp8
from swiglu_bench.cases.cases import PLAIN, Case, Extras
from swiglu_bench.cases.costs import Product, products_by_kind
from swiglu_bench.cases.errors import one_line
from swiglu_bench.check import usage
from swiglu_bench.check.built import OWN, OwnLayout
from swiglu_bench.check.chain import Marks
from swiglu_bench.check.inputs import Draw, ExpertLoad, load_of, make_problem, numbers, rows_of_each, sizes, torch_dtype
from swiglu_bench.check.judge import Judge
from swiglu_bench.check.quantised import QuantisedJudge, judge_of, with_loss
from swiglu_bench.check.results import Fault, Letterbox, Sizes, same_bits
from swiglu_bench.machine import ceilings_cache, machine
from swiglu_bench.machine.ceilings_cache import Ceilings, bare_products, grouped_products
from swiglu_bench.measure.clock import Clock, Sample, make_clock
from swiglu_bench.rows.record import TensorCheck
from swiglu_bench.worker import policy
from swiglu_bench.worker.policy import Settings

KEPT_SHARE = 16
"""Of the free memory, what truths of a model's use may take that are kept for the next contender: a part of so many."""
Delivered = Mapping[str, Sequence[str]]
"""Names of the results in each contender's letterbox."""


class JudgeBench:
    """The suite's own process on a device. Methods are asked for by name, from the parent."""

    def __init__(self, settings: Settings, this: machine.Machine) -> None:
        """Make the device's context."""
        self.settings, self._machine, self._device = settings, this, settings.device
        torch.zeros((), device=settings.device)
        self._boxes: dict[tuple[str, str], Letterbox] = {}
        self._layouts: dict[str, OwnLayout | None] = {}
        self._runs: dict[Any, Callable[[], list[Tensor]]] = {}
        """Bare products, by what they were made of."""
        self._expected: dict[str, usage.UseJudge] = {}
        self._uses: dict[tuple[usage.Question, type[Judge]], usage.UseJudge] = {}
        self._quantised: dict[str, QuantisedJudge] = {}

    @functools.cached_property
    def clock(self) -> Clock:
        """The device's clock."""
        return make_clock(self._device, self.settings.cold_l2)

    def warm_up(self, case: Case) -> None:
        """Run a scenario of a model's use at the small size: what torch and CUDA load lazily is loaded then."""
        small, seeds = usage.small_case(case, self._device.type), usage.Seeds.new()
        problem = make_problem(small, self._device, seed=seeds.weights)
        usage.UseJudge(problem, usage.Question(usage.two_calls.__name__, small, PLAIN, seeds, train=True))

    def free_bytes(self) -> int:
        """What a case may still take on the device."""
        return machine.free_memory_bytes(self._device)

    def ceilings(self, dtype: str, again: bool = False) -> Ceilings:
        """The device's best rates for a dtype, measured `again` where those that were kept are contradicted."""
        return ceilings_cache.ceilings(self._machine, self._device, getattr(torch, dtype), self.clock, again)

    def begin_case(self, case: Case, weights_seed: int, extras: Extras = PLAIN) -> str:
        """Draw the weights; why the case cannot be judged here, or ""."""
        self.end_case()
        try:
            self._judge = Judge(make_problem(case, self._device, extras, weights_seed))
        except RuntimeError as error:
            return _out_of_memory(error)
        return ""

    def end_case(self) -> None:
        """Let go of the case, and of the device's memory, which the next contenders may need."""
        for box in self._boxes.values():
            box.close()
        for held in (self._boxes, self._layouts, self._runs, self._expected, self._uses, self._quantised):
            held.clear()
        self.__dict__.pop("_judge", None)
        torch.cuda.empty_cache()

    def close_letterboxes(self, contender: str) -> None:
        """Give back the memory of those of a contender whose process has ended, or lets go of the case next."""
        for key in [key for key in self._boxes if key[0] == contender]:
            self._boxes.pop(key).close()
        torch.cuda.empty_cache()

    def letterbox(
        self, contender: str, kind: str, names: Sequence[str], layout: OwnLayout | None = None
    ) -> tuple[bytes, Sizes]:
        """A letterbox for results of these names, which are a case's tensors, or `output`; weights as they lie."""
        case = self._judge.problem.case
        found = sizes(case) | {"output": sizes(case)["upstream"]}
        if kind == "results":
            self._layouts[contender] = layout and layout.to(self._device)
        if layout:
            found |= {OWN + name: size for name, size in layout.sizes.items()}
            names = layout.own(names)
        return self._open(contender, kind, {name: found[name] for name in names}, torch_dtype(case))

    def operand_letterboxes(self, contender: str, *way: bool) -> dict[str, tuple[bytes, Sizes]]:
        """Letterboxes for codes and scales; from now on it is judged as one that quantises in the way of `judge_of`."""
        case, kind = self._judge.problem.case, judge_of(*way)
        known = (judge for judge in self._quantised.values() if type(judge) is kind)
        self._quantised[contender] = next(known, None) or kind(self._judge.problem)
        codes = dict(fp8.operand_sizes(case))
        scales = {name: fp8.scale_size(case.precision, name, size) for name, size in codes.items()}
        opened = (("codes", codes, fp8.E4M3), ("scales", scales, torch.float32))
        return {kind: self._open(contender, kind, found, dtype) for kind, found, dtype in opened}

    def numbers(self, case: Case) -> str:
        """A mark of the random numbers that are drawn here for a case."""
        return numbers(case, self._device)

    def truth(self, draw: Draw, train: bool) -> str:
        """Compute the truth of a call, which several contenders are judged by; why it cannot be, or ""."""
        try:
            self._judge.truth(draw, train)
        except RuntimeError as error:
            return _out_of_memory(error)
        torch.cuda.empty_cache()
        return ""

    def judge(
        self, contender: str, draw: Draw, results: Mapping[str, Fault | None], label: str, distribution: bool,
        operands: Sequence[str] | None = None,
    ) -> tuple[TensorCheck, ...]:  # fmt: skip
        """Verdicts on what lies in a letterbox or has a fault instead; with `operands` on codes and scales, too."""
        handed = None
        if operands is not None:
            codes, scales = (self._boxes[contender, kind].tensors for kind in ("codes", "scales"))
            handed = {name: (codes[name].clone(), scales[name].clone()) for name in operands}
        places = self._delivered(contender, [name for name, fault in results.items() if not fault])
        produced = {name: None if fault else places[name].clone() for name, fault in results.items()}
        faults, judge = {name: fault for name, fault in results.items() if fault}, self._judge_of(contender)
        options: dict[str, Any] = {"label": label, "faults": faults, "distribution": distribution}
        if handed is not None and isinstance(judge, QuantisedJudge):
            checks = judge.judge_handed(produced, draw, handed, **options)
        else:
            checks = judge.judge(produced, draw, **options)
        if isinstance(judge, QuantisedJudge):
            checks = with_loss(checks, produced, self._judge, draw)
        torch.cuda.empty_cache()  # a truth that was not at hand takes much, and contenders need the memory
        return checks

    def _judge_of(self, contender: str) -> Judge:
        return self._quantised.get(contender, self._judge)

    def compare(self, draw: Draw, delivered: Delivered) -> dict[str, str]:
        """Hold the results of a round against eager's on the same inputs: what is wrong, by contender."""
        mode = self._judge.problem.case.mode
        held = functools.cache(lambda judge: judge.compare(mode, [draw]))  # which runs the reference
        wrong = {name: held(self._judge_of(name))(self._delivered(name, names)) for name, names in delivered.items()}
        return {name: reason for name, reason in wrong.items() if reason}

    def glue_ms(self, draw: Draw, calls: int, names: Sequence[str], recorded: bool) -> float:
        """The ms a call that a chain of so many calls takes for anything but the calls."""
        return self._judge.glue_ms(self._judge.problem.case.mode, draw, calls, names, self.clock, recorded)

    def compare_chain(self, contender: str, draw: Draw, key: int, marks: Marks, names: Sequence[str]) -> str:
        """Hold a contender's chain, its marks and the sums in its letterbox, against eager's: what is wrong, or ""."""
        layout, mode = self._layouts.get(contender), self._judge.problem.case.mode
        wrong = self._judge_of(contender).follow(mode, draw, key, marks, names, layout)
        return wrong(self._delivered(contender, names))

    def _delivered(self, contender: str, names: Sequence[str]) -> dict[str, Tensor]:
        places, layout = self._boxes[contender, "results"].tensors, self._layouts.get(contender)
        if layout:
            places = layout.canonical({name: places[name] for name in layout.own(names)})
        return {name: places[name] for name in names}

    def changed_weights(self, contender: str) -> list[str]:
        """Names of the weights in a contender's letterbox that are not the case's."""
        places = self._boxes[contender, "weights"].tensors
        return [name for name, value in places.items() if not same_bits(value, self._judge.problem.parameters[name])]

    def too_large_to_use(self, case: Case) -> str:
        """Why the scenarios of a model's use do not fit into the device's memory at a case's size, or ""."""
        need = policy.use_bytes(self.settings, case)
        return "" if need <= self.free_bytes() else f"that needs about {need / 2**30:.1f} GiB, more than is free"

    def expect_use(self, contender: str, asked: usage.Question, gradients: Sequence[str]) -> tuple[bytes, Sizes] | str:
        """A letterbox for the results of a scenario of a model's use, whose truth is known then; or why there is none.

        Several contenders are asked the same, so that what was computed for one is kept where it takes little memory.
        """
        key = asked, type(self._judge_of(contender))
        expected = self._uses.get(key)
        try:
            if expected is None:
                case, problem = asked.case, self._judge.problem
                if case != problem.case:
                    problem = make_problem(case, self._device, asked.extras, asked.seeds.weights)
                expected = usage.UseJudge(problem, *key)
                kept = sum(known.bytes for known in self._uses.values())
                if kept + expected.bytes <= self.free_bytes() / KEPT_SHARE:
                    self._uses[key] = expected
        except RuntimeError as error:
            return _out_of_memory(error)
        torch.cuda.empty_cache()
        self._expected[contender] = expected
        found = {name: tuple(expected.truth[name].shape) for name in expected.names(gradients)}
        return self._open(contender, "usage", found, torch_dtype(asked.case))

    def judge_use(self, contender: str, delivered: Sequence[str]) -> tuple[TensorCheck, ...]:
        """Verdicts on the results of a scenario."""
        places = self._boxes.pop((contender, "usage"))
        expected, known = self._expected.pop(contender), places.tensors
        checks = tuple(c for n in delivered if n in known for c in expected.judge({n: known[n].clone()}))
        places.close()
        torch.cuda.empty_cache()
        return checks

    def load(self) -> ExpertLoad:
        """How a typical call loads the experts of the case."""
        experts = self._judge.problem.case.shape.experts
        assert experts
        return load_of(experts, self._judge.desk.typical_experts)

    def sample_products(self, products: tuple[Product, ...], in_fp8: bool, lead_us: float) -> Sample:
        """Time the bare products of a case once, after an untimed run as Workbench.sample has one."""
        key = products, in_fp8
        if key not in self._runs:
            dtype = fp8.E4M3 if in_fp8 else torch_dtype(self._judge.problem.case)
            self._runs[key] = bare_products(products, self._device, dtype)
        return self._sample(key, lead_us)

    def lay_out_grouped(self, gradients: tuple[str, ...]) -> str:
        """Make the bare products of experts, with a typical load, ready to be timed; why they cannot be, or ""."""
        case = self._judge.problem.case
        assert case.shape.experts
        counts = rows_of_each(case.shape.experts, self._judge.desk.typical_experts)
        try:
            run = grouped_products(*products_by_kind(case, gradients), counts, torch_dtype(case))
            run()
        except RuntimeError as error:
            return one_line(error)
        self._runs[gradients] = run
        return ""

    def sample_grouped(self, gradients: tuple[str, ...], lead_us: float) -> Sample:
        """Time them once, in the same way."""
        return self._sample(gradients, lead_us)

    def _sample(self, key: Any, lead_us: float) -> Sample:
        run = self._runs[key]
        if not self.settings.rule.rest_s:
            run()
        return replace(self.clock.sample(run, lead_us), result=None)

    def _open(self, contender: str, kind: str, found: Sizes, dtype: torch.dtype) -> tuple[bytes, Sizes]:
        box = Letterbox.make(found, dtype, self._device)
        for place in box.tensors.values():
            place.fill_(math.nan)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if old := self._boxes.pop((contender, kind), None):
            old.close()
        self._boxes[contender, kind] = box
        return box.address(), found


def _out_of_memory(error: RuntimeError) -> str:
    """The reason of a case that does not fit; raises other errors again. A CPU raises a plain RuntimeError."""
    if not isinstance(error, torch.OutOfMemoryError) and "DefaultCPUAllocator" not in str(error):
        raise error
    return f"The device ran out of memory for the inputs and their fp64 truth: {one_line(error)}"
