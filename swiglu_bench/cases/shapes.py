"""Shapes by the words of `--shapes`: names of configs/, files, sizes, models, layers drawn at random. No torch."""

from __future__ import annotations

import dataclasses
import math
import os
import random
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import pydantic
from pydantic import Field
from pydantic_core import PydanticCustomError

from swiglu_bench.cases import files
from swiglu_bench.cases.cases import Experts, Extras, Shape
from swiglu_bench.cases.errors import BadInput, did_you_mean
from swiglu_bench.cases.files import Size

DEFAULT_TOKENS = (1, 16, 128, 1024, 2048, 4096, 8192)
RANDOM_HIDDEN, RANDOM_INTERMEDIATE, RANDOM_TOKENS = (2048, 8192), (768, 28672), (1, 16384)
"""Of layers drawn at random, the smallest and the largest: sizes from those of the models in configs/, and a single
expert of their mixtures."""
OF_EXPERTS, RANDOM_EXPERTS, RANDOM_TOP_K = ((1024, 7168), (256, 14336)), (8, 16, 32, 64, 128, 256), (1, 2, 4, 8)
"""Of mixtures drawn at random: hidden and intermediate, how many experts there are, and how many a token has."""
MOST_WEIGHTS = 2**29
"""Elements of a drawn mixture's w_gate, 3 GiB of all weights in bf16."""
MOST_RANDOM = 10_000
DRAWN = "drawn at random"

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Tokens = Annotated[list[Size], Field(min_length=1)]
Source = Annotated[str, Field(min_length=1)]


class ShapeFile(pydantic.BaseModel, extra="forbid", strict=True):
    """One shape, as a YAML file states it: of a block or, with `experts` and `top_k`, of a mixture of experts."""

    hidden: Size
    intermediate: Size
    source: Source
    tokens: Tokens = list(DEFAULT_TOKENS)
    experts: Size | None = None
    top_k: Size | None = None
    bias: bool = False
    limit: Positive | None = None
    alpha: Positive = 1.0
    interleaved: bool = False

    @pydantic.model_validator(mode="after")
    def _of_experts(self) -> ShapeFile:
        """Refuse what belongs to experts where there are none, and more experts for a token than there are."""
        rest = self.model_fields_set & {"top_k", "bias", "limit", "alpha", "interleaved"}
        if self.experts is None and rest:
            raise PydanticCustomError("experts", f"{min(rest)} is for a mixture of experts; give experts and top_k")
        if self.experts is not None and not 1 <= (self.top_k or 0) <= self.experts:
            raise PydanticCustomError("top_k", f"a mixture of experts needs a top_k of 1 to {self.experts}")
        if (self.limit is None) != (self.alpha == 1.0):
            raise PydanticCustomError("limit", "limit and alpha belong together, as in gpt-oss: 7.0 and 1.702")
        return self

    def shape(self, name: str) -> Shape:
        """The shape under its name."""
        experts = Experts(self.experts, self.top_k or 1) if self.experts else None
        extras = Extras(bias=self.bias, limit=self.limit, alpha=self.alpha, interleaved=self.interleaved)
        return Shape(name, self.hidden, self.intermediate, self.source, tuple(self.tokens), experts, extras)


class SweepFile(pydantic.BaseModel, extra="forbid", strict=True):
    """A named sweep: shapes, and token counts that replace the shapes' own."""

    shapes: Annotated[list[str], Field(min_length=1)]
    tokens: Tokens | None = None
    source: Source
    packages: Annotated[list[str], Field(alias="with")] = []
    """As of the option `--with`."""
    python: list[str] = []
    """As of the option `--python`."""


Config = files.Document[ShapeFile | SweepFile]
"""A file of configs/, read and checked."""


def configs_folder() -> Path:
    """The folder with the shapes: inside the installed package, or the checkout's own configs/."""
    package = Path(__file__).parents[1]
    installed, checkout = package / "configs", package.parent / "configs"
    return installed if installed.is_dir() else checkout


def config_names() -> list[str]:
    """Names of every shape and sweep that `--shapes` accepts."""
    return sorted(path.stem for path in configs_folder().glob("*.yaml"))


