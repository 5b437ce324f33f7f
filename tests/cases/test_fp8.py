"""The quantiser of each recipe, by what its docstring says; tests/cases/test_definition.py compares its bits."""

import pytest
import torch

from swiglu_bench.cases.cases import Precision
from swiglu_bench.cases.fp8 import dequantise, quantise, scale_size

RECIPES = [one for one in Precision if one]


@pytest.mark.parametrize(
    ("precision", "name", "high", "wide"),
    [
        (Precision.FP8_TENSORWISE, "x", 999, 999), (Precision.FP8_TENSORWISE, "x.T", 999, 999),
        (Precision.FP8_ROWWISE, "x", 1, 999), (Precision.FP8_ROWWISE, "w_gate.T", 999, 1),
        (Precision.FP8_BLOCKWISE, "x", 1, 128), (Precision.FP8_BLOCKWISE, "d_up.T", 128, 1),
        (Precision.FP8_BLOCKWISE, "w_up", 128, 128), (Precision.FP8_BLOCKWISE, "w_up.T", 128, 128),
    ],
)  # fmt: skip
@pytest.mark.parametrize("size", [(256, 128), (130, 300), (1, 1)])
def test_scales_are_those_of_every_group_and_codes_are_near(
    precision: Precision, name: str, high: int, wide: int, size: tuple[int, int]
) -> None:
    value = torch.randn(size).bfloat16() * 3
    value[:, : size[1] // 2] *= 1e-3
    codes, scales = quantise(value, precision, name)
    largest = [[part.float().abs().max() for part in rows.split(wide, 1)] for rows in value.split(high)]
    assert scales.shape == scale_size(precision, name, size)
    assert torch.equal(scales, torch.tensor(largest) * torch.tensor(1 / 448))
    off = (dequantise(codes, scales) - value.double()).abs()
    assert (off <= value.double().abs() / 16 + value.abs().max().double() / 448 / 2**9).all()


@pytest.mark.parametrize("precision", RECIPES)
def test_zeros_have_the_smallest_scale_and_nan_reaches_its_group_only(precision: Precision) -> None:
    value = torch.zeros(4, 256)
    assert quantise(value, precision, "x")[1].unique().tolist() == [torch.tensor(2.0**-100 / 448).item()]
    value[1, 3] = torch.nan
    lost = dequantise(*quantise(value, precision, "x")).isnan().any(1)
    assert lost.tolist() == ([True] * 4 if precision is Precision.FP8_TENSORWISE else [False, True, False, False])
