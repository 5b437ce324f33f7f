"""The rules for each part of a step against what was measured, on one H200: 39 layers and numbers of tokens."""

import csv
import statistics
from pathlib import Path

import pytest
import torch

from swiglu_kernels.hopper import shared
from swiglu_kernels.ops.glu import choice as glu_choice
from swiglu_kernels.ops.mlp import choice as mlp_choice
from swiglu_kernels.tiles import here
from swiglu_kernels.tiles.candidates import KERNELS, TileProblem, shipped

MEASURED = Path(__file__).parents[3] / "results" / "nvidia-h200"
Place = tuple[int, int, int]
"""Hidden, intermediate, tokens."""


PARTS = ("parts.csv", "parts-preact.csv")


def measured(*names: str) -> dict[Place, dict[str, dict[str, float]]]:
    """Microseconds by part and way, of some files."""
    found: dict[Place, dict[str, dict[str, float]]] = {}
    for name in names:
        with (MEASURED / name).open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                place = int(row["hidden"]), int(row["intermediate"]), int(row["tokens"])
                found.setdefault(place, {}).setdefault(row["part"], {})[row["way"]] = float(row["us"])
    return found


def ruled(part: str, place: Place) -> str:
    hidden, intermediate, tokens = place
    x = torch.empty(tokens, hidden, dtype=torch.bfloat16, device="meta")
    weight_grad, _, input_grad = glu_choice.resolve("auto", "auto", "auto", x, intermediate)
    by_torch = {"input-grad": input_grad, "weight-grad": weight_grad, "mlp-weight-grad": weight_grad}.get(part)
    if by_torch == "torch" or (part == "mlp-weight-grad" and mlp_choice.down_weight_grad_by_torch(x, intermediate)):
        return "torch"
    return shipped(part, TileProblem(tokens, hidden, intermediate, torch.bfloat16, (9, 0))).schedule


def way(part: str, place: Place, us: dict[str, float]) -> str:
    """What is ruled; of more than 1024 tokens the file has no transposed forward (ragged.csv has), which is faster."""
    found = ruled(part, place)
    return "ping-pong" if found == "transposed" and found not in us else found


@pytest.fixture(autouse=True)
def _on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "why_off", lambda *_: None)
    monkeypatch.setattr(here, "hopper_multiprocessors", lambda *_: 132)
    monkeypatch.setattr(here, "capability_of", lambda _: (9, 0))


@pytest.mark.parametrize(
    ("part", "mean", "most"),
    [
        ("forward-preact", 1.005, 1.08), ("mlp-hidden-grad", 1.005, 1.08), ("input-grad", 1.005, 1.12),
        ("weight-grad", 1.015, 1.22), ("mlp-weight-grad", 1.01, 1.12),
    ],
)  # fmt: skip
def test_each_part_is_near_the_fastest_way(part: str, mean: float, most: float) -> None:
    assert part in KERNELS
    over = []
    for place, parts in measured(*PARTS).items():
        us = parts[part]
        over.append(us[way(part, place, us)] / min(us.values()))
    assert len(over) == 39
    assert statistics.geometric_mean(over) < mean
    assert max(over) < most


@pytest.mark.parametrize(("part", "mean", "most"), [("input-grad", 1.006, 1.03), ("mlp-weight-grad", 1.005, 1.04)])
def test_products_by_hand_are_taken_where_their_waves_are_filled(part: str, mean: float, most: float) -> None:
    parts = {place: us[part] for place, us in measured("waves.csv").items()}
    over = [us[ruled(part, place)] / min(us.values()) for place, us in parts.items()]
    assert len(over) == 31
    assert statistics.geometric_mean(over) < mean
    assert max(over) < most


def test_no_step_is_slower_than_pytorch_with_our_elementwise_launches() -> None:
    ratios = []
    for place, parts in measured(*PARTS).items():
        ours = sum(us[way(part, place, us)] for part, us in parts.items())
        ratios.append(ours / sum(us["torch"] for us in parts.values()))
    assert max(ratios) <= 1
    assert statistics.geometric_mean(ratios) < 0.93
