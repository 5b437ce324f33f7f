"""The models, and the places in them where a SwiGLU block stands."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from swiglu_bench.cases import costs
from swiglu_bench.cases.cases import Case, Dtype, Mode, Precision, Scope, Shape
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.check.inputs import torch_dtype
from swiglu_bench.contenders.pytorch import eager
from swiglu_bench.tasks.train import data as datasets
from swiglu_bench.tasks.train.data import Batch, Images, Text
from swiglu_bench.tasks.train.options import TrainOptions
from swiglu_bench.tasks.train.workload import VOCABULARY, Llama, Workload
from swiglu_bench.worker.policy import CONTEXT_BYTES


@dataclass(frozen=True)
class Experiment:
    """A model with its data, ready to be trained from any seed."""

    workload: Workload
    data: Images | Text
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
    w: Workload, options: TrainOptions, device: torch.device, dtype: Dtype, precision: Precision = Precision.UNQUANTISED
) -> Experiment:
    """Read the data and decide how the model is made. Raises BadInput for missing data or a missing package."""
    if isinstance(w, Llama):
        if options.epochs is not None:
            raise BadInput("--epochs is for images; give the task llama --steps.")
        text = datasets.text(options.data, w.sequence, w.batch, device)
        return Experiment(w, text, _llama(w, device), options.steps or w.steps, device, dtype, precision)
    if w.task == "digits" and options.data is not None:
        raise BadInput("--data is for mnist and llama; the task digits brings its own.")
    images = datasets.digits(w.batch, device) if w.task == "digits" else datasets.mnist(options.data, w.batch, device)
    pixels = images.train[0].shape[1]

    def make(where: torch.device = device) -> nn.Module:
        with where:
            return Network(pixels, w.hidden, w.intermediate)

    steps = options.steps or (options.epochs or w.epochs) * images.steps_per_epoch
    return Experiment(w, images, make, steps, device, dtype, precision)


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
