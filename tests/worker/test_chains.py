"""Whose calls back to back are held against what its samples claim."""

from collections.abc import Iterator
from itertools import chain, cycle, repeat
from types import SimpleNamespace
from typing import Any

import pytest

from swiglu_bench.cases.cases import Mode
from swiglu_bench.worker import chains
from swiglu_bench.worker.chains import Chains, Unsettled, WrongTime

CLAIMED_BY_HOST = 1.0 + 1e-9


def found(
    monkeypatch: pytest.MonkeyPatch, took: dict[str, Iterator[float]], baseline: str = "eager", *host_bound: str,
    inputs_ms: float = 0.0, apart: float = 1.0,
) -> dict[str, Exception]:  # fmt: skip
    """What is said of contenders whose calls take so many milliseconds, try after try."""
    place: Any = SimpleNamespace(
        judge=SimpleNamespace(glue_ms=lambda *_: inputs_ms),
        settings=SimpleNamespace(device=SimpleNamespace(type="cuda")),
    )
    monkeypatch.setattr(Chains, "_call_ms", lambda self, name, *_: next(took[name]))
    monkeypatch.setattr(Chains, "_record", lambda self, name: None)
    case: Any = SimpleNamespace(mode=Mode.FORWARD)
    contenders: Any = dict.fromkeys(took)
    equals, claimed = [name for name in took if "twin" in name], dict.fromkeys(took, 1.0)
    host_ms = {name: CLAIMED_BY_HOST if name in host_bound else 0.0 for name in took}
    said = Chains(place, case, contenders, lambda name: (), equals)
    return said.disagreements(claimed, baseline, host_ms, apart)


@pytest.mark.parametrize(
    ("mine", "expected"),
    [
        (repeat(1.1), None),
        (chain([1.6, 1.3], repeat(1.0)), None),
        (repeat(1.4), WrongTime),  # a third is done outside of its samples, however often it is asked
        (chain([1.4, 1.4, 1.4], [0.8], repeat(1.4)), Unsettled),  # noise only adds: once it took no longer
    ],
)
def test_noise_adds_and_never_takes_away(
    monkeypatch: pytest.MonkeyPatch, mine: Iterator[float], expected: type[Exception] | None
) -> None:
    said = found(monkeypatch, {"eager": repeat(1.0), "mine": mine})
    assert type(said.get("mine")) is (expected or type(None))
    assert "eager" not in said


@pytest.mark.parametrize(
    ("twin", "mine", "expected"),
    [
        (1.0, 1.1, WrongTime),  # the baseline's processes are alike, so that a tenth is much
        (1.0, 1.04, None),
        (1.03, 1.08, None),
        (1.03, 1.12, WrongTime),
        (1.3, 1.14, None),  # they are not
        (1.3, 1.2, WrongTime),  # the bound stays
    ],
)
def test_what_may_be_left_unexplained_is_measured(
    monkeypatch: pytest.MonkeyPatch, twin: float, mine: float, expected: type[Exception] | None
) -> None:
    took = {"eager": repeat(1.0), "eager (twin 1)": repeat(twin), "mine": repeat(mine)}
    assert type(found(monkeypatch, took).get("mine")) is (expected or type(None))


@pytest.mark.parametrize(
    ("busy", "host_bound", "inputs_ms", "said"),
    [
        (True, (), 0.0, {1.4: Unsettled, 2.5: WrongTime}),
        (False, ("mine",), 0.0, {1.1: None, 1.5: Unsettled, 2.5: WrongTime}),
        (False, ("mine",), 2.0, {1.4: None, 1.6: Unsettled}),
        (False, ("mine",), 20.0, {1.9: None, 2.5: WrongTime}),
        (False, (), 2.0, {1.4: WrongTime}),
    ],
    ids=["busy machine", "host takes longer than GPU", "as do its inputs", "many inputs", "inputs alone"],
)
def test_where_times_are_uncertain_only_what_is_beyond_doubt_is_wrong(
    monkeypatch: pytest.MonkeyPatch, busy: bool, host_bound: tuple[str, ...], inputs_ms: float, said: dict[float, Any]
) -> None:
    for factor, kind in said.items():
        eager = chain([chains.BUSY + 1 if busy else 1.0], repeat(1.0))
        took = {"eager": eager, "mine": repeat(factor)}
        mine = found(monkeypatch, took, "eager", *host_bound, inputs_ms=inputs_ms).get("mine")
        assert type(mine) is (kind or type(None)), factor
        assert ("host takes longer" in str(mine)) is (kind is Unsettled and not busy)


def test_what_the_baseline_s_own_processes_differ_by_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside programs on every CPU, an honest contender's calls once took 58 times what its samples said."""
    for apart, kind in ((50.0, WrongTime), (60.0, Unsettled)):
        said = found(monkeypatch, {"eager": repeat(1.0), "mine": repeat(58.0)}, apart=apart)
        assert type(said["mine"]) is kind
        assert ("while the machine is busy" in str(said["mine"])) is (kind is Unsettled)


@pytest.mark.parametrize("baseline", ["", "grouped"], ids=["none asked for", "one that could not run"])
def test_without_a_baseline_nothing_is_proven(monkeypatch: pytest.MonkeyPatch, baseline: str) -> None:
    for factor, kind in ((1.1, type(None)), (1.4, Unsettled), (5.0, Unsettled)):
        said = found(monkeypatch, {"eager": repeat(1.0), "mine": repeat(factor)}, baseline)
        assert type(said.get("mine")) is kind
        assert "without a baseline" in str(said.get("mine", "without a baseline"))


def test_who_takes_much_longer_has_chains_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The few calls of a slow contender's chain would be over before the clock can tell those of a fast one."""
    claimed = {"baseline": 0.4, "slow": 40.0, "fast": 0.3, "as fast": 2.3}
    calls: dict[str, set[int]] = {name: set() for name in claimed}

    def call_ms(_: Chains, name: str, draw: Any, number: int, chains: int, baseline: str) -> float:
        calls[name].add(number)
        if name == "baseline" and number == 4:
            return claimed[name] * 9.0  # of so few calls nothing can be told
        return claimed[name]

    judge = SimpleNamespace(glue_ms=lambda *_: 0.0)
    place: Any = SimpleNamespace(judge=judge, settings=SimpleNamespace(device=SimpleNamespace(type="cuda")))
    monkeypatch.setattr(Chains, "_call_ms", call_ms)
    contenders, case = dict.fromkeys(claimed), SimpleNamespace(mode=Mode.FORWARD)
    all_of_them: Any = Chains(place, case, contenders, lambda name: ())  # type: ignore[arg-type]
    said = all_of_them.disagreements(claimed, "baseline")
    assert calls == {"baseline": {4, 21}, "slow": set(), "fast": {21}, "as fast": {21}}
    assert list(map(type, said.values())) == [Unsettled]
    assert "slow" in said, "the baseline is settled beside others"
    calls = {name: set() for name in claimed}
    assert not all_of_them.disagreements(claimed, "slow")
    assert set(map(tuple, calls.values())) == {(10,)}, "a slow baseline shortens them less than a slow other"


def test_a_try_counts_if_the_baseline_is_as_fast_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What began to use the machine in between is no fault of a contender, whatever it takes."""
    said = found(monkeypatch, {"eager": cycle([1.0, chains.BUSY + 1]), "mine": repeat(5.0)})
    assert type(said["mine"]) is Unsettled
    said = found(monkeypatch, {"eager": repeat(1.2), "mine": repeat(2.0)})
    assert "at least 1.67 times" in str(said["mine"])
