"""What is chosen by the model of a GPU."""

import pytest
import torch

from swiglu_kernels.hopper import admission, shared
from swiglu_kernels.ops.glu import choice
from swiglu_kernels.ops.glu.choice import weight_grad_is_by_torch
from swiglu_kernels.runtime import backend
from swiglu_kernels.tiles import cards, here, tuning
from swiglu_kernels.tiles.candidates import BY_TORCH, Choice, TileProblem, shipped
from swiglu_kernels.tiles.rules import Tile

H100, OTHER = "NVIDIA H100 80GB HBM3", "NVIDIA H20"


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every hand-scheduled kernel is admitted."""
    monkeypatch.setattr(shared, "GLUON_MISSING", None)
    monkeypatch.setattr(admission, "_override", [None])


def problem(card: str, tokens: int, hidden: int = 4096, intermediate: int = 11008) -> TileProblem:
    return TileProblem(tokens, hidden, intermediate, torch.bfloat16, (9, 0), card=card)


@pytest.mark.parametrize(
    ("card", "tokens", "sizes", "by_torch"),
    [
        (cards.H200, 8192, (4096, 11008), False), (H100, 256, (4096, 11008), False), (H100, 8192, (4096, 11008), False),
        (OTHER, 64, (4096, 11008), True), (OTHER, 1, (4096, 11008), False),
    ],
)  # fmt: skip
def test_weight_gradients(card: str, tokens: int, sizes: tuple[int, int], by_torch: bool) -> None:
    at = problem(card, tokens, *sizes)
    assert weight_grad_is_by_torch(at) == by_torch
    assert (shipped("weight-grad", at) == BY_TORCH) == by_torch


def test_tiles_of_weight_gradients_are_the_cards() -> None:
    """Wide ones on an H100, where layers are large and their waves filled; narrow ones elsewhere."""
    for card, sizes, expected in (
        (H100, (4096, 11008), ("cooperative", 3, 16)), (H100, (5120, 17408), ("cooperative", 3, 16)),
        (H100, (4096, 14336), ("ping-pong", 5, 4)), (H100, (2560, 9728), ("ping-pong", 5, 4)),
        (cards.H200, (4096, 11008), ("ping-pong", 6, 8)),
    ):  # fmt: skip
        found = shipped("weight-grad", problem(card, 2048, *sizes))
        assert (found.schedule, found.tile.stages, found.tile.group) == expected
    found = shipped("mlp-weight-grad", problem(H100, 2048))
    assert (found.schedule, found.tile.stages, found.tile.group) == ("ping-pong", 5, 4)


def test_tuning_a_card_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    by_hand = Choice("ping-pong", Tile(128, 128, 64, warps=4, stages=5, group=8))
    x = torch.empty(1024, 4096, dtype=torch.bfloat16, device="meta")
    for module in (choice, here, backend):
        monkeypatch.setattr(module, "capability_of", lambda device: (9, 0))
    for module in (choice, here):
        monkeypatch.setattr(module, "card_of", lambda device: OTHER)
    monkeypatch.setattr(here, "hopper_multiprocessors", lambda device, kernel: 78)
    monkeypatch.setattr(here, "multiprocessors", lambda device: 78)

    def chosen() -> str:
        return choice.resolve("auto", "auto", "auto", x, 11008)[0]

    assert chosen() == "torch"
    for tuned, name in ((by_hand, "triton"), (BY_TORCH, "torch")):
        monkeypatch.setattr(choice, "lookup", lambda kernel, *_, tuned=tuned: tuned)
        assert chosen() == name
        assert choice.why_weight_grad(x, 11008) == f"tuned on this {OTHER}"
    tuning.forget()
