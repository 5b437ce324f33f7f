"""What is trained, and on which data.

A model's sizes are from configs/train/*.yaml. Batches are a pure function of seed and step: every implementation sees
the same.
"""

import functools
import gzip
import os
import platform
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import pydantic
import torch
from pydantic import ConfigDict, Field
from torch import Tensor, nn
from torch.nn import functional

from swiglu_bench.cases import costs, files
from swiglu_bench.cases.cases import Case, Dtype, Mode, Precision, Scope, Shape
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.cases.shapes import model_file
from swiglu_bench.check.inputs import torch_dtype
from swiglu_bench.contenders.pytorch import eager
from swiglu_bench.worker.policy import CONTEXT_BYTES

Batch = tuple[Tensor, Tensor]
"""Inputs and targets."""
IDX_FILES = (
    "train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte",
)  # fmt: skip
TEXT_BYTES = 8 << 20
HELD_OUT_BATCHES = 8
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
    def _heads_fit(self) -> Self:
        if self.hidden % (2 * self.heads) or self.heads % self.kv_heads:
            raise ValueError("hidden has to be an even multiple of heads, and heads a multiple of kv_heads")
        return self


ModelSizes = Classifier | Llama


def default_model(task: str, on_gpu: bool) -> str:
    """The name of the model that a task trains by default."""
    return task if task != "llama" else "llama-1b" if on_gpu else "llama-tiny"


def load_sizes(task: str, model: str) -> ModelSizes:
    """The sizes of a task's model, by a name of configs/train or a YAML path. Raises BadInput for anything else."""
    path = model_file(model)

    def kind(data: dict[str, Any]) -> type[Classifier | Llama]:
        return Llama if data.get("task") == "llama" else Classifier

    found: ModelSizes = files.read_yaml(path, kind, "task, hidden, intermediate and source").content
    if found.task != task:
        raise BadInput(f"--model: {path} is for the task {found.task}; give --task {found.task}, or another model.")
    return found


@dataclass(frozen=True)
class Images:
    """Images as rows of [pixels], and their labels."""

    about: str
    """What they are, in a few words."""
    train: Batch
    test: Batch
    size: int
    """Images in a batch."""

    def __post_init__(self) -> None:
        if self.steps_per_epoch < 1:
            raise BadInput(f"There are {len(self.train[0])} images to train on, fewer than a batch of {self.size}.")

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches only."""
        return len(self.train[0]) // self.size

    def batch(self, seed: int, step: int) -> Batch:
        """The batch of a step; the seed shuffles the order of each epoch."""
        epoch, number = divmod(step, self.steps_per_epoch)
        chosen = _order(len(self.train[0]), seed, epoch)[number * self.size : (number + 1) * self.size]
        chosen = chosen.to(self.train[0].device)
        return self.train[0][chosen], self.train[1][chosen]

    def held_out(self) -> Iterator[tuple[Batch, int]]:
        """All test images in batches of the same size, and how many rows of each count: the last one is padded."""
        count = len(self.test[0])
        for start in range(0, count, self.size):
            rows = torch.arange(start, start + self.size, device=self.test[0].device) % count
            yield (self.test[0][rows], self.test[1][rows]), min(self.size, count - start)


@dataclass(frozen=True)
class Pieces:
    """Bytes as tokens; a batch is pieces of [sequence] from random places, which are both inputs and targets."""

    about: str
    """What it is, in a few words."""
    train: Tensor
    test: Tensor
    sequence: int
    size: int
    """Pieces in a batch."""

    def batch(self, seed: int, step: int) -> Batch:
        """The batch of a step, from places drawn from seed and step."""
        generator = torch.Generator().manual_seed(_mixed(seed, step))
        starts = torch.randint(len(self.train) - self.sequence, (self.size,), generator=generator).tolist()
        pieces = torch.stack([self.train[start : start + self.sequence] for start in starts]).long()
        return pieces, pieces

    def held_out(self) -> Iterator[tuple[Batch, int]]:
        """Batches of adjacent pieces from the beginning of the held-out part; all rows of each count."""
        for tokens in self.test.split(self.sequence * self.size)[:HELD_OUT_BATCHES]:
            if len(tokens) == self.sequence * self.size:
                pieces = tokens.view(self.size, self.sequence).long()
                yield (pieces, pieces), self.size


@dataclass(frozen=True)
class Experiment:
    """A model with its data, ready to be trained from any seed."""

    workload: ModelSizes
    data: Images | Pieces
    build: Callable[[], nn.Module]
    steps: int
    device: torch.device
    dtype: Dtype
    """Of products; weights and the optimiser's state are fp32."""
    precision: Precision = Precision.UNQUANTISED
    """Of the operands of the blocks' products, where an implementation has it."""

    def make(self, where: torch.device | None = None) -> nn.Module:
        """A new network on the device, or on the one given, in fp32, with random weights from torch's current seed."""
        with where or self.device:
            return self.build().float()

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
        with torch.autocast(self.device.type, torch_dtype(self.case), enabled=self.dtype is not Dtype.FLOAT32):
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
        pieces = text(data, w.sequence, w.batch, device)
        return Experiment(w, pieces, _llama(w), steps or w.steps, device, dtype, precision)
    images = digits(w.batch, device) if w.task == "digits" else mnist(data, w.batch, device)
    build = functools.partial(Network, images.train[0].shape[1], w.hidden, w.intermediate)
    count = steps or (epochs or w.epochs) * images.steps_per_epoch
    return Experiment(w, images, build, count, device, dtype, precision)


