"""Every kernel at odd sizes against fp64: all of them on a GPU, the portable ones in the interpreter elsewhere."""

import itertools
from dataclasses import replace

import pytest
import torch

from swiglu_kernels.hopper import admission
from swiglu_kernels.ops.fp8.operation import why_not as why_no_fp8
from swiglu_kernels.runtime.backend import backend_for
from swiglu_kernels.runtime.launch import Launch
from swiglu_kernels.standalone import odd_sizes

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(backend_for(DEVICE) == "torch", reason="no GPU, and Triton's interpreter is off")


def wrong(found: list[odd_sizes.Outcome]) -> list[odd_sizes.Outcome]:
    return [outcome for outcome in found if not outcome.right]


def test_each_is_right() -> None:
    at = odd_sizes.Sizes((17, 24, 40), torch.float16, DEVICE)
    found = list(odd_sizes._portable(at, "here"))
    assert not wrong(found)
    names = " ".join(outcome.name for outcome in found)
    for kernel in ("forward", "recompute", "dX", "dW", "mlp d_gate", "silu_mul", "unsloth"):
        assert kernel in names


def test_experts() -> None:
    found = list(odd_sizes._experts((9, 24, 20), torch.float16, DEVICE, "portable"))
    assert len(found) == 6
    assert not wrong(found)


@pytest.mark.parametrize("spoilt", ["", "first", "experts", "everything"])
def test_exchange_of_experts(spoilt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Launch.run

    def spoil(launch: Launch) -> None:
        if spoilt in launch.arguments:
            launch.arguments[spoilt] = launch.arguments[spoilt] + 1
        run(launch)

    monkeypatch.setattr(Launch, "run", spoil if spoilt != "everything" else lambda launch: None)
    (found,) = odd_sizes._exchange(odd_sizes.Sizes((9, 72, 8), torch.float16, DEVICE), "here")
    assert found.right is not bool(spoilt)


@pytest.mark.skipif(why_no_fp8(DEVICE) is not None, reason=f"{why_no_fp8(DEVICE)}")
def test_experts_in_fp8() -> None:
    found = list(odd_sizes._experts((9, 80, 48), torch.float16, DEVICE, "portable", "fp8-rowwise"))
    assert [outcome.name.split()[1] for outcome in found] == ["out", "d_x", "d_w_gate_up", "d_w_down", "d_weights"]
    assert not wrong(found)


def test_what_is_wrong_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Launch.run

    def spoil_one(launch: Launch) -> None:
        run(launch)
        launch.arguments["z_ptr"][3, 5] += 0.1

    def spoil_a_margin(launch: Launch) -> None:
        run(launch)
        z = launch.arguments["z_ptr"]
        torch.as_strided(z, (1,), (1,), z.storage_offset() - 1).fill_(1.0)

    at = odd_sizes.Sizes((17, 24, 40), torch.float16, DEVICE)
    for spoil in (spoil_one, spoil_a_margin, lambda launch: None):
        monkeypatch.setattr(Launch, "run", spoil)
        with admission.by_hand_aside("portable kernels are asked for"):
            assert not next(odd_sizes._portable(at, "forward")).right
    assert not replace(odd_sizes.Outcome("one", 1.0), roundings=odd_sizes.SLACK * 2).right


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", odd_sizes.DTYPES)
@pytest.mark.parametrize("number", range(8))
def test_all_of_them_on_a_gpu(dtype: torch.dtype, number: int) -> None:
    found = list(odd_sizes.outcomes(torch.device("cuda"), dtypes=[dtype], share=(number, 8)))
    assert len(found) > 3
    assert not wrong(found)


def test_shares_are_all_sizes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(odd_sizes, "_portable", lambda at, label: iter([label]))
    monkeypatch.setattr(odd_sizes, "_exchange", lambda at, label: iter([f"exchange {label}"]))
    monkeypatch.setattr(odd_sizes, "_experts", lambda *size: iter([str(size)]))
    whole = list(odd_sizes.outcomes(DEVICE, portable=True))
    shares = [list(odd_sizes.outcomes(DEVICE, portable=True, share=(number, 3))) for number in range(3)]
    assert len(whole) > 20
    assert sorted(whole) == sorted(itertools.chain(*shares))
