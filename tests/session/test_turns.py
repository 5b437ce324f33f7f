"""Turns by the parent's clock: what samples leave out shows in them, and chance does not."""

import time
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from swiglu_bench.check.inputs import Draw, new_draw
from swiglu_bench.measure.clock import Sample
from swiglu_bench.measure.rounds import Rounds, Timing
from swiglu_bench.session.batches import Unsettled, WrongTime
from swiglu_bench.session.reports import SampleReport
from swiglu_bench.session.round_judge import led_sample
from swiglu_bench.session.settings import Settings, Task
from swiglu_bench.session.turns import Turns
from swiglu_bench.spec.cases import Mode


@dataclass
class Court:
    """What turns ask a place for."""

    settings: Settings = field(default_factory=lambda: Settings(Task.TIME, torch.device("cpu"), "c", "r"))
    judge: Any = None


@dataclass
class Slow:
    """A contender that says 1 ms and whose turns take longer by `hides_ms`."""

    name: str
    hides_ms: float = 0.0
    asked: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    implementation: Any = None

    def ask(self, kind: Any, method: str, *arguments: Any) -> Any:
        self.asked.append((method, arguments))
        time.sleep((1.0 + self.hides_ms) / 1e3)
        return SampleReport(ms=1.0, host_us=1e3, queue_us=1e3, queue_filled=True, delivered=[], faults={})

    def tell(self, method: str, *arguments: Any) -> str:
        self.asked.append((method, arguments))
        return ""

    def end(self) -> None: ...


def rounds_of(**beside_ms: list[float]) -> Rounds:
    """Samples of 1 ms each, and what their turns took beside them."""
    samples = {
        name: Timing([Sample(1.0, 0.0, 0.0, True, None, turn_ms=1.0 + one) for one in many])
        for name, many in beside_ms.items()
    }
    return Rounds(samples, "rounds")


def found(hides_ms: float, rounds: Rounds) -> dict[str, Exception]:
    turns = Turns(Court(), Mode.FORWARD, [Slow("eager"), Slow("twin")], [Slow("other", hides_ms)])  # type: ignore[arg-type]
    return turns.disagreements(rounds)


def test_what_takes_longer_at_each_look_is_wrong_and_one_look_acquits() -> None:
    longer = rounds_of(eager=[0.3] * 20, twin=[0.31] * 20, other=[30.0] * 20)
    assert isinstance(found(30.0, longer)["other"], WrongTime)
    assert not found(-0.9, longer)


def test_what_the_baselines_own_processes_cannot_tell_is_undecided() -> None:
    apart = rounds_of(eager=[0.3] * 20, twin=[3.0] * 20, other=[4.0] * 20)
    assert isinstance(found(30.0, apart)["other"], Unsettled)


@pytest.mark.parametrize("other_ms", [0.0, 0.3, 0.5])
def test_noise_and_less_than_a_share_of_the_call_are_nothing(other_ms: float) -> None:
    assert not found(10.0, rounds_of(eager=[0.3] * 20, twin=[0.35] * 20, other=[other_ms] * 20))


def test_some_true_samples_do_not_hide_the_others() -> None:
    lies, truths = [Sample(1.0, 0, 0, True, None, 5.3)] * 11, [Sample(5.0, 0, 0, True, None, 5.3)] * 9
    rounds = rounds_of(eager=[0.3] * 20, twin=[0.3] * 20)
    rounds.timings["other"] = Timing(lies + truths)
    assert isinstance(found(30.0, rounds)["other"], WrongTime)


@pytest.mark.parametrize("mode", list(Mode))
def test_inputs_are_told_when_all_that_comes_before_is_done(mode: Mode) -> None:
    contender, draw = Slow("one"), new_draw()
    sample, _ = led_sample(Court(), contender, mode, draw, 100.0)  # type: ignore[arg-type]
    (first, (before,)), (second, (told, *_)) = contender.asked
    assert (first, second, told) == ("lead_in", "sample", draw)
    assert before.upstream is None
    assert (before == Draw(draw.seed)) is (mode is Mode.BACKWARD), "a backward's forward comes before"
    assert sample.turn_ms >= 1.0
