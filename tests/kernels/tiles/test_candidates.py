"""Candidates of the tuner: bounded, able to run by arithmetic, the shipped one first."""

import itertools

import pytest
import torch

from swiglu_kernels.hopper import admission, shared
from swiglu_kernels.ops.glu import hopper_forward, hopper_products, hopper_row, hopper_transposed
from swiglu_kernels.tiles.candidates import (
    BY_TORCH,
    GROUPS,
    KERNELS,
    REGISTERS,
    SHARED_BYTES,
    Choice,
    TileProblem,
    candidates,
    shipped,
    why_illegal,
)  # fmt: skip
from swiglu_kernels.tiles.rules import Tile, family_of

CAPABILITIES = [None, (8, 0), (8, 6), (9, 0), (10, 0), (12, 0)]
MIXTURE = {"experts": 64, "top_k": 8}
TOKENS = [1, 17, 65, 512, 513, 8192]


def at(tokens: int = 8192, capability: tuple[int, int] | None = (9, 0), **changes: object) -> TileProblem:
    return TileProblem(**{"tokens": tokens, "hidden": 4096, "intermediate": 11008, "dtype": torch.bfloat16} | changes,
                   capability=capability)  # type: ignore[arg-type]  # fmt: skip


@pytest.fixture
def _gluon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "GLUON_MISSING", None)
    monkeypatch.setattr(admission, "_override", [None])


@pytest.mark.usefixtures("_gluon")
@pytest.mark.parametrize("name", KERNELS)
def test_every_list_is_bounded_unique_and_able_to_run(name: str) -> None:
    kernel = KERNELS[name]
    for capability, tokens in itertools.product(CAPABILITIES, TOKENS):
        problem = at(tokens, capability, **(MIXTURE if name.startswith("experts") else {}))
        found = candidates(name, problem, most=12)
        assert found[0] == shipped(name, problem)
        assert len(found) == len(set(found)) == len(set(map(str, found)))
        by_hand = sum(len(tiles(problem)) for tiles in kernel.by_hand.values())
        assert 2 <= len(found) <= 1 + by_hand * 2 * len(GROUPS) + 12
        for choice in found:
            assert why_illegal(name, choice, problem) is None
        for choice in found[1:]:
            tile = choice.tile
            if choice.schedule != "portable" or choice == Choice("portable", kernel.tile(problem, True)):
                continue
            assert REGISTERS[0] <= kernel.accumulators * tile.rows * tile.columns / (32 * tile.warps) <= REGISTERS[1]
            stage_bytes = (kernel.left * tile.rows + kernel.right * tile.columns) * tile.depth * 2
            assert stage_bytes * (tile.stages - 1) <= SHARED_BYTES[family_of(capability)]


@pytest.mark.usefixtures("_gluon")
def test_the_nearest_come_first_and_fewer_are_a_part_of_more() -> None:
    few, many = (candidates("input-grad-fused", at(), most) for most in (4, 12))
    assert many[: len(few)] == few
    assert str(few[1]) == "64x128x64 8w 3s g16", "one halving from the shipped tile"


def test_experts_have_tiles_of_the_routing_s_rows() -> None:
    for tokens, rows in ((1, 16), (128, 16), (129, 32), (512, 64), (513, 128), (8192, 128)):
        problem = at(tokens, **MIXTURE)
        assert problem.kept_for == rows
        assert {choice.tile.rows for choice in candidates("experts-down", problem)} == {rows}
        taller = Choice("portable", Tile(2 * rows, 64, 64, warps=4, stages=3))
        assert why_illegal("experts-down", taller, problem) == "not of the routing's rows"
        kept = at(rows)  # as a file has it
        assert why_illegal("experts-down", candidates("experts-down", problem)[1], kept) is None


def schedules(name: str, problem: TileProblem) -> list[str]:
    return [choice.schedule for choice in candidates(name, problem)]


@pytest.mark.usefixtures("_gluon")
def test_the_forward_by_hand_is_a_choice_on_hopper_at_any_token_count() -> None:
    for tokens in (512, 4096):
        tile = hopper_forward.tile_for(tokens, at().intermediate, 132, False)
        assert shipped("forward", at(tokens)) == Choice("ping-pong", tile)
    few_hundred = Choice("transposed", hopper_transposed.tile(160, 3))
    assert shipped("forward", at(160)) == few_hundred
    assert why_illegal("forward", few_hundred, at(256)) is None  # as a file has it, where the last wave is another
    too_many = Choice("transposed", hopper_transposed.tile(160, hopper_transposed.MOST_SHARES + 1))
    assert why_illegal("forward", too_many, at(256)) is not None
    row = Choice("cooperative", hopper_row.tile_for(at().intermediate, 132))
    assert shipped("forward", at(65)) == shipped("forward", at(hopper_row.MOST_TOKENS)) == row
    assert shipped("forward", at(64)).schedule == "portable"
    for tokens, by_hand in ((64, "cooperative"), (160, "transposed"), (8192, "transposed")):
        assert set(schedules("forward", at(tokens))) - {"torch"} == {"portable", "ping-pong", by_hand}
    for other in (at(capability=(10, 0)), at(dtype=torch.float32)):
        assert set(schedules("forward", other)) == {"portable", "torch"}
        assert shipped("forward", other) == BY_TORCH
    assert set(schedules("recompute", at())) == {"portable"}


@pytest.mark.usefixtures("_gluon")
def test_the_backward_by_hand_is_a_choice_on_hopper() -> None:
    assert shipped("input-grad", at(8192)).schedule == "cooperative"
    assert shipped("input-grad", at(512)).schedule == "ping-pong"
    assert shipped("input-grad", at(512, multiprocessors=1000)).schedule == "portable"
    assert set(schedules("input-grad", at(16))) == {"portable", "ping-pong", "cooperative"}
    assert {shipped(name, at(1)).schedule for name in ("weight-grad", "mlp-weight-grad")} == {"ping-pong"}
    least = hopper_products.LEAST_GATE_TOKENS
    assert [shipped("mlp-hidden-grad", at(tokens)).schedule for tokens in (least - 1, least)] == ["torch", "gate"]


def test_without_gluon_all_are_portable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "GLUON_MISSING", "there is none")
    assert set(schedules("forward", at())) == {"portable", "torch"}


@pytest.mark.usefixtures("_gluon")
@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        (Choice("portable", Tile(48, 64, 64, warps=4, stages=3)), "grid"),
        (Choice("portable", Tile(128, 64, 64, warps=4, stages=3)), "taller"),
        (Choice("portable", Tile(64, 256, 64, warps=4, stages=2)), "registers"),
        (Choice("portable", Tile(64, 128, 256, warps=8, stages=4)), "shared memory"),
        (Choice("ping-pong", Tile(128, 128, 64, warps=4, stages=5)), "not a configuration"),
        (Choice("cooperative", hopper_forward.TILE), "of a schedule 'cooperative' here"),
    ],
)
def test_what_cannot_run(choice: Choice, reason: str) -> None:
    assert reason in str(why_illegal("forward", choice, at(64)))
    assert why_illegal("input-grad", Choice("ping-pong", hopper_forward.TILE), at()) is not None
