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
        self.prepared: list[tuple[str, int]] = []
        self.called: list[tuple[str, int]] = []

    def contender(self, name: str, ms: Callable[[int], float] = lambda number: 1.0) -> Contender:
        def prepare(number: int) -> Callable[[], float]:
            self.prepared.append((name, number))

            def call() -> float:
                self.called.append((name, number))
                return ms(number)

            return call

        return Contender(name, prepare)

    def by_round(self, rule: Rule, per_round: int) -> list[list[str]]:
        kept = self.called[rule.warmup_rounds * per_round :]
        return [[name for name, _ in kept[i : i + per_round]] for i in range(0, len(kept), per_round)]


def exactly(count: int, **changes: Any) -> Rule:
    """A rule that ends after a number of rounds."""
    return Rule(**({"warmup_rounds": 2, "min_rounds": count, "max_rounds": count, "budget_s": 1e9} | changes))


# Order


def test_every_contender_runs_once_a_round(clock: FakeClock) -> None:
    log, rule = Log(), exactly(12)
    result = run_rounds([log.contender(name) for name in "abcd"], clock, rule)
    played = log.by_round(rule, 4)
    assert len(played) == 12
    assert all(sorted(names) == list("abcd") for names in played)
    assert all(len(timing.samples) == 12 for timing in result.timings.values())


def test_rounds_are_numbered_from_0_after_a_warm_up_from_0(clock: FakeClock) -> None:
    log = Log()
    run_rounds([log.contender("a")], clock, exactly(4))
    assert log.called == log.prepared == [("a", number) for number in (0, 1, 0, 1, 2, 3)]


def test_the_order_is_shuffled_in_each_round(clock: FakeClock) -> None:
    log, rule = Log(), exactly(60)
    run_rounds([log.contender(name) for name in "abc"], clock, rule)
    played = ["".join(names) for names in log.by_round(rule, 3)]
    assert set(played) == {"abc", "acb", "bac", "bca", "cab", "cba"}
    firsts = Counter(names[0] for names in played)
    assert min(firsts.values()) > 8, "each is first about as often"


def test_the_seed_decides_the_order(clock: FakeClock) -> None:
    orders = []
    for seed in (1, 1, 2):
        log = Log()
        run_rounds([log.contender(name) for name in "abcd"], clock, exactly(20), seed=seed)
        orders.append(log.called)
    assert orders[0] == orders[1] != orders[2]


def test_a_call_is_prepared_just_before_it_is_timed(clock: FakeClock) -> None:
    events: list[str] = []

    def contender(name: str) -> Contender:
        def prepare(number: int) -> Callable[[], float]:
            events.append(f"prepare {name}")
            return lambda: (events.append(f"call {name}"), 1.0)[1]

        return Contender(name, prepare)

    run_rounds([contender("a"), contender("b")], clock, exactly(5))
    for first, second in zip(events[::2], events[1::2], strict=True):
        assert (first.split()[0], second.split()[0]) == ("prepare", "call")
        assert first.split()[1] == second.split()[1]


# Samples


def test_warm_up_is_not_kept(clock: FakeClock) -> None:
    calls: list[int] = []

    def ms(number: int) -> float:
        calls.append(number)
        return 100.0 if len(calls) <= 3 else 1.0

    result = run_rounds([Log().contender("a", ms)], clock, exactly(6, warmup_rounds=3))
    assert result.timings["a"].ms == [1.0] * 6


def test_pairs_stay_aligned_however_rounds_are_shuffled(clock: FakeClock) -> None:
    """Sample i of every contender is of round i: a drift that hits all alike leaves the ratio alone."""
    log = Log()
    contenders = [log.contender(name, lambda n, k=k: k * (1 + n)) for name, k in (("a", 1.0), ("b", 2.0), ("c", 5.0))]
    result = run_rounds(contenders, clock, exactly(15), baseline="a")
    for name, factor in (("a", 1.0), ("b", 2.0), ("c", 5.0)):
        assert result.timings[name].ms == [factor * (1 + number) for number in range(15)]
        interval = result.ratio(name, "a")
        assert interval is not None
        assert (interval.low, interval.median, interval.high) == (factor, factor, factor)


def test_results_are_not_kept_with_the_samples(clock: FakeClock) -> None:
    """A hundred outputs would fill the device."""
    result = run_rounds([Log().contender("a")], clock, exactly(4))
    assert all(sample.result is None for sample in result.timings["a"].samples)


# inspect


