"""Colours, axes and labels of charts."""

import itertools

import pytest

pytest.importorskip("altair", reason="the extra `report` is not installed")

from swiglu_bench.show.drawing import Style, linear_range, log_range, slots, spread


def test_a_known_name_keeps_its_colour_and_the_others_get_what_is_free() -> None:
    known = ["eager", "compile", "liger"]
    assert slots(["mine", "liger", "yours"], known) == {"liger": 2, "mine": 0, "yours": 1}
    everything = slots([f"n{index}" for index in range(40)], [])
    style = Style(everything)
    shown = {(style.colour(name), style.shape(name), style.dash(name)) for name in everything}
    assert len(shown) == 40


@pytest.mark.parametrize("ends", [(0.05, 2.2), (0.9, 1.1), (3e-5, 7e3), (5.0, 5.0), (0.0123, 0.0131)])
def test_ticks_are_few_enough_and_within(ends: tuple[float, float]) -> None:
    for extent in (log_range(ends), linear_range(ends)):
        assert extent.low < ends[0] <= ends[1] < extent.high
        assert len(extent.ticks) <= 11
        assert all(extent.low <= tick <= extent.high for tick in extent.ticks)
        assert extent.pixel(extent.high) == pytest.approx(0)
        assert extent.pixel(extent.low, 200) == pytest.approx(200)
    assert len(linear_range(ends).ticks) >= 3


def test_labels_are_moved_apart_and_keep_their_order() -> None:
    placed = spread([10, 11, 12, 300], 14, 0, 340)
    assert placed[3] == 300
    assert [round(b - a, 6) for a, b in itertools.pairwise(placed[:3])] == [14, 14]
    assert sum(placed[:3]) / 3 == pytest.approx(14)  # pushed off the edge: the middle wanted 11
    assert min(placed) >= 0
    crowded = spread([5.0] * 20, 14, 0, 100)
    assert crowded == sorted(crowded)
    assert (min(crowded), max(crowded)) == (pytest.approx(0), pytest.approx(100))
    assert spread([], 14, 0, 100) == []
