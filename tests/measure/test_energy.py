from collections.abc import Callable

import pytest

from swiglu_bench.measure import energy
from swiglu_bench.measure.energy import joules_per_call


class Meter:
    """A device of 500 W whose counter moves every 100 ms; a call takes `call_ms`, and there is a clock to look at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call_ms: float, step_ms: float = 100.0) -> None:
        self.now_ms, self.call_ms, self.step_ms = 37.0, call_ms, step_ms
        self.calls = 0
        monkeypatch.setattr(energy.time, "perf_counter", self.look)

    def look(self) -> float:
        self.now_ms += 1e-4
        return self.now_ms / 1e3

    def run(self, calls: int) -> None:
        self.calls += calls
        self.now_ms += calls * self.call_ms

    def read_j(self) -> float:
        return 0.5 * self.step_ms * (self.now_ms // self.step_ms)

    def measure(self, read_j: Callable[[], float] | None = None) -> float:
        return joules_per_call(self.run, read_j or self.read_j)


@pytest.mark.parametrize("call_ms", [0.02, 0.5, 2.0, 7.0])
def test_the_width_of_the_counter_s_steps_does_not_matter(monkeypatch: pytest.MonkeyPatch, call_ms: float) -> None:
    meter = Meter(monkeypatch, call_ms)
    assert meter.measure() == pytest.approx(0.5 * call_ms, rel=0.02)
    assert 400 <= meter.calls * call_ms < 1000, "it lasts for 0.4 s and the steps at both ends"


def test_a_call_longer_than_the_loop_is_still_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = Meter(monkeypatch, 900.0)
    assert meter.measure() == pytest.approx(450.0, rel=0.15)


def test_a_counter_that_stands_still_is_no_energy(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="The energy counter did not move in 2 s"):
        Meter(monkeypatch, 1.0).measure(lambda: 5.0)