@pytest.mark.parametrize("inspected", [1, 2, 3])
def test_inspect_sees_the_last_rounds_only(clock: FakeClock, inspected: int) -> None:
    log, seen = Log(), []
    contenders = [log.contender("a", lambda n: 10.0 + n), log.contender("b", lambda n: 20.0 + n)]
    run_rounds(contenders, clock, exactly(9), inspect=lambda *found: seen.append(found), inspected_rounds=inspected)
    last = range(9 - inspected, 9)
    assert sorted(seen) == sorted((name, n, base + n) for n in last for name, base in (("a", 10.0), ("b", 20.0)))


def test_inspect_comes_before_the_next_call(clock: FakeClock) -> None:
    """A buffer that an implementation reuses still holds its own answer."""
    log, told = Log(), []
    contenders = [log.contender(name) for name in "abc"]
    run_rounds(contenders, clock, exactly(5), inspect=lambda name, *_: told.append((name, log.called[-1][0])))
    assert len(told) == 3
    assert all(name == last for name, last in told)


def test_inspected_rounds_are_timed_like_all_others(clock: FakeClock) -> None:
    result = run_rounds([Log().contender("a")], clock, exactly(7), inspect=lambda *_: None, inspected_rounds=2)
    assert len(result.timings["a"].samples) == 7


# A gap in the queue


def test_a_sample_with_a_gap_is_taken_again_behind_a_longer_spin(clock: FakeClock) -> None:
    log = Log()
    clock.unfilled = 2
    run_rounds([log.contender("a")], clock, exactly(1, warmup_rounds=0, max_rounds=2))
    assert log.prepared[:3] == [("a", 0)] * 3, "prepared anew for every try"
    assert clock.leads_us[0] < clock.leads_us[1] < clock.leads_us[2]


def test_it_is_kept_and_marked_when_the_gap_stays(clock: FakeClock) -> None:
    log = Log()
    clock.unfilled = RETRIES
    result = run_rounds([log.contender("a")], clock, exactly(2, warmup_rounds=0))
    assert [sample.queue_filled for sample in result.timings["a"].samples] == [False, True]
    assert log.called == [("a", 0)] * RETRIES + [("a", 1)]


def test_the_lead_follows_what_the_host_needs(clock: FakeClock) -> None:
    """The fake host needs 50 us; the spin settles a little above, no matter where it began."""
    run_rounds([Log().contender("a")], clock, exactly(30))
    assert 50.0 < clock.leads_us[-1] <= 60.0 + 1e-9


# Rest


