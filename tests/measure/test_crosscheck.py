import pytest
import torch

from swiglu_bench.measure.crosscheck import REPEATS, Agreement, agreements, per_call


@pytest.mark.parametrize(("ours", "holds"), [(101.9, True), (98.1, True), (102.1, False), (97.9, False)])
def test_two_percent_is_the_limit(ours: float, holds: bool) -> None:
    assert Agreement("w", ours, 100.0).holds is holds


def test_what_lies_between_events_and_kernels_is_no_difference() -> None:
    assert Agreement("w", 105.0, 100.0, between_us=5.0).holds
    assert not Agreement("w", 111.0, 100.0, between_us=11.0).holds
    assert not Agreement("w", 108.0, 100.0, between_us=5.0).holds


@pytest.mark.parametrize(("count", "reason"), [(0, "saw no kernels"), (REPEATS + 1, "saw 31 kernels in 30 calls")])
def test_kernels_are_summed_by_call_where_they_can_be_told_apart(count: int, reason: str) -> None:
    assert per_call([1.0, 2.0, 3.0] * REPEATS) == [6.0] * REPEATS
    with pytest.raises(RuntimeError, match=reason):
        per_call([1.0] * count)


@pytest.mark.gpu
@pytest.mark.alone
def test_both_clocks_agree_on_a_gpu() -> None:
    found = list(agreements(torch.device("cuda", 0)))
    assert len(found) == 4
    assert all(isinstance(one, Agreement) and one.holds for one in found), found
