"""Tables as text, and what every table has to keep."""

import io
import re
from collections.abc import Iterator, Sequence

import pytest
from rich.console import Console, RenderableType

WIDTHS = pytest.mark.parametrize("width", [60, 100, 200])
MARK = re.compile(r"(skipped|incorrect|error|FAIL) \[(\d+)\]")


def shown(renderables: Iterator[RenderableType], width: int) -> str:
    console = Console(record=True, width=width, file=io.StringIO(), color_system=None)
    for renderable in renderables:
        console.print(renderable)
    return console.export_text()


def unwrapped(text: str) -> str:
    return " ".join(text.split())


def assert_every_mark_has_its_reason(text: str, reasons: Sequence[str]) -> None:
    """Under its table each mark's number stands at the start of a line, with the reason."""
    used = {number for _, number in MARK.findall(text)}
    explained = dict(re.findall(r"^\[(\d+)\] (.*)$", text, flags=re.MULTILINE))
    assert used == set(explained)
    assert used
    for reason in reasons:
        assert reason in unwrapped(text), reason


def assert_fits(text: str, width: int) -> None:
    assert all(len(line) <= width for line in text.splitlines())
    assert "…" not in text
