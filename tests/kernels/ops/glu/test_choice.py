"""Where the forward is two products by torch and one elementwise launch, and that this is as right as one launch."""

import csv
import re
import statistics
from pathlib import Path

import pytest
import torch

from swiglu_kernels import reference
from swiglu_kernels.hopper import shared
from swiglu_kernels.ops.gate.formula import PLAIN, Formula
from swiglu_kernels.ops.glu import choice as glu_choice
from swiglu_kernels.ops.glu import hopper_forward, hopper_products
from swiglu_kernels.ops.glu import operation as glu
from swiglu_kernels.ops.glu.hopper_forward import TILE
from swiglu_kernels.ops.mlp import choice as mlp_choice
from swiglu_kernels.runtime.backend import backend_for
from swiglu_kernels.tiles import candidates, here
from swiglu_kernels.tiles.candidates import BY_TORCH, Choice, TileProblem

CPU = torch.device("cpu")
CLAMPED = Formula(alpha=1.702, limit=1.0, up_offset=1.0)


@pytest.fixture(autouse=True)
def _as_if_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (glu_choice, mlp_choice):
        monkeypatch.setattr(module, "INTERPRETING", False)


def by_torch(
    x: torch.Tensor, weight: torch.Tensor, has_bias: bool = False, formula: Formula = PLAIN, stored: bool = True
) -> bool:
    z = x.new_empty(len(x), len(weight))
    chosen = glu_choice.forward(x, weight, weight, z, has_bias=has_bias, formula=formula, stored=stored)
    return chosen.schedule == "torch"


def hidden_grad_by_torch(d_out: torch.Tensor, w_down: torch.Tensor, formula: Formula) -> bool:
    stored = [d_out.new_empty(len(d_out), w_down.shape[1])] * 4
    return mlp_choice.hidden_grad(d_out, w_down, stored, formula).schedule == "torch"


@pytest.mark.parametrize(
    ("shape", "by_hand", "given", "expected"),
    [
        ((128, 16, 16), False, {}, False),
        ((129, 16, 16), False, {}, True),
        ((129, 16, 16), True, {}, False),
        ((129, 16, 16), True, {"has_bias": True}, True),
        ((129, 16, 16), True, {"formula": CLAMPED}, True),
        ((32, 4104, 11008), True, {}, False),  # rows of odd lengths
        ((33, 4104, 11008), True, {}, True),
        ((1, 4104, 11008), False, {}, True),
    ],
)
def test_the_forward(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int], by_hand: bool, given: dict, expected: bool
) -> None:
    monkeypatch.setattr(hopper_forward, "why_not", lambda *_: None if by_hand else "another GPU or layout")
    monkeypatch.setattr(here, "capability_of", lambda _: (9, 0))
    monkeypatch.setattr(shared, "why_off", lambda *_: None)
    tokens, hidden, intermediate = shape
    x, weight = (torch.empty(rows, hidden, dtype=torch.bfloat16, device="meta") for rows in (tokens, intermediate))
    assert by_torch(x, weight, **given) is expected


@pytest.mark.parametrize(
    ("tokens", "hidden", "intermediate", "expected"),
    [(512, 4096, 11008, False), (511, 4096, 11008, True), (512, 4096, 8192, True), (8192, 4104, 11008, True)],
)
def test_hidden_gradients(
    monkeypatch: pytest.MonkeyPatch, tokens: int, hidden: int, intermediate: int, expected: bool
) -> None:
    monkeypatch.setattr(here, "capability_of", lambda _: (9, 0))
    monkeypatch.setattr(hopper_products, "why_not", lambda *_: None)
    monkeypatch.setattr(shared, "why_off", lambda *_: None)
    sizes = (tokens, hidden), (hidden, intermediate)
    d_out, w_down = (torch.empty(size, dtype=torch.bfloat16, device="meta") for size in sizes)
    assert hidden_grad_by_torch(d_out, w_down, PLAIN) is expected
    assert hidden_grad_by_torch(d_out, w_down, CLAMPED)
    for tuned, torchs in ((BY_TORCH, True), (Choice("portable", TILE), False), (Choice("gate", TILE), False)):
        monkeypatch.setattr(mlp_choice, "lookup", lambda *_, tuned=tuned: tuned)
        assert hidden_grad_by_torch(d_out, w_down, PLAIN) is torchs
        assert hidden_grad_by_torch(d_out, w_down, CLAMPED) is (tuned.schedule != "portable")


@pytest.mark.parametrize("tuned", [Choice("ping-pong", TILE), BY_TORCH], ids=str)
@pytest.mark.parametrize("tokens", [20, 200])
def test_a_tuned_choice_is_used(monkeypatch: pytest.MonkeyPatch, tuned: Choice, tokens: int) -> None:
    monkeypatch.setattr(glu_choice, "lookup", lambda *_: tuned)
    x, weight = torch.empty(tokens, 8), torch.empty(16, 8)
    assert by_torch(x, weight, stored=False) is (tuned == BY_TORCH)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0)], ids=["A100", "RTX 4090", "B200"])
