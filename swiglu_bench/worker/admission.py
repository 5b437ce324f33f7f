"""What an implementation has to pass before it gets a time.

It is built and called in a process of its own, on inputs drawn from seeds that are new; the judge, in another process,
gets the results through shared memory. `record.FAULTS` lists the checks.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass

from swiglu_bench.cases.cases import PLAIN, Case, Extras, Mode
from swiglu_bench.check import usage
from swiglu_bench.check.inputs import Draw, Values, new_draw, new_seed
from swiglu_bench.check.results import Fault, Sizes
from swiglu_bench.measure.resources import UNJOINED
from swiglu_bench.rows.record import TensorCheck
from swiglu_bench.worker.child import Contender, ContenderFailed
from swiglu_bench.worker.court import Judging
from swiglu_bench.worker.worker import BuildReport, CallReport, FaultReport, SampleReport, UsageReport

NOT_JOINED = (
    "complete on return", f"it leaves work on a stream that it forks and does not join: as a CUDA graph, {UNJOINED}"
)  # fmt: skip
VALUES = ("relative error", "largest element", "bias")


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
    ) -> None:  # fmt: skip
        """`thorough` adds what timing has no use for; `used` keeps verdicts on a model's use, None skips it."""
        self._court, self._judge, self._case, self._drawn = court, court.judge, case, drawn
        self._thorough, self._extras = thorough, extras
        self._used = used

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
            checks += self._use_once(contender)
        if self._thorough and all(check.ok for check in checks):
            checks += self._use_here(contender, gradients)
        if not contender.child.ended:
            checks += self.conduct(contender)
        return Admission(checks, gradients, first_ms)

    def check_again(self, contender: Contender, gradients: Sequence[str]) -> tuple[TensorCheck, ...]:
        """What an admitted contender does wrong later; only what failed."""
        _, checks = self._run(contender, gradients, train=self._case.mode is not Mode.FORWARD)
        checks += self._use_here(contender, gradients)
        return tuple(check for check in (*checks, *self.conduct(contender)) if not check.ok)

    def rehearse(self, contender: Contender) -> None:
        """Have a process that is for nothing else compile what the case needs, and be used as a model uses it."""
        contender.tell("rehearse", self._case, new_seed(), self._extras)
        self._operand_letterboxes(contender)
        self._use_once(contender)

    def build(self, contender: Contender) -> tuple[str, ...]:
        """Build a contender and give it a letterbox; the names of its gradients."""
        built = contender.ask(BuildReport, "build", self._case, self._drawn.weights, self._extras)
        promised = contender.implementation.gradients(self._case.scope)
        gradients = tuple(name for name in built.gradients if name in promised or name.startswith("bias_"))
        names = self._case.mode.results(gradients)
        contender.tell("open_letterbox", "results", *self._judge.letterbox(contender.name, "results", names))
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
        failed = []
        for draw in self._drawn.draws:
            report = contender.ask(SampleReport, "replay", draw, 100.0)
            checks = self._judge.judge(contender.name, draw, results_of(report, ["output"]), "{} (CUDA graph)", False)
            failed += [check for check in checks if not check.ok]
        return tuple(
            dataclasses.replace(check, check="graph replay", reason=f"replayed on changed inputs, {check.reason}")
            for check in failed
        )

    def _use_once(self, contender: Contender) -> tuple[TensorCheck, ...]:
        """Check the use as a model uses it, once for each scope, variant and dtype; not in Triton's interpreter."""
        implementation, settings = contender.implementation, self._court.settings
        if self._used is None or (settings.interpreter and implementation.backend == "triton"):
            return ()
        key = (implementation.name, self._case.scope, self._case.dtype, str(self._case.shape.extras))
        if key not in self._used:
            self._used[key] = self.use(contender)
        return self._used[key]

    def _use_here(self, contender: Contender, gradients: Sequence[str]) -> tuple[TensorCheck, ...]:
        """Check the use in training at the case's own size, where another path may be taken; only what failed.

        Not one that quantises, whose weights may be quantised once; one of the suite's compiler is spared inference,
        for which it would compile again.
        """
        implementation = contender.implementation
        interpreted = self._court.settings.interpreter and implementation.backend == "triton"
        if self._used is None or interpreted or implementation.precision_of(self._case) or self._extras != PLAIN:
            return ()
        spared = usage.of_suites_compiler(implementation) and self._case.mode is not Mode.FORWARD
        draws = [new_draw() for _ in range(2 if spared else 3)]
        learns = "w_gate" in implementation.gradients(self._case.scope)
        weights_seed = new_seed() if learns else None
        about = "at its own size, with weights changed in place, gradients that add up, and inference in between"
        try:
            report = contender.ask(CallReport, "accumulate", draws, weights_seed)
        except ContenderFailed as error:
            return () if "OutOfMemory" in str(error) else (failure("use", f"{about}, it raises {error}"),)
        names = self._case.mode.results(gradients)
        reason = _lacking(report, names) or self._judge.compare_use(contender.name, draws, weights_seed, names)
        if not reason and not spared:
            about, draw = "at its own size, with wide values, NaN and Inf", Draw(new_seed(), Values.HARSH)
            report = contender.ask(CallReport, "check", draw, False)
            reason = _lacking(report, ["output"]) or self._judge.compare_harsh(contender.name, draw)
        return (failure("use", f"{about}, {reason}"),) if reason else ()

    def use(self, contender: Contender) -> tuple[TensorCheck, ...]:
        """Check the use as a model uses it, at a small size; only what failed."""
        implementation = contender.implementation
        case = usage.small_case(self._case, self._court.settings.device.type)
        wanted = usage.wanted(implementation, case)
        if not wanted or implementation.refuses(case):
            return ()
        seeds = usage.Seeds(new_seed(), new_seed(), new_seed(), (new_seed(), new_seed(), new_seed()))
        box = self._judge.usage_letterbox(contender.name, case, seeds, wanted, implementation.gradients(case.scope))
        report = contender.ask(UsageReport, "use", case, seeds, *box)
        known = set(box[1])
        checks = self._judge.judge_usage(contender.name, [name for name in report.delivered if name in known])
        if usage.BUILD in report.raised:
            reason = report.raised[usage.BUILD]
            return (failure("use", f"at {case.shape.name} and {case.how_many} it cannot be built: {reason}"),)
        names = {scenario.__name__: scenario for scenario in usage.REQUIRED + usage.TOLERATED}
        found = []
        needed = {scenario.__name__ for scenario in usage.REQUIRED} | {values.value for values in usage.VALUES}
        for check in (check for check in checks if not check.ok):
            scenario = check.tensor.partition(":")[0]
            about = (names[scenario].__doc__ or "").rstrip(".") if scenario in names else f"with {scenario} values"
            found.append(dataclasses.replace(check, check="use", reason=f"{check.reason} ({about})"))
        for scenario, reason in report.raised.items():
            if scenario in needed:
                found.append(failure("use", f"{scenario.replace('_', ' ')}: it raises {reason}"))
        missing = [n for n in known - set(report.delivered) if n.partition(":")[0] not in report.raised]
        if missing and not found:
            what = ", ".join(sorted(missing)).replace("_", " ")
            found.append(failure("use", f"no result of the right form came for {what}"))
        return tuple(found)

    def conduct(self, contender: Contender) -> tuple[TensorCheck, ...]:
        """Failures that no result shows, so far: changed weights, replaced functions, global state."""
        found = dict(contender.ask(CallReport, "conduct").conduct)
        changed = self.changed_weights(contender)
        if changed:
            found["inputs unchanged"] = f"changed its parameters {', '.join(changed)}"
        return tuple(failure(check, reason) for check, reason in found.items())

    def changed_weights(self, contender: Contender) -> list[str]:
        """Names of the weights that are not what they were."""
        names = [name for name in contender.implementation.gradients(self._case.scope) if name.startswith("w_")]
        if not names or self._extras.packed:
            return []
        contender.tell("open_letterbox", "weights", *self._judge.letterbox(contender.name, "weights", names))
        contender.ask(CallReport, "deliver_weights")
        return self._judge.changed_weights(contender.name)


def results_of(report: CallReport | SampleReport, names: Sequence[str]) -> dict[str, Fault | None]:
    """For each result None where it lies in the letterbox, else its fault."""
    found: dict[str, Fault | None] = {}
    for name in names:
        fault: FaultReport | None = report.faults.get(name)
        if fault:
            found[name] = Fault(fault.check, fault.reason)
        elif name in report.delivered:
            found[name] = None
        else:
            found[name] = Fault("missing", "missing: it was not handed over")
    return found


def _lacking(report: CallReport, names: Sequence[str]) -> str:
    return "; ".join(f"{name}: {fault.reason}" for name, fault in results_of(report, names).items() if fault)


def failure(check: str, reason: str) -> TensorCheck:
    """A verdict that belongs to no tensor."""
    return TensorCheck("conduct", False, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, reason, check)
