import math
import re
from dataclasses import replace

import pytest
from places import ROOT
from rendered import shown
from specimens import a_split_row

from swiglu_bench.cases import costs
from swiglu_bench.cases.cases import Dtype, Experts, Mode, Scope, Shape, tensors
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.cases.shapes import load_shapes
from swiglu_bench.cli.beyond import _ways, parse_gpus
from swiglu_bench.machine import system
from swiglu_bench.machine.machine import DATASHEETS
from swiglu_bench.measure.clock import Sample
from swiglu_bench.measure.rounds import Rounds, Timing
from swiglu_bench.options import TpOptions
from swiglu_bench.rows.record import Record
from swiglu_bench.rows.run_folder import PARTS
from swiglu_bench.show.tables import tp_tables
from swiglu_bench.tasks import tp

SHAPE = Shape("made-up", 16, 96, "for tests", (1, 4, 6))
SPLIT = tp.SplitCase(
    Shape("made-up", 1024, 4096, "for tests", ()), 2048, Dtype.BFLOAT16, Scope.MLP, Mode.FORWARD, ranks=4
)


def cases(tokens=None, sizes=(2,), ways=(False, True), modes=(Mode.STEP, Mode.FORWARD)):
    return tp.cases_of([SHAPE], modes, [Dtype.BFLOAT16], tokens, 0, sizes, ways)


def test_forward_comes_first_and_own_token_counts_that_do_not_divide_are_left_out():
    assert [(case.mode, case.tokens) for case in cases()] == [
        (Mode.FORWARD, 4), (Mode.FORWARD, 6), (Mode.STEP, 4), (Mode.STEP, 6),
    ]  # fmt: skip
    assert [(case.ranks, case.tokens) for case in cases(sizes=(2, 4), modes=(Mode.STEP,))] == [(2, 4), (4, 4)]
    assert [case.tokens for case in cases(ways=(False,), modes=(Mode.STEP,))] == [1, 4, 6]
    with pytest.raises(BadInput, match="none of the shapes' own token counts is divisible by 8"):
        cases(sizes=(8,))


def test_numbers_of_gpus():
    assert parse_gpus("1, 2,4,2") == [1, 2, 4]
    for text in ("0", "-1", "two", "", "5000", "²"):
        with pytest.raises(BadInput, match="is not a number of GPUs"):
            parse_gpus(text)


def test_more_gpus_than_nvml_knows_are_refused_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "visible_gpus", lambda: [object()])
    with pytest.raises(BadInput, match="--gpus: 2 were asked for, and there are 1 here"):
        _ways(TpOptions(gpus="1,2"))


def test_collectives_and_what_they_put_on_the_wires():
    forward, *_, step = cases()
    assert forward.tensor_bytes == 4 * 16 * 2
    assert forward.collectives(False) == (tp.Collective.ALL_REDUCE,)
    assert step.collectives(True) == (tp.Collective.ALL_GATHER, tp.Collective.REDUCE_SCATTER) * 2
    # nccl-tests: an all-reduce is a reduce-scatter and an all-gather
    for ranks in (1, 2, 8):
        both = tp.bus_bytes((tp.Collective.ALL_GATHER, tp.Collective.REDUCE_SCATTER), 1000, ranks)
        assert tp.bus_bytes((tp.Collective.ALL_REDUCE,), 1000, ranks) == both == 2000 * (ranks - 1) / ranks


def test_experts_are_split_by_expert_and_rows_travel_in_both_directions():
    shape = replace(SHAPE, experts=Experts(8, 2))
    (case,) = tp.cases_of([shape], [Mode.STEP], [Dtype.BFLOAT16], [4], 0, (2,), (True,))
    assert case.scope is Scope.EXPERTS
    assert case.local.shape.experts == Experts(4, 2)
    assert case.tensor_bytes == 4 * 2 * 16 * 2, "a row for each rank that may have some of a token's experts"
    these = case.collectives(True)
    assert these == (tp.Collective.ALL_TO_ALL,) * 4
    assert tp.bus_bytes(these, 1000, 2) == 4 * 1000 / 2 / 2, "half of a rank's half stays where it is"


def test_the_document_s_arithmetic_is_that_of_the_costs():
    document = ROOT / "docs" / "scaling.md"
    if not document.exists():
        pytest.skip("the documents are not here")
    block = re.search(r"<!-- arithmetic -->\n(.*?)<!-- end -->", document.read_text(encoding="utf-8"), re.DOTALL)
    head, _, *lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in block[1].splitlines()]
    wires_gbps = {"NVLink, datasheet": 450, "InfiniBand, datasheet": 50}
    for name, wires, *shares in lines:
        case = tp.SplitCase(load_shapes(name)[0], 16384, Dtype.BFLOAT16, Scope.MLP, Mode.STEP)
        for column, share in zip(head[2:], shares, strict=True):
            ranks = int(column.split()[0])
            products_s = costs.flops(case, tensors(case.scope)) / ranks / DATASHEETS["H200"].tflops / 1e12
            wires_s = tp.bus_bytes(case.collectives(False), case.tensor_bytes, ranks) / wires_gbps[wires] / 1e9
            assert int(share.strip("%")) == pytest.approx(100 * wires_s / products_s, abs=0.6, rel=0.002)


