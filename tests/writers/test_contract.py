from pathlib import Path

from rendered import shown

from swiglu_bench.rows.audit_cell import Cell, CellStatus
from swiglu_bench.writers.contract import ContractFile, contract_tables

CELLS = [
    Cell(name, scope, check, verdict, reason, "float32", "cpu")
    for name, scope, check, verdict, reason in (
        ("eager", "glu", "zeros", CellStatus.PASS, ""),
        ("eager", "glu", "bias", CellStatus.PASS, ""),
        ("mine", "glu", "bias", CellStatus.UNSUPPORTED, "it does not offer this"),
        ("mine", "glu", "zeros", CellStatus.FAIL, "output: off"),
        ("mine", "mlp", "bias", CellStatus.UNSUPPORTED, "it does not offer this"),
        ("idle", "glu", "zeros", CellStatus.NOT_RUN, "no GPU"),
        ("idle", "glu", "bias", CellStatus.NOT_RUN, "no GPU"),
    )
]


def test_a_matrix_per_scope_a_legend_and_every_reason_once_failures_first() -> None:
    text = shown(contract_tables(CELLS, {"zeros": "All zeros.", "bias": "A bias."}), 100)
    lines = [line.rstrip() for line in text.splitlines()]
    for line in ("eager ✓ ✓", "mine  ✗ –", "idle  · ·", "a zeros: All zeros.", "b bias: A bias."):
        assert line in lines
    assert lines[-3:] == [
        "✗ zeros: output: off [mine (glu)]",
        "– bias: it does not offer this [mine (glu, mlp)]",
        "· every check: no GPU [idle (glu)]",
    ]


def test_the_file_has_a_line_per_cell(tmp_path: Path) -> None:
    file = ContractFile(tmp_path)
    for cell in CELLS:
        file.write(cell)
    lines = (tmp_path / "audit.csv").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "implementation,scope,check,verdict,reason,dtype,device"
    assert lines[4] == "mine,glu,zeros,fail,output: off,float32,cpu"
    assert len(lines) == 1 + len(CELLS)