def _llama(w: Llama) -> Callable[[], nn.Module]:
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        raise BadInput("The task llama needs transformers; install it with: pip install transformers.") from None
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=w.hidden, intermediate_size=w.intermediate, num_hidden_layers=w.layers,
        num_attention_heads=w.heads, num_key_value_heads=w.kv_heads, max_position_embeddings=w.sequence,
        tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    return functools.partial(LlamaForCausalLM, config)


# Data


def digits(size: int, device: torch.device) -> Images:
    """scikit-learn's bundled images, split by a fixed seed. Raises BadInput without scikit-learn."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise BadInput("The task digits needs scikit-learn; install it with: pip install scikit-learn.") from None
    found = load_digits()
    order = torch.randperm(len(found.data), generator=torch.Generator().manual_seed(0))
    inputs = torch.from_numpy(found.data).float().div(8).sub(1)[order].to(device)
    labels = torch.from_numpy(found.target).long()[order].to(device)
    about = "scikit-learn's digits, 1437 images of 8 x 8 to train on, 360 held out"
    return Images(about, (inputs[:1437], labels[:1437]), (inputs[1437:], labels[1437:]), size)


def mnist(folder: Path | None, size: int, device: torch.device) -> Images:
    """MNIST from torchvision's IDX files, gzipped or not. Raises BadInput for a missing or incomplete one."""
    if folder is None:
        raise BadInput(f"The task mnist needs --data FOLDER, with {_expected(Path('FOLDER'))}.")
    parts = []
    for names in (IDX_FILES[:2], IDX_FILES[2:]):
        images, labels = (torch.from_numpy(_read_idx(folder, name)) for name in names)
        if len(images) != len(labels) or not len(images) or int(labels.max()) > 9:
            both = f"{names[0]} has {len(images)} images and {names[1]} {len(labels)} labels"
            raise BadInput(f"--data: {both}; expected one label of 0 to 9 for each image.")
        parts.append((images.flatten(1).float().div(127.5).sub(1).to(device), labels.long().to(device)))
    train, test = parts
    about = f"MNIST from {folder}, {len(train[0])} images to train on, {len(test[0])} held out"
    return Images(about, train, test, size)


def text(file: Path | None, sequence: int, size: int, device: torch.device) -> Pieces:
    """A file's bytes, or the sources of Python's standard library. Raises BadInput where there are too few."""
    if file is None:
        about = f"the sources of Python {platform.python_version()}'s standard library"
        content = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
    else:
        about = str(file)
        try:
            content = file.read_bytes()
        except OSError as error:
            raise BadInput(f"--data: {file} cannot be read: {error.strerror}; give a text file.") from None
    content = content[:TEXT_BYTES]
    if len(content) < (least := 11 * sequence * size):
        raise BadInput(f"--data: {about} has {len(content)} bytes; at least {least} are needed. Give a longer file.")
    tokens = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
    train, test = tokens.tensor_split([len(tokens) * 9 // 10])
    return Pieces(f"{about}, {len(tokens):,} bytes, the last tenth held out", train, test, sequence, size)


def _read_idx(folder: Path, name: str) -> np.ndarray:
    """One IDX file: two zero bytes, the type 8 (bytes), the number of dimensions, big-endian sizes, the bytes."""
    plain = folder / "MNIST" / "raw" / name
    path = next((file for file in (plain, plain.with_name(f"{name}.gz")) if file.is_file()), None)
    if path is None:
        raise BadInput(f"--data: {plain} is not there, nor {name}.gz; expected {_expected(folder)}.")
    dimensions = 3 if "images" in name else 1
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
        kind, *sizes = np.frombuffer(content, ">u4", 1 + dimensions).tolist()
        if kind != 0x800 + dimensions:
            raise ValueError(f"it does not hold bytes in {dimensions} dimension{'s' * (dimensions > 1)}")
        return np.frombuffer(content, np.uint8, offset=4 * (1 + dimensions)).reshape(sizes).copy()
    except OSError as error:
        raise BadInput(f"--data: {path} cannot be read: {error.strerror or error}.") from None
    except (EOFError, ValueError, zlib.error) as error:
        raise BadInput(f"--data: {path} is not a complete IDX file: {error}; expected {_expected(folder)}.") from None


def _expected(folder: Path) -> str:
    return f"{', '.join(IDX_FILES)}, each as it is or with .gz, in {folder / 'MNIST' / 'raw'}"


@functools.lru_cache(maxsize=2)
def _order(count: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(_mixed(seed, epoch)))


def _mixed(seed: int, number: int) -> int:
    """One seed made of two numbers, a different one for neighbours of either."""
    return (seed * 1_000_003 + number) % 2**63
