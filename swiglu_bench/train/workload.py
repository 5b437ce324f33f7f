"""What is trained: sizes from configs/train/*.yaml, found by name and checked by pydantic. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import ConfigDict, Field

from swiglu_bench.spec import yaml_file
from swiglu_bench.spec.errors import BadInput, did_you_mean
from swiglu_bench.spec.shapes import configs_folder

TASKS = ("digits", "mnist", "llama")
VOCABULARY = 256
"""Tokens are bytes."""

Size = Annotated[int, Field(gt=0, le=2**24)]
Positive = Annotated[float, Field(gt=0, le=1)]


class Classifier(pydantic.BaseModel):
    """flatten -> linear -> SwiGLU block with a residual -> linear."""

    model_config = ConfigDict(extra="forbid", strict=True)
    task: Literal["digits", "mnist"]
    hidden: Size
    intermediate: Size
    batch: Size
    learning_rate: Positive
    epochs: Size
    source: Annotated[str, Field(min_length=1)]

    @property
    def tokens(self) -> int:
        """Rows that each call of the block gets."""
        return self.batch


class Llama(pydantic.BaseModel):
    """A decoder of transformers' LlamaForCausalLM over bytes, with random weights."""

    model_config = ConfigDict(extra="forbid", strict=True)
    task: Literal["llama"]
    hidden: Size
    intermediate: Size
    layers: Size
    heads: Size
    kv_heads: Size
    sequence: Annotated[int, Field(ge=2, le=2**24)]
    batch: Size
    learning_rate: Positive
    steps: Size
    source: Annotated[str, Field(min_length=1)]

    @property
    def tokens(self) -> int:
        """Rows that each call of a block gets."""
        return self.batch * self.sequence

    @pydantic.model_validator(mode="after")
    def _heads_fit(self) -> Llama:
        if self.hidden % (2 * self.heads) or self.heads % self.kv_heads:
            raise ValueError("hidden has to be an even multiple of heads, and heads a multiple of kv_heads")
        return self


Workload = Classifier | Llama


def names() -> list[str]:
    """What `--model` takes beside a path."""
    return sorted(path.stem for path in _folder().glob("*.yaml"))


def usual(task: str, on_gpu: bool) -> str:
    """The name of the model that a task has unless told otherwise."""
    return task if task != "llama" else "llama-1b" if on_gpu else "llama-tiny"


def load(task: str, model: str) -> Workload:
    """The sizes of a task: a name of configs/train or a YAML path.

    Raises BadInput for an unknown name, a malformed file, or one of another task.
    """
    path = Path(model)
    if not (model.endswith((".yaml", ".yml")) or "/" in model):
        path = _folder() / f"{model}.yaml"
        if model not in names():
            raise BadInput(f"--model: there is no model {model!r}; {did_you_mean(model, names())}")
    found: Workload = yaml_file.read(path, _model, "task, hidden, intermediate and source").content
    if found.task != task:
        raise BadInput(f"--model: {path} is of the task {found.task}; give --task {found.task}, or another model.")
    return found


def _model(data: dict[str, Any]) -> type[Classifier | Llama]:
    return Llama if data.get("task") == "llama" else Classifier


def _folder() -> Path:
    return configs_folder() / "train"
