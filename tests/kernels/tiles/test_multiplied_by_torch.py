"""Where the forward is two products by torch and one elementwise launch, and that this is as right as one launch."""

import csv
from pathlib import Path

import pytest
import torch

from swiglu_kernels import glu, reference, swiglu_mlp
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


@pytest.mark.parametrize("what", ["torch2", "torch2_stored"])
def test_the_choice_from_129_tokens_on_loses_little_where_it_was_measured(what: str) -> None:
    file = Path(__file__).parents[3] / "results" / "nvidia-h200" / "ragged.csv"
    with file.open() as lines:
        rows = [row for row in csv.DictReader(lines) if row["what"] == what]
    assert len(rows) == 240
    lost = []
    for row in rows:
        sizes = [int(row[name]) for name in ("tokens", "hidden", "intermediate")]
        ratio = float(row["ratio_to_ours"])
        lost.append(ratio if choices.has_empty_rows(*sizes) else 1 / ratio)
    assert max(lost) < 1.13
    assert sum(one > 1.03 for one in lost) < 20


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


@pytest.fixture
def _ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "capability_of", lambda _: (8, 0))


@pytest.mark.usefixtures("_ampere")
@pytest.mark.parametrize(("tokens", "by_torch"), [(1, False), (16, False), (17, True), (4096, True)])
def test_where_nothing_was_measured_torch_multiplies(tokens: int, by_torch: bool) -> None:
    x, weight = torch.empty(tokens, 8), torch.empty(16, 8)
    assert choices.multiplied_by_torch(x, weight, weight, False, PLAIN, stored=True) is by_torch
    assert choices.resolve("auto", "auto", "auto", x, 16) == ("torch", "preact", "torch")
    assert choices.hidden_grad_by_torch(x, weight.t())
    assert choices.why_unmeasured(CPU) == "this is compute capability 8.0, and only 9.0 was measured"


@pytest.mark.usefixtures("_ampere")
def test_what_is_tuned_there_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "lookup", lambda *_: object())
    x, weight = torch.empty(200, 8), torch.empty(16, 8)
    assert not choices.multiplied_by_torch(x, weight, weight, False, PLAIN, stored=False)
    assert not choices.hidden_grad_by_torch(x, weight.t())


@pytest.mark.skipif(backend_for(CPU) == "torch", reason="Triton's interpreter is off")
@pytest.mark.usefixtures("_ampere")
@pytest.mark.parametrize("options", [{}, {"save": "input", "chunk_tokens": 8}, {"limit": 1.0}], ids=str)
@pytest.mark.parametrize("tokens", [0, 20])
def test_the_whole_block_there_has_the_same_gradients(options: dict, tokens: int) -> None:
    shapes = ((tokens, 24), (40, 24), (40, 24), (24, 40))
    torch.manual_seed(0)
    given = [torch.randn(shape, requires_grad=True) for shape in shapes]
    gradients = []
    for function in (swiglu_mlp, reference.swiglu_mlp):
        known = options if function is swiglu_mlp else {"limit": options.get("limit")}
        gradients.append(torch.autograd.grad(function(*given, **known).square().sum(), given))
    torch.testing.assert_close(*gradients, atol=1e-3, rtol=1e-3)
