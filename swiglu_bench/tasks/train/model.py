"""What is trained: a model's sizes from configs/train/*.yaml, the network, and the places of its SwiGLU blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pydantic
import torch
from pydantic import ConfigDict, Field
from torch import Tensor, nn
from torch.nn import functional

from swiglu_bench.cases import costs, files
from swiglu_bench.cases.cases import Case, Dtype, Mode, Precision, Scope, Shape
from swiglu_bench.cases.errors import BadInput, did_you_mean
from swiglu_bench.cases.shapes import configs_folder
from swiglu_bench.check.inputs import torch_dtype
from swiglu_bench.contenders.pytorch import eager
from swiglu_bench.tasks.train import data as datasets
from swiglu_bench.tasks.train.data import Batch, Images, Pieces
from swiglu_bench.worker.policy import CONTEXT_BYTES

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


ModelSizes = Classifier | Llama


def default_model(task: str, on_gpu: bool) -> str:
    """The name of the model that a task trains by default."""
    return task if task != "llama" else "llama-1b" if on_gpu else "llama-tiny"


def load_sizes(task: str, model: str) -> ModelSizes:
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

    found: ModelSizes = files.read_yaml(path, kind, "task, hidden, intermediate and source").content
    if found.task != task:
        raise BadInput(f"--model: {path} is for the task {found.task}; give --task {found.task}, or another model.")
    return found


@dataclass(frozen=True)
class Experiment:
    """A model with its data, ready to be trained from any seed."""

    workload: ModelSizes
    data: Images | Pieces
    make: Callable[..., nn.Module]
    """A new network on the device, or on the one given, in fp32, with random weights from torch's current seed."""
    steps: int
    device: torch.device
    dtype: Dtype
    """Of products; weights and the optimiser's state are fp32."""
    precision: Precision = Precision.UNQUANTISED
    """Of the operands of the blocks' products, where an implementation has it."""

    @functools.cached_property
    def case(self) -> Case:
        """A block of the model as the benchmarks name it."""
        w = self.workload
        shape = Shape(f"{w.hidden}x{w.intermediate}", w.hidden, w.intermediate, w.source, (w.tokens,))
        return Case(shape, w.tokens, self.dtype, Scope.MLP, Mode.STEP, precision=self.precision)

    @functools.cached_property
    def parameters(self) -> int:
        """Weights of the network, which is not made for that."""
        return sum(weight.numel() for weight in self.make(torch.device("meta")).parameters())

    def needed_bytes(self, trainees: int) -> float:
        """The device's memory that so many trainees, timed side by side, take at least.

        A trained weight takes 16 bytes: itself, its gradient and AdamW's two moments. In 16 bits each trainee has a
        copy of the blocks' weights. Backward needs what eager saves in each block and, in a decoder, 32 bytes for each
        element of a layer's hidden state, measured in bfloat16 on an H200.
        """
        w, case = self.workload, self.case
        layers = w.layers if isinstance(w, Llama) else 1
        saved, peak = costs.predicted_memory(case, eager.footprints[Scope.MLP])
        around = 32 * case.tokens * w.hidden if isinstance(w, Llama) else 0
        copies = 2 * trainees * layers * 3 * w.hidden * w.intermediate if self.dtype is not Dtype.FLOAT32 else 0
        return 16 * self.parameters + copies + layers * (saved + around) + peak + CONTEXT_BYTES[self.device.type]

    def loss(self, network: nn.Module, batch: Batch, rows: int | None = None) -> tuple[Tensor, Tensor]:
        """Mean loss over the batch or its first rows, and their logits; products are in the dtype, by autocast."""
        inputs, targets = batch
        enabled = self.dtype is not Dtype.FLOAT32
        with torch.autocast(self.device.type, torch_dtype(self.case), enabled=enabled):
            if isinstance(self.workload, Llama):  # each token is to predict the next one
                logits, targets = network(input_ids=inputs).logits[:, :-1], targets[:, 1:]
            else:
                logits = network(inputs)
            logits, targets = logits[:rows].float(), targets[:rows]
            return functional.cross_entropy(logits.flatten(0, -2), targets.flatten()), logits

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then constant."""
        rise = max(1, round(self.steps * self.workload.warm_up))
        return self.workload.learning_rate * min(1.0, (step + 1) / rise)


class Network(nn.Module):
    """Images as [batch, pixels] to logits; `mlp` only holds weights until an implementation takes its place."""

    def __init__(self, pixels: int, hidden: int, intermediate: int, classes: int = 10) -> None:
        super().__init__()
        self.embed = nn.Linear(pixels, hidden)
        self.mlp = nn.ModuleDict({
            "gate_proj": nn.Linear(hidden, intermediate, bias=False),
            "up_proj": nn.Linear(hidden, intermediate, bias=False),
            "down_proj": nn.Linear(intermediate, hidden, bias=False),
        })  # fmt: skip
        self.head = nn.Linear(hidden, classes)

    def forward(self, images: Tensor) -> Tensor:
        """[batch, pixels] -> [batch, classes]."""
        hidden = self.embed(images)
        return self.head(hidden + self.mlp(hidden))


def sites(network: nn.Module) -> list[nn.Module]:
    """The modules whose attribute `mlp` is a SwiGLU block, in order."""
    return [module for module in network.modules() if hasattr(getattr(module, "mlp", None), "gate_proj")]


def prepare(
    w: ModelSizes, device: torch.device, dtype: Dtype, precision: Precision = Precision.UNQUANTISED, *,
    data: Path | None = None, epochs: int | None = None, steps: int | None = None,
) -> Experiment:  # fmt: skip
    """Read the data and decide how the model is made. Raises BadInput for missing data or a missing package."""
    if isinstance(w, Llama):
        if epochs is not None:
            raise BadInput("--epochs is for images; give the task llama --steps.")
        text = datasets.text(data, w.sequence, w.batch, device)
        return Experiment(w, text, _llama(w, device), steps or w.steps, device, dtype, precision)
    if w.task == "digits" and data is not None:
        raise BadInput("--data is for mnist and llama; the task digits brings its own.")
    images = datasets.digits(w.batch, device) if w.task == "digits" else datasets.mnist(data, w.batch, device)
    pixels = images.train[0].shape[1]

    def make(where: torch.device = device) -> nn.Module:
        with where:
            return Network(pixels, w.hidden, w.intermediate)

    count = steps or (epochs or w.epochs) * images.steps_per_epoch
    return Experiment(w, images, make, count, device, dtype, precision)


def _llama(workload: Llama, device: torch.device) -> Callable[[], nn.Module]:
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        raise BadInput(
            "The task llama needs transformers; install it with: pip install 'swiglu-bench[train]'."
        ) from None
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=workload.hidden, intermediate_size=workload.intermediate,
        num_hidden_layers=workload.layers, num_attention_heads=workload.heads, num_key_value_heads=workload.kv_heads,
        max_position_embeddings=workload.sequence, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip

    def make(where: torch.device = device) -> nn.Module:
        with where:
            network: nn.Module = LlamaForCausalLM(config)
            return network.float()

    return make
