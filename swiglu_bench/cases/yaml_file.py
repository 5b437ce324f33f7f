"""A YAML file checked by pydantic; errors name the file and the line. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import pydantic
import yaml

from swiglu_bench.cases.errors import BadInput, one_line

Model = TypeVar("Model", bound=pydantic.BaseModel)


@dataclass(frozen=True)
class Document(Generic[Model]):
    """A checked file and its syntax tree, which has line numbers."""

    path: Path
    content: Model
    node: yaml.Node = field(repr=False, compare=False)

    @property
    def name(self) -> str:
        """The file's name without its ending."""
        return self.path.stem

    def line(self, *location: int | str) -> int:
        """The line of the file that states a key, or an entry of its list."""
        return _line(self.node, location)


def read(path: Path, choose: Callable[[dict[str, Any]], type[Model]], expected: str) -> Document[Model]:
    """Parse one file by the model that `choose` has for its mapping; `expected` names some of its keys.

    Raises BadInput, which names the file and the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}.") from error
    except yaml.MarkedYAMLError as error:
        place = f"{path}:{error.problem_mark.line + 1}" if error.problem_mark else str(path)
        what = ", ".join(part for part in (error.context, error.problem) if part)
        raise BadInput(f"{place}: not valid YAML: {what}.") from error
    except Exception as error:  # not UTF-8, endless nesting; PyYAML raises many types for values such as `!!int x`
        raise BadInput(f"{path}: not valid YAML: {one_line(error)}.") from error
    if not isinstance(node, yaml.MappingNode) or not isinstance(data, dict):
        raise BadInput(f"{path}:1: expected keys such as {expected}; found {_kind(data)}.")
    keys: set[str] = set()
    for key, _ in node.value:
        if key.value in keys:
            raise BadInput(f"{path}:{key.start_mark.line + 1}: {key.value}: the key is given twice.")
        keys.add(key.value)
    try:
        return Document(path, choose(data).model_validate(data), node)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        found = "" if first["type"] == "missing" else f" (found {_found(first['input'])})"
        raise BadInput(f"{path}:{_line(node, first['loc'])}: {where}: {first['msg']}{found}.") from error


def _line(node: yaml.Node | None, location: tuple[int | str, ...]) -> int:
    """Line of the YAML node that a pydantic location names, or of its nearest parent that exists."""
    found = 1
    for part in location:
        if isinstance(node, yaml.MappingNode):
            pair = next((pair for pair in node.value if pair[0].value == str(part)), None)
            if pair is None:
                break
            found, node = pair[0].start_mark.line + 1, pair[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            found = node.start_mark.line + 1
        else:
            break
    return found


def _found(value: Any) -> str:
    """A wrong value in short form, since through aliases a few lines can hold an endless value."""
    if isinstance(value, dict | list | set | tuple):
        return _kind(value)
    if isinstance(value, int) and value.bit_length() > 64:
        return "an integer of more than 64 bits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _kind(data: Any) -> str:
    if data is None:
        return "an empty file"
    kinds = {dict: "a mapping", list: "a list", str: "text", int: "a number", float: "a number", bool: "a truth value"}
    return kinds.get(type(data), f"a {type(data).__name__}")
