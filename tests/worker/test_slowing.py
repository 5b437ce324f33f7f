"""Who makes others slow, from times alone: contenders whose speed depends on which of them are alive."""

from types import SimpleNamespace
from typing import Any

import pytest

from swiglu_bench.tasks import time as case
from swiglu_bench.worker.reports import SampleReport
from swiglu_bench.worker.turns import Turn, find_culprit, slow_the_next


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

    def revive(one: Any) -> Any:
        alive.add(one.name)
        return one

    found = find_culprit(base, others, revive, [1.0] * 11)  # type: ignore[arg-type]
    assert (found.name if found else "") == "".join(harmful & {"a", "b"})


def test_those_after_whom_the_next_is_slow_are_named() -> None:
    names = ["eager", "slow", "eager", "fair", "eager (twin 1)"]
    turns = [Turn("eager", "", 1.0)]
    for number in range(60):
        name, after = names[number % len(names)], turns[-1].name
        turns.append(Turn(name, after, (1.5 if after == "slow" else 1.0) + 0.001 * (number % 7)))
    assert slow_the_next(turns, {"eager", "eager (twin 1)"}) == ["slow"]
    assert slow_the_next(turns[:12], {"eager", "eager (twin 1)"}) == [], "too few to tell"


@pytest.mark.parametrize("again", [True, False])
def test_a_second_try_decides_whether_it_is_certain(monkeypatch: pytest.MonkeyPatch, again: bool) -> None:
    tries = iter([True, again])
    monkeypatch.setattr(case, "slow_the_next", lambda *_: ["mine"])
    monkeypatch.setattr(case, "slows_the_next", lambda *_: next(tries))
    base, mine = (
        SimpleNamespace(contender=SimpleNamespace(name=name, implementation=SimpleNamespace(name=name)))
        for name in ("eager", "mine")
    )
    this: Any = SimpleNamespace(_ready=lambda _: True)
    assert case._TimedCase._slows_others(this, base, [base, mine], []) == (mine, again)  # type: ignore[arg-type, list-item]
