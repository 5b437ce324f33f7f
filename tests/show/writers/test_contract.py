from rendered import shown
from specimens import a_cell

from swiglu_bench.rows.record import AuditVerdict
from swiglu_bench.show.writers.contract import contract_tables

CELLS = [
    a_cell(*of)
    for of in (
        ("eager", "glu", "zeros", AuditVerdict.PASS, ""),
        ("eager", "glu", "bias", AuditVerdict.PASS, ""),
        ("mine", "glu", "bias", AuditVerdict.UNSUPPORTED, "it does not offer this"),
        ("mine", "glu", "zeros", AuditVerdict.FAIL, "output: off"),
        ("mine", "mlp", "bias", AuditVerdict.UNSUPPORTED, "it does not offer this"),
        ("idle", "glu", "zeros", AuditVerdict.NOT_RUN, "no GPU"),
        ("idle", "glu", "bias", AuditVerdict.NOT_RUN, "no GPU"),
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
