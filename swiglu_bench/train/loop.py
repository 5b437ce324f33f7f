"""One implementation trained from one seed, step by step, with checkpoints."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from swiglu_bench.check.inputs import torch_dtype
from swiglu_bench.rows.training import Judged, Row
from swiglu_bench.spec.cases import Dtype
from swiglu_bench.train.blocks import Block, Contender, blocks, trained
from swiglu_bench.train.data import Batch
from swiglu_bench.train.model import Experiment, sites

WARM_UP = 0.1
"""Share of the steps in which the learning rate rises to its full size; it then stays."""


class Training:
    """A network with a contender's blocks in it, its optimiser, and the step it is at."""

    def __init__(self, experiment: Experiment, contender: Contender, seed: int) -> None:
        torch.manual_seed(seed)  # on every device: the same weights for all contenders
        self.experiment = experiment
        self.contender = contender
        self.seed = seed
        self.step = 0
        self.network = experiment.make()
        self.blocks = blocks(contender, experiment.case(), self.network)
        self.parameters = trained(self.network, self.blocks)
        install(self.network, self.blocks)
        self.optimizer = optimizer(self.parameters, experiment.device)

    def advance(self) -> Row:
        """Train one step."""
        experiment = self.experiment
        began = time.perf_counter()
        rate = learning_rate(experiment, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = learn(experiment, self.network, self.seed, self.step)
        if self.step == 0:
            for block in self.blocks:
                block.check_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        value = loss.item()
        took_ms = (time.perf_counter() - began) * 1e3
        self.step += 1
        return Row(self.contender.name, self.seed, self.step - 1, value, rate, took_ms)

    def judge(self) -> Judged:
        """Loss and metric over the held-out data."""
        total = right = count = 0.0
        experiment = self.experiment
        with torch.no_grad(), precision(experiment):
            for batch, rows in experiment.data.held_out():
                loss, logits = experiment.loss(self.network, batch)
                if experiment.metric == "accuracy":  # the last batch is padded: its loss is over the rows that count
                    kept = logits[:rows].float()
                    loss = nn.functional.cross_entropy(kept, batch[1][:rows])
                    right += (kept.argmax(-1) == batch[1][:rows]).sum().item()
                total += loss.item() * rows
                count += rows
        mean = total / count
        metric = right / count if experiment.metric == "accuracy" else math.exp(min(mean, 700.0))
        return Judged(mean, metric)

    def save(self, path: Path) -> None:
        """Whole or not at all."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        state = {"step": self.step, "network": self.network.state_dict(), "optimizer": self.optimizer.state_dict()}
        try:
            torch.save(state, temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    def load(self, path: Path) -> None:
        """Go on where `save` left off."""
        state: dict[str, Any] = torch.load(path, map_location=self.experiment.device, weights_only=True)
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]


def install(network: nn.Module, those: list[Block], places: list[nn.Module] | None = None) -> None:
    """Put blocks where the network has its own, or where `places` say."""
    for place, block in zip(places if places is not None else sites(network), those, strict=True):
        place.mlp = block


def optimizer(parameters: list[nn.Parameter], device: torch.device, rate: float = 0.0) -> torch.optim.Optimizer:
    """AdamW with torch's defaults; its one-kernel version on a GPU."""
    return torch.optim.AdamW(parameters, lr=rate, fused=device.type == "cuda")


def learn(experiment: Experiment, network: nn.Module, seed: int, step: int) -> torch.Tensor:
    """Forward and backward of one step: the loss, the gradients in the parameters."""
    return learn_from(experiment, network, experiment.data.batch(seed, step))


def learn_from(experiment: Experiment, network: nn.Module, batch: Batch) -> torch.Tensor:
    """The same of a batch at hand."""
    with precision(experiment):
        loss, _ = experiment.loss(network, batch)
    loss.backward()
    return loss.detach()


def precision(experiment: Experiment) -> torch.autocast:
    """Autocast to the products' dtype, unless that is fp32."""
    dtype = torch_dtype(experiment.case())
    return torch.autocast(experiment.device.type, dtype, enabled=experiment.dtype is not Dtype.FLOAT32)


def learning_rate(experiment: Experiment, step: int) -> float:
    """Linear warm-up, then constant."""
    rise = max(1, round(experiment.steps * WARM_UP))
    return experiment.workload.learning_rate * min(1.0, (step + 1) / rise)