def model_file(model: str) -> Path:
    """The file of a model for `train`, by a name of configs/train or a YAML path. Raises BadInput for another name."""
    known = {path.stem: path for path in sorted((configs_folder() / "train").glob("*.yaml"))}
    if model.endswith((".yaml", ".yml")) or "/" in model:
        if not os.path.isfile(model):
            raise BadInput(f"--model: there is no file {model!r}; give a YAML file of sizes.")
        return Path(model)
    if model not in known:
        raise BadInput(f"--model: there is no model {model!r}; {did_you_mean(model, list(known))}")
    return known[model]


def all_configs() -> list[Config]:
    """Every shape and sweep of configs/, read and checked."""
    return [_read(configs_folder() / f"{name}.yaml") for name in config_names()]


def load_shapes(text: str, seed: int = 0) -> list[Shape]:
    """Shapes for `--shapes`, separated by commas: names of shapes or sweeps, YAML files, HIDDENxINTERMEDIATE, models.

    A model is a config.json, a folder with one, or a name such as Qwen/Qwen3-8B in the local Hugging Face cache.
    random:N is N layers drawn from the seed, random-experts:N as many mixtures.

    Raises BadInput for a name that does not exist (offering near ones), sizes that are not positive, a file that is
    missing or malformed (naming file and line), and two different shapes of one name.
    """
    shapes: dict[str, Shape] = {}
    for word in text.split(","):
        for shape in _named(word.strip(), seed):
            other = shapes.setdefault(shape.name, shape)
            if dataclasses.replace(other, source="", tokens=()) != dataclasses.replace(shape, source="", tokens=()):
                raise BadInput(f"--shapes: two different shapes are called {shape.name!r}; rename one of them.")
            shapes[shape.name] = shape
    return list(shapes.values())


def environments_of(text: str) -> tuple[list[str], list[str]]:
    """What the sweeps of a valid `--shapes` say as `--with` and as `--python` would."""
    packages, pythons = list[str](), list[str]()
    for word in map(str.strip, text.split(",")):
        path = Path(word) if word.endswith((".yaml", ".yml")) else configs_folder() / f"{word}.yaml"
        content = _read(path).content if path.is_file() else None
        if isinstance(content, SweepFile):
            packages += content.packages
            pythons += content.python
    return packages, pythons


def split_over(shapes: Iterable[Shape], ranks: int) -> list[Shape]:
    """What one of `ranks` GPUs has of each shape in tensor parallelism: intermediate / ranks. Raises BadInput."""
    if ranks == 1:
        return list(shapes)
    found = []
    for shape in shapes:
        if shape.intermediate % ranks:
            size = f"the intermediate size of {shape.name}, {shape.intermediate}"
            raise BadInput(f"--tp: {size}, is not a multiple of {ranks}.")
        share = shape.intermediate // ranks
        found.append(dataclasses.replace(shape, name=f"{shape.name}-tp{ranks}", intermediate=share))
    return found


def with_tokens(shapes: Iterable[Shape], tokens: Sequence[int]) -> list[Shape]:
    """The shapes with a command's own token counts; those drawn at random keep theirs."""
    return [shape if shape.source == DRAWN else dataclasses.replace(shape, tokens=tuple(tokens)) for shape in shapes]


def dense_shapes(text: str, command: str, seed: int = 0) -> list[Shape]:
    """The same for a command that takes no mixture of experts."""
    shapes = load_shapes(text, seed)
    for shape in shapes:
        if shape.experts:
            raise BadInput(f"--shapes: {shape.name} is a mixture of experts, which {command} does not take; give one "
                           "without experts, such as llama7b.")  # fmt: skip
    return shapes


