"""Where the forward is two products by torch and one elementwise launch, and that this is as right as one launch."""

import pytest
import torch

from swiglu_kernels import glu, reference
from swiglu_kernels.launches.backend import backend_for
from swiglu_kernels.launches.formula import PLAIN, Formula
from swiglu_kernels.tiles import choices

CPU = torch.device("cpu")
CLAMPED = Formula(alpha=1.702, limit=1.0, up_offset=1.0)


@pytest.fixture(autouse=True)
def _as_if_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "INTERPRETING", False)


@pytest.mark.parametrize(
    ("tokens", "by_hand", "has_bias", "formula", "expected"),
    [
        (128, False, False, PLAIN, False),
        (129, False, False, PLAIN, True),
        (129, True, False, PLAIN, False),
        (129, True, True, PLAIN, True),
        (129, True, False, CLAMPED, True),
    ],
)
def test_only_many_tokens_without_a_kernel_by_hand(
    monkeypatch: pytest.MonkeyPatch, tokens: int, by_hand: bool, has_bias: bool, formula: Formula, expected: bool
) -> None:
    monkeypatch.setattr(choices, "why_not", lambda *_: None if by_hand else "another GPU")
    x, weight = torch.empty(tokens, 8), torch.empty(16, 8)
    assert choices.multiplied_by_torch(x, weight, weight, has_bias, formula, stored=False) is expected


def test_a_tuned_tile_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "lookup", lambda *_: object())
    x, weight = torch.empty(200, 8), torch.empty(16, 8)
    assert not choices.multiplied_by_torch(x, weight, weight, False, PLAIN, stored=False)


@pytest.mark.skipif(backend_for(CPU) == "torch", reason="Triton's interpreter is off")
@pytest.mark.parametrize("formula", [PLAIN, CLAMPED])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("save", ["preact", "input"])
def test_it_yields_the_same(monkeypatch: pytest.MonkeyPatch, formula: Formula, biased: bool, save: str) -> None:
    monkeypatch.setattr(choices, "PORTABLE_TOKENS", 4)
    x, w_gate, w_up = torch.randn(5, 24), torch.randn(40, 24), torch.randn(40, 24)
    biases = (torch.randn(40), torch.randn(40)) if biased else (None, None)
    z, gate, up = glu.run_forward(x, w_gate, w_up, biases, formula, save)
    numbers = {"alpha": formula.alpha, "limit": formula.limit, "up_offset": formula.up_offset}
    torch.testing.assert_close(z, reference.swiglu_glu(x, w_gate, w_up, *biases, **numbers))
    if save == "preact":
        torch.testing.assert_close(gate, torch.nn.functional.linear(x, w_gate, biases[0]))
        torch.testing.assert_close(up, torch.nn.functional.linear(x, w_up, biases[1]))
