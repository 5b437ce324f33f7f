from collections.abc import Callable
from typing import Any

import pytest
import torch

from swiglu_bench.measure import crosscheck
from swiglu_bench.measure.clock import CpuClock, Sample
from swiglu_bench.measure.crosscheck import REPEATS, Agreement, agreements, compare, per_call


class DriftingClock(CpuClock):
    """Every sample takes 1 us more than the last."""

    us = 100.0

    def sample(self, call: Callable[[], Any], lead_us: float) -> Sample:
        self.us += 1
        return Sample(self.us / 1e3, 1.0, True, call())


def test_a_drift_during_the_comparison_cancels(monkeypatch: pytest.MonkeyPatch) -> None:
    def profiled(call: object, clock: CpuClock) -> list[float]:
        return [clock.sample(lambda: None, 0.0).ms * 1e3 for _ in range(REPEATS)]  # drifts as ours does

    monkeypatch.setattr(crosscheck, "profiled_us", profiled)
    agreement = compare("w", lambda: None, DriftingClock())
    assert agreement.difference == pytest.approx(0.0, abs=0.005)
    assert agreement.holds


@pytest.mark.parametrize(("ours", "holds"), [(101.9, True), (98.1, True), (102.1, False), (97.9, False)])
def test_two_percent_is_the_limit(ours: float, holds: bool) -> None:
    assert Agreement("w", ours, 100.0).holds is holds


@pytest.mark.parametrize(("count", "reason"), [(0, "saw no kernels"), (REPEATS + 1, "saw 31 kernels in 30 calls")])
def test_kernels_are_summed_by_call_where_they_can_be_told_apart(count: int, reason: str) -> None:
    assert per_call([1.0, 2.0, 3.0] * REPEATS) == [6.0] * REPEATS
    with pytest.raises(RuntimeError, match=reason):
        per_call([1.0] * count)


def test_a_reason_takes_the_place_of_a_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first workload is long enough, the second too short, and the third is not profiled."""
    monkeypatch.setattr(crosscheck, "CudaClock", lambda device, cold_l2: DriftingClock())
    monkeypatch.setattr(crosscheck, "workloads", lambda device: [(name, lambda: None) for name in "abc"])
    answers = iter([[100.0] * REPEATS, [20.0] * REPEATS])

    def profiled(call: object, clock: object) -> list[float]:
        for answer in answers:
            return answer
        raise RuntimeError("no permission")

    monkeypatch.setattr(crosscheck, "profiled_us", profiled)
    first, *others = agreements(torch.device("cuda", 0))
    assert isinstance(first, Agreement)
    assert others == ["b: it takes 20.0 us, and a comparison needs at least 50 us", "c: no permission"]


@pytest.mark.gpu
def test_both_clocks_agree_on_a_gpu() -> None:
    found = list(agreements(torch.device("cuda", 0)))
    assert len(found) == 4
    for one in found:
        assert isinstance(one, Agreement), one
        assert one.holds, one
