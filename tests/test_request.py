import dataclasses
from typing import Any

import pytest
import torch
from rich.console import Console
from specimens import result_or_complaint

from swiglu_bench import request
from swiglu_bench.cases import costs
from swiglu_bench.cases.cases import Dtype, Precision, Scope
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.contenders import CATALOGUE
from swiglu_bench.measure.rounds import Rule
from swiglu_bench.options import SweepOptions, TimingOptions, VerifyOptions
from swiglu_bench.request import REGIMES, Request, requested
from swiglu_bench.worker.policy import Task


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def asked(command: str = "forward", options: SweepOptions | None = None, **more: Any) -> Request:
    with requested(command, options or TimingOptions(**more), Console(), "swiglu-bench x") as found:
        return found


@pytest.mark.parametrize(
    ("command", "options", "wanted"),
    [
        ("forward", TimingOptions(), {"task": Task.TIME, "cold_l2": True, "energy": True, "rule": Rule(budget_s=20.0)}),
        ("backward", TimingOptions(l2="hot", energy=False), {"cold_l2": False, "energy": False}),
        ("step", TimingOptions(regime="rested", budget=3.0), {"rule": Rule(budget_s=3.0, rest_s=REGIMES["rested"])}),
        ("step", TimingOptions(rounds=4), {"rule": Rule(budget_s=20.0, min_rounds=4, max_rounds=4, min_s=0.0)}),
        ("step", TimingOptions(baseline="compile"), {"baseline": "compile", "interpreter": False}),
        ("memory", SweepOptions(), {"task": Task.MEMORY, "baseline": "", "energy": False, "rule": Rule(budget_s=0.0)}),
        ("verify", SweepOptions(detail=True), {"task": Task.VERIFY, "interpreter": True, "detail": True}),
    ],
)
def test_settings_follow_from_the_options(command: str, options: SweepOptions, wanted: dict[str, Any]) -> None:
    found = asked(command, options)
    assert {name: getattr(found.settings, name) for name in wanted} == wanted
    assert (found.command, found.settings.command, found.settings.device.type) == (command, "swiglu-bench x", "cpu")


@pytest.mark.parametrize(
    ("shapes", "more", "names"),
    [
        ("smoke-experts", {}, ["grouped", "batched"]),
        ("smoke,smoke-experts", {}, ["grouped", "eager", "batched"]),
        ("smoke-experts", {"baseline": "eager"}, ["eager", "batched"]),
        ("smoke-experts", {"skip_impl": ["grouped"]}, ["batched"]),
    ],
)
def test_experts_are_compared_with_grouped_unless_the_options_say_otherwise(
    shapes: str, more: dict[str, Any], names: list[str]
) -> None:
    found = asked("step", shapes=shapes, impl=["batched"], in_process=True, **more)
    assert [known.name for known in found.implementations] == names
    assert found.settings.baseline_of(found.cases[-1]) == more.get("baseline", "grouped")


def test_layers_are_those_of_a_cuda_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    for command, device in (("forward", "cpu"), ("backward", "cuda")):
        monkeypatch.setattr(request, "find_device", lambda *_, device=device: torch.device(device))
        monkeypatch.setattr(request, "device_type", lambda _, device=device: device)
        with pytest.raises(BadInput, match=r"^--layers records CUDA graphs, and (this|a backward) .*; leave it out\.$"):
            asked(command, layers=4)
    assert asked(layers=4).settings.layers == 4


def test_micro_batches_are_those_of_a_step() -> None:
    found = asked("step", shapes="smoke", tokens="6", accumulate=4)
    assert {(case.accumulate, case.tokens, case.name) for case in found.cases} == {(4, 6, "smoke@accumulate-4")}
    kept = next(known for known in CATALOGUE if known.name == "fused-fp8-kept")
    case = dataclasses.replace(found.cases[0], dtype=Dtype.BFLOAT16, precision=Precision.FP8_ROWWISE)
    assert case.name == "smoke@fp8-rowwise@accumulate-4"
    assert kept.refuses(case) is None
    assert "--accumulate" in str(kept.refuses(dataclasses.replace(case, accumulate=1)))
    one, four = (costs.flops(dataclasses.replace(case, accumulate=count), ("x", "w_gate")) for count in (1, 4))
    assert four == 4 * one
    for command, more in (("forward", {}), ("step", {"scope": "activation"}), ("step", {"layers": 2})):
        with pytest.raises(BadInput, match=r"^--accumulate adds up gradients .*; leave it out, or "):
            asked(command, shapes="smoke", accumulate=2, **more)


def test_the_scope_of_experts_follows_from_the_shape_and_the_routing_is_part_of_its_name() -> None:
    def found(**options: Any) -> list[tuple[str, Scope]]:
        return [(case.shape.name, case.scope) for case in asked(tokens="5", **options).cases]

    experts, glu = Scope.EXPERTS, Scope.GLU
    assert found() == [("smoke", glu)]
    assert found(shapes="smoke,smoke-experts") == [("smoke", glu), ("smoke-experts", experts)]
    assert found(scope="experts,mlp") == [("smoke", Scope.MLP), ("smoke-experts", experts)]
    routed = found(shapes="smoke,smoke-experts", routing="zipf,uniform")
    assert routed == [("smoke", glu), ("smoke-experts@zipf", experts), ("smoke-experts", experts)]
    assert [case.tokens for case in asked(shapes="random:3", seed=1).cases] == [1655, 78, 2], "of their own"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"routing": "zipf"}, ["--routing", "smoke"]),
        ({"shapes": "smoke-experts", "routing": "zip"}, ["--routing", "'zip'", "zipf"]),
        ({"shapes": "smoke-experts", "scope": "glu"}, ["--scope glu", "smoke-experts"]),
        ({"shapes": "smoke", "scope": "experts"}, ["--scope experts", "smoke has no experts"]),
        ({"shapes": "smoke", "scope": "glu,experts"}, ["--scope experts"]),
        ({"shapes": "smoke,smoke-experts", "precision": "fp8-blockwise"}, ["blockwise", "smoke-experts", "rowwise"]),
        ({"scope": "experts", "precision": "fp8-rowwise,fp8-tensorwise"}, ["--precision fp8-tensorwise", "dense"]),
        ({"scope": "activation", "precision": "fp8-rowwise"}, ["glu, mlp, experts", "activation"]),
    ],
)
def test_scopes_and_routings_that_do_not_fit_the_shapes(options: dict[str, str], words: list[str]) -> None:
    found = result_or_complaint(lambda: asked(**options))
    assert isinstance(found, BadInput)
    assert all(word in str(found) for word in words)
    assert str(found).endswith((".", "?"))


def test_experts_have_the_precisions_that_grouped_products_are_made_for() -> None:
    def found(command: str, options: SweepOptions) -> set[tuple[str, str]]:
        return {(case.scope.value, case.precision.value) for case in asked(command, options).cases}

    mixture = TimingOptions(shapes="smoke-experts", precision="bf16,fp8-rowwise")
    assert found("forward", mixture) == {("experts", ""), ("experts", "fp8-rowwise")}
    every = found("verify", VerifyOptions(precision="fp8-rowwise,fp8-blockwise"))
    dense = {(scope, f"fp8-{kind}wise") for scope in ("glu", "mlp") for kind in ("row", "block")}
    assert every == dense | {("experts", "fp8-rowwise")}
