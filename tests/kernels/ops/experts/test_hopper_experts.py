"""The hand-scheduled products of experts: who may take them (on any machine), and that they are right (on Hopper)."""

import pytest
import torch
from accuracy import assert_equal
from clamped import GPT_OSS, keep_off_limit
from on_hopper import drawn_experts, needs_hopper

from swiglu_kernels import reference, swiglu_experts
from swiglu_kernels.hopper import admission, shared
from swiglu_kernels.ops.experts import choice, hopper_experts, hopper_tiles
from swiglu_kernels.ops.experts import operation as experts
from swiglu_kernels.ops.experts.routing import route
from swiglu_kernels.runtime.backend import INTERPRETING
from swiglu_kernels.tiles import here


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


class TestWhoMayTakeThem:
    @pytest.mark.parametrize("transposed", [False, True])
    def test_weights_in_both_orientations(self, transposed: bool) -> None:
        w_gate_up, w_down = empty(4, 512, 192), empty(4, 192, 256)
        if transposed:
            w_gate_up, w_down = (weight.mT.contiguous().mT for weight in (w_gate_up, w_down))
        assert hopper_experts.why_not(empty(3, 192), w_gate_up, w_down, "silu") is None

    def test_reasons(self) -> None:
        x, w_gate_up, w_down = empty(3, 192), empty(4, 512, 192), empty(4, 192, 256)
        for reason, *given in (
            ("16-bit", x.float(), w_gate_up, w_down), ("SiLU", x, w_gate_up, w_down, "gelu_tanh"),
            ("multiples of 64", x, empty(4, 400, 192), empty(4, 192, 200)),
            ("at least 192", x, empty(4, 256, 192), empty(4, 192, 128)),
            ("more than 512 experts", x, empty(513, 512, 192), empty(513, 192, 256)),
            ("one matrix", x, w_gate_up, empty(4, 192, 512)[:, :, ::2]),
            ("one matrix", x, w_gate_up, empty(4, 192, 260)[:, :, :256]),
        ):  # fmt: skip
            assert reason in str(hopper_experts.why_not(*given, *(["silu"] if len(given) == 3 else [])))

    def test_many_rows_of_an_expert_are_theirs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(here, "hopper_multiprocessors", lambda *_: 132)
        monkeypatch.setattr(shared, "why_off", lambda kernel: None)
        layer = empty(3, 192), empty(4, 512, 192), empty(4, 192, 256), "silu"
        for with_grad, least in hopper_experts.LEAST_ROWS.items():
            assert choice.why_portable(4 * least, *layer, with_grad) is None
            assert f"fewer than {least} rows" in str(choice.why_portable(4 * least - 1, *layer, with_grad))
        monkeypatch.setattr(shared, "why_off", lambda kernel: "another Triton")
        assert choice.why_portable(2**20, *layer, True) == "another Triton"

    def test_elsewhere_the_reason_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shared, "GLUON_MISSING", None)
        monkeypatch.setattr(experts, "backend_for", lambda x: "triton")
        x, index = torch.zeros(2, 192), torch.zeros(2, 1, dtype=torch.int64)
        with pytest.raises(ValueError, match="backend: expected 'portable' or None, got 'hopper'"):
            swiglu_experts(
                x, torch.zeros(4, 512, 192), torch.zeros(4, 192, 256), index, torch.ones(2, 1), backend="hopper"
            )


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The products for the gradients of weights in plain PyTorch; of each, whether it copied rows of tokens."""
    copied: list[bool] = []

    def run(describe, a, b, out, routed, sums, ones) -> None:
        starts, counts, pair, slots = routed
        assert describe is hopper_experts.weights_launch
        assert 1 in out.stride()[1:], "TMA needs it"
        copied.append(slots > 0)
        for start, count, product in zip(starts.tolist(), counts.tolist(), out, strict=False):
            rows = slice(start, start + count)
            torch.mm(a[pair[rows] // slots if slots else rows].T, b[rows], out=product)
        if sums is not None:
            assert out.shape[1] % hopper_experts.ROWS == ones.shape[0], (
                "the first rows behind the last are as many ones"
            )
            for start, count, total in zip(starts.tolist(), counts.tolist(), sums, strict=False):
                torch.sum(b[start : start + count], 0, out=total)

    monkeypatch.setattr(hopper_experts, "run", run)
    return copied


@pytest.mark.skipif(not INTERPRETING, reason="needs Triton's interpreter: tensors lie on the CPU")
class TestGradientsOfWeights:
    @pytest.mark.parametrize("aligned", [True, False])
    def test_tokens_are_copied_or_sorted_whichever_operand_they_are(self, products: list[bool], aligned: bool) -> None:
        index = torch.tensor([[0, 2], [2, 3], [0, 3], [2, 0]])
        routing = route(index, 5, hopper_experts.ROWS)
        tokens = torch.randn(4, 1096)[:, 8:] if aligned else torch.randn(4, 1089)[:, 1:]
        rows = torch.randn(routing.pair.shape[0], 192)
        pairs = routing.row.view(index.shape)
        exact = torch.zeros(5, 1088, 192)
        for token, slot in ((token, slot) for token in range(4) for slot in range(2)):
            exact[index[token, slot]] += torch.outer(tokens[token], rows[pairs[token, slot]])
        for a, b, expected in ((tokens, rows, exact), (rows, tokens, exact.mT)):
            for like in (torch.empty(expected.shape), torch.empty(expected.mT.shape).mT):
                found, sums = hopper_experts.weight_grad(a, b, routing, like, True)
                assert found.stride() == like.stride()
                torch.testing.assert_close(found, expected)
                if a is tokens:
                    assert sums is None
                else:
                    exact_sums = [a[pairs[index == expert].long()].sum(0) for expert in range(5)]
                    torch.testing.assert_close(sums, torch.stack(exact_sums))
        assert products == [aligned] * 4


class TestOnHopper:
    pytestmark = needs_hopper

    @pytest.mark.parametrize("count", [4, 130])
    @pytest.mark.parametrize("tokens", [1, 63, 2500])
    @pytest.mark.parametrize("gate", [{}, GPT_OSS, GPT_OSS | {"interleaved": True}])
    @pytest.mark.parametrize("transposed", [False, True])
    def test_output_and_gradients(self, count: int, tokens: int, gate: dict, transposed: bool) -> None:
        torch.manual_seed(tokens)
        index = torch.randint(-1, count, (tokens, 3), device="cuda") // 2 * 2  # of odd experts nobody
        intermediate = {4: 448, 130: 320}[count]  # last tiles overlap by two blocks, and by one
        self.check(index, count, 320, intermediate, gate, transposed)

    @pytest.mark.parametrize("sizes", [(448, 320), (1088, 576), (512, 448)])
    @pytest.mark.parametrize("gate", [{}, GPT_OSS, GPT_OSS | {"interleaved": True}])
    @pytest.mark.parametrize("transposed", [False, True])
    def test_experts_with_a_tall_tile_and_without(self, sizes: tuple[int, int], gate: dict, transposed: bool) -> None:
        """Of 3, 5, 17, 19 and 23 blocks, beside others: of one block, of an even number, and of too many.

        All sizes but 576 have one or two columns of tall tiles; hidden 448 and 1088 has room for sums.
        """
        torch.manual_seed(0)
        rows = [150, 0, 320, 64, 1 + 16 * 64, 19 * 64, 128, 23 * 64, 25 * 64 - 3]
        index = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(rows)).to("cuda")
        index = index[torch.randperm(len(index), device="cuda")].view(-1, 1)
        assert hopper_tiles.TALL_BLOCKS == 24
        self.check(index, len(rows), *sizes, gate, transposed)

    def check(
        self, index: torch.Tensor, count: int, hidden: int, intermediate: int, gate: dict, transposed: bool
    ) -> None:
        drawn = drawn_experts(index, count, hidden, intermediate, transposed)
        keep_off_limit(gate, drawn[0], drawn[1:2], drawn[4:5])
        upstream = torch.randn(len(index), hidden, device="cuda").bfloat16()

        def run(function, dtype: torch.dtype, **options) -> list[torch.Tensor]:
            torch.cuda.empty_cache()
            torch.full((2**27,), float("nan"), device="cuda")  # what is allocated next and never written holds NaN
            leaves = [operand.to(dtype).requires_grad_() for operand in drawn]
            out = function(*leaves[:3], index, leaves[3], b_gate_up=leaves[4], b_down=leaves[5], **gate, **options)
            return [out, *torch.autograd.grad(out, leaves, upstream.to(dtype))]

        exact = run(reference.swiglu_experts, torch.float64)
        with admission.by_hand_aside(None):
            ours, again = (run(swiglu_experts, torch.bfloat16, backend="hopper") for _ in range(2))
        eager = run(reference.swiglu_experts, torch.bfloat16)
        assert_equal(ours, again)
        for found, plain, true in zip(ours, eager, exact, strict=True):
            error, of_eager = ((result.double() - true).norm() for result in (found, plain))
            assert error <= 1.5 * of_eager + 2e-3 * true.norm()

    @pytest.mark.parametrize("slots", [1, 3])
    @pytest.mark.parametrize("recompute", [False, True])
    def test_rows_that_are_copied_and_sorted_ones_give_the_same_bits(
        self, slots: int, recompute: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sizes = (700, 328), (5, 768, 320), (5, 320, 384), (700, 320)
        *leaves, upstream = (torch.randn(size, device="cuda").bfloat16() for size in sizes)
        index = torch.randint(-1, 5, (700, slots), device="cuda")
        weights = torch.rand(700, slots, device="cuda").bfloat16()
        copies, sort = [], hopper_experts.sort
        monkeypatch.setattr(hopper_experts, "sort", lambda *of: copies.append(of) or sort(*of))

        def run() -> list[torch.Tensor]:
            copies.clear()
            x, *others = (leaf.requires_grad_() for leaf in leaves)
            with admission.by_hand_aside(None):
                out = swiglu_experts(x[:, 8:], *others, index, weights, backend="hopper", recompute=recompute)
            return [out, *torch.autograd.grad(out, leaves, upstream)]

        copied = run()
        assert not copies
        monkeypatch.setattr(hopper_experts, "_can_copy", lambda x: False)
        assert all(map(torch.equal, copied, run()))
        assert len(copies) == (5 if recompute else 4)
