from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from specimens import result_or_complaint

from swiglu_bench import request
from swiglu_bench.cases.cases import Case, Scope
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.contenders import CATALOGUE
from swiglu_bench.measure.rounds import Rule
from swiglu_bench.options import SweepOptions, TimingOptions, VerifyOptions
from swiglu_bench.request import REGIMES, requested
from swiglu_bench.worker.policy import Task

names = st.sampled_from([one.name for one in CATALOGUE])
patterns = st.one_of(st.text(), names, st.sampled_from(["*", "eager*", "[a-", "[!x]*", "?", "a.py:b", ".py:", ","]))


@given(st.lists(patterns, max_size=3), st.lists(patterns, max_size=3), st.one_of(st.none(), names, st.text(max_size=8)))
def test_any_text_is_implementations_or_bad_input(wanted: list[str], unwanted: list[str], baseline: str | None) -> None:
    options = SweepOptions(impl=wanted, skip_impl=unwanted, in_process=True)
    baselines = [] if baseline is None else [baseline]
    chosen = result_or_complaint(lambda: request.implementations_of(options, baselines=baselines))
    if isinstance(chosen, BadInput):
        assert str(chosen).endswith((".", "?"))
    else:
        assert chosen
        assert len({one.name for one in chosen}) == len(chosen)


@pytest.mark.parametrize(
    ("command", "options", "wanted"),
    [
        ("forward", TimingOptions(), {"task": Task.TIME, "cold_l2": True, "energy": True, "rule": Rule(budget_s=20.0)}),
        ("backward", TimingOptions(l2="hot", energy=False), {"cold_l2": False, "energy": False}),
        ("step", TimingOptions(regime="rested", budget=3.0), {"rule": Rule(budget_s=3.0, rest_s=REGIMES["rested"])}),
        ("step", TimingOptions(baseline="compile"), {"baseline": "compile", "interpreter": False}),
        ("memory", SweepOptions(), {"task": Task.MEMORY, "baseline": "", "energy": False, "cold_l2": True}),
        ("verify", SweepOptions(detail=True), {"task": Task.VERIFY, "interpreter": True, "detail": True}),
    ],
)
def test_settings_follow_from_the_options(
    monkeypatch: pytest.MonkeyPatch, command: str, options: SweepOptions, wanted: dict[str, Any]
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with requested(command, options, Console(), "swiglu-bench x") as asked:
        found = {name: getattr(asked.settings, name) for name in wanted}
    assert found == wanted
    assert (asked.command, asked.settings.command, asked.settings.device.type) == (command, "swiglu-bench x", "cpu")


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
    monkeypatch: pytest.MonkeyPatch, shapes: str, more: dict[str, Any], names: list[str]
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    options = TimingOptions(shapes=shapes, impl=["batched"], in_process=True, **more)
    with requested("step", options, Console(), "swiglu-bench x") as asked:
        assert [one.name for one in asked.implementations] == names
        assert asked.settings.baseline_of(asked.cases[-1]) == more.get("baseline", "grouped")


@pytest.mark.parametrize("command", ["forward", "verify"])
def test_random_layers_have_token_counts_of_their_own(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    def counts(**more: Any) -> list[int]:
        options = VerifyOptions if command == "verify" else TimingOptions
        given = {"shapes": "random:3", "seed": 1, "scope": "glu", "dtype": "fp32"} | more
        with requested(command, options(**given), Console(), "swiglu-bench x") as asked:
            return [case.tokens for case in asked.cases]

    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert counts() == [1655, 78, 2]
    assert counts(tokens="4") == [4, 4, 4]
    assert counts(shapes="random:1,smoke")[0] == 1655


@pytest.mark.parametrize("command", ["forward", "backward"])
def test_layers_are_those_of_a_cuda_graph(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    device = torch.device("cuda" if command == "backward" else "cpu")
    monkeypatch.setattr(request, "find_device", lambda name, interpret: device)
    with (
        pytest.raises(BadInput, match=r"^--layers records CUDA graphs, and (this|a backward) .*; leave it out\.$"),
        requested(command, TimingOptions(layers=4), Console(), "swiglu-bench x"),
    ):
        pass
    monkeypatch.setattr(request, "find_device", lambda name, interpret: torch.device("cuda"))
    with requested("forward", TimingOptions(layers=4), Console(), "swiglu-bench x") as asked:
        assert asked.settings.layers == 4


def cases(monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[Case]:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with requested("forward", TimingOptions(**options), Console(), "swiglu-bench x") as asked:
        return list(asked.cases)


def test_the_scope_of_experts_follows_from_the_shape_and_the_routing_is_part_of_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def found(**options: Any) -> list[tuple[str, Scope]]:
        return [(case.shape.name, case.scope) for case in cases(monkeypatch, tokens="5", **options)]

    experts, glu = Scope.EXPERTS, Scope.GLU
    assert found() == [("smoke", glu)]
    assert found(shapes="smoke,smoke-experts") == [("smoke", glu), ("smoke-experts", experts)]
    assert found(scope="experts") == [("smoke-experts", experts)]
    assert found(scope="experts,mlp") == [("smoke", Scope.MLP), ("smoke-experts", experts)]
    routed = found(shapes="smoke,smoke-experts", routing="zipf,uniform")
    assert routed == [("smoke", glu), ("smoke-experts@zipf", experts), ("smoke-experts", experts)]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"routing": "zipf"}, ["--routing", "smoke"]),
        ({"shapes": "smoke-experts", "routing": "zip"}, ["--routing", "'zip'", "zipf"]),
        ({"shapes": "smoke-experts", "routing": ""}, ["--routing", "uniform"]),
        ({"shapes": "smoke-experts", "scope": "glu"}, ["--scope glu", "smoke-experts"]),
        ({"shapes": "smoke", "scope": "experts"}, ["--scope experts", "smoke has no experts"]),
        ({"shapes": "smoke", "scope": "glu,experts"}, ["--scope experts"]),
        (
            {"shapes": "smoke,smoke-experts", "precision": "fp8-blockwise"},
            ["fp8-blockwise", "smoke-experts", "rowwise"],
        ),
        ({"scope": "experts", "precision": "fp8-rowwise,fp8-tensorwise"}, ["--precision fp8-tensorwise", "dense"]),
        ({"scope": "activation", "precision": "fp8-rowwise"}, ["glu, mlp, experts", "activation"]),
    ],
)
def test_scopes_and_routings_that_do_not_fit_the_shapes(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, str], names: list[str]
) -> None:
    found = result_or_complaint(lambda: cases(monkeypatch, **options))
    assert isinstance(found, BadInput)
    assert all(name in str(found) for name in names)
    assert str(found).endswith((".", "?"))


