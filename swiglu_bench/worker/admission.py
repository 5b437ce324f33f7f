"""What an implementation has to pass before it gets a time.

It is built and called in a process of its own, on inputs drawn from seeds that are new; the judge, in another process,
gets the results through shared memory. `record.FAULTS` lists the checks.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swiglu_bench.cases.cases import BIASES, PLAIN, Case, Extras, Mode
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.check import usage
from swiglu_bench.check.inputs import Draw, Values, new_seed, sizes
from swiglu_bench.check.results import Fault, Sizes
from swiglu_bench.measure.resources import UNJOINED
from swiglu_bench.rows.record import Record, TensorCheck
from swiglu_bench.worker.child import Contender, ContenderFailed
from swiglu_bench.worker.court import Judging
from swiglu_bench.worker.worker import BuildReport, CallReport, SampleReport, UsageReport

NOT_JOINED = (
    "complete on return", f"it leaves work on a stream that it forks and does not join: as a CUDA graph, {UNJOINED}"
)  # fmt: skip
VALUES = ("relative error", "largest element", "bias")
OUT_OF_MEMORY = ("OutOfMemory", "out of memory", "DefaultCPUAllocator")


class _OutOfMemory(Exception):
    """There is no room for a scenario; one phrase."""


@dataclass(frozen=True)
class Admission:
    """A built implementation: the verdicts on it, its gradients, and what building and the first call took."""

    checks: tuple[TensorCheck, ...]
    gradients: tuple[str, ...]
    first_call_ms: float


@dataclass(frozen=True)
class Drawn:
    """What is drawn for a case, and every contender of it gets alike."""

    weights: int
    draws: tuple[Draw, Draw]

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds of the weights and of each draw."""
        return (self.weights, *(draw.seed for draw in self.draws))

    @classmethod
    def new(cls, values: Values = Values.NORMAL) -> Drawn:
        """From seeds that nothing knows."""
        return cls(new_seed(), (Draw(new_seed(), values), Draw(new_seed(), values)))


