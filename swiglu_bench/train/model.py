"""The models, and the places in them where a SwiGLU block stands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from swiglu_bench.spec.cases import Case, Dtype, Mode, Scope, Shape
from swiglu_bench.spec.errors import BadInput
from swiglu_bench.train import data as datasets
from swiglu_bench.train.data import Batch, Data, Images
from swiglu_bench.train.workload import VOCABULARY, Classifier, Llama, Workload


@dataclass(frozen=True)
class Experiment:
    """A model with its data, ready to be trained from any seed."""

    workload: Workload
    data: Data
    make: Callable[[], nn.Module]
    """A new network on the device, in fp32, drawn from torch's current seed."""
    loss: Callable[[nn.Module, Batch], tuple[Tensor, Tensor]]
    """Mean loss over the batch and the logits."""
    steps: int
    device: torch.device
    dtype: Dtype
    """Of products; weights and the optimiser's state are fp32."""

    @property
    def metric(self) -> str:
        """What is computed of the held-out data."""
        return "perplexity" if isinstance(self.workload, Llama) else "accuracy"

    @property
    def unit(self) -> str:
        """What a rate counts."""
        return "tokens" if isinstance(self.workload, Llama) else "samples"

    def case(self, mode: Mode = Mode.STEP) -> Case:
        """A block of the model as the benchmarks name it."""
        w = self.workload
        shape = Shape(f"{w.hidden}x{w.intermediate}", w.hidden, w.intermediate, w.source, (w.tokens,))
        return Case(shape, w.tokens, self.dtype, Scope.MLP, mode)


class SwiGLU(nn.Module):
    """down_proj(silu(gate_proj(x)) * up_proj(x)): holds the weights until an implementation takes its place."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)


class Network(nn.Module):
    """Images as [batch, pixels] to logits."""

    def __init__(self, pixels: int, hidden: int, intermediate: int, classes: int = 10) -> None:
        super().__init__()
        self.embed = nn.Linear(pixels, hidden)
        self.mlp = SwiGLU(hidden, intermediate)
        self.head = nn.Linear(hidden, classes)

    def forward(self, images: Tensor) -> Tensor:
        """[batch, pixels] -> [batch, classes]."""
        hidden = self.embed(images)
        return self.head(hidden + self.mlp(hidden))


def sites(network: nn.Module) -> list[nn.Module]:
    """The modules whose attribute `mlp` is a SwiGLU block, in order."""
    return [module for module in network.modules() if hasattr(getattr(module, "mlp", None), "gate_proj")]


def experiment(
    workload: Workload, source: Path | None, device: torch.device, dtype: Dtype, epochs: int | None, steps: int | None
) -> Experiment:
    """Read the data and say how the model is made. Raises BadInput for data or a package that is not there."""
    if isinstance(workload, Llama):
        if epochs is not None:
            raise BadInput("--epochs is for images; give the task llama --steps.")
        llama_text = datasets.text(source, workload.sequence, workload.batch, device)
        make = _llama(workload, device)
        return Experiment(workload, llama_text, make, _next_token, steps or workload.steps, device, dtype)
    if workload.task == "digits" and source is not None:
        raise BadInput("--data is for mnist and llama; the task digits brings its own.")
    images = (
        datasets.digits(workload.batch, device)
        if workload.task == "digits"
        else datasets.mnist(source, workload.batch, device)
    )
    count = steps or (epochs or workload.epochs) * images.steps_per_epoch
    return Experiment(workload, images, _classifier(workload, images, device), _classes, count, device, dtype)


def _classifier(workload: Classifier, images: Images, device: torch.device) -> Callable[[], nn.Module]:
    pixels = images.train[0].shape[1]

    def make() -> nn.Module:
        with device:
            return Network(pixels, workload.hidden, workload.intermediate)

    return make


def _llama(workload: Llama, device: torch.device) -> Callable[[], nn.Module]:
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        raise BadInput(
            "The task llama needs transformers; install it with: pip install 'swiglu-bench[train]'."
        ) from None
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=workload.hidden,
        intermediate_size=workload.intermediate,
        num_hidden_layers=workload.layers,
        num_attention_heads=workload.heads,
        num_key_value_heads=workload.kv_heads,
        max_position_embeddings=workload.sequence,
        tie_word_embeddings=False,
        use_cache=False,
    )

    def make() -> nn.Module:
        with device:
            network: nn.Module = LlamaForCausalLM(config)
            return network.float()

    return make


def _classes(network: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    logits = network(batch[0])
    return functional.cross_entropy(logits.float(), batch[1]), logits


def _next_token(network: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    logits = network(input_ids=batch[0]).logits[:, :-1].float()
    return functional.cross_entropy(logits.flatten(0, 1), batch[1][:, 1:].flatten()), logits
