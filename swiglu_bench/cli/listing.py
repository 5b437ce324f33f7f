"""What `list` and `--dry-run` print."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from swiglu_bench.spec.cases import VARIANTS, Case, Scope
from swiglu_bench.spec.costs import needed_bytes
from swiglu_bench.spec.implementation import Implementation
from swiglu_bench.spec.shapes import Config, ShapeFile
from swiglu_bench.writers.tables import Notes

if TYPE_CHECKING:
    from swiglu_kernels.standalone.compiled import Report


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column)
    return table


def implementations(
    catalogue: Sequence[Implementation], device_type: str, capability: str = ""
) -> Iterator[RenderableType]:
    """Every implementation with what it can do and whether it runs here; reasons against it under the table."""
    table = _table("Implementations", "name", "scopes", "gradients", "weights", "here", "what it is")
    for column in table.columns:
        column.overflow = "fold"
        column.no_wrap = column.header in {"name", "here"}
    notes = Notes()
    for one in catalogue:
        reason = one.unavailable(device_type, capability=capability)
        usual = "on request" if one.on_request else "yes"
        here = Text(usual, "green") if reason is None else Text(f"no {notes.mark(reason)}", "yellow")
        trains = {"everything": "all", "inputs": "inputs", "nothing": "none"}[one.trains]
        scopes = "all" if len(one.scopes) == len(Scope) else " ".join(sorted(one.scopes))
        table.add_row(Text(one.name, "bold"), scopes, trains, one.weight_layout, here, one.description)
    yield table
    yield from notes.lines()


def shapes(configs: Sequence[Config]) -> Iterator[RenderableType]:
    """Every shape, then every sweep."""
    sizes = _table("Shapes", "name", "hidden", "intermediate", "tokens", "source")
    sweeps = _table("Sweeps", "name", "shapes", "tokens", "source")
    for config in configs:
        content = config.content
        tokens = ", ".join(map(str, content.tokens)) if content.tokens else "the shapes' own"
        name = Text(config.name, "bold")
        if isinstance(content, ShapeFile):
            sizes.add_row(name, str(content.hidden), str(content.intermediate), tokens, content.source)
        else:
            sweeps.add_row(name, ", ".join(content.shapes), tokens, content.source)
    for table in (sizes, sweeps):
        table.columns[0].no_wrap = True
    yield sizes
    yield sweeps


def everything(
    catalogue: Sequence[Implementation], configs: Sequence[Config], about: Mapping[str, Any]
) -> dict[str, Any]:
    """All that `list` shows, for a program."""
    device = str(about["device_type"])
    return {
        "kind": "list",
        "implementations": [
            {
                "name": one.name, "description": one.description, "scopes": sorted(one.scopes), "trains": one.trains,
                "weight_layout": one.weight_layout, "backend": one.backend, "package": one.package,
                "offers": sorted(one.offers), "usage": one.usage, "source": one.source,
                "unavailable": one.unavailable(device, capability=str(about["compute_capability"] or "")),
            }
            for one in catalogue
        ],
        "shapes": [
            {"name": one.name, **one.content.model_dump()} for one in configs if isinstance(one.content, ShapeFile)
        ],
        "sweeps": [
            {"name": one.name, **one.content.model_dump()} for one in configs if not isinstance(one.content, ShapeFile)
        ],
        "machine": dict(about),
    }  # fmt: skip


def machine(about: Mapping[str, Any]) -> Table:
    """The machine, a line per fact."""
    table = _table("Machine", "what", "value")
    for name, value in about.items():
        text = f"{value / 2**30:.1f} GiB" if name == "memory_bytes" else "-" if value in (None, "") else str(value)
        table.add_row(name.replace("_", " "), text)
    return table


def dry_run(cases: Sequence[Case], chosen: Sequence[Implementation], free_bytes: int) -> Iterator[RenderableType]:
    """The cases of a sweep and the memory each needs."""
    table = _table("Cases", "shape", "scope", "mode", "dtype", "tokens", "memory needed", "")
    for case in cases:
        need = needed_bytes(case, VARIANTS)
        verdict = (
            "" if need <= free_bytes else Text(f"skipped: the device has {free_bytes / 2**30:.1f} GiB free", "yellow")
        )
        size = f"{need / 2**20:,.1f} MiB"
        table.add_row(case.shape.name, case.scope, case.mode, case.dtype, str(case.tokens), size, verdict)
    yield table
    yield Text(f"{len(cases)} cases x {len(chosen)} implementations: {', '.join(one.name for one in chosen)}")


def kernels(reports: Iterable[Report]) -> Iterator[RenderableType]:
    """What the compiler made of each kernel of swiglu_kernels; spills in red."""
    figures = ("tokens", "registers", "spills", "shared", "wgmma", "tcgen05", "mma.sync", "TMA")
    table = _table("Compiled kernels", "target", "dtype", "kernel", *figures)
    for column in table.columns[3:]:
        column.justify = "right"
    for one in reports:
        spills = Text(f"{one.stack_bytes} B", "bold red") if one.stack_bytes else Text("none", "green")
        counts = (str(count) if count else "-" for count in (one.wgmma, one.tcgen05, one.mma, one.tma))
        target = f"sm_{one.capability.replace('.', '')}"
        shared = f"{one.shared_bytes / 1024:.0f} KiB"
        table.add_row(target, one.dtype, one.kernel, str(one.tokens), str(one.registers), spills, shared, *counts)
    yield table
    yield Text(
        "registers and spills (stack) per thread, shared memory per program, instructions in the PTX; compiled here "
        "for each target, no GPU needed.",
        style="dim",
    )
