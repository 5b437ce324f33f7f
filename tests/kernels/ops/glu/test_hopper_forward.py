"""The hand-scheduled forward: who may take it (on any machine), and that it is right (on a Hopper GPU)."""

from dataclasses import replace

import pytest
import torch
from on_hopper import check_against_fp64, needs_hopper

from swiglu_kernels import swiglu_glu
from swiglu_kernels.hopper import admission, shared
from swiglu_kernels.ops.glu import hopper_forward, hopper_transposed


def matrices(tokens: int = 512, hidden: int = 64, intermediate: int = 128, dtype: torch.dtype = torch.bfloat16):
    return [
        torch.empty(shape, dtype=dtype) for shape in ((tokens, hidden), (intermediate, hidden), (intermediate, hidden))
    ]


class TestWhoMayTakeIt:
    @pytest.fixture(autouse=True)
    def gluon_is_here(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shared, "GLUON_MISSING", None)
        monkeypatch.setattr(admission, "_override", [None])

    def test_aligned_16_bit_matrices_on_hopper(self) -> None:
        for dtype in (torch.bfloat16, torch.float16):
            assert hopper_forward.why_not(*matrices(dtype=dtype), (9, 0)) is None
        halves = torch.empty(256, 64, dtype=torch.bfloat16).chunk(2)
        assert hopper_forward.why_not(matrices()[0], *halves, (9, 0)) is None
        for capability in (None, (8, 9), (10, 0)):
            assert "9.0" in str(hopper_forward.why_not(*matrices(), capability))

    def test_reasons(self) -> None:
        for change, reason in (
            ({"dtype": torch.float32}, "16-bit"), ({"intermediate": 0}, "empty"), ({"hidden": 0}, "empty"),
            ({"intermediate": 132}, "16 bytes"), ({"hidden": 60}, "TMA"),
        ):  # fmt: skip
            assert reason in str(hopper_forward.why_not(*matrices(**change), (9, 0)))

    def test_layouts_that_tma_cannot_read(self) -> None:
        x, w_gate, w_up = matrices()
        assert "TMA" in str(hopper_forward.why_not(x.T.contiguous().T, w_gate, w_up, (9, 0)))
        shifted = torch.empty(512 * 64 + 1, dtype=torch.bfloat16)[1:].view(512, 64)
        assert "TMA" in str(hopper_forward.why_not(shifted, w_gate, w_up, (9, 0)))
        assert "TMA" in str(hopper_forward.why_not(x[:1].expand(512, 64), w_gate, w_up, (9, 0)))


@pytest.mark.skipif(shared.GLUON_MISSING is not None, reason=f"needs Gluon: {shared.GLUON_MISSING}")
@pytest.mark.parametrize(("hidden", "shares"), [(64, 1), (72, 2), (136, 3), (4096, 8)])
def test_every_share_has_some_depth(hidden: int, shares: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_transposed, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(hopper_forward, "descriptor", lambda *block: block)
    x, w, z = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((131, hidden), (200, hidden), (131, 200)))
    launch = hopper_transposed.forward_launch(
        x, w, w, z, None, hopper_transposed.tile(192, hopper_transposed.MOST_SHARES)
    )
    assert launch.arguments["shares"] == shares
    assert launch.arguments["SHARED"] == (shares > 1)


def random(*shape: int) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * shape[1] ** -0.5).bfloat16()


class TestOnHopper:
    pytestmark = needs_hopper

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("store", [False, True], ids=["z", "z, gate, up"])
    @pytest.mark.parametrize("columns", hopper_forward.COLUMNS)
    @pytest.mark.parametrize(
        "shape",
        [(65, 64, 96), (128, 4096, 11008), (777, 520, 1000), (4096, 2880, 2880), (129, 64, 72), (300, 512, 104)],
    )
    def test_against_fp64(self, shape: tuple[int, int, int], columns: int, store: bool, dtype: torch.dtype) -> None:
        tile = replace(hopper_forward.TILE, columns=columns)
        check_against_fp64(hopper_forward.forward_launch, shape, store, dtype, tile)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("store", [False, True], ids=["z", "z, gate, up"])
    @pytest.mark.parametrize("shares", [1, 2, hopper_transposed.MOST_SHARES])
    @pytest.mark.parametrize("rows", hopper_transposed.TOKENS)
    @pytest.mark.parametrize(
        "shape",
        [(129, 64, 72), (131, 136, 64), (160, 4096, 11008), (256, 2880, 2112), (333, 520, 1000), (777, 1032, 520)],
    )
    def test_transposed_against_fp64(
        self, shape: tuple[int, int, int], rows: int, shares: int, store: bool, dtype: torch.dtype
    ) -> None:
        check_against_fp64(hopper_transposed.forward_launch, shape, store, dtype, hopper_transposed.tile(rows, shares))

    @pytest.mark.parametrize(
        ("tokens", "hidden", "intermediate", "transposed"),
        [
            (8192, 256, 8192, False), (4100, 256, 8200, False), (129, 256, 8200, False),
            (160, 4096, 11008, True), (333, 4096, 14336, True), (290, 4096, 8200, True),
        ],
    )  # fmt: skip
    def test_the_same_bits_each_time(self, tokens: int, hidden: int, intermediate: int, transposed: bool) -> None:
        """The ring goes round often; where tiles overlap, both write the same."""
        tile = hopper_transposed.tile_for(tokens, hidden, intermediate, 132, stores_preact=False)
        assert tile is not None or not transposed, "so that it runs"
        x, w_gate, w_up = random(tokens, hidden), random(intermediate, hidden), random(intermediate, hidden)
        first = swiglu_glu(x, w_gate, w_up)
        for _ in range(20):
            assert torch.equal(swiglu_glu(x, w_gate, w_up), first)
