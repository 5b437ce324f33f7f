"""The hand-scheduled products: who may take them (on any machine), and that they are right (on a Hopper GPU)."""

import pytest
import torch
from accuracy import assert_as_accurate_as_eager
from on_hopper import needs_hopper

from swiglu_kernels.hopper import admission, shared
from swiglu_kernels.ops.glu import choice as glu_choice
from swiglu_kernels.ops.glu import hopper_products, hopper_weights
from swiglu_kernels.ops.glu.hopper_products import LEAST_GATE_ELEMENTS, LEAST_GATE_TOKENS
from swiglu_kernels.ops.glu.portable_backward import input_grad_launch, weight_grad_launch
from swiglu_kernels.ops.mlp.portable_mlp import down_backward_launch, down_weight_grad_launch
from swiglu_kernels.tiles import here


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


class TestWhoMayTakeThem:
    @pytest.fixture(autouse=True)
    def gluon_is_here(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shared, "GLUON_MISSING", None)
        monkeypatch.setattr(admission, "_override", [None])

    def why_not(self, left: torch.Tensor, right: torch.Tensor, capability: tuple[int, int] | None = (9, 0)) -> str:
        out = empty(left.shape[0], right.shape[1], dtype=left.dtype)
        return str(hopper_products.why_not("dX", [(left, right)], [out], capability))

    def test_operands_in_both_orientations(self) -> None:
        for left in (empty(24, 32), empty(32, 24).t()):
            for right in (empty(32, 40), empty(40, 32).t()):
                assert self.why_not(left, right) == "None"

    def test_reasons(self) -> None:
        square, in_fp32 = empty(16, 16), empty(16, 16, dtype=torch.float32)
        for reason, *given in (
            ("9.0", square, square, (8, 0)), ("9.0", square, square, None), ("16-bit", in_fp32, in_fp32),
            ("empty", empty(16, 0), empty(0, 16)), ("TMA", empty(16, 12), empty(12, 16)),
            ("TMA", empty(16, 32)[:, ::2], square), ("TMA", square, empty(16, 12)),
        ):  # fmt: skip
            assert reason in self.why_not(*given)

    def test_two_pairs_have_to_lie_alike(self) -> None:
        pairs = [(empty(16, 16), empty(16, 16)), (empty(16, 16), empty(16, 16).t())]
        assert "alike" in str(hopper_products.why_not("dW", pairs, [empty(16, 16)], (9, 0)))

    def test_launches_of_the_backward(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """On a GPU of 132 multiprocessors; kernels are named only where Gluon is."""
        monkeypatch.setattr(here, "capability_of", lambda _: (9, 0))
        monkeypatch.setattr(hopper_products, "_product_kernel", "by hand", raising=False)
        monkeypatch.setattr(hopper_products, "descriptor", lambda matrix, *block: matrix)

        def meta(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.bfloat16, device="meta")

        def of_dx(tokens: int) -> object:
            gate, weight = meta(tokens, 256), meta(256, 4096)
            return input_grad_launch(None, gate, gate, weight, weight, meta(tokens, 4096))

        assert of_dx(256).kernel != "by hand"  # 64 tiles
        few, many, between = of_dx(512), of_dx(1024), of_dx(1536)
        assert (few.kernel, few.arguments["ROWS"], many.arguments["ROWS"]) == ("by hand", 128, 256)
        assert between.arguments["ROWS"] == 128  # 384 tiles in 3 waves of 132, or 192 of twice the size in 2
        gate, weight, dx = meta(1024, 256), meta(256, 4096), torch.empty(1024, 4096, device="meta")
        added = input_grad_launch(None, gate, gate, weight, weight, dx, accumulate=True)
        assert (added.kernel, added.arguments["ADD"], added.arguments["ROWS"]) == ("by hand", True, 128)

        gate, x, weight = meta(64, 256), meta(64, 128), meta(256, 128)
        both = weight_grad_launch(None, gate, gate, x, weight, weight)
        assert (both.kernel, both.arguments["OUTPUTS"], both.arguments["TERMS"]) == ("by hand", 2, 1)
        assert weight_grad_launch(gate, gate, gate, x, weight, weight).kernel != "by hand"
        assert down_weight_grad_launch(x, gate, meta(128, 256)).kernel == "by hand"

        enough = -(-LEAST_GATE_ELEMENTS // (LEAST_GATE_TOKENS * 64)) * 64
        for tokens, columns, by_hand in (
            (LEAST_GATE_TOKENS - 1, 2 * enough, False),
            (LEAST_GATE_TOKENS, enough - 64, False),
            (LEAST_GATE_TOKENS, enough, True),
        ):
            z = meta(tokens, columns)
            launch = down_backward_launch(meta(tokens, 128), meta(128, columns), (z, z), z, z, None)
            assert (launch.kernel == "by hand") is by_hand


@pytest.mark.parametrize(
    ("tokens", "hidden", "dtype", "expected"),
    [
        (256, 4104, torch.bfloat16, ("triton", "preact", "torch")),
        (257, 4104, torch.bfloat16, ("torch", "preact", "torch")),
        (512, 4096, torch.bfloat16, ("triton", "preact", "two_step")),
        (512, 4096, torch.float32, ("torch", "preact", "torch")),
    ],
)
def test_auto_takes_them_where_they_are_faster(monkeypatch, tokens, hidden, dtype, expected) -> None:
    """At sizes where nothing was measured; `tests/kernels/tiles/test_parts.py` has the others."""
    monkeypatch.setattr(here, "hopper_multiprocessors", lambda *_: 132)
    monkeypatch.setattr(here, "capability_of", lambda _: (9, 0))
    monkeypatch.setattr(shared, "why_off", lambda *_: None)
    x = torch.empty(tokens, hidden, dtype=dtype, device="meta")
    assert glu_choice.resolve("auto", "auto", "auto", x, 11008) == expected
    assert glu_choice.resolve("auto", "auto", "auto", x, 11008, chunk_tokens=128)[1] == "input"


class TestOnHopper:
    pytestmark = needs_hopper

    @staticmethod
    def random(rows: int, columns: int, dtype: torch.dtype, transposed: bool = False) -> torch.Tensor:
        if transposed:
            return TestOnHopper.random(columns, rows, dtype).t()
        return (torch.randn(rows, columns, device="cuda") * rows**-0.25).to(dtype)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("a_across", [False, True], ids=["A", "A across"])
    @pytest.mark.parametrize("b_across", [False, True], ids=["B", "B across"])
    @pytest.mark.parametrize("shape", [(8, 8, 8), (520, 264, 72), (1000, 4096, 344), (4104, 3000, 4096)])
    @pytest.mark.parametrize("form", ["one", "two terms", "two outputs"])
    def test_against_fp64(self, shape, a_across: bool, b_across: bool, form: str, dtype: torch.dtype) -> None:
        M, N, K = shape
        count = 1 if form == "one" else 2
        pairs = [(self.random(M, K, dtype, a_across), self.random(K, N, dtype, not b_across)) for _ in range(count)]
        outs = [
            torch.full((M, N), float("nan"), dtype=dtype, device="cuda") for _ in range(1 + (form == "two outputs"))
        ]
        with admission.by_hand_aside(None):
            assert hopper_products.why_not("dW", pairs, outs, torch.cuda.get_device_capability()) is None
        if form == "two outputs":
            stored = [(left.t(), right) for left, right in pairs]  # [K, M] in either orientation
            hopper_products.transposed_launch(stored, outs).run()
        else:
            hopper_products.sum_launch(pairs, outs[0]).run()
        exact = [left.double() @ right.double() for left, right in pairs]
        eager = [left @ right for left, right in pairs]
        if form == "two terms":
            exact, eager = [sum(exact)], [sum(eager)]
        for results in zip(outs, eager, exact, strict=True):
            assert_as_accurate_as_eager(form, *results, terms=K * count)

    @pytest.mark.parametrize("outputs", [1, 2])
    @pytest.mark.parametrize("tokens", [1, 15, 16, 17, 65, 80, 128, 2050])
    def test_sums_over_any_number_of_tokens(self, tokens: int, outputs: int) -> None:
        pairs = [
            (self.random(tokens, 1000, torch.bfloat16), self.random(tokens, 520, torch.bfloat16))
            for _ in range(outputs)
        ]
        outs = [torch.full((1000, 520), float("nan"), dtype=torch.bfloat16, device="cuda") for _ in range(outputs)]
        hopper_products.transposed_launch(pairs, outs).run()
        for out, (left, right) in zip(outs, pairs, strict=True):
            exact = left.t().double() @ right.double()
            assert_as_accurate_as_eager("out", out, left.t() @ right, exact, terms=tokens)

    @pytest.mark.parametrize("across", [False, True], ids=["", "outputs across"])
    @pytest.mark.parametrize("shape", [(8, 8, 8), (72, 520, 264), (1001, 1000, 520), (2048, 4096, 3000)])
    def test_wide_tiles(self, shape, across: bool) -> None:
        K, M, N = shape
        a, *bs = (self.random(K, columns, torch.bfloat16) for columns in (M, N, N))
        outs = [torch.full((M, N) if across else (N, M), float("nan"), dtype=a.dtype, device="cuda") for _ in bs]
        outs = [out.t() if across else out for out in outs]
        hopper_weights.weights_launch(a, bs, outs).run()
        for out, b in zip(outs, bs, strict=True):
            assert_as_accurate_as_eager("out", out, b.t() @ a, b.t().double() @ a.double(), terms=K)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("shape", [(8, 8, 8), (520, 264, 72), (4104, 3000, 1376), (8192, 4096, 1408)])
    def test_sums_over_slices(self, shape, dtype: torch.dtype) -> None:
        M, N, K = shape
        out = torch.randn(M, N, device="cuda")
        exact, eager = out.double(), out.clone()
        for _ in range(3):
            pairs = [(self.random(M, K, dtype), self.random(K, N, dtype)) for _ in range(2)]
            hopper_products.sum_launch(pairs, out, accumulate=True).run()
            exact += sum(left.double() @ right.double() for left, right in pairs)
            eager += sum(left.float() @ right.float() for left, right in pairs)
        assert_as_accurate_as_eager("sum", out, eager, exact, terms=6 * K)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("in_place", [False, True], ids=["", "in place"])
    @pytest.mark.parametrize("wants_h", [False, True], ids=["", "h"])
    @pytest.mark.parametrize("shape", [(8, 8, 8), (520, 264, 72), (4104, 11008, 256)])
    def test_gate_backward(self, shape, wants_h: bool, in_place: bool, dtype: torch.dtype) -> None:
        M, N, H = shape
        d_out, w_down = self.random(M, H, dtype), self.random(H, N, dtype)
        gate, up = (torch.randn(M, N, device="cuda").to(dtype) * 3 for _ in range(2))

        def formulas(d_h, gate, up):
            sigmoid = torch.sigmoid(gate)
            return d_h * up * sigmoid * (1 + gate * (1 - sigmoid)), d_h * gate * sigmoid, gate * sigmoid * up

        exact = formulas(d_out.double() @ w_down.double(), gate.double(), up.double())
        eager = [value.to(dtype) for value in formulas((d_out @ w_down).float(), gate.float(), up.float())]
        d_gate, d_up = (gate, up) if in_place else (torch.full_like(gate, float("nan")) for _ in range(2))
        h = torch.full_like(gate, float("nan")) if wants_h else None
        hopper_products.gate_backward_launch(d_out, w_down, (gate, up), d_gate, d_up, h).run()
        results = [d_gate, d_up] + ([h] if wants_h else [])
        for found in zip(results, eager, exact, strict=False):
            assert_as_accurate_as_eager("d_gate, d_up or h", *found, terms=H)

    def test_the_same_bits_each_time(self) -> None:
        left, right = self.random(8192, 512, torch.bfloat16), self.random(512, 4096, torch.bfloat16)
        out = torch.empty(8192, 4096, dtype=torch.bfloat16, device="cuda")
        hopper_products.sum_launch([(left, right)], out).run()
        first = out.clone()
        for _ in range(20):
            hopper_products.sum_launch([(left, right)], out.zero_()).run()
            assert torch.equal(out, first)
