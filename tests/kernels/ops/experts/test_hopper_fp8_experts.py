"""The hand-scheduled products of experts in fp8: described without a GPU, and right on Hopper."""

from typing import Any

import pytest
import torch
from accuracy import assert_equal
from clamped import GPT_OSS, keep_off_limit
from on_hopper import drawn_experts, needs_hopper

from swiglu_kernels import reference, swiglu_experts
from swiglu_kernels.hopper import admission
from swiglu_kernels.ops.experts import fp8_experts
from swiglu_kernels.ops.fp8.operation import quantise


def test_codes_of_any_weights_lie_as_the_kernels_need_them() -> None:
    x, across = torch.empty(3, 64, dtype=torch.bfloat16), torch.empty(4, 64, 96).mT
    like, _ = fp8_experts.like_codes(x, across, across)
    assert like.is_contiguous()
    assert (like.shape, like.dtype, like.device.type) == (across.shape, x.dtype, "meta")


class TestOnHopper:
    pytestmark = needs_hopper

    @pytest.mark.parametrize("count", [4, 130])
    @pytest.mark.parametrize("tokens", [1, 63, 700])
    @pytest.mark.parametrize("gate", [{}, GPT_OSS, GPT_OSS | {"interleaved": True}])
    @pytest.mark.parametrize("transposed", [False, True])
    def test_output_and_gradients(self, count: int, tokens: int, gate: dict[str, Any], transposed: bool) -> None:
        torch.manual_seed(tokens)
        index = torch.randint(-1, count, (tokens, 3), device="cuda") // 2 * 2  # of odd experts nobody
        drawn = drawn_experts(index, count, 320, 448, transposed, sizes=torch.rand(count, 1, 1, device="cuda") + 0.1)
        keep_off_limit(gate, drawn[0], drawn[1:2], drawn[4:5], "rowwise")
        upstream = torch.randn(tokens, 320, device="cuda").bfloat16()

        def run(function: Any, dtype: torch.dtype, **options: Any) -> list[torch.Tensor]:
            leaves = [operand.to(dtype).requires_grad_() for operand in drawn]
            biases = {"b_gate_up": leaves[4], "b_down": leaves[5]}
            out = function(*leaves[:3], index, leaves[3], precision="fp8-rowwise", **biases, **gate, **options)
            return [out, *torch.autograd.grad(out, leaves, upstream.to(dtype))]

        exact = run(reference.swiglu_experts, torch.float64)
        with admission.by_hand_aside(None):
            ours, again = (run(swiglu_experts, torch.bfloat16, backend="hopper") for _ in range(2))
            codes = [quantise(weight, "rowwise", weight=True) for weight in drawn[1:3]]
            with torch.no_grad():
                inferred = swiglu_experts(
                    drawn[0], *codes, index, drawn[3], b_gate_up=drawn[4], b_down=drawn[5], precision="fp8-rowwise",
                    backend="hopper", **gate,
                )  # fmt: skip
        portable = run(swiglu_experts, torch.bfloat16, backend="portable")
        assert_equal((inferred, *ours), (ours[0], *again))
        for found, plain, true in zip(ours, portable, exact, strict=True):
            error, of_portable = ((result.double() - true).norm() for result in (found, plain))
            assert error <= 1.5 * of_portable + 0.02 * true.norm()
            assert of_portable <= 0.05 * true.norm()  # codes of h that are a step away

    @pytest.mark.parametrize("sizes", [(208, 240), (1936, 368)], ids=str)
    @pytest.mark.parametrize("gate", [{}, GPT_OSS, GPT_OSS | {"interleaved": True}])
    def test_a_forward_of_any_multiples_of_16(self, sizes: tuple[int, int], gate: dict[str, Any]) -> None:
        index = torch.randint(-1, 5, (700, 3), device="cuda")
        *operands, weights, b_gate_up, b_down = drawn_experts(index, 5, *sizes, False)
        options = {"precision": "fp8-rowwise", "b_gate_up": b_gate_up, "b_down": b_down} | gate
        with torch.no_grad(), admission.by_hand_aside(None):
            torch.full((2**27,), float("nan"), device="cuda")  # what is allocated next and never written holds NaN
            ours, portable = (
                swiglu_experts(*operands, index, weights, backend=backend, **options).double()
                for backend in ("hopper", "portable")
            )
        assert (ours - portable).norm() <= 0.02 * portable.norm()  # codes of h that are a step away
