from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from swiglu_bench.measure import rounds as rounds_module
from swiglu_bench.measure.clock import DeviceLost, Sample
from swiglu_bench.measure.rounds import RETRIES, Contender, Rounds, Rule, Timing, run_rounds


class FakeClock:
    """A clock whose time passes only when something is timed; what a call returns is how long it took, in ms."""

    cache = "fake"

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.leads_us: list[float] = []
        self.unfilled = 0
        """How many of the next samples find a gap in the queue."""
        monkeypatch.setattr(rounds_module.time, "perf_counter", lambda: self.now_s)

    def sample(self, call: Callable[[], Any], lead_us: float) -> Sample:
        self.leads_us.append(lead_us)
        ms = call()
        self.now_s += ms / 1e3
        filled = self.unfilled <= 0
        self.unfilled -= 1
        return Sample(ms, 50.0, filled, ms)

    def synchronize(self) -> None:
        pass


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    return FakeClock(monkeypatch)


class Log:
    """Contenders that write down when they are prepared and called."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, int]] = []

    @property
    def called(self) -> list[tuple[str, int]]:
        return [(name, number) for event, name, number in self.events if event == "call"]

    def contender(self, name: str, ms: Callable[[int], float] = lambda number: 1.0) -> Contender:
        def prepare(number: int) -> Callable[[], float]:
            self.events.append(("prepare", name, number))
            return lambda: (self.events.append(("call", name, number)), ms(number))[1]

        return Contender(name, prepare)


def exactly(count: int, **changes: Any) -> Rule:
    """A rule that ends after a number of rounds."""
    return Rule(**({"warmup_rounds": 2, "min_rounds": count, "max_rounds": count, "budget_s": 1e9} | changes))


def broken(number: int) -> Callable[[], float]:
    raise RuntimeError("broken")


# Order


def test_every_contender_runs_once_a_round_in_every_order(clock: FakeClock) -> None:
    log = Log()
    run_rounds([log.contender(name) for name in "abc"], clock, exactly(60))
    kept = "".join(name for name, _ in log.called[2 * 3 :])
    played = [kept[i : i + 3] for i in range(0, len(kept), 3)]
    assert len(played) == 60
    assert set(played) == {"abc", "acb", "bac", "bca", "cab", "cba"}
    assert min(Counter(names[0] for names in played).values()) > 8, "each is first about as often"


def test_the_seed_decides_the_order(clock: FakeClock) -> None:
    orders = []
    for seed in (1, 1, 2):
        log = Log()
        run_rounds([log.contender(name) for name in "abcd"], clock, exactly(20), seed=seed)
        orders.append(log.called)
    assert orders[0] == orders[1] != orders[2]


def test_rounds_are_numbered_from_0_after_a_warm_up_from_0_and_each_call_is_prepared_just_before(
    clock: FakeClock,
) -> None:
    log, heard = Log(), []
    run_rounds([log.contender("a"), log.contender("b")], clock, exactly(4), on_round=heard.append)
    assert [number for name, number in log.called if name == "a"] == [0, 1, 0, 1, 2, 3]
    assert log.events[::2] == [("prepare", name, number) for name, number in log.called]
    assert heard == [1, 2, 3, 4]


# Samples


def test_neither_warm_up_nor_results_are_kept(clock: FakeClock) -> None:
    """A hundred outputs would fill the device."""
    calls: list[int] = []

    def ms(number: int) -> float:
        calls.append(number)
        return 100.0 if len(calls) <= 3 else 1.0

    result = run_rounds([Log().contender("a", ms)], clock, exactly(6, warmup_rounds=3))
    assert result.timings["a"].ms == [1.0] * 6
    assert all(sample.result is None for sample in result.timings["a"].samples)


def test_pairs_stay_aligned_however_rounds_are_shuffled(clock: FakeClock) -> None:
    """Sample i of every contender is of round i: a drift that affects all alike leaves the ratio alone."""
    log = Log()
    contenders = [log.contender(name, lambda n, k=k: k * (1 + n)) for name, k in (("a", 1.0), ("b", 2.0), ("c", 5.0))]
    result = run_rounds(contenders, clock, exactly(15), baseline="a")
    for name, factor in (("a", 1.0), ("b", 2.0), ("c", 5.0)):
        assert result.timings[name].ms == [factor * (1 + number) for number in range(15)]
        interval = result.ratio(name, "a")
        assert interval is not None
        assert (interval.low, interval.median, interval.high) == (factor, factor, factor)


# inspect


@pytest.mark.parametrize("inspected", [1, 2, 3])
def test_inspect_sees_the_last_rounds_which_are_timed_like_others(clock: FakeClock, inspected: int) -> None:
    """And before the next call: a buffer that an implementation reuses still holds its own answer."""
    log, seen, before = Log(), [], []

    def inspect(*found: Any) -> None:
        seen.append(found)
        assert log.called[-1][0] == found[0]

    result = run_rounds(
        [log.contender("a", lambda n: 10.0 + n), log.contender("b", lambda n: 20.0 + n)], clock, exactly(9),
        inspect=inspect, inspected_rounds=inspected, before_inspection=before.append,
    )  # fmt: skip
    last = range(9 - inspected, 9)
    assert sorted(seen) == sorted((name, n, base + n) for n in last for name, base in (("a", 10.0), ("b", 20.0)))
    assert before == [number for number in last for _ in "ab"]
    assert len(result.timings["a"].samples) == 9


# A gap in the queue


def test_a_sample_with_a_gap_is_taken_again_behind_a_longer_spin_then_kept_and_marked(clock: FakeClock) -> None:
    log = Log()
    clock.unfilled = RETRIES
    result = run_rounds([log.contender("a")], clock, exactly(2, warmup_rounds=0))
    assert log.events == [("prepare", "a", 0), ("call", "a", 0)] * RETRIES + [("prepare", "a", 1), ("call", "a", 1)]
    assert clock.leads_us[0] < clock.leads_us[1] < clock.leads_us[2]
    assert [sample.queue_filled for sample in result.timings["a"].samples] == [False, True]


def test_the_lead_follows_what_the_host_needs(clock: FakeClock) -> None:
    """The fake host needs 50 us; the spin settles a little above, no matter where it began."""
    run_rounds([Log().contender("a")], clock, exactly(30))
    assert 50.0 < clock.leads_us[-1] <= 60.0 + 1e-9


def test_a_rested_contender_waits_before_every_sample_and_the_wait_is_not_timed(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, naps = Log(), []
    monkeypatch.setattr(rounds_module.time, "sleep", lambda seconds: naps.append((seconds, len(log.called))))
    result = run_rounds([log.contender("a"), log.contender("b")], clock, exactly(3, warmup_rounds=1, rest_s=0.05))
    assert naps == [(0.05, number) for number in range(8)]
    assert result.timings["a"].ms == [1.0] * 3


# Failures


@pytest.mark.parametrize("where", ["prepare", "call", "inspect"])
@pytest.mark.parametrize("baseline", ["good", "bad"])
def test_a_failure_costs_one_contender_and_leaves_the_others(clock: FakeClock, where: str, baseline: str) -> None:
    log = Log()

    def at(here: str, number: int) -> float:
        if where == here and number == 4:
            raise ValueError(f"in {where}")
        return 1.0

    def prepare(number: int) -> Callable[[], float]:
        at("prepare", number)
        return log.contender("bad", lambda number: at("call", number)).prepare(number)

    def inspect(name: str, number: int, result: object) -> None:
        if where == "inspect" and name == "bad":
            raise ValueError("in inspect")

    contenders = [log.contender("good"), Contender("bad", prepare)]
    result = run_rounds(contenders, clock, exactly(10), baseline=baseline, inspect=inspect)
    assert str(result.timings["bad"].failure) == f"in {where}"
    assert result.timings["good"].failure is None
    assert len(result.timings["good"].samples) == 10
    assert result.ratio("bad", "good") is None
    assert result.ratio("good", "bad") is None
    assert result.ratio("good", "good") is not None
    if where != "inspect":
        assert all(number <= 4 for name, number in log.called[4:] if name == "bad"), "it takes no further part"


def test_a_lost_device_ends_the_measurement_and_the_turn_names_who_broke_it(clock: FakeClock) -> None:
    turns: list[str] = []

    def prepare(number: int) -> Callable[[], float]:
        def dead() -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        clock.synchronize = dead  # type: ignore[method-assign]
        raise RuntimeError("CUDA error")

    contenders = [Log().contender("a"), Contender("bad", prepare), Log().contender("b")]
    with pytest.raises(DeviceLost, match="RuntimeError: CUDA error"):
        run_rounds(contenders, clock, exactly(10), on_turn=turns.append)
    assert turns[-1] == "bad"
    assert turns.count("bad") == 1


def test_when_everyone_fails_it_ends(clock: FakeClock) -> None:
    result = run_rounds([Contender("a", broken), Contender("b", broken)], clock, Rule(), baseline="a")
    assert all(timing.failure and not timing.samples for timing in result.timings.values())
    assert result.ratio("b", "a") is None
    assert Rounds({"a": Timing(), "b": Timing()}, "rounds").ratio("a", "b") is None, "a ratio needs samples"


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit])
def test_an_interruption_is_not_a_failure_of_a_contender(clock: FakeClock, interruption: type[BaseException]) -> None:
    def prepare(number: int) -> Callable[[], float]:
        raise interruption

    with pytest.raises(interruption):
        run_rounds([Contender("a", prepare)], clock, exactly(3))


# When to stop


def jitter(factor: float) -> Callable[[int], float]:
    """Times that scatter by some percent, never the same for two rounds."""
    return lambda number: factor * (1 + 0.1 * ((number * 7919) % 13) / 13)


def timed(clock: FakeClock, rule: Rule, *ms: Callable[[int], float]) -> Rounds:
    """The first is the baseline, "0"."""
    log = Log()
    return run_rounds([log.contender(str(i), one) for i, one in enumerate(ms)], clock, rule, baseline="0")


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
        (Rule(budget_s=1e9, max_rounds=33, precision=-1.0), (lambda n: 1.0,), "rounds", [33]),
        # at least the fewest rounds, whatever the budget
        (Rule(budget_s=0.001), (lambda n: 1e6,), "budget", [10]),
        # 0.3 s and 0.2 s a round, of 10 s
        (Rule(warmup_rounds=0), (lambda n: 300.0, lambda n: 100.0 + 200 * (n % 2)), "budget", range(18, 22)),
    ],
)
def test_when_it_stops(
    clock: FakeClock, rule: Rule, ms: tuple[Callable[[int], float], ...], stopped_by: str, rounds: Any
) -> None:
    result = timed(clock, rule, *ms)
    assert result.stopped_by == stopped_by
    (count,) = {len(timing.samples) for timing in result.timings.values()}
    assert count in rounds
