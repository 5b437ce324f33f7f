"""The command `list`, and the tables of it and of `--dry-run`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text
from typer import Argument

from swiglu_bench import request
from swiglu_bench.cases.cases import DENSE, Case, Scope
from swiglu_bench.cases.errors import matching
from swiglu_bench.cases.shapes import ShapeFile, all_configs
from swiglu_bench.machine.machine import describe, find_device, without_torch
from swiglu_bench.machine.system import gpu_index, visible_gpus
from swiglu_bench.options import OUTPUT, SHAPE, TIMEOUT_S, WHAT, Device, JsonForm, option
from swiglu_bench.rows.figures import token_text
from swiglu_bench.show import text
from swiglu_bench.show.table import Cell, Grid, Notes, by_reason

if TYPE_CHECKING:
    from swiglu_bench.cases.implementation import Implementation
    from swiglu_bench.worker.policy import Settings

FACTS = (
    "name", "description", "trains", "weight_layout", "backend", "package", "usage", "source", "on_request",
)  # fmt: skip
"""What `list --format json` says of an implementation, besides its sets and why it cannot run."""
COLUMNS = {"shapes": ("hidden", "intermediate", "experts", "tokens"), "sweeps": ("shapes", "tokens")}
"""What a line says of each; `--detail` adds the sources."""


def list_(
    names: Annotated[
        list[str] | None, Argument(help="Only these: names or globs.", show_default="all", metavar="[NAME]...")
    ] = None,
    shapes: Annotated[
        bool, option(WHAT, "Shapes and sweeps, with their sizes; with --detail also their sources.", *SHAPE)
    ] = False,
    machine: Annotated[bool, option(WHAT, "This machine, with all versions.", "--machine")] = False,
    detail: Annotated[
        bool, option(OUTPUT, "All facts of every implementation, including those not available.", "--detail", "-v")
    ] = False,
    device: Device = None,
    form: JsonForm = "table",
) -> None:
    """Show the implementations, and why some are not available here; or the shapes or the machine, with these options.

    --format json shows all of it at once.

    Example: swiglu-bench list --shapes
    """
    told: dict[str, Any] = {"kind": "list"}
    everything = form == "json"
    gpus = visible_gpus() if device != "cpu" else []
    if gpus is None:  # only torch knows, whose import takes seconds
        this = describe(find_device(device)).as_dict()
    else:
        index = gpu_index(device, len(gpus))
        this = without_torch(None if index is None else gpus[index])
    if machine or everything:
        told["machine"] = this
    told |= _shapes_and_sweeps() if shapes or everything else {}
    if everything or not (shapes or machine):
        known = request.catalogue(request.loader(TIMEOUT_S))
        told["implementations"] = implementations(known, this["compute_capability"])
    if names:
        _choose(told, request.split(names, "NAME"))
    if everything:
        text.put(text.as_json(told))
        return
    for part in tables(told, detail, shapes, machine):
        text.screen().print(part, highlight=False)


def _choose(told: dict[str, Any], patterns: Sequence[str]) -> None:
    """Keep what names or globs choose. Raises BadInput for one that chooses nothing."""
    lists = {kind: told[kind] for kind in ("implementations", "shapes", "sweeps") if kind in told}
    names = [entry["name"] for listed in lists.values() for entry in listed]
    chosen = matching(names, patterns, "NAME: nothing is called {!r}")
    told |= {kind: [entry for entry in listed if entry["name"] in chosen] for kind, listed in lists.items()}


def implementations(known: Sequence[Implementation], capability: str) -> list[dict[str, Any]]:
    """Facts of each implementation, and why it is unavailable on a GPU of a compute capability, or a CPU for ""."""
    device_type = "cuda" if capability else "cpu"
    return [
        {fact: getattr(entry, fact) for fact in FACTS}
        | {fact: sorted(getattr(entry, fact)) for fact in ("scopes", "variant", "offers")}
        | {"unavailable": entry.unavailable(device_type, capability=capability)}
        for entry in known
    ]


def _shapes_and_sweeps() -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {"shapes": [], "sweeps": []}
    for config in all_configs():
        kind = "shapes" if isinstance(config.content, ShapeFile) else "sweeps"
        found[kind].append({"name": config.name, **config.content.model_dump()})
    return found


def table(title: str, *columns: str, right: Sequence[str] = (), rows: Iterable[Sequence[Cell]] = ()) -> Table:
    """A table of texts, with figures in the columns of `right`; more rows may be added."""
    return Grid(columns, list(rows), title, text=set(columns) - set(right), wrap=columns).terminal()


def tables(told: Mapping[str, Any], detail: bool, shapes: bool, machine: bool) -> Iterator[RenderableType]:
    """What was asked for: implementations in a line each or in detail, shapes and sweeps, this machine."""
    if not shapes and not machine:
        yield from _in_detail(told["implementations"]) if detail else _in_lines(told["implementations"])
    if shapes:
        yield from _sizes(told)
        if detail:
            sources = [(entry["name"], entry["source"]) for entry in (*told["shapes"], *told["sweeps"])]
            yield _filled("Sources", ("name", "source"), sources)
        else:
            yield Text("--detail: the source of each.", "dim")
    if machine:
        facts = (
            (name.replace("_", " "), f"{value / 2**30:.1f} GiB" if name == "memory_bytes"
             else "-" if value in (None, "") else str(value)) for name, value in told["machine"].items()
        )  # fmt: skip
        yield _filled("Machine", ("what", "value"), facts)


def _filled(title: str, heads: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> Table:
    """A table whose first column, of names, is never wrapped."""
    found = table(title, *heads, rows=([Text(str(name), "bold"), *cells] for name, *cells in rows))
    found.columns[0].no_wrap = True
    return found


def _sizes(told: Mapping[str, Any]) -> Iterator[Table]:
    """A line for each shape, also at 80 columns, and what the sweeps are made of."""
    for kind, columns in COLUMNS.items():
        separator, rows = "," if kind == "shapes" else ", ", []
        for entry in told[kind]:
            counts = separator.join(map(token_text, entry["tokens"] or ())) or "the shapes' own"
            experts = f"{entry['experts']}, top {entry['top_k']}" if entry.get("experts") else ""
            shown = {**entry, "tokens": counts, "experts": experts, "shapes": ", ".join(entry.get("shapes", ()))}
            rows.append((entry["name"], *(str(shown[column]) for column in columns)))
        if rows:
            yield _filled(kind.title(), ("name", *columns), rows)


def _in_lines(known: Sequence[Mapping[str, Any]]) -> Iterator[RenderableType]:
    """A line for each implementation that can run here, and one per reason for those that cannot."""
    here = [entry for entry in known if entry["unavailable"] is None]
    begins = [re.split(r"[:;]| \(", entry["description"], maxsplit=1)[0] for entry in here]  # --detail has the rest
    brief = (Text(begin, no_wrap=True, overflow="ellipsis") for begin in begins)
    rows = [(entry["name"], _scopes(entry), what) for entry, what in zip(here, brief, strict=True)]
    found = _filled("Implementations", ("name", "scopes", "what it is"), rows)
    found.columns[1].max_width = 10  # many scopes take another line, so that descriptions have room
    yield found
    yield from _marks(here)
    absent = ((entry["unavailable"], entry["name"]) for entry in known if entry["unavailable"])
    yield from (Text(line, "yellow") for line in by_reason("not here", absent))
    more = "--detail: gradients, weights and every description; --shapes: sizes by name; --machine: this one."
    yield Text(more, "dim")


def _in_detail(known: Sequence[Mapping[str, Any]]) -> Iterator[RenderableType]:
    """All facts of each implementation, and the reasons against those that cannot run here."""
    notes, rows = Notes(), []
    for entry in known:
        reason = entry["unavailable"]
        here = Text("yes", "green") if reason is None else Text(f"no {notes.mark(reason)}", "yellow")
        trains = {"everything": "all", "inputs": "inputs", "nothing": "none"}[entry["trains"]]
        rows.append((entry["name"], _scopes(entry), trains, entry["weight_layout"], here, entry["description"]))
    found = _filled("Implementations", ("name", "scopes", "gradients", "weights", "here", "what it is"), rows)
    found.columns[4].no_wrap = True
    yield found
    yield from _marks(known)
    yield from notes.lines()


def _scopes(entry: Mapping[str, Any]) -> str:
    """Its scopes, with a star where it is compared only on request."""
    if len(entry["scopes"]) == len(Scope):
        return "all"
    asked = entry["scopes"] if entry["on_request"] else entry["variant"]
    if set(entry["scopes"]) == set(DENSE):
        return "dense" + "*" * bool(asked)
    return " ".join(name + "*" * (name in asked) for name in entry["scopes"])


def _marks(shown: Sequence[Mapping[str, Any]]) -> Iterator[Text]:
    if any(_scopes(entry).startswith("dense") for entry in shown):
        yield Text("dense: activation, glu and mlp; dense*: at some of them only if --impl names it.", "dim")
    if any("*" in _scopes(entry) for entry in shown):
        yield Text("*: at this scope it is compared only if --impl names it.", "dim")


def planned(settings: Settings, cases: Sequence[Case], free_bytes: int, processes: int = 1) -> list[dict[str, Any]]:
    """The cases of a sweep, the memory that each needs, and whether it fits; `processes` share the device's."""
    from swiglu_bench.worker import policy

    return [
        {
            "shape": case.name, "hidden": case.shape.hidden, "intermediate": case.shape.intermediate,
            "scope": case.scope, "mode": case.mode, "dtype": case.dtype, "tokens": case.tokens,
            "needed_bytes": int(policy.needed_bytes(settings, case, processes)),
            "fits": policy.needed_bytes(settings, case, processes) <= free_bytes,
        }
        for case in cases
    ]  # fmt: skip


def put_plan(form: str, command: str, cases: Sequence[dict[str, Any]], names: Sequence[str], free_bytes: int) -> None:
    """What `--dry-run` says: planned cases, the memory that each needs, and the implementations that each is for."""
    if form != text.TABLE:
        about = {"kind": "plan", "command": command, "free_bytes": free_bytes, "implementations": names}
        text.put(text.as_text(form, cases, about, cases[0]))
        return
    shown = [name for name in cases[0] if name not in ("hidden", "intermediate", "needed_bytes", "fits")]
    found = table("Cases", *shown, "needs, MiB", "fits")
    for case in cases:
        fits = Text("yes", "green") if case["fits"] else Text("no", "yellow")
        found.add_row(*(str(case[name]) for name in shown), f"{case['needed_bytes'] / 2**20:,.0f}", fits)
    count = f"{len(cases)} case{'s' * (len(cases) > 1)}"
    free = Text(f"free: {free_bytes / 2**20:,.0f} MiB")
    text.screen().print(found, free, Text(f"{count} x {len(names)} implementations: {', '.join(names)}"), sep="\n")
