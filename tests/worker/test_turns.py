"""Turns by the parent's clock: what samples leave out shows in them, and chance does not."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from courts import run_here
from specimens import declared, small_case

from swiglu_bench.cases.cases import Case, Dtype, Mode, Scope
from swiglu_bench.cases.implementation import Step
from swiglu_bench.cases.problem import Problem
from swiglu_bench.check.inputs import Draw, new_draw
from swiglu_bench.contenders import pytorch
from swiglu_bench.machine.machine import describe
from swiglu_bench.measure.clock import Sample
from swiglu_bench.measure.rounds import Rounds, Timing
from swiglu_bench.rows.record import Status
from swiglu_bench.tasks.selftest.run import LARGE, RULE_OF_ALARMS, slow
from swiglu_bench.worker.chains import Unsettled, WrongTime
from swiglu_bench.worker.policy import Settings, Task
from swiglu_bench.worker.turns import LOOKS, Turn, Turns, find_culprit, led_sample, slow_the_next
from swiglu_bench.worker.workbench import Workbench
from swiglu_bench.worker.worker import SampleReport


@dataclass
class Court:
    """What turns ask a place for."""

    settings: Settings = field(default_factory=lambda: Settings(Task.TIME, torch.device("cpu"), "c", "r"))
    judge: Any = None


@dataclass
class Named:
    """A contender as far as turns are concerned that were taken before."""

    name: str
    asked: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    answered: float = 0.0

    def ask(self, kind: Any, method: str, *arguments: Any) -> Any:
        self.asked.append((method, arguments))
        time.sleep(1e-3)
        self.answered = time.perf_counter()
        return SampleReport(ms=1.0, host_us=1e3, queue_us=1e3, queue_filled=True, delivered=[], faults={})

    def tell(self, method: str, *arguments: Any) -> str:
        self.asked.append((method, arguments))
        return ""


def rounds_of(ms: float = 1.0, **beside_ms: list[float]) -> Rounds:
    """Samples of 1 ms each, of "other" another time, and what their turns took beside them."""
    samples = {
        name: Timing([Sample(own := ms if name == "other" else 1.0, 0, 0, True, None, own + each) for each in many])
        for name, many in beside_ms.items()
    }
    return Rounds(samples, "rounds")


def found(rounds: Rounds, *again: Rounds, device: str = "cpu", shared: bool = True) -> dict[str, BaseException]:
    """What is said of "other" after these rounds; when there are no more, the last come again."""
    left = [*again, *[again[-1]] * LOOKS]
    contenders: Any = [Named("eager"), Named("twin"), Named("other")]
    return Turns(device, contenders[:2], contenders[2:], lambda _: left.pop(0), lambda: shared).disagreements(rounds)


def test_what_takes_longer_at_each_look_is_wrong_unless_the_baselines_own_processes_cannot_tell() -> None:
    longer = rounds_of(eager=[0.3] * 20, twin=[0.31] * 20, other=[30.0] * 20)
    fair = rounds_of(eager=[0.3] * 20, twin=[0.31] * 20, other=[0.3] * 20)
    assert isinstance(found(longer, longer)["other"], WrongTime)
    assert not found(longer, fair), "as many rounds without a fault acquit"
    assert not found(longer, longer, fair)
    apart = rounds_of(eager=[0.3] * 20, twin=[3.0] * 20, other=[4.0] * 20)
    assert isinstance(found(apart, longer, apart)["other"], Unsettled)
    lies, truths = [Sample(1.0, 0, 0, True, None, 5.3)] * 11, [Sample(5.0, 0, 0, True, None, 5.3)] * 9
    longer.timings["other"] = Timing(lies + truths)
    assert isinstance(found(longer, longer)["other"], WrongTime), "some true samples do not hide the others"


def test_on_a_gpu_that_others_use_interruptions_prove_nothing() -> None:
    """A time slice is as long for all, but turns that take the host longer meet it more often."""
    sliced = rounds_of(eager=[1.4] * 28 + [3.9] * 12, twin=[1.4] * 30 + [3.9] * 10, other=[3.6] * 40)
    said = [type(found(sliced, sliced, device="cuda", shared=shared)["other"]) for shared in (True, False)]
    assert said == [Unsettled, WrongTime]
    sliced.timings["other"] = rounds_of(other=[9.0] * 40).timings["other"]
    assert isinstance(found(sliced, sliced, device="cuda")["other"], WrongTime), "longer than any of them"


def test_who_tells_the_truth_from_some_moment_on_is_held_to_what_it_said_before() -> None:
    lies = rounds_of(1.0, eager=[0.3] * 20, twin=[0.31] * 20, other=[4.3] * 20)
    truths = rounds_of(5.0, eager=[0.3] * 20, twin=[0.31] * 20, other=[0.3] * 20)
    assert isinstance(found(lies, truths)["other"], WrongTime)
    slower = rounds_of(1.3, eager=[0.3] * 20, twin=[0.31] * 20, other=[0.3] * 20)
    little = rounds_of(1.0, eager=[0.3] * 20, twin=[0.31] * 20, other=[0.6] * 20)
    assert isinstance(found(little, slower)["other"], Unsettled), "a machine that got slower proves nothing"


@pytest.mark.parametrize(("apart_ms", "caught"), [(0.0, True), (0.01, True), (0.06, False)])
def test_what_a_turn_may_take_is_what_the_baselines_own_processes_differ_by(apart_ms: float, caught: bool) -> None:
    hidden = rounds_of(eager=[0.3] * 20, twin=[0.3 + apart_ms] * 20, other=[0.3 + apart_ms / 2 + 0.15] * 20)
    assert bool(found(hidden, hidden)) is caught, "of a call of 1 ms"


@pytest.mark.parametrize("mode", list(Mode))
def test_inputs_are_told_when_all_that_comes_before_is_done(mode: Mode) -> None:
    contender, draw = Named("one"), new_draw()
    sample, _ = led_sample(Court(), contender, mode, draw, 100.0)  # type: ignore[arg-type]
    (first, (before,)), (second, (told, *_)) = contender.asked
    assert (first, second, told) == ("lead_in", "sample", draw)
    assert before.upstream is None
    assert (before == Draw(draw.seed)) is (mode is Mode.BACKWARD), "a backward's forward comes before"
    assert sample.turn_ms >= 1.0


@pytest.mark.parametrize("mode", list(Mode))
def test_what_comes_before_is_done_on_the_gpu_when_the_turn_begins(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a right contender whose calls take long would have the one before in its turn, and be refused."""
    happened: list[str] = []

    def build(problem: Problem) -> Step:
        step = pytorch.eager.build(problem)

        def forward(x: torch.Tensor) -> torch.Tensor:
            happened.append("queued")
            return step.forward(x)

        return Step(forward)

    bench = Workbench(Settings(Task.TIME, torch.device("cpu"), "c", "r"), declared(build))
    bench.build(small_case(mode=mode), weights_seed=1)
    monkeypatch.setattr(bench.clock, "synchronize", lambda: happened.append("waited"))
    bench.lead_in(new_draw())
    assert "queued" in happened
    assert happened[-1] == "waited"


