from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from swiglu_bench.measure import rounds as rounds_module
from swiglu_bench.measure.clock import DeviceLost, Sample
from swiglu_bench.measure.rounds import RETRIES, Rounds, Rule, TimedCall, run_rounds


class Bench:
    """Contenders that write down their turns, on a clock whose time passes only when something is timed."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.leads_us: list[float] = []
        self.unfilled = 0
        """How many of the next samples find a gap in the queue."""
        self.called: list[tuple[str, int]] = []

    def contender(self, name: str, ms: Callable[[int], float] = lambda number: 1.0) -> TimedCall:
        """A host that needs 50 us; the result is the time."""

        def take(number: int, lead_us: float) -> Sample:
            self.called.append((name, number))
            self.leads_us.append(lead_us)
            taken_ms = ms(number)
            self.now_s += taken_ms / 1e3
            filled = self.unfilled <= 0
            self.unfilled -= 1
            return Sample(taken_ms, 40.0, 50.0, filled, taken_ms)

        return TimedCall(name, take)

    def run(self, contenders: list[TimedCall], rule: Rule, **options: Any) -> Rounds:
        return run_rounds(contenders, rule, now=lambda: self.now_s, **options)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def exactly(count: int, **changes: Any) -> Rule:
    """A rule that ends after a number of rounds."""
    return Rule(**({"warmup_rounds": 2, "min_rounds": count, "max_rounds": count, "budget_s": 1e9} | changes))


def test_every_contender_runs_once_a_round_in_every_order(bench: Bench) -> None:
    heard: list[int] = []
    bench.run([bench.contender(name) for name in "abc"], exactly(60), on_round=heard.append)
    assert heard == [number for name, number in bench.called if name == "a"] == list(range(-2, 60))
    kept = "".join(name for name, _ in bench.called[2 * 3 :])
    played = [kept[i : i + 3] for i in range(0, len(kept), 3)]
    assert len(played) == 60
    assert set(played) == {"abc", "acb", "bac", "bca", "cab", "cba"}
    assert min(Counter(names[0] for names in played).values()) > 8, "each is first about as often"


def test_pairs_stay_aligned_however_rounds_are_shuffled(bench: Bench) -> None:
    """Sample i of every contender is of round i: a drift that affects all alike leaves the ratio alone.

    Neither warm-up nor results are kept: a hundred outputs would fill the device.
    """
    factors = {"a": 1.0, "b": 2.0, "c": 5.0}
    contenders = [bench.contender(name, lambda n, k=k: k * (3 + n)) for name, k in factors.items()]
    result = bench.run(contenders, exactly(15), baseline="a")
    for name, factor in factors.items():
        assert result.timings[name].ms == [factor * (3 + number) for number in range(15)]
        interval = result.ratio(name, "a")
        assert interval is not None
        assert (interval.low, interval.median, interval.high) == (factor, factor, factor)
        assert all(sample.result is None for sample in result.timings[name].samples)


def test_inspect_sees_the_last_round_which_is_timed_like_others(bench: Bench) -> None:
    """And before the next call: a buffer that an implementation reuses still holds its own answer."""
    seen: list[tuple[Any, ...]] = []
    before: list[int] = []

    def inspect(*found: Any) -> None:
        seen.append(found)
        assert bench.called[-1][0] == found[0]

    contenders = [bench.contender("a", lambda n: 10.0 + n), bench.contender("b", lambda n: 20.0 + n)]
    result = bench.run(contenders, exactly(9), inspect=inspect, before_inspection=before.append)
    assert (sorted(seen), before) == ([("a", 8, 18.0), ("b", 8, 28.0)], [8, 8])
    assert len(result.timings["a"].samples) == 9


def test_a_sample_with_a_gap_is_taken_again_behind_a_longer_spin_then_kept_and_marked(bench: Bench) -> None:
    bench.unfilled = RETRIES
    result = bench.run([bench.contender("a")], exactly(2, warmup_rounds=0))
    assert bench.called == [("a", 0)] * RETRIES + [("a", 1)]
    assert bench.leads_us[0] < bench.leads_us[1] < bench.leads_us[2]
    assert [sample.queue_filled for sample in result.timings["a"].samples] == [False, True]


def test_a_call_that_waits_for_the_gpu_is_not_taken_again_behind_spins_that_it_waits_for() -> None:
    """Its host needs 5 ms after whatever spin; a disturbed one has a filled queue at the next turn."""
    leads_us: dict[str, list[float]] = {"waits": [], "disturbed": []}

    def take(name: str, number: int, lead_us: float) -> Sample:
        leads_us[name].append(lead_us)
        waits = name == "waits" or (number < 0 and len(leads_us[name]) > 1)
        queue_us = lead_us + 5000.0 if waits else 300.0
        return Sample(5.0, queue_us, queue_us, not waits and lead_us > queue_us, None)

    timed = [TimedCall(name, partial(take, name)) for name in leads_us]
    result = run_rounds(timed, exactly(10, warmup_rounds=1))
    assert len(leads_us["waits"]) == RETRIES + 10
    assert max(leads_us["waits"][RETRIES:]) < 7000.0, "the spin does not grow with what it makes the call wait"
    assert len(leads_us["disturbed"]) == RETRIES + 10
    assert all(sample.queue_filled for sample in result.timings["disturbed"].samples)


def test_a_rested_contender_waits_before_every_sample(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[tuple[float, int]] = []
    monkeypatch.setattr(rounds_module.time, "sleep", lambda seconds: naps.append((seconds, len(bench.called))))
    bench.run([bench.contender("a"), bench.contender("b")], exactly(3, warmup_rounds=1, rest_s=0.05))
    assert naps == [(0.05, number) for number in range(8)]


@pytest.mark.parametrize("where", ["call", "inspect", "judge"])
@pytest.mark.parametrize("baseline", ["good", "bad"])
def test_a_failure_costs_one_contender_and_leaves_the_others(bench: Bench, where: str, baseline: str) -> None:
    def fail(here: str, number: int) -> float:
        if where == here and number >= 4:
            raise ValueError(f"in {where}")
        return 1.0

    def inspect(name: str, number: int, result: object) -> None:
        if name == "bad":
            fail("inspect", number)

    def judge(number: int) -> dict[str, Exception]:
        return {"bad": ValueError(f"in judge {number}")} if where == "judge" and number >= 4 else {}

    contenders = [bench.contender("good"), bench.contender("bad", lambda number: fail("call", number))]
    result = bench.run(contenders, exactly(10), baseline=baseline, inspect=inspect, on_round=judge)
    assert str(result.timings["bad"].failure) == ("in judge 4" if where == "judge" else f"in {where}"), "the first"
    assert result.timings["good"].failure is None
    assert len(result.timings["good"].samples) == 10
    assert result.ratio("bad", "good") is None
    assert result.ratio("good", "bad") is None
    assert result.ratio("good", "good") is not None
    if where != "inspect":
        assert all(number <= 4 for name, number in bench.called if name == "bad"), "it takes no further part"


def test_a_lost_device_ends_the_measurement(bench: Bench) -> None:
    def broken(number: int) -> float:
        raise RuntimeError("CUDA error")

    contenders = [bench.contender("a"), bench.contender("bad", broken), bench.contender("b")]
    with pytest.raises(DeviceLost, match="CUDA error"):
        bench.run(contenders, exactly(10), device_works=lambda: "bad" not in dict(bench.called))
    assert [name for name, _ in bench.called].count("bad") == 1
    assert bench.called[-1][0] == "bad"


def test_when_everyone_fails_it_ends(bench: Bench) -> None:
    result = bench.run([bench.contender(name, lambda number: 1 / 0) for name in "ab"], Rule(), baseline="a")
    assert all(timing.failure and not timing.samples for timing in result.timings.values())
    assert result.ratio("b", "a") is None


def jitter(factor: float) -> Callable[[int], float]:
    """Times that scatter by some percent, never the same for two rounds."""
    return lambda number: factor * (1 + 0.1 * ((number * 7919) % 13) / 13)


@pytest.mark.parametrize(
    ("rule", "ms", "stopped_by", "rounds"),
    [
        # every ratio is known
        (Rule(min_s=0.0, budget_s=1e9), (jitter(1.0), lambda n: 2 * jitter(1.0)(n)), "precision", range(10, 13)),
        # 10 and 20 ms, exactly known at once: the least time, 2 s, is 67 rounds
        (Rule(budget_s=1e9), (lambda n: 10.0, lambda n: 20.0), "precision", range(67, 70)),
        # one ratio is uncertain
        (Rule(budget_s=1e9, max_rounds=40), (lambda n: 1.0, lambda n: 2.0, lambda n: 1.0 + n % 2), "rounds", [40]),
        # without a ratio the times themselves have to be known
        (Rule(min_s=0.0, budget_s=1e9, max_rounds=33), (lambda n: 1.0,), "precision", range(10, 33)),
        # at least the fewest rounds, whatever the budget
        (Rule(budget_s=0.001), (lambda n: 1e6,), "budget", [10]),
        # 0.3 s and 0.2 s a round, of 10 s
        (Rule(warmup_rounds=0), (lambda n: 300.0, lambda n: 100.0 + 200 * (n % 2)), "budget", range(18, 22)),
    ],
)
def test_when_it_stops(
    bench: Bench, rule: Rule, ms: tuple[Callable[[int], float], ...], stopped_by: str, rounds: Any
) -> None:
    """The first is the baseline."""
    contenders = [bench.contender(str(index), time_of) for index, time_of in enumerate(ms)]
    result = bench.run(contenders, rule, baseline="0")
    assert result.stopped_by == stopped_by
    (count,) = {len(timing.samples) for timing in result.timings.values()}
    assert count in rounds
