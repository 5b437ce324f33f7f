from pathlib import Path

from rich.console import Console

from swiglu_bench.rows.audit_cell import Cell, CellStatus
from swiglu_bench.writers.contract import ContractFile, contract_tables


def a_cell(name: str, check: str, verdict: CellStatus, reason: str = "", scope: str = "glu") -> Cell:
    return Cell(name, scope, check, verdict, reason, "float32", "cpu")


CELLS = [
    a_cell("eager", "zeros", CellStatus.PASS),
    a_cell("eager", "bias", CellStatus.PASS),
    a_cell("mine", "zeros", CellStatus.FAIL, "output: off"),
    a_cell("mine", "bias", CellStatus.UNSUPPORTED, "it does not offer this"),
    a_cell("mine", "bias", CellStatus.UNSUPPORTED, "it does not offer this", "mlp"),
    a_cell("idle", "zeros", CellStatus.NOT_RUN, "no GPU"),
    a_cell("idle", "bias", CellStatus.NOT_RUN, "no GPU"),
]


def shown(width: int = 100) -> list[str]:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for part in contract_tables(CELLS, {"zeros": "All zeros.", "bias": "A bias."}):
        console.print(part, soft_wrap=True)
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_a_matrix_per_scope_a_legend_and_every_reason_once() -> None:
    lines = shown()
    assert "eager ✓ ✓" in lines
    assert "mine  ✗ –" in lines
    assert "idle  · ·" in lines
    assert "a zeros: All zeros." in lines
    assert "✗ zeros: output: off [mine (glu)]" in lines
    assert "– bias: it does not offer this [mine (glu, mlp)]" in lines
    assert "· every check: no GPU [idle (glu)]" in lines
    assert lines.index("✗ zeros: output: off [mine (glu)]") < lines.index(
        "– bias: it does not offer this [mine (glu, mlp)]"
    )


def test_the_file_has_a_line_per_cell(tmp_path: Path) -> None:
    file = ContractFile(tmp_path)
    for cell in CELLS:
        file.write(cell)
    lines = (tmp_path / "audit.csv").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "implementation,scope,check,verdict,reason,dtype,device"
    assert lines[3] == "mine,glu,zeros,fail,output: off,float32,cpu"
    assert len(lines) == 1 + len(CELLS)