# Who makes others slow, from times alone


class Racer:
    """Takes 1 ms, or 2 while one of `harmful` is alive."""

    def __init__(self, name: str, alive: set[str], harmful: set[str]) -> None:
        self.name, self.alive, self.harmful = name, alive, harmful
        alive.add(name)

    def ask(self, *_: Any) -> SampleReport:
        ms = 2.0 if self.alive & self.harmful else 1.0
        return SampleReport(ms=ms, host_us=1.0, queue_us=1.0, queue_filled=True, delivered=[], faults={})

    def end(self) -> None:
        self.alive.discard(self.name)


@pytest.mark.parametrize("harmful", [set(), {"a"}, {"b"}, {"nobody of them"}])
def test_the_culprit_is_the_one_without_whom_the_baseline_is_fast(harmful: set[str]) -> None:
    alive: set[str] = set(harmful - {"a", "b"})
    base, *others = (Racer(name, alive, harmful) for name in ("eager", "a", "b"))
    found = find_culprit(base, others, lambda ended: Racer(ended.name, alive, harmful), [1.0] * 11)  # type: ignore[arg-type]
    assert (found.name if found else "") == "".join(harmful & {"a", "b"})


def test_those_after_whom_the_next_is_slow_are_named() -> None:
    names, turns = ["eager", "slow", "eager", "fair", "eager (twin 1)"], [Turn("eager", "", 1.0)]
    for number in range(60):
        name, after = names[number % len(names)], turns[-1].name
        turns.append(Turn(name, after, (1.5 if after == "slow" else 1.0) + 0.001 * (number % 7)))
    assert slow_the_next(turns, {"eager", "eager (twin 1)"}) == ["slow"]
    assert slow_the_next(turns[:12], {"eager", "eager (twin 1)"}) == [], "too few to tell"


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("mode", [Mode.FORWARD, Mode.STEP])
def test_what_is_right_and_slow_gets_a_time(mode: Mode, tmp_path: Path) -> None:
    device, shape = torch.device("cuda", 0), LARGE["cuda"]
    case = Case(shape, shape.tokens[0], Dtype.BFLOAT16, Scope.GLU, mode)
    settings = Settings(Task.TIME, device, "c", "r", rule=RULE_OF_ALARMS, energy=False)
    for row in run_here([case], [pytorch.eager, slow], settings, describe(device), logs=tmp_path, timeout_s=120.0):
        assert row.status is Status.OK, f"{row.implementation}: {row.reason}"
