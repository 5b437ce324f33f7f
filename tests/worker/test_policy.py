from pathlib import Path

import pytest
from command_line import swiglu_bench

from swiglu_bench.machine import ceilings_cache
from swiglu_bench.worker import policy

MEASURED = policy._interpreter_flops_per_s


@pytest.fixture(autouse=True)
def _rates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A CPU of 1 GFLOP/s, whose interpreter is a thousand times slower."""
    at = ceilings_cache.datetime.datetime.now(ceilings_cache.datetime.UTC)
    figure = ceilings_cache.MeasuredRate(value=1e-3, at=at)
    monkeypatch.setattr(ceilings_cache.Limits, "product", lambda *_: figure)
    monkeypatch.setattr(policy, "_interpreter_flops_per_s", lambda: 1e6)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "more",
    [("memory", "--impl", "eager"), ("verify", "--impl", "eager,fused", "--tokens", "1"),
     ("step", "--impl", "eager", "--scope", "mlp")],
)  # fmt: skip
def test_what_a_cpu_cannot_end_in_time_is_refused_with_the_estimate(more: tuple[str, ...]) -> None:
    said = swiglu_bench(*more, "--device", "cpu", "--shapes", "4096x11008", "--dtype", "fp32").complaint
    assert "hours on this CPU" in said or "minutes on this CPU" in said
    assert said.endswith("to run it anyway.")
    assert list(Path().iterdir()) == []


def test_the_estimate_is_held_against_the_budget() -> None:
    little = ("memory", "--device", "cpu", "--shapes", "64x128", "--tokens", "16", "--impl", "eager", "--no-csv")
    assert "--budget" in swiglu_bench(*little, "--budget", "0.01").complaint
    assert swiglu_bench(*little, "--in-process").code == 0


def test_checks_of_what_is_timed_may_take_the_budgets_of_all_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights' gradients are judged again and again, however few the tokens; the rounds have a budget of their own."""
    monkeypatch.setattr(policy, "JUDGED_S", 1e-2)
    little = ("step", "--device", "cpu", "--shapes", "64x128", "--tokens", "1,2", "--impl", "eager", "--no-csv")
    monkeypatch.setattr(policy, "_seconds", lambda *_: 1.0)
    said = swiglu_bench(*little).complaint
    assert said.startswith("--shapes: to check the results would take about 67 minutes on this CPU; ")
    assert "--budget 2002 " in said
    monkeypatch.setattr(policy, "JUDGED_S", 1e-9)
    assert swiglu_bench(*little, "--budget", "0.1", "--in-process").code in {0, 1}


def test_the_interpreter_has_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "INTERPRETED", (16, 16, 16))
    assert MEASURED() > 0