def test_other_gpus_get_what_the_readme_says(capability: tuple[int, int]) -> None:
    (row,) = [line for line in README.read_text("utf-8").splitlines() if line.startswith("| A100, RTX 4090, B200")]
    most = next(int(words) for words in re.findall(r"up to (\d+) tokens one launch", row))
    at = [TileProblem(tokens, 4096, 11008, torch.bfloat16, capability) for tokens in (most, most + 1)]
    assert [glu_choice.forward_is_by_torch(problem, by_hand=False) for problem in at] == [False, True]
    assert glu_choice.weight_grad_is_by_torch(at[1])


README = Path(__file__).parents[4] / "README.md"
MEASURED = Path(__file__).parents[4] / "results" / "nvidia-h200" / "ragged.csv"


@pytest.mark.parametrize("stored", [False, True], ids=["z", "z, gate, up"])
def test_the_forward_follows_what_was_measured(monkeypatch: pytest.MonkeyPatch, stored: bool) -> None:
    """What is shipped takes hardly more time than the fastest way, of 129 to 2048 tokens and eight layers."""
    monkeypatch.setattr(shared, "why_off", lambda *_: None)
    times: dict[tuple[int, int, int], dict[str, float]] = {}
    with MEASURED.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            place = int(row["tokens"]), int(row["hidden"]), int(row["intermediate"])
            times.setdefault(place, {})[row["way"]] = float(row["us"])
    assert len({place[1:] for place in times}) == 8
    kernel, suffix = ("forward-preact", " storing") if stored else ("forward", "")
    ruled, ping_pong = [], []
    for place, us in times.items():
        choice = candidates.shipped(kernel, TileProblem(*place, torch.bfloat16, (9, 0)))
        name = "two"
        if choice.schedule == "ping-pong":
            name = f"ping-pong {choice.tile.columns}{suffix}"
        elif choice.schedule == "transposed":
            tile = choice.tile
            name = f"transposed {tile.rows}{f' /{tile.parts}' if tile.parts > 1 else ''}{suffix}"
        ours = {way: time for way, time in us.items() if way.endswith("storing") is stored}
        best = min(us["two"], *(time for way, time in ours.items() if way.startswith(("ping-pong", "transposed"))))
        ruled.append(us[name] / best)
        ping_pong.append(min(time for way, time in ours.items() if way.startswith("ping-pong")) / best)
    assert statistics.geometric_mean(ruled) < 1.005
    assert statistics.geometric_mean(ping_pong) > 1.07, "or the transposed kernel is not worth its lines"
    assert max(ruled) < 1.1


@pytest.mark.skipif(backend_for(CPU) == "torch", reason="Triton's interpreter is off")
@pytest.mark.parametrize(("formula", "biased"), [(PLAIN, False), (CLAMPED, True)])
@pytest.mark.parametrize("stored", [False, True])
def test_it_yields_the_same(monkeypatch: pytest.MonkeyPatch, formula: Formula, biased: bool, stored: bool) -> None:
    monkeypatch.setattr(glu_choice, "PORTABLE_TOKENS", 4)
    x, w_gate, w_up = torch.randn(5, 24), torch.randn(40, 24), torch.randn(40, 24)
    biases = (torch.randn(40), torch.randn(40)) if biased else (None, None)
    z, gate, up = (torch.full((5, 40), torch.nan) for _ in range(3))
    glu.write_forward(x, w_gate, w_up, z, (gate, up) if stored else None, biases, formula)
    numbers = {"alpha": formula.alpha, "limit": formula.limit, "up_offset": formula.up_offset}
    torch.testing.assert_close(z, reference.swiglu_glu(x, w_gate, w_up, *biases, **numbers))
    if stored:
        torch.testing.assert_close(gate, torch.nn.functional.linear(x, w_gate, biases[0]))
        torch.testing.assert_close(up, torch.nn.functional.linear(x, w_up, biases[1]))


@pytest.fixture
def _ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(here, "capability_of", lambda _: (8, 0))


@pytest.mark.usefixtures("_ampere")
@pytest.mark.parametrize(("tokens", "expected"), [(1, False), (16, False), (17, True), (4096, True)])
def test_where_nothing_was_measured_torch_multiplies(
    monkeypatch: pytest.MonkeyPatch, tokens: int, expected: bool
) -> None:
    x, weight = torch.empty(tokens, 16), torch.empty(16, 16)
    assert by_torch(x, weight) is expected
    for hidden in (16, 24):  # what `tune` calls shipped is what runs
        x, weight = torch.empty(tokens, hidden), torch.empty(16, hidden)
        what = candidates.shipped("forward", TileProblem(tokens, hidden, 16, x.dtype, (8, 0))) == BY_TORCH
        assert by_torch(x, weight) is what
    x, weight = torch.empty(tokens, 16), torch.empty(16, 16)
    assert glu_choice.resolve("auto", "auto", "auto", x, 16) == ("torch", "preact", "torch")
    assert hidden_grad_by_torch(x, weight.t(), PLAIN)
    assert here.why_unmeasured(CPU) == "this is compute capability 8.0, and only 9.0 was measured"
    for module in (glu_choice, mlp_choice):  # what is tuned there is used
        monkeypatch.setattr(module, "lookup", lambda *_: Choice("portable", TILE))
    assert not by_torch(x, weight, stored=False)
    assert not hidden_grad_by_torch(x, weight.t(), PLAIN)
