"""A row from the columns of its file: what these do not say follows from them, and from the run's run.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swiglu_bench.rows.record import AuditVerdict, Record

About = Mapping[str, Any]
BASELINE = "eager"
"""Of `tp` and `train`."""


def row_of(kind: str, about: About, **columns: Any) -> Record:
    """A row of the layout of this kind; `about` is run.json. Raises ValueError for columns that are none of its."""
    return Record(**columns | MORE[kind](about, columns), kind=kind)


def _of_tp(about: About, columns: About) -> dict[str, Any]:
    """The scope says how the block is split, as `mlp-tp4-sp` or `experts-ep4`."""
    commands = {one.get("run_id"): one.get("command") for one in (*about.get("earlier", ()), about)}
    ranks, split = columns["ranks"], "-sp" * columns["sequence_parallel"]
    return {
        "command": str(commands.get(columns["run_id"], "swiglu-bench tp")), "baseline": BASELINE,
        "scope": f"experts-ep{ranks}" if columns.get("experts") else f"mlp-tp{ranks}{split}",
    }  # fmt: skip


def _of_training(about: About, columns: About) -> dict[str, Any]:
    """The case is a step of the whole model, which has the model's name as its shape."""
    settings, machine = about.get("settings", {}), about.get("machine", {})
    sizes = settings.get("workload", {})
    return {
        "command": str(about.get("command", "swiglu-bench train")), "shape": columns["model"], "scope": "model",
        "mode": "train", "hidden": sizes.get("hidden", 0), "intermediate": sizes.get("intermediate", 0),
        "tokens": sizes.get("batch", 0) * sizes.get("sequence", 1), "dtype": settings.get("dtype", ""),
        "seed": settings.get("seed", 0), "baseline": BASELINE, "comparable": columns["trains"] != "inputs",
        **{name: machine.get(name, "") for name in ("host", "driver", "cuda")},
    }  # fmt: skip


def _of_audit(about: About, columns: About) -> dict[str, Any]:
    return {"verdict": AuditVerdict(columns["verdict"])}


MORE = {
    "run": lambda about, columns: {},
    "seeds": lambda about, columns: {},
    "tp": _of_tp,
    "training": _of_training,
    "audit": _of_audit,
}
