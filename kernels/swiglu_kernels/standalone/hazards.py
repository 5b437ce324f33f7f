"""What compute-sanitizer's racecheck reports of kernels, without Triton's own dispatch of warps.

    compute-sanitizer --tool racecheck --print-limit 0 python -m swiglu_kernels.standalone.odd_sizes --few | tee LOG
    python -m swiglu_kernels.standalone.hazards LOG

Of `gl.warp_specialize` Triton makes a loop in which warps wait for a number in shared memory that says what to run, and
for the arguments of that. In the PTX of all kernels here a `barrier.sync 1` of all warps, the form without a number of
threads, stands between each store and each load of these, and racecheck reports them all the same. They bear the lines
of the kernel's `def`, of its `gl.warp_specialize` and of a `_keep_alive` behind it, which is no access, and none of
ours does: those have the lines of their own calls. So a program says which lines these are (`announce`), and what is
reported between two of them is left out.
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ANNOUNCED = "Triton's dispatch of warps: "
_RACE = re.compile(r"^=+ \w+: (Race reported between .* in (\S+:\d+))$")
_OTHER = re.compile(r"^=+     and .* in (\S+:\d+) \[")
_SUMMARY = re.compile(r"^=+ RACECHECK SUMMARY: (\d+) hazards displayed \((\d+) errors, (\d+) warnings\)", re.MULTILINE)


def dispatch_lines(source: str) -> Iterator[int]:
    """Line numbers of the kernels in a source file that call `gl.warp_specialize`, and of what it is known by."""
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef) or "jit" not in map(_name, function.decorator_list):
            continue
        calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
        if lines := [call.lineno for call in calls if _name(call) in ("warp_specialize", "_keep_alive")]:
            yield from (function.lineno, *lines)


def _name(node: ast.expr) -> str:
    """The last part of a dotted name, or of what is called by one."""
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else ""


def announce() -> None:
    """Print the lines of all modules that this process has imported, as a log needs them to be read."""
    files = {Path(file) for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))}
    places = []
    for file in sorted(path for path in files if path.suffix == ".py" and path.exists()):
        source = file.read_text("utf-8", "replace")
        if ".warp_specialize(" in source:
            places += [f"{file.name}:{line}" for line in dispatch_lines(source)]
    print(ANNOUNCED + ", ".join(places), flush=True)


def unexplained(log: str) -> list[str]:
    """The hazards of a log that are not between two of the lines it announces, and whether it has all there are."""
    lines = log.splitlines()
    announced = [line.removeprefix(ANNOUNCED) for line in lines if line.startswith(ANNOUNCED)]
    known = {place for line in announced for place in line.split(", ")}
    found, first, place = [], "", ""
    for line in lines:
        if race := _RACE.match(line):
            first, place = race.groups()
        elif (other := _OTHER.match(line)) and not {place, other[1]} <= known:
            found.append(f"{first} {line.lstrip('= ')}")
    summaries = _SUMMARY.findall(log)
    hidden = sum(int(errors) + int(warnings) - int(shown) for shown, errors, warnings in summaries)
    found += [f"{hidden} hazards that are not displayed, see --print-limit"] if hidden else []
    return found if summaries else [*found, "the log does not end with racecheck's summary"]


def main() -> None:
    """Print them; exit with 1 where there are any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path)
    found = unexplained(parser.parse_args().log.read_text("utf-8", "replace"))
    print(*found, sep="\n", end="\n" if found else "")
    print(f"{len(found)} findings beyond Triton's dispatch of warps")
    raise SystemExit(1 if found else 0)


if __name__ == "__main__":
    main()