def test_a_rested_contender_waits_before_every_sample_and_the_wait_is_not_timed(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    naps: list[tuple[float, int]] = []
    log = Log()
    monkeypatch.setattr(rounds_module.time, "sleep", lambda seconds: naps.append((seconds, len(log.called))))
    result = run_rounds([log.contender("a"), log.contender("b")], clock, exactly(3, warmup_rounds=1, rest_s=0.05))
    assert naps == [(0.05, number) for number in range(8)]
    assert result.timings["a"].ms == [1.0] * 3


# Failures


@pytest.mark.parametrize("where", ["prepare", "call", "inspect"])
def test_a_failure_costs_one_contender_and_leaves_the_others(clock: FakeClock, where: str) -> None:
    log = Log()

    def prepare(number: int) -> Callable[[], float]:
        if where == "prepare" and number == 4:
            raise ValueError("in prepare")

        def call() -> float:
            log.called.append(("bad", number))
            if where == "call" and number == 4:
                raise ValueError("in call")
            return 1.0

        return call

    def inspect(name: str, number: int, result: object) -> None:
        if where == "inspect" and name == "bad":
            raise ValueError("in inspect")

    result = run_rounds(
        [log.contender("good"), Contender("bad", prepare)], clock, exactly(10), baseline="good", inspect=inspect
    )
    assert str(result.timings["bad"].failure) == f"in {where}"
    assert result.timings["good"].failure is None
    assert len(result.timings["good"].samples) == 10
    assert result.ratio("bad", "good") is None
    assert result.ratio("good", "bad") is None
    assert result.ratio("good", "good") is not None
    if where != "inspect":
        assert all(number <= 4 for name, number in log.called[4:] if name == "bad"), "it takes no further part"


def test_a_lost_device_ends_the_measurement_and_the_mark_names_whose_turn_it_was(clock: FakeClock) -> None:
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
    def prepare(number: int) -> Callable[[], float]:
        raise RuntimeError("broken")

    result = run_rounds([Contender("a", prepare), Contender("b", prepare)], clock, Rule(), baseline="a")
    assert all(timing.failure and not timing.samples for timing in result.timings.values())
    assert result.ratio("b", "a") is None


def test_a_failed_baseline_ends_nothing_else(clock: FakeClock) -> None:
    def prepare(number: int) -> Callable[[], float]:
        raise RuntimeError("broken")

    result = run_rounds([Contender("base", prepare), Log().contender("a")], clock, exactly(10), baseline="base")
    assert len(result.timings["a"].samples) >= 10


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


def test_it_stops_once_every_ratio_is_known(clock: FakeClock) -> None:
    log = Log()
    contenders = [log.contender("base", jitter(1.0)), log.contender("mine", lambda n: 2 * jitter(1.0)(n))]
    result = run_rounds(contenders, clock, Rule(min_s=0.0, budget_s=1e9), baseline="base")
    assert result.stopped_by == "precision"
    assert 10 <= len(result.timings["mine"].samples) <= 12


def test_precision_does_not_stop_it_before_its_least_time(clock: FakeClock) -> None:
    """Two contenders of 10 and 20 ms, exactly known at once: 2 s are 67 rounds."""
    log = Log()
    contenders = [log.contender("base", lambda n: 10.0), log.contender("mine", lambda n: 20.0)]
    result = run_rounds(contenders, clock, Rule(budget_s=1e9), baseline="base")
    assert result.stopped_by == "precision"
    assert 67 <= len(result.timings["mine"].samples) <= 69


def test_it_goes_on_while_one_ratio_is_uncertain(clock: FakeClock) -> None:
    log = Log()
    contenders = [
        log.contender("base"),
        log.contender("sure", lambda n: 2.0),
        log.contender("unsure", lambda n: 1.0 + n % 2),
    ]
    result = run_rounds(contenders, clock, Rule(budget_s=1e9, max_rounds=40), baseline="base")
    assert result.stopped_by == "rounds"
    assert {len(timing.samples) for timing in result.timings.values()} == {40}


def test_a_tighter_precision_takes_more_rounds(clock: FakeClock) -> None:
    counts = []
    for precision in (0.05, 0.01):
        log = Log()
        contenders = [log.contender("base"), log.contender("mine", jitter(1.0))]
        rule = Rule(min_s=0.0, budget_s=1e9, max_rounds=2000, precision=precision)
        result = run_rounds(contenders, clock, rule, baseline="base")
        assert result.stopped_by == "precision"
        interval = result.ratio("mine", "base")
        assert interval is not None
        assert interval.half_width < 1.5 * precision * interval.median
        counts.append(len(result.timings["mine"].samples))
    assert counts[0] < counts[1]


def test_the_budget_ends_it_and_is_kept(clock: FakeClock) -> None:
    log = Log()
    contenders = [log.contender("base", lambda n: 300.0), log.contender("mine", lambda n: 100.0 + 200 * (n % 2))]
    result = run_rounds(contenders, clock, Rule(warmup_rounds=0, budget_s=10.0), baseline="base")
    assert result.stopped_by == "budget"
    spent = sum(sum(timing.ms) for timing in result.timings.values()) / 1e3
    assert 9.0 < spent <= 10.6


def test_at_least_the_fewest_rounds_whatever_the_budget(clock: FakeClock) -> None:
    result = run_rounds([Log().contender("a", lambda n: 1e6)], clock, Rule(budget_s=0.001))
    assert (result.stopped_by, len(result.timings["a"].samples)) == ("budget", Rule().min_rounds)


def test_without_a_baseline_the_times_themselves_have_to_be_known(clock: FakeClock) -> None:
    result = run_rounds([Log().contender("a")], clock, Rule(min_s=0.0, budget_s=1e9, max_rounds=33))
    assert result.stopped_by == "precision"
    result = run_rounds([Log().contender("a")], clock, Rule(budget_s=1e9, max_rounds=33, precision=-1.0))
    assert (result.stopped_by, len(result.timings["a"].samples)) == ("rounds", 33)


def test_the_law_s_own_numbers_are_the_defaults() -> None:
    assert (Rule().min_rounds, Rule().precision) == (10, 0.005)


def test_on_round_hears_of_every_round(clock: FakeClock) -> None:
    heard: list[int] = []
    run_rounds([Log().contender("a")], clock, exactly(6), on_round=heard.append)
    assert heard == [1, 2, 3, 4, 5, 6]


def test_a_ratio_needs_samples() -> None:
    assert Rounds({"a": Timing(), "b": Timing()}, "rounds").ratio("a", "b") is None