def test_experts_have_the_precisions_that_grouped_products_are_made_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)

    def found(command: str, options: SweepOptions) -> set[tuple[str, str]]:
        with requested(command, options, Console(), "swiglu-bench x") as asked:
            return {(case.scope.value, case.precision.value) for case in asked.cases}

    mixture = TimingOptions(shapes="smoke-experts", precision="bf16,fp8-rowwise")
    assert found("forward", mixture) == {("experts", ""), ("experts", "fp8-rowwise")}
    every = found("verify", VerifyOptions(precision="fp8-rowwise,fp8-blockwise"))
    assert every == {(scope, "fp8-rowwise") for scope in ("glu", "mlp", "experts")} | {
        (scope, "fp8-blockwise") for scope in ("glu", "mlp")
    }


def test_tables_of_a_dense_block_do_not_list_what_is_for_experts_and_the_other_way_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)

    def chosen(**options: Any) -> set[str]:
        with requested("forward", TimingOptions(**options), Console(), "swiglu-bench x") as asked:
            return {one.name for one in asked.implementations}

    assert {"eager", "fused"} <= chosen()
    assert {"eager", "fused-mlp-auto"} <= chosen(scope="mlp")
    assert max(len(chosen(scope=scope)) for scope in Scope) <= 9, "more than eight or nine cannot be read at once"
    assert "fused" not in chosen(scope="mlp")
    assert "fused-mlp-recompute" in chosen(scope="mlp", baseline="fused-mlp-recompute")
    assert chosen() & chosen(scope="experts") == {"eager"}
    assert chosen(impl=["grouped"]) == {"eager", "grouped"}, "asked for by name, its row says why"
