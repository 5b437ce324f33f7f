"""How large the project is: each number may only be raised on purpose, in the commit that needs it.

`python tests/test_counts.py` lists what is counted: the largest files, the longest functions, and all offenders.
"""

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SUITE, KERNELS, TESTS = (ROOT / name for name in ("swiglu_bench", "kernels", "tests"))

SOURCE_LINES = 48_700
TEST_LINES = 26_165
SUITE_FILES = 120
FUNCTION_LINES = 80
HOST_ARGUMENTS, HOST_FUNCTIONS = 10, 9
"""Functions with so many arguments or more, jit functions aside, and how many of them there may be."""
JIT_ARGUMENTS, JIT_FUNCTIONS = 15, 37
ONE_LINES = 0
"""Lines of source with a variable or a parameter called `one`, which says nothing of what it stands for."""

pytestmark = pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="not in a checkout")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def files(*folders: Path) -> list[Path]:
    return sorted(file for folder in folders for file in folder.rglob("*.py"))


def lines(*folders: Path) -> dict[str, int]:
    """Lines by file, the longest first."""
    found = {named(file): len(file.read_text(encoding="utf-8").splitlines()) for file in files(*folders)}
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def named(file: Path, line: int | None = None, name: str = "") -> str:
    place = file.relative_to(ROOT).as_posix()
    return place if line is None else f"{place}:{line} {name}".rstrip()


@functools.cache
def every_node() -> list[tuple[Path, ast.AST]]:
    """Every node of the source, in the file that it is of: all counts of names and functions read these."""
    trees = ((file, ast.parse(file.read_text(encoding="utf-8"))) for file in files(SUITE, KERNELS))
    return [(file, node) for file, tree in trees for node in ast.walk(tree)]


def nodes(kind: type | tuple[type, ...]) -> Iterator[tuple[Path, Any]]:
    return ((file, node) for file, node in every_node() if isinstance(node, kind))


def is_jit(function: Function) -> bool:
    """Whether it is of Triton's or Gluon's language."""
    decorators = (getattr(decorator, "func", decorator) for decorator in function.decorator_list)
    return any(ast.unparse(decorator).split(".")[-1] in {"jit", "constexpr_function"} for decorator in decorators)


@functools.cache
def functions() -> dict[str, tuple[int, int, bool]]:
    """Of each function its lines, its arguments without self, and whether it is a jit function."""
    found = {}
    for file, node in nodes((ast.FunctionDef, ast.AsyncFunctionDef)):
        assert isinstance(node, Function)
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        count = sum(argument.arg not in ("self", "cls") for argument in arguments)
        length = (node.end_lineno or 0) - node.lineno + 1
        found[named(file, node.lineno, node.name)] = length, count, is_jit(node)
    return found


def long_functions(most: int = FUNCTION_LINES) -> list[str]:
    return [f"{name}: {length} lines" for name, (length, _, _) in functions().items() if length > most]


def many_arguments(jit: bool) -> list[str]:
    least = JIT_ARGUMENTS if jit else HOST_ARGUMENTS
    return [f"{name}: {count}" for name, (_, count, is_jit) in functions().items() if is_jit is jit and count >= least]


def lines_with_one() -> list[str]:
    found = {
        named(file, node.lineno)
        for file, node in nodes((ast.Name, ast.arg))
        if "one" in (getattr(node, "id", ""), getattr(node, "arg", ""))
    }
    return sorted(found)


def names_with_two_meanings() -> list[str]:
    """Public classes that two modules define, and modules that others import under two names."""
    classes: dict[str, set[str]] = defaultdict(set)
    for file, node in nodes(ast.ClassDef):
        if not node.name.startswith("_"):
            classes[node.name].add(named(file))
    modules = {".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files(SUITE, KERNELS)}
    imported: dict[str, set[str]] = defaultdict(set)
    for _, node in nodes(ast.ImportFrom):
        for alias in node.names:
            module = f"{node.module}.{alias.name}"
            if module in modules or f"kernels.{module}" in modules:
                imported[module].add(alias.asname or alias.name)
    both = {**classes, **imported}
    return [f"{name}: {', '.join(sorted(meanings))}" for name, meanings in both.items() if len(meanings) > 1]


def test_lines() -> None:
    source, tests = lines(SUITE, KERNELS), lines(TESTS)
    assert sum(source.values()) <= SOURCE_LINES, dict(list(source.items())[:10])
    assert sum(tests.values()) <= TEST_LINES, dict(list(tests.items())[:10])
    assert len(files(SUITE)) <= SUITE_FILES


def test_functions() -> None:
    assert not long_functions(), "\n".join(long_functions())
    for jit, most in ((False, HOST_FUNCTIONS), (True, JIT_FUNCTIONS)):
        found = many_arguments(jit)
        assert len(found) <= most, "\n".join(found)


def test_names() -> None:
    found = lines_with_one()
    assert len(found) <= ONE_LINES, "\n".join(found)
    assert not names_with_two_meanings(), "\n".join(names_with_two_meanings())


if __name__ == "__main__":
    for title, listed in {
        "lines of source": [f"{name}: {count}" for name, count in list(lines(SUITE, KERNELS).items())[:20]],
        "lines of tests": [f"{name}: {count}" for name, count in list(lines(TESTS).items())[:20]],
        "functions": sorted(long_functions(70)),
        f"host functions of {HOST_ARGUMENTS} or more arguments": many_arguments(jit=False),
        f"jit functions of {JIT_ARGUMENTS} or more": many_arguments(jit=True),
        "`one`": lines_with_one(),
        "names with two meanings": names_with_two_meanings(),
    }.items():
        print(f"\n{title}: {len(listed)} listed", *listed, sep="\n  ")
    print(f"\n{sum(lines(SUITE, KERNELS).values())} lines of source, {sum(lines(TESTS).values())} of tests,",
          f"{len(files(SUITE))} files in the suite")  # fmt: skip