def _named(word: str, seed: int, in_sweep: bool = False) -> list[Shape]:
    """What one word of `--shapes`, or of a sweep's list, names."""
    if sizes := re.fullmatch(r"(-?\d{1,20})[xX](-?\d{1,20})", word):
        hidden, intermediate = int(sizes[1]), int(sizes[2])
        if not (0 < hidden <= 2**24 and 0 < intermediate <= 2**24):
            raise BadInput(f"--shapes: {word!r} has a size outside 1 to 2^24; give HIDDENxINTERMEDIATE, as 4096x11008.")
        return [Shape(f"{hidden}x{intermediate}", hidden, intermediate, "given on the command line", DEFAULT_TOKENS)]
    if re.match("random(-experts)?(:|$)", word):
        return random_shapes(word, seed)
    known = config_names()
    if word.endswith((".yaml", ".yml", ".json")) or "/" in word or (word not in known and os.path.isdir(word)):
        if model := files.config_file(word):
            try:
                return [ShapeFile.model_validate(fields).shape(name) for name, fields in files.blocks(model)]
            except pydantic.ValidationError as error:
                raise BadInput(f"{model}: {files.first_of(error, model.stem)}.") from None
        path = Path(word)
        if not os.path.isfile(word):  # Path.is_file would raise for a folder that may not be entered
            raise BadInput(f"--shapes: there is no file {word!r}; give a YAML file with hidden and intermediate.")
    else:
        path = configs_folder() / f"{word}.yaml"
        if word not in known:
            raise BadInput(f"--shapes: there is no shape or sweep {word!r}; {did_you_mean(word, known)}")
    config = _read(path)
    content = config.content
    if isinstance(content, ShapeFile):
        return [content.shape(config.name)]
    if in_sweep:
        raise BadInput(f"--shapes: {word!r} is a sweep; a sweep may only name shapes.")
    members: list[Shape] = []
    for index, member in enumerate(content.shapes):
        try:
            members += _named(member, seed, in_sweep=True)
        except BadInput as error:
            place = f"{path}:{config.line('shapes', index)}"
            raise BadInput(f"{place}: shapes: {str(error).removeprefix('--shapes: ')}") from None
    if content.tokens is None:
        return members
    return [dataclasses.replace(shape, tokens=tuple(content.tokens)) for shape in members]


def _read(path: Path) -> Config:
    expected = "hidden, intermediate and source"
    return files.read_yaml(path, lambda data: SweepFile if "shapes" in data else ShapeFile, expected)


def random_shapes(word: str, seed: int) -> list[Shape]:
    """Draw the layers of `random:N`, or the mixtures of `random-experts:N`, each with one token count.

    Sizes and token counts are log-uniform. Every other layer has multiples of 64, as models have; the rest have odd
    multiples of 8, whose rows begin inside a sector of the L2 cache. The first layers of a seed are the same for all N.
    Raises BadInput for another N.
    """
    number = re.fullmatch(r"random(-experts)?:(\d{1,5})", word)
    count, mixed = (int(number[2]), bool(number[1])) if number else (0, False)
    if not 1 <= count <= MOST_RANDOM:
        advice = f"give random:N or random-experts:N, with N of 1 to {MOST_RANDOM}"
        raise BadInput(f"--shapes: {word!r} does not say how many layers to draw; {advice}.")
    source = random.Random(seed)

    def log_uniform(low: float, high: float) -> float:
        return math.exp(source.uniform(math.log(low), math.log(high)))

    drawn: dict[str, Shape] = {}
    while len(drawn) < count:
        step, offset = (64, 0) if len(drawn) % 2 == 0 else (16, 8)
        bounds = OF_EXPERTS if mixed else (RANDOM_HIDDEN, RANDOM_INTERMEDIATE)
        hidden, intermediate = (step * int(log_uniform(*each) / step) + offset for each in bounds)
        tokens = round(log_uniform(*RANDOM_TOKENS))
        name, experts = f"{hidden}x{intermediate}", None
        if mixed:
            there = source.choice(RANDOM_EXPERTS)
            experts = Experts(there, min(source.choice(RANDOM_TOP_K), there // 2))
            name = f"{there}x{name}-top{experts.top_k}"
        if not experts or experts.count * hidden * intermediate <= MOST_WEIGHTS:
            drawn.setdefault(name, Shape(name, hidden, intermediate, DRAWN, (tokens,), experts))
    return list(drawn.values())