def test_the_document_s_arithmetic_of_experts():
    document = ROOT / "docs" / "scaling.md"
    if not document.exists():
        pytest.skip("the documents are not here")
    block = re.search(
        r"<!-- experts' arithmetic -->\n(.*?)<!-- end -->", document.read_text(encoding="utf-8"), re.DOTALL
    )
    _, _, *lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in block[1].splitlines()]
    experts = k = hidden = intermediate = 0
    for name, ranks, rows, per_token, *shares in lines:
        if name:
            experts, k, hidden, intermediate = map(
                int, re.search(r"\((\d+), k = (\d+), (\d+) x (\d+)\)", name).groups()
            )
        n = int(ranks)
        sent = (n - 1) * (1 - math.comb(experts - experts // n, k) / math.comb(experts, k))
        assert rows == f"{sent:.2f} / {k * (n - 1) / n:.2f}"
        assert per_token == f"{8 * hidden * sent / 1024:.0f} KB"
        for share, gbps in zip(shares, (450, 50), strict=True):
            seconds = 8 * hidden * sent / gbps / 1e9
            products_s = 18 * k * hidden * intermediate / DATASHEETS["H200"].tflops / 1e12
            assert int(share.strip("%")) == pytest.approx(100 * seconds / products_s, abs=0.6)


# Figures


def filled(name: str = "mine", **more: float) -> Record:
    """A row after twenty rounds in which each takes the same time but for drift that hits all alike."""
    ms = {tp.key(baseline, True): 4.0 for baseline in ("eager", tp.TWIN)}
    ms |= {tp.key("mine", how): value for how, value in ((True, 3.0), (tp.LOCAL, 2.5), (tp.SINGLE, 9.6))}
    ms[tp.key(tp.COLLECTIVES, True)] = 1.0
    timings = {
        name: Timing([Sample(value * (1 + 0.01 * (number % 5)), 1.0, 1.0, True, None) for number in range(20)])
        for name, value in (ms | more).items()
    }
    row = a_split_row(name, shape="made-up", tokens=2048, device="A GPU")
    tp.fill(row, Rounds(timings, "budget"), SPLIT, 400.0)
    return row


def test_times_ratios_and_parts_are_of_the_same_rounds():
    mine = filled()
    assert (mine.ratio, mine.verdict) == (pytest.approx(0.75), "faster")
    assert mine.hidden_share == pytest.approx(0.5)  # of 1 ms half is seen behind 2.5 ms
    assert mine.efficiency == pytest.approx(9.6 / 4 / 3)
    assert mine.comm_bytes == 2 * 2048 * 1024 * 2
    assert mine.bus_gbps == pytest.approx(2 * 3 / 4 * 2048 * 1024 * 2 / (1.02e-3 * 1e9))
    assert mine.bus_ceiling_gbps == 400.0
    assert (len(mine.samples_ms), mine.twin_ms) == (20, ())
    assert {name: len(times) for name, times in mine.series.items()} == dict.fromkeys(PARTS, 20)
    longer = filled(**{tp.key("mine", True): 4.5})
    assert longer.hidden_share == pytest.approx(-1.0), "not cut off where the whole takes longer than its parts"


@pytest.mark.parametrize(
    ("name", "alone"),
    [("compile-async-tp", "compile"), ("megatron-alltoall", "grouped-compile"), ("megatron-deepep", "grouped-compile")],
)
def test_what_is_compared_with_another_that_has_no_collectives(name, alone):
    keys = {tp.key(name, True): 2.8, tp.key(alone, tp.LOCAL): 2.4, tp.key(alone, tp.SINGLE): 9.0}
    mine = filled(name, **keys)
    assert (mine.compute_ms, mine.single_ms) == pytest.approx((2.4 * 1.02, 9.0 * 1.02))


def test_what_is_slower_than_one_gpu_is_said_under_the_table():
    for ms, said in ((12.0, True), (3.0, False)):
        row = filled(**{tp.key("mine", True): ms})
        text = shown(tp_tables([row]), 140)
        assert ("slower than one GPU: mine at 2,048 tokens" in text) is said
        assert "eager against itself (A/A)" in text
