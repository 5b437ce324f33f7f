"""Shapes and sweeps from YAML: found by name, checked by pydantic, wrong ones named by file and line. No torch."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pydantic
import yaml
from pydantic import ConfigDict, Field

from swiglu_bench.spec import yaml_file
from swiglu_bench.spec.cases import Shape
from swiglu_bench.spec.errors import BadInput, did_you_mean

DEFAULT_TOKENS = (1, 16, 128, 1024, 2048, 4096, 8192)

Size = Annotated[int, Field(gt=0, le=2**24)]
Tokens = Annotated[list[Annotated[int, Field(gt=0, le=2**24)]], Field(min_length=1)]


class ShapeFile(pydantic.BaseModel):
    """One shape, as a YAML file states it."""

    model_config = ConfigDict(extra="forbid", strict=True)
    hidden: Size
    intermediate: Size
    source: Annotated[str, Field(min_length=1)]
    tokens: Tokens = list(DEFAULT_TOKENS)


class SweepFile(pydantic.BaseModel):
    """A named sweep: shapes, and token counts that replace the shapes' own."""

    model_config = ConfigDict(extra="forbid", strict=True)
    shapes: Annotated[list[str], Field(min_length=1)]
    tokens: Tokens | None = None
    source: Annotated[str, Field(min_length=1)]


@dataclass(frozen=True)
class Config:
    """A parsed file of configs/: what `list` shows."""

    name: str
    path: Path
    content: ShapeFile | SweepFile
    node: yaml.Node = field(repr=False, compare=False)

    def line(self, *location: int | str) -> int:
        """The line of the file that states a key, or an entry of its list."""
        return yaml_file.line(self.node, location)


def configs_folder() -> Path:
    """The folder with the shapes: inside the installed package, or the checkout's own configs/."""
    package = Path(__file__).parents[1]
    installed, checkout = package / "configs", package.parent / "configs"
    return installed if installed.is_dir() else checkout


def config_names() -> list[str]:
    """Names of every shape and sweep that `--shapes` accepts."""
    return sorted(path.stem for path in configs_folder().glob("*.yaml"))


def all_configs() -> list[Config]:
    """Every shape and sweep of configs/, read and checked."""
    return [_read(configs_folder() / f"{name}.yaml") for name in config_names()]


def load_shapes(text: str) -> list[Shape]:
    """Shapes for `--shapes`: names of shapes or sweeps, YAML paths, or HIDDENxINTERMEDIATE, separated by commas.

    Raises BadInput for a name that does not exist (offering near ones), sizes that are not positive, a file that is
    missing or malformed (naming file and line), and two shapes of one name.
    """
    shapes: dict[str, Shape] = {}
    for word in (part.strip() for part in text.split(",")):
        found = _find(word)
        for shape in [found] if isinstance(found, Shape) else _expand(found):
            other = shapes.setdefault(shape.name, shape)
            if (other.hidden, other.intermediate) != (shape.hidden, shape.intermediate):
                raise BadInput(f"--shapes: two different shapes are called {shape.name!r}; rename one of them.")
            shapes[shape.name] = shape
    return list(shapes.values())


def _find(word: str) -> Shape | Config:
    """What one word of `--shapes`, or of a sweep's list, names."""
    sizes = re.fullmatch(r"(-?\d{1,20})[xX](-?\d{1,20})", word)
    if sizes:
        hidden, intermediate = int(sizes[1]), int(sizes[2])
        if not (0 < hidden <= 2**24 and 0 < intermediate <= 2**24):
            raise BadInput(f"--shapes: {word!r} has a size outside 1 to 2^24; give HIDDENxINTERMEDIATE, as 4096x11008.")
        return Shape(f"{hidden}x{intermediate}", hidden, intermediate, "given on the command line", DEFAULT_TOKENS)
    if word.endswith((".yaml", ".yml")) or "/" in word:
        if not os.path.isfile(word):  # Path.is_file would raise for a folder that may not be entered
            raise BadInput(f"--shapes: there is no file {word!r}; give a YAML file with hidden and intermediate.")
        return _read(Path(word))
    known = config_names()
    if word not in known:
        raise BadInput(f"--shapes: there is no shape or sweep {word!r}; {did_you_mean(word, known)}")
    return _read(configs_folder() / f"{word}.yaml")


def _expand(config: Config) -> list[Shape]:
    content = config.content
    if isinstance(content, ShapeFile):
        return [Shape(config.name, content.hidden, content.intermediate, content.source, tuple(content.tokens))]
    members = []
    for index, word in enumerate(content.shapes):
        place = f"{config.path}:{config.line('shapes', index)}"
        try:
            found = _find(word)
        except BadInput as error:
            raise BadInput(f"{place}: shapes: {str(error).removeprefix('--shapes: ')}") from None
        if isinstance(found, Shape):
            members.append(found)
        elif isinstance(found.content, ShapeFile):
            members += _expand(found)
        else:
            raise BadInput(f"{place}: the sweep names the sweep {word!r}; a sweep may only name shapes.")
    if content.tokens is None:
        return members
    return [
        Shape(shape.name, shape.hidden, shape.intermediate, shape.source, tuple(content.tokens)) for shape in members
    ]


def _read(path: Path) -> Config:
    document = yaml_file.read(path, _model, "hidden, intermediate and source")
    return Config(path.stem, path, document.content, document.node)


def _model(data: dict[str, Any]) -> type[ShapeFile | SweepFile]:
    return SweepFile if "shapes" in data else ShapeFile
