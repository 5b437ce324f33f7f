"""How a command finds the implementations it was asked for: the suite's own, entry points, files. No torch."""

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable, Collection, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path

from swiglu_bench.cases.errors import BadInput, matching, one_line
from swiglu_bench.cases.implementation import Implementation

ENTRY_POINT_GROUP = "swiglu_bench.implementations"
NOBODY = "{}: no implementation is called {{!r}}"
"""Of an option, the complaint about a name."""


def _published() -> dict[str, EntryPoint]:
    published = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    return {f"{entry.name} = {entry.value}": entry for entry in published}


def entry_point_addresses() -> list[str]:
    """Addresses of the implementations that installed packages publish under `swiglu_bench.implementations`."""
    return list(_published())


def load(address: str) -> Implementation:
    """The Implementation at `path/to/file.py:name` or of an entry point. This runs its file or imports its package.

    Of a file that has only one, the name may be left out.
    """
    entry = _published().get(address)
    found = _from_entry_point(entry, address) if entry else from_file(address)
    return dataclasses.replace(found, address=f"{address}:{found.name}" if address.endswith(".py") else address)


def find(declared: Implementation) -> Implementation:
    """The implementation, with its code, that was declared in another process: by its address, or the suite's own."""
    if declared.original:
        known = find(dataclasses.replace(declared, name=declared.original, original=""))
        told = ("name", "original", "layer", "python", "path")
        return dataclasses.replace(known, **{field: getattr(declared, field) for field in told})
    if declared.address:
        return load(declared.address)
    found = list(vars(importlib.import_module(declared.source)).values())
    found += [thing for group in found if isinstance(group, dict) for thing in group.values()]
    found += [thing for group in found if isinstance(group, tuple) for thing in group]
    for thing in found:
        candidate = getattr(thing, "implementation", thing)
        if isinstance(candidate, Implementation) and candidate.name == declared.name:
            return candidate
    raise BadInput(f"{declared.source} has no implementation {declared.name!r}; its code has changed.")


def _from_entry_point(entry: EntryPoint, address: str) -> Implementation:
    try:
        found = entry.load()
    except Exception as error:
        failed = f"failed to import: {one_line(error)}; fix or uninstall its package"
        raise BadInput(f"The entry point {address} {failed}.") from error
    if not isinstance(found, Implementation):
        advice = "decorate its build function with swiglu_bench.implementation"
        raise BadInput(f"The entry point {address} is a {type(found).__name__}, not an Implementation; {advice}.")
    return found


def _parts(spec: str) -> tuple[str, str]:
    """The path and the name, "" where there is none, of `path/to/file.py:name`."""
    path, _, name = spec.rpartition(":")
    return (spec, "") if spec.endswith(".py") else (path, name)


def check_file(spec: str) -> None:
    """Raise BadInput unless `path/to/file.py:name`, or the path alone, names a file."""
    path, _ = _parts(spec)
    if not os.path.isfile(path):
        raise BadInput(f"--impl {spec}: there is no file {path!r}; give path/to/file.py:name.")


def from_file(spec: str) -> Implementation:
    """The Implementation that `path/to/file.py:name` names, or the only one at a path. This runs the file's code."""
    check_file(spec)
    path, name = _parts(spec)
    module_spec = importlib.util.spec_from_file_location(f"swiglu_bench_user_{Path(path).stem}", path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses look their module up
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise BadInput(f"--impl {spec}: {path} failed to import: {one_line(error)}.") from error
    offered = {value.name: value for value in vars(module).values() if isinstance(value, Implementation)}
    if not name and len(offered) > 1:
        raise BadInput(f"--impl {spec}: {path} has {', '.join(offered)}; name one, as in {path}:{next(iter(offered))}.")
    chosen = offered.get(name or next(iter(offered), "")) or getattr(module, name, None)
    if not isinstance(chosen, Implementation):
        names = ", ".join(offered) or "none (decorate a build function with swiglu_bench.implementation)"
        raise BadInput(f"--impl {spec}: {path} has no implementation {name!r}; it offers: {names}.")
    return chosen


def is_file(spec: str) -> bool:
    """Whether a word of `--impl` is `path/to/file.py:name`, or a path alone."""
    return ".py:" in spec or spec.endswith(".py")


def select(
    catalogue: Sequence[Implementation],
    wanted: Sequence[str] = (),
    unwanted: Sequence[str] = (),
    load_file: Callable[[str], Implementation] = load,
    unasked: Collection[str] | None = None,
) -> list[Implementation]:
    """The implementations that names and globs choose, in the catalogue's order, those of files after them.

    An empty `wanted` means the names of `unasked`, or all but those `on_request`; `load_file` gets one from
    `path/to/file.py:name`. Raises BadInput for a pattern that matches nothing, offering near matches.
    """
    names = [known.name for known in catalogue]
    if twice := next((name for name in names if names.count(name) > 1), None):
        sources = " and ".join(known.source for known in catalogue if known.name == twice)
        raise BadInput(f"Two implementations are called {twice!r}, from {sources}; rename or uninstall one of them.")
    files = [spec for spec in wanted if is_file(spec)]
    keep = matching(names, [spec for spec in wanted if spec not in files], NOBODY.format("--impl"))
    if not wanted:
        keep = {known.name for known in catalogue if not known.on_request} if unasked is None else {*unasked}
    keep -= matching(names, unwanted, NOBODY.format("--skip-impl"))
    chosen = [known for known in catalogue if known.name in keep]
    for spec in files:
        check_file(spec)
        extra = load_file(spec)
        if extra.name in names:
            raise BadInput(f"--impl: the name {extra.name!r} is taken by another implementation; choose another.")
        names.append(extra.name)
        chosen.append(extra)
    if not chosen:
        raise BadInput("--skip-impl left no implementation to run; skip fewer.")
    return chosen
