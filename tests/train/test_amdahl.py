import dataclasses

import pytest
from places import ROOT

from swiglu_bench.measure.statistics import Interval
from swiglu_bench.spec.cases import Case, Dtype, Mode, Scope, Shape
from swiglu_bench.spec.errors import BadInput
from swiglu_bench.train.amdahl import disagrees, expected, from_run

RUN = ROOT / "results" / "nvidia-h200" / "2026-11-21" / "step-mlp"


def interval(middle: float, half: float = 0.002) -> Interval:
    return Interval(middle, middle - half, middle + half)


def test_the_law() -> None:
    assert expected(0.5, 0.8) == pytest.approx(0.9)
    assert expected(0.0, 0.1) == 1.0
    assert expected(1.0, 0.7) == pytest.approx(0.7)
    assert expected(0.5, 0.8, 0.05) == pytest.approx(0.85)


@pytest.mark.parametrize(
    ("wanted", "measured", "noise", "off"),
    [
        (0.90, 0.90, 0.001, False),
        (0.90, 0.915, 0.001, False),
        (0.90, 0.925, 0.001, True),
        (0.90, 0.87, 0.001, True),
        (0.90, 0.88, 0.001, False),
        (1.00, 1.001, 0.001, False),
        (0.999, 1.0015, 0.005, False),
        (0.90, 0.95, 0.06, False),
    ],
)
def test_a_fifth_of_the_saving_and_more_than_noise(wanted: float, measured: float, noise: float, off: bool) -> None:
    assert disagrees(wanted, interval(measured), noise) is off


def test_ratios_of_an_earlier_run() -> None:
    shape = Shape("llama7b", 4096, 11008, "", ())
    case = Case(shape, 1024, Dtype.BFLOAT16, Scope.MLP, Mode.STEP)
    found = from_run(RUN, case)
    assert 0.5 < found["fused-mlp-auto"] < 1.1
    assert "compile" in found
    with pytest.raises(BadInput, match="no row of this block; make one with: swiglu-bench step --scope mlp"):
        from_run(RUN, dataclasses.replace(case, tokens=77))
    with pytest.raises(BadInput, match="does not exist"):
        from_run(RUN / "none", case)
