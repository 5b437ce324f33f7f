"""The command `list`, and the tables of it and of `--dry-run`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from swiglu_bench.rows import text
from swiglu_bench.spec.cases import Case, Scope
from swiglu_bench.sweep import request
from swiglu_bench.sweep.options import TIMEOUT_S, Device, JsonForm

if TYPE_CHECKING:
    from swiglu_bench.machine.machine import Machine
    from swiglu_bench.session.settings import Settings
    from swiglu_bench.spec.implementation import Implementation

FACTS = ("name", "description", "trains", "weight_layout", "backend", "package", "usage", "source", "on_request")
"""What `list --format json` says of an implementation, besides scopes, offers and why it cannot run."""
COLUMNS = {"shapes": ("hidden", "intermediate", "tokens", "source"), "sweeps": ("shapes", "tokens", "source")}


def list_(device: Device = None, form: JsonForm = "table") -> None:
    """Show implementations with their availability, shapes and sweeps, and this machine.

    Example: swiglu-bench list
    """
    text.check("--format", form, text.TABLE, "json")
    from swiglu_bench.machine import machine

    found = machine.find_device(device)
    this = machine.describe(found)
    from swiglu_kernels.hopper.shared import why_aside  # imports Triton, whose interpreter is chosen before

    told = {
        "kind": "list",
        "implementations": implementations(request.catalogue(request.loader(TIMEOUT_S)), this),
        **_shapes_and_sweeps(),
        "machine": this.as_dict() | {"kernels_that_step_aside": why_aside(found) or ""},
    }
    if form == "json":
        text.put(text.as_json(told))
        return
    for part in tables(told):
        text.screen().print(part)


def implementations(known: Sequence[Implementation], this: Machine) -> list[dict[str, Any]]:
    """Facts of each implementation, and why it is unavailable on this machine, if it is."""
    return [
        {fact: getattr(one, fact) for fact in FACTS}
        | {"scopes": sorted(one.scopes), "offers": sorted(one.offers)}
        | {"unavailable": one.unavailable(this.device_type, capability=this.compute_capability)}
        for one in known
    ]


def _shapes_and_sweeps() -> dict[str, list[dict[str, Any]]]:
    from swiglu_bench.spec.shapes import ShapeFile, all_configs

    found: dict[str, list[dict[str, Any]]] = {"shapes": [], "sweeps": []}
    for one in all_configs():
        kind = "shapes" if isinstance(one.content, ShapeFile) else "sweeps"
        found[kind].append({"name": one.name, **one.content.model_dump()})
    return found


def table(title: str, *columns: str, right: Sequence[str] = ()) -> Table:
    """An empty table of texts, with figures in the columns of `right`."""
    from swiglu_bench.writers.tables import new_table

    return new_table(columns, title, text=set(columns) - set(right), wrap=columns)


def tables(told: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Implementations, with the reasons against those that cannot run here; shapes; sweeps; this machine."""
    from swiglu_bench.writers.tables import Notes

    found, notes = table("Implementations", "name", "scopes", "gradients", "weights", "here", "what it is"), Notes()
    found.columns[0].no_wrap = found.columns[4].no_wrap = True
    for one in told["implementations"]:
        reason, usual = one["unavailable"], "on request" if one["on_request"] else "yes"
        here = Text(usual, "green") if reason is None else Text(f"no {notes.mark(reason)}", "yellow")
        trains = {"everything": "all", "inputs": "inputs", "nothing": "none"}[one["trains"]]
        scopes = "all" if len(one["scopes"]) == len(Scope) else " ".join(one["scopes"])
        found.add_row(Text(one["name"], "bold"), scopes, trains, one["weight_layout"], here, one["description"])
    yield found
    yield from notes.lines()
    for kind, columns in COLUMNS.items():
        found = table(kind.title(), "name", *columns)
        found.columns[0].no_wrap = True
        for one in told[kind]:
            shown = {
                name: ", ".join(map(str, value)) if isinstance(value, list) else str(value or "the shapes' own")
                for name, value in one.items()
            }
            found.add_row(Text(one["name"], "bold"), *(shown[column] for column in columns))
        yield found
    found = table("Machine", "what", "value")
    for name, value in told["machine"].items():
        fact = f"{value / 2**30:.1f} GiB" if name == "memory_bytes" else "-" if value in (None, "") else str(value)
        found.add_row(name.replace("_", " "), fact)
    yield found


def dry_run(
    settings: Settings, cases: Sequence[Case], chosen: Sequence[Implementation], free_bytes: int, processes: int = 1
) -> Iterator[RenderableType]:
    """The cases of a sweep and the memory each needs; `processes` share the device's at the same time."""
    from swiglu_bench.session import policy

    found = table("Cases", "shape", "scope", "mode", "dtype", "tokens", "memory needed", "")
    for case in cases:
        need = policy.needed_bytes(settings, case, processes)
        lacks = f"skipped: the device has {free_bytes / 2**30:.1f} GiB free" if need > free_bytes else ""
        size = f"{need / 2**20:,.1f} MiB"
        found.add_row(case.shape.name, case.scope, case.mode, case.dtype, str(case.tokens), size, Text(lacks, "yellow"))
    yield found
    yield Text(f"{len(cases)} cases x {len(chosen)} implementations: {', '.join(one.name for one in chosen)}")
