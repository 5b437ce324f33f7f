"""What a faster block should make of a whole step, by Amdahl's law, and whether it did. No torch in here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from swiglu_bench.rows.run_folder import read_records
from swiglu_bench.rows.training import SAVING_TOLERANCE
from swiglu_bench.spec.cases import Case
from swiglu_bench.spec.errors import BadInput

if TYPE_CHECKING:
    from swiglu_bench.measure.statistics import Interval


def expected(share: float, block_ratio: float, spared: float = 0.0) -> float:
    """Step time over eager's, where the blocks' `share` of eager's step takes `block_ratio` of its time.

    `spared` is the share of eager's step that is not done at all: the optimiser's work on weights that stay.
    """
    return 1 - share + share * block_ratio - spared


def disagrees(wanted: float, measured: Interval, noise: float) -> bool:
    """Whether the saving is off by more than a fifth of itself, and by more than the measurement can err."""
    off = abs(measured.median - wanted)
    sure = max(measured.half_width, noise)
    return off > SAVING_TOLERANCE * max(abs(1 - wanted), abs(1 - measured.median)) and off > sure


def from_run(path: Path, case: Case) -> dict[str, float]:
    """Ratios to eager from the records of `swiglu-bench step --scope mlp` at the same sizes.

    Raises BadInput where there is none.
    """
    rows = read_records(path)
    same = rows[
        (rows["mode"] == "step")
        & (rows["scope"] == "mlp")
        & (rows["hidden"] == case.shape.hidden)
        & (rows["intermediate"] == case.shape.intermediate)
        & (rows["tokens"] == case.tokens)
        & (rows["dtype"] == case.dtype.value)
        & (rows["status"] == "ok")
        & (rows["baseline"] == "eager")
        & rows["ratio"].notna()
    ]
    if same.empty:
        raise BadInput(
            f"--step-run: {path} has no row of this block; make one with: swiglu-bench step --scope mlp "
            f"--shapes {case.shape.name} --tokens {case.tokens} --dtype {case.dtype.value}."
        )
    return {str(name): float(ratio) for name, ratio in zip(same["implementation"], same["ratio"], strict=True)}
