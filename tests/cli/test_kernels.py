import json
import os
from collections.abc import Callable
from typing import Any

import pytest
from command_line import swiglu_bench

from swiglu_kernels.standalone import compiled
from swiglu_kernels.standalone.compiled import Report

ARGUMENTS = ("inspect", "--target", "sm_80, 90a", "--shapes", "24x40", "--tokens", "1,8", "--dtype", "fp16")


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Nothing is compiled; the bytes that each kernel spills."""
    spills = {"forward": 0, "dX": 0}

    def report(name: str, tokens: int, hidden: int, intermediate: int, dtype: Any, capability: Any) -> Report:
        assert (hidden, intermediate) == (24, 40)
        return Report(name, "{}.{}".format(*capability), str(dtype), tokens, 128, spills[name], 2**16, 5, 0, 7, 3, 0)

    monkeypatch.setattr(compiled, "launches", lambda *_: spills)
    monkeypatch.setattr(compiled, "report", report)
    return spills


def test_every_kernel_is_shown_for_every_target_and_token_count_and_a_spill_exits_1(compiler: dict[str, int]) -> None:
    rows = json.loads(swiglu_bench(*ARGUMENTS, "--format", "json").out)["rows"]
    assert [(row["capability"], row["tokens"], row["kernel"]) for row in rows] == [
        (capability, tokens, name) for capability in ("8.0", "9.0") for tokens in (1, 8) for name in ("forward", "dX")
    ]
    assert swiglu_bench(*ARGUMENTS).code == 0
    assert "8192 tokens" in swiglu_bench("inspect", "--shapes", "24x40").out
    compiler["dX"] = 96
    ran = swiglu_bench(*ARGUMENTS, width=140)
    assert (ran.code, ran.out.count("none"), ran.out.count("96 B")) == (1, 4, 4)
    for text in ("sm_80", "sm_90", "torch.float16", "64 KiB"):
        assert text in ran.out


def test_what_all_kernels_of_a_table_share_is_in_its_title_and_no_column_is_cut_at_80() -> None:
    shown = swiglu_bench(*ARGUMENTS, width=80).out
    for title in (f"sm_{target}, torch.float16, {tokens} tokens" for target in (80, 90) for tokens in (1, 8)):
        assert title in shown
    heads = [line.split() for line in shown.splitlines() if line.startswith(" kernel")]
    assert heads == [["kernel", "registers", "spills", "shared", "wgmma", "mma.sync", "TMA"]] * 4  # none has a tcgen05


@pytest.mark.parametrize("end", [lambda: os._exit(134), lambda: int("a kernel of no target")])
def test_a_target_that_the_compiler_does_not_know_is_named(
    monkeypatch: pytest.MonkeyPatch, end: Callable[[], object]
) -> None:
    monkeypatch.setattr(compiled, "report", lambda *_: end())
    complaint = swiglu_bench("inspect", "--target", "sm_12").complaint
    assert "--target" in complaint
    assert "sm_12 " in complaint
    assert "sm_90" in complaint