class Admitting:
    """Admits the contenders of one case."""

    def __init__(
        self, court: Judging, case: Case, drawn: Drawn, *, thorough: bool = False, extras: Extras = PLAIN,
        used: dict[tuple[str, ...], tuple[TensorCheck, ...]] | None = None,
        works_idle: Callable[[Contender], str] = lambda contender: "",
    ) -> None:  # fmt: skip
        """`thorough` adds what timing has no use for; `used` keeps verdicts on a model's use, None skips it.

        `works_idle` says what a contender does that must rest, before it is asked for more.
        """
        self._court, self._judge, self._case, self._drawn = court, court.judge, case, drawn
        self._thorough, self._extras = thorough, extras
        self._used, self._works_idle = used, works_idle
        self._variant = case.shape.extras if extras == PLAIN else extras
        self._small, self._seeds = usage.small_case(case, court.settings.device.type), usage.Seeds.new()
        self.used_at: dict[str, list[str]] = {}
        """The sizes at which the use of each contender was checked."""
        self.remarks: dict[str, str] = {}

    def admit(self, contender: Contender) -> Admission:
        """Build and check a contender; raises what `Contender.ask` raises where it does not get that far."""
        began = time.perf_counter()
        gradients = self.build(contender)
        infers = self._case.mode is Mode.FORWARD
        first_ms, checks = self._run(contender, gradients, train=not infers, began=began)
        if self._thorough:
            if not infers:
                checks = (*self._run(contender, gradients, train=False, label="{} (inference)")[1], *checks)
            checks += self.replayed(contender)
        if all(check.ok for check in checks):
            if working := self._works_idle(contender):  # every answer of such a process takes long
                return Admission((*checks, failure("slows others", working)), gradients, first_ms)
            checks += self._use_once(contender)
        if all(check.reason != NOT_JOINED[1] for check in checks):  # else its process has ended
            checks += self.conduct(contender)  # before weights are changed, and put back
        if self._thorough and all(check.ok for check in checks):
            checks += (*self._use_here(contender), *self.conduct(contender))
        return Admission(checks, gradients, first_ms)

    def check_again(self, contender: Contender, gradients: Sequence[str]) -> tuple[TensorCheck, ...]:
        """What an admitted contender does wrong later; only what failed."""
        _, checks = self._run(contender, gradients, train=self._case.mode is not Mode.FORWARD)
        checks += self.conduct(contender)
        checks += (*self._use_here(contender), *self.conduct(contender))
        return tuple({(check.check, check.reason): check for check in checks if not check.ok}.values())

    def rehearse(self, contender: Contender) -> None:
        """Have a process that is for nothing else compile what the case needs, and be used as a model uses it."""
        contender.tell("rehearse", self._case, new_seed(), self._extras)
        self._operand_letterboxes(contender)
        self._use_once(contender)

    def build(self, contender: Contender) -> tuple[str, ...]:
        """Build a contender and give it a letterbox; the names of its gradients."""
        built = contender.ask(BuildReport, "build", self._case, self._drawn.weights, self._extras)
        if contender.implementation.python and contender.tell("numbers") != self._judge.numbers(self._case):
            raise ContenderFailed("its PyTorch draws other random numbers than this one, so that its inputs are others")
        promised = contender.implementation.gradients(self._case.scope)
        gradients = tuple(name for name in built.gradients if name in promised or name.startswith("bias_"))
        names, found = self._case.mode.results(gradients), sizes(self._case)
        told = built.layout
        layout = told.layout({n: found[n] for n in told.views if n in found}) if told else None
        contender.tell("open_letterbox", "results", *self._judge.letterbox(contender.name, "results", names, layout))
        for kind, box in self._operand_letterboxes(contender).items():
            contender.tell("open_letterbox", kind, *box)
        return gradients

    def _operand_letterboxes(self, contender: Contender) -> dict[str, tuple[bytes, Sizes]]:
        """Letterboxes for the operands of a contender that quantises; from now on the judge judges it as one."""
        implementation = contender.implementation
        if not implementation.precision_of(self._case):
            return {}
        return self._judge.operand_letterboxes(contender.name, *implementation.way_of(self._case))

    def _run(
        self, contender: Contender, gradients: Sequence[str], *, train: bool, label: str = "{}", began: float = 0.0
    ) -> tuple[float, tuple[TensorCheck, ...]]:
        worst: dict[str, TensorCheck] = {}
        first_ms = 0.0
        names = ("output", *(gradients if train else ()))
        for number, draw in enumerate(self._drawn.draws):
            report = contender.ask(CallReport, "check", draw, train)
            first_ms = first_ms or (time.perf_counter() - began) * 1e3
            results = results_of(report, names)
            operands = () if report.operands is None else (report.operands,)
            for check in self._judge.judge(contender.name, draw, results, label, self._thorough, *operands):
                name = check.tensor
                if check.check in VALUES and number and worst[name].ok:
                    where = f"on new inputs at the same addresses (seed {draw.seed}), {check.reason}"
                    check = dataclasses.replace(check, check="new inputs", reason=where)
                if name not in worst or (worst[name].ok and (not check.ok or check.used > worst[name].used)):
                    worst[name] = check
            for check_name, reason in report.conduct.items():
                worst.setdefault(f"conduct: {check_name}", failure(check_name, reason))
        return first_ms, tuple(worst.values())

    def replayed(self, contender: Contender) -> tuple[TensorCheck, ...]:
        """On a GPU: what is wrong with a CUDA graph of the forward on other inputs, where it can be recorded.

        A stream that it forks and does not join shows in the recording; its process is of no use after that.
        """
        if self._court.settings.device.type != "cuda":
            return ()
        reason = contender.tell("record", Mode.FORWARD)
        if reason == UNJOINED:
            contender.end()
            return (failure(*NOT_JOINED),)
        if reason:
            return ()
        failed = list[TensorCheck]()
        for draw in self._drawn.draws:
            report = contender.ask(SampleReport, "replay", draw, 100.0)
            checks = self._judge.judge(contender.name, draw, results_of(report, ["output"]), "{} (CUDA graph)", False)
            failed += _failed(checks, "graph replay", "replayed on changed inputs, {}")
        return tuple(failed)

    def _use_once(self, contender: Contender) -> tuple[TensorCheck, ...]:
        """Check the use as a model uses it at a small size, once for each scope, variant and dtype."""
        implementation = contender.implementation
        if self._used is None or self._spared(implementation):
            return ()
        key = (implementation.name, self._case.scope, self._case.dtype, self._case.precision, str(self._variant))
        if key not in self._used:
            self._used[key] = self.use(contender)
        self._note(contender, self._small)
        return self._used[key]

    def _use_here(self, contender: Contender) -> tuple[TensorCheck, ...]:
        """Check the use at the case's own size, where another path may be taken; only what failed.

        Where memory is short, a mixture with few experts stands for it, or nothing does, which the row says.
        """
        if self._used is None or self._spared(contender.implementation):
            return ()
        reason = ""
        for case in dict.fromkeys((self._case, usage.with_few_experts(self._case))):
            reason = self._judge.too_large_to_use(case)
            try:
                checks = () if reason else self.use(contender, case)
            except _OutOfMemory as error:
                reason = str(error)
                contender.tell("end_use")
            if not reason:
                self._note(contender, case)
                break
        else:
            self.remarks[contender.name] = f"Its use in a model was not checked at this size: {reason}."
        if contender.implementation.backend == "inductor" and not reason:
            self.build(contender)  # without what was compiled for the scenarios, which a later call might find first
        return checks if not reason else ()

    def _spared(self, implementation: Implementation) -> bool:
        """What Triton's interpreter runs, which takes long and gets no time."""
        return self._court.settings.interpreter and implementation.backend == "triton"

    def _note(self, contender: Contender, case: Case) -> None:
        sizes = self.used_at.setdefault(contender.name, [])
        if usage.wanted(contender.implementation, case) and usage.size_of(case) not in sizes:
            sizes.append(usage.size_of(case))

    def note_use(self, record: Record, contender: Contender) -> None:
        """Enter at which sizes a contender's use was checked, and why not at its own."""
        record.used_at = "; ".join(self.used_at.get(contender.name, ()))
        if remark := self.remarks.pop(contender.name, ""):
            record.remark(remark)

    def use(self, contender: Contender, at: Case | None = None) -> tuple[TensorCheck, ...]:
        """Check the use as a model uses it, at a case or at a small size; only what failed."""
        implementation, case = contender.implementation, at or self._small
        if implementation.refuses(case):
            return ()
        seeds = self._seeds if at is None else dataclasses.replace(self._seeds, weights=self._drawn.weights)
        train, found = usage.trains(implementation, case), list[TensorCheck]()
        for name in usage.wanted(implementation, case):
            about = usage.case_of(name, case)
            asked = usage.Question(name, about, self._variant, seeds, train, implementation.most_tokens)
            found += self._ask_use(contender, asked)
        contender.tell("end_use")
        return tuple(found)

    def _ask_use(self, contender: Contender, asked: usage.Question) -> list[TensorCheck]:
        """What fails in one scenario; raises _OutOfMemory."""
        promised = contender.implementation.gradients(asked.case.scope)
        names = (*promised, *(BIASES[asked.case.scope] if "w_gate" in promised else ()))
        box = self._judge.expect_use(contender.name, asked, names)
        if isinstance(box, str):
            raise _OutOfMemory(box)
        report = contender.ask(UsageReport, "use", asked, *box)
        about, where = usage.SCENARIOS[asked.name], f"at {usage.size_of(asked.case)}, {asked.name.replace('_', ' ')}"
        checks = self._judge.judge_use(contender.name, report.delivered)
        if any(said in report.raised for said in OUT_OF_MEMORY):
            raise _OutOfMemory(report.raised)
        if report.raised and not report.built:
            return [failure("use", f"at {usage.size_of(asked.case)} it cannot be built: {report.raised}")]
        found = _failed(checks, "use", f"{where}, {{}} ({about.about})")
        if report.raised and about.required:
            found.append(failure("use", f"{where}: it raises {report.raised}"))
        missing = sorted(set(box[1]) - set(report.delivered))
        if missing and not found and not report.raised:
            found.append(failure("use", f"{where}: no result of the right form came for {', '.join(missing)}"))
        return found + [failure(check, f"{where}: it {reason}") for check, reason in report.conduct.items()]

    def conduct(self, contender: Contender) -> tuple[TensorCheck, ...]:
        """Failures that no result shows, so far: changed weights, replaced functions, global state."""
        found = dict(contender.ask(CallReport, "conduct").conduct)
        names = [name for name in contender.implementation.gradients(self._case.scope) if name.startswith("w_")]
        if names and not self._extras.packed:
            contender.tell("open_letterbox", "weights", *self._judge.letterbox(contender.name, "weights", names))
            contender.ask(CallReport, "deliver_weights")
            if changed := self._judge.changed_weights(contender.name):
                found["inputs unchanged"] = f"changed its parameters {', '.join(changed)}"
        return tuple(failure(check, reason) for check, reason in found.items())


def results_of(report: CallReport | SampleReport, names: Sequence[str]) -> dict[str, Fault | None]:
    """For each result None where it lies in the letterbox, else its fault."""
    missing = Fault("missing", "missing: it was not handed over")
    found = {name: None if name in report.delivered else missing for name in names}
    return found | {n: Fault(fault.check, fault.reason) for n, fault in report.faults.items() if n in found}


def _failed(checks: Sequence[TensorCheck], check: str, said: str) -> list[TensorCheck]:
    """Those that failed, as failures of another check, whose reasons `said` words."""
    return [dataclasses.replace(c, check=check, reason=said.format(c.reason)) for c in checks if not c.ok]


def failure(check: str, reason: str) -> TensorCheck:
    """A verdict that belongs to no tensor."""
    return TensorCheck("conduct", False, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, reason, check)
