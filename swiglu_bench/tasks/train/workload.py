"""What is trained: sizes from configs/train/*.yaml, found by name and checked by pydantic. No torch in here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import ConfigDict, Field

from swiglu_bench.cases import files
from swiglu_bench.cases.errors import BadInput, did_you_mean
from swiglu_bench.cases.shapes import configs_folder

TASKS = ("digits", "mnist", "llama")
VOCABULARY = 256
"""Tokens are bytes."""

Size = Annotated[int, Field(gt=0, le=2**24)]
Share = Annotated[float, Field(gt=0, le=1)]


class _Model(pydantic.BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    hidden: Size
    intermediate: Size
    batch: Size
    learning_rate: Share
    warm_up: Share = 0.1
    """Share of the steps in which the learning rate rises to its full size; it then stays."""
    max_gradient_norm: Annotated[float, Field(gt=0)] | None = None
    """Gradients are scaled down to this norm; None: they are not."""
    source: Annotated[str, Field(min_length=1)]


class Classifier(_Model):
    """flatten -> linear -> SwiGLU block with a residual -> linear."""

    metric: ClassVar = "accuracy"
    unit: ClassVar = "samples"
    task: Literal["digits", "mnist"]
    epochs: Size

    @property
    def tokens(self) -> int:
        """Rows of the block's input in each call."""
        return self.batch


class Llama(_Model):
    """A decoder of transformers' LlamaForCausalLM over bytes, with random weights."""

    metric: ClassVar = "perplexity"
    unit: ClassVar = "tokens"
    task: Literal["llama"]
    layers: Size
    heads: Size
    kv_heads: Size
    sequence: Annotated[int, Field(ge=2, le=2**24)]
    steps: Size

    @property
    def tokens(self) -> int:
        """Rows of a block's input in each call."""
        return self.batch * self.sequence

    @pydantic.model_validator(mode="after")
    def _heads_fit(self) -> Llama:
        if self.hidden % (2 * self.heads) or self.heads % self.kv_heads:
            raise ValueError("hidden has to be an even multiple of heads, and heads a multiple of kv_heads")
        return self


Workload = Classifier | Llama


def default_model(task: str, on_gpu: bool) -> str:
    """The name of the model that a task trains by default."""
    return task if task != "llama" else "llama-1b" if on_gpu else "llama-tiny"


def load(task: str, model: str) -> Workload:
    """The sizes of a task's model, by a name of configs/train or a YAML path. Raises BadInput for anything else."""
    if task not in TASKS:
        raise BadInput(f"--task: {task!r} is not a task; {did_you_mean(task, TASKS)}")
    path, known = Path(model), {path.stem: path for path in sorted((configs_folder() / "train").glob("*.yaml"))}
    if not (model.endswith((".yaml", ".yml")) or "/" in model):
        if model not in known:
            raise BadInput(f"--model: there is no model {model!r}; {did_you_mean(model, list(known))}")
        path = known[model]

    def kind(data: dict[str, Any]) -> type[Classifier | Llama]:
        return Llama if data.get("task") == "llama" else Classifier

    found: Workload = files.read_yaml(path, kind, "task, hidden, intermediate and source").content
    if found.task != task:
        raise BadInput(f"--model: {path} is for the task {found.task}; give --task {found.task}, or another model.")
    return found
